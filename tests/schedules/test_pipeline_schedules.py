"""Pipeline schedules: golden makespans and memory, the formulas, and what is refused."""

import itertools
import json
import random
from dataclasses import replace
from fractions import Fraction as Q
from pathlib import Path

import pytest

from toolkit.schedules import (
    Durations,
    Schedule,
    Task,
    faults,
    from_csv,
    gpipe,
    interleaved,
    one_forward_one_backward,
    simulate,
    to_csv,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)

LESSON = Path(__file__).parents[2] / "tutorials" / "07_pipeline.ipynb"
ONE_CHUNK = [gpipe, one_forward_one_backward, zero_bubble_h1]
ALL = [*ONE_CHUNK, interleaved, zero_bubble_h2, zero_bubble_v]
# p, m -> makespans with all three durations 1: GPipe and 1F1B, interleaved by 2, ZB-H1, ZB-H2,
# ZB-V; and the longest span of a device for the last two.
GOLDEN = {
    (2, 4): (15, Q(27, 2), 13, 13, Q(25, 2), 12),
    (4, 8): (33, Q(57, 2), 27, 27, Q(51, 2), 24),
    (4, 16): (57, Q(105, 2), 51, 51, Q(99, 2), 48),
    (8, 16): (69, Q(117, 2), 55, 55, Q(103, 2), 48),
}


@pytest.mark.parametrize(("p", "m"), GOLDEN)
def test_golden_makespans(p, m):
    plain, chunked, h1, h2, v, span = GOLDEN[p, m]
    made = (gpipe, one_forward_one_backward, interleaved, zero_bubble_h1, zero_bubble_h2)
    lines = [simulate(make(p, m)) for make in (*made, zero_bubble_v)]
    assert [line.makespan for line in lines] == [plain, plain, chunked, h1, h2, v]
    for line in lines[-2:]:
        assert line.span_bubble == 1 - Q(3 * m, span)


def test_golden_interleaving():
    assert simulate(interleaved(4, 8, 4)).bubble == Q(3, 35)
    assert simulate(interleaved(8, 16, 4)).makespan == Q(213, 4)
    assert simulate(interleaved(4, 16, 3)).peak_memory() == (5, Q(13, 3), Q(11, 3), 3)
    assert simulate(interleaved(4, 8)).peak_memory() == (Q(11, 2), Q(9, 2), Q(7, 2), Q(5, 2))


def test_golden_memory():
    peaks = lambda make: simulate(make(4, 8)).peak_memory(activation=4, weight_gradient=1)  # noqa: E731
    assert peaks(zero_bubble_h1) == (16, 13, 10, 7)
    assert peaks(zero_bubble_h2) == (28, 22, 16, 10)
    assert peaks(zero_bubble_v) == (16,) * 4


def test_formulas():
    draw = random.Random(0)
    for _ in range(30):
        p, v = draw.randint(1, 8), draw.randint(1, 4)
        m = draw.randint(1, 32)
        f, i = Q(draw.randint(1, 9)), Q(draw.randint(1, 9))
        w = Q(draw.randint(1, int(min(f, i))))  # longer weight gradients delay what waits
        times = Durations(f, i, w)
        whole = (p - 1) * (f + i + w)
        for make in (gpipe, one_forward_one_backward):
            line = simulate(make(p, m), times)
            assert line.makespan - line.busy == whole, (make, p, m)
        assert simulate(gpipe(p, m)).peak_memory() == (m,) * p
        peaks = simulate(one_forward_one_backward(p, m)).peak_memory()
        assert peaks == tuple(min(p - d, m) for d in range(p))
        even = simulate(interleaved(p, p * (1 + m // p), v), times)
        assert even.makespan - even.busy == whole / v, (p, m, v)
        m = max(m, 2 * p)
        line = simulate(zero_bubble_h1(p, m), times)
        assert line.makespan - line.busy == (p - 1) * (f + i - w), (p, m, times)
        equal = simulate(zero_bubble_h1(p, m)), simulate(zero_bubble_h2(p, m))
        assert equal[0].makespan - equal[0].busy == p - 1
        assert equal[1].span_bubble == 0
        assert simulate(zero_bubble_v(p, m)).span_bubble == 0


def test_zero_bubble_formulas_for_any_durations():
    """The papers' formulas hold under their conditions only, which random cases leave."""
    draw, outside = random.Random(1), 0
    for _ in range(60):
        p, f, i, w = draw.randint(2, 6), *(draw.randint(1, 6) for _ in range(3))
        times, m = Durations(f, i, w), draw.randint(2 * p - 1, 5 * p)
        first = simulate(zero_bubble_h1(p, draw.randint(p, 5 * p)), times)
        second = simulate(zero_bubble_h2(p, m), times)
        h1 = first.makespan - first.busy
        h2 = max(row[-1].end - row[0].start for row in second.spans) - second.busy
        assert h1 == (p - 1) * (f + i - w if w <= min(f, i) else max(f, i))
        assert h2 == (p - 1) * max(0, f + i - 2 * min(f, w))
        assert (h2 == (p - 1) * (f + i - 2 * w)) == (w <= f and 2 * w <= f + i)
        outside += h1 != (p - 1) * (f + i - w)
        m_b = draw.randint(1, 5)
        m_w = draw.randint(0, m_b)
        peaks = [
            simulate(schedule, times).peak_memory(m_b, m_w)
            for schedule in (first.schedule, second.schedule, zero_bubble_v(p, m))
        ]
        assert peaks[0] == tuple((p - d) * m_b + d * m_w for d in range(p))
        assert peaks[1] == tuple((2 * p - 2 * d - 1) * m_b + 2 * d * m_w for d in range(p))
        assert peaks[2] == (p * m_b,) * p
    assert outside > 10


def test_what_the_lesson_says():
    """Who idles when, messages and memory: the sentences of lesson 07, for 4 devices."""
    for line in (simulate(gpipe(4, 8)), simulate(one_forward_one_backward(4, 8))):
        first, last = line.spans[0], line.spans[-1]
        assert (first[0].start, last[0].start) == (0, 3)  # 3 forwards
        assert (line.makespan - first[-1].end, line.makespan - last[-1].end) == (0, 6)
        waits = (b.start - a.end for a, b in itertools.pairwise(first))
        assert sum(waits) == 9  # 3 forwards and 3 backwards
    hops = lambda make: sum(a != b for a, b in itertools.pairwise(make(4, 8).placement))  # noqa: E731
    made = (gpipe, one_forward_one_backward, zero_bubble_h1, zero_bubble_h2)
    assert [hops(make) for make in made] == [3] * 4
    assert (hops(interleaved), hops(zero_bubble_v)) == (7, 6)
    fullest = [max(simulate(make(4, 8)).peak_memory()) for make in ALL]
    assert fullest == [8, 4, 4, Q(11, 2), 7, 4]
    source = "".join(
        "".join(cell["source"]) for cell in json.loads(LESSON.read_text(encoding="utf-8"))["cells"]
    )
    assert "need neither" not in source
    assert "twice as many messages as 1F1B" in source
    assert "and in between the first" in source


def test_uneven_durations():
    line = simulate(zero_bubble_h1(4, 8), Durations(4, 5, 3))
    assert line.makespan - line.busy == 18
    late = simulate(gpipe(4, 8), Durations(delay=Q(1, 2)))
    assert late.makespan == 33 + 2 * 3 * Q(1, 2)  # there and back, between four devices


@pytest.mark.parametrize("make", ALL)
def test_nothing_overlaps_and_nothing_runs_too_early(make):
    schedule = make(4, 8)
    line = simulate(schedule, Durations(2, 3, 1, delay=Q(1, 4)))
    ends = {span.task: span.end for row in line.spans for span in row}
    for device, row in enumerate(line.spans):
        assert [span.task for span in row] == list(schedule.orders[device])
        for before, after in itertools.pairwise(row):
            assert before.end <= after.start
        for span in row:
            for other in schedule.waits_for(span.task):
                far = schedule.placement[other.stage] != device
                assert span.start >= ends[other] + (Q(1, 4) if far else 0)
    assert [held for _, held in line.memory(0, 3, 2)][-1] == 0


@pytest.mark.parametrize("make", ALL)
def test_pytorchs_files_there_and_back(make):
    schedule = make(2, 4)
    assert from_csv(to_csv(schedule), schedule.name) == schedule


def test_faults_are_named():
    good = one_forward_one_backward(2, 2)
    first, second = good.orders
    said = lambda *orders: faults(replace(good, orders=orders))  # noqa: E731
    assert faults(good) == []
    assert said(first[:-1], second) == ["B1@0 is missing: backward of microbatch 1."]
    assert said((*first, first[0]), second) == ["F0@0 is scheduled 2 times."]
    assert said((*first, Task("F", 7, 0)), second) == ["F7@0 is not a task of this pipeline."]
    assert "F0@0 is on device 1; stage 0 lies on device 0." in said(second, first)
    swapped = (second[1], second[0], *second[2:])
    assert said(first, swapped) == [
        "device 0 waits for ever at B0@0: it needs B0@1.",
        "device 1 waits for ever at B0@1: it needs F0@1.",
    ]
    with pytest.raises(ValueError, match="'1F1B' cannot run: B1@0 is missing"):
        simulate(replace(good, orders=(first[:-1], second)))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: gpipe(0, 4), "devices: got 0"),
        (lambda: gpipe(2, 1.5), "microbatches must be an int; got 1.5"),
        (lambda: interleaved(4, 6), r"microbatches: got 6, .* \(8 is the next\)"),
        (lambda: interleaved(4, 8, 0), "chunks: got 0"),
        (lambda: zero_bubble_v(4, 6), "microbatches: got 6, zero_bubble_v wants .* = 7"),
        (lambda: zero_bubble_h2(4, 6), "microbatches: got 6, zero_bubble_h2 wants"),
        (lambda: Durations(forward=0), "forward: got 0"),
        (
            lambda: Durations(delay=float("nan")),
            "delay must be a finite number or a Fraction; got nan",
        ),
        (lambda: Durations(input_gradient=True), "input_gradient must be a finite number"),
        (lambda: Durations(delay=1j), "delay must be a finite number"),
        (lambda: gpipe(10**12, 4), "devices: got 1000000000000; devices x microbatches is"),
        (lambda: interleaved(4, 8, 10**12), "chunks: got 1000000000000; devices x microb"),
        (lambda: zero_bubble_v(2, 10**12), "microbatches: got 1000000000000; devices x"),
        (lambda: simulate("no"), "schedule must be a Schedule; got 'no'"),
        (lambda: simulate(gpipe(1, 1), object()), "durations must be a Durations or None"),
        (lambda: faults(None), "schedule must be a Schedule; got None"),
        (lambda: from_csv(b"0F0"), "text must be a string; got b'0F0'"),
        (lambda: from_csv("0F0", name=7), "name must be a string; got 7"),
        (lambda: from_csv("0F0,X1"), "row 0 has 'X1'"),
        (lambda: from_csv("0F0\n0B0"), "stage 0 is on devices 0 and 1"),
        (lambda: from_csv("1F0,1B0"), r"stages are \[1\]"),
    ],
)
def test_bad_input_gets_one_line(call, said):
    with pytest.raises((TypeError, ValueError), match=said):
        call()


def test_a_schedule_of_ones_own():
    order = (Task("F", 0, 0), Task("B", 0, 0))
    line = simulate(Schedule("mine", microbatches=1, placement=(0,), orders=(order,)))
    assert str(line) == "0 F0|B0   |"
