"""Searched schedules: golden periods and makespans, an exact oracle, handcrafted orders beaten or
met, and every result checked block by block."""

import time
from dataclasses import replace

import pytest

from toolkit.schedules import (
    Durations,
    breadth_first,
    dual_pipe_v,
    faults,
    gpipe,
    interleaved,
    one_forward_one_backward,
    simulate,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from toolkit.schedules.search import (
    Block,
    Found,
    exact_schedule,
    find_repetend,
    search_schedule,
    shape_of,
    tessel_shape,
)

# Shape, devices, memory -> the shortest period, which is the bound where memory suffices.
PERIODS = {
    ("V", 4, 4): 4, ("X", 4, 4): 8, ("K", 4, 3): 6, ("M", 4, 5): 6, ("NN", 4, 6): 8,
    ("V", 8, 8): 4, ("K", 8, 6): 6, ("V", 4, 3): 8, ("V", 4, 1): 16, ("M", 4, 4): 7,
}  # fmt: skip
# Shape, memory -> makespans of 4, 8 and 16 microbatches on four devices, at most.
MAKESPANS = {
    ("V", 4): (28, 44, 76), ("X", 4): (41, 73, 137), ("K", 6): (28, 52, 100),
    ("M", 6): (36, 60, 108), ("NN", 6): (45, 77, 141),
}  # fmt: skip
# Proved by an integer program over all blocks.
EXACT = {("V", 2): 20, ("V", 4): 28, ("X", 2): 22, ("K", 4): 28, ("M", 2): 24, ("NN", 2): 28}
MEMORY = {"V": 4, "X": 4, "K": 6, "M": 6, "NN": 6}


@pytest.mark.parametrize(
    ("name", "devices", "memory"), [*PERIODS, pytest.param("X", 4, 3, marks=pytest.mark.slow)]
)
def test_golden_periods(name, devices, memory):
    shape = tessel_shape(name, devices)
    found = find_repetend(shape, memory, seconds=30)
    assert found is not None
    assert found.period == PERIODS.get((name, devices, memory), 9)
    starts = tuple(tuple(s + r * found.period for s in found.starts) for r in range(12))
    assert Found(shape, starts, found.bound, "unrolled").faults(memory) == []
    assert found.is_proved
    assert found.period >= found.bound


@pytest.mark.parametrize(("name", "memory"), MAKESPANS)
def test_golden_makespans(name, memory):
    shape = tessel_shape(name, 4)
    for m, most in zip((4, 8, 16), MAKESPANS[name, memory], strict=True):
        found = search_schedule(shape, m, memory, seconds=2)
        assert found.faults(memory) == []
        assert found.bound <= found.makespan <= most


@pytest.mark.slow
@pytest.mark.parametrize(("name", "m"), EXACT)
def test_what_is_exact(name, m):
    shape = tessel_shape(name, 4)
    exact, is_proved = exact_schedule(shape, m, MEMORY[name])
    assert is_proved
    assert exact.faults(MEMORY[name]) == []
    assert exact.makespan == EXACT[name, m]
    found = search_schedule(shape, m, MEMORY[name], seconds=2)
    assert found.bound <= exact.makespan <= found.makespan <= exact.makespan + 3


def test_inference():
    periods = {"V": 1, "X": 2, "K": 2, "M": 2, "NN": 3}
    for name, period in periods.items():
        found = find_repetend(tessel_shape(name, 4, is_inference=True), 0)
        assert found is not None
        assert found.period == found.bound == period


MADE = (
    gpipe, one_forward_one_backward, interleaved, breadth_first, zero_bubble_h1, zero_bubble_h2,
    zero_bubble_v, dual_pipe_v,
)  # fmt: skip


@pytest.mark.parametrize("make", MADE)
def test_at_least_as_good_as_what_is_handcrafted(make):
    """By itself, on its own shape, in its own memory, for durations that suit it and others."""
    schedule = make(2, 6)
    for lengths in ((1, 1, 1), (2, 3, 2)):
        shape = shape_of(schedule, Durations(*lengths))
        v = schedule.chunks
        by_hand = simulate(schedule, Durations(*(v * each for each in lengths))).makespan
        memory = 2 * max(schedule.peak_activations)  # halves: until the weight gradients start
        found = search_schedule(shape, 6, memory, seconds=1)
        assert found.faults(memory) == []
        assert found.bound <= found.makespan <= by_hand
        order = found.schedule()
        assert faults(order) == []
        assert simulate(order, Durations(*(v * each for each in lengths))).makespan == (
            found.makespan
        )


def test_several_microbatches_per_period_where_memory_is_short():
    """On the V of four devices one microbatch per period leaves half of the time idle."""
    shape, rates = tessel_shape("V", 4), []
    for copies in (1, 2, 3):
        found = find_repetend(shape, 3, copies=copies, seconds=30)
        assert found is not None
        assert found.is_proved
        rates.append((found.period, copies))
        starts = tuple(map(found.row, range(9)))
        assert Found(shape, starts, found.bound, "unrolled").faults(3) == []
        # Control: one time unit less per period is too little.
        early = replace(found, period=found.period - 1)
        starts = tuple(map(early.row, range(9)))
        assert Found(shape, starts, found.bound, "unrolled").faults(3) != []
    assert rates == [(8, 1), (12, 2), (16, 3)]
    whole = search_schedule(shape, 12, 3, seconds=2)
    assert whole.faults(3) == []
    assert whole.bound <= whole.makespan <= 72 < 8 * 12
    assert "lower bound 4 per microbatch" in str(whole.repetend)


@pytest.mark.slow
def test_sixteen_stages_and_sixty_four_microbatches():
    begin = time.perf_counter()
    found = search_schedule(shape_of(zero_bubble_h1(16, 64)), 64, 16, seconds=5)
    assert found.makespan == found.bound == simulate(zero_bubble_h1(16, 64)).makespan == 207
    assert found.faults(16) == []
    assert time.perf_counter() - begin < 60  # seconds on a quiet machine


def test_faults_are_seen():
    found = search_schedule(tessel_shape("V", 2), 3, 2, seconds=1)
    assert found.faults(2) == []
    assert found.faults(1) == ["device 0 holds 2 of 1"]
    early = replace(found, starts=((0, 0, *found.starts[0][2:]), *found.starts[1:]))
    assert "F1 of 0 starts before 0 ends" in early.faults()
    twice = replace(found, starts=(found.starts[0], found.starts[0], found.starts[2]))
    assert any("overlap" in fault for fault in twice.faults())


def test_what_cannot_be_searched_is_refused():
    shape = tessel_shape("V", 2)
    for call, words in (
        (lambda: tessel_shape("W", 4), "name must be one of 'V', 'X', 'M', 'NN', 'K'"),
        (lambda: tessel_shape("K", 3), "devices: got 3, wanted .* even"),
        (lambda: search_schedule(shape, 0, 2), "got 0, 2 and 4 blocks"),
        (lambda: search_schedule(shape, 2, 0), "memory: got 0, in which no schedule"),
        (lambda: search_schedule(shape, 2, 2, known=[gpipe(2, 3)]), "'GPipe' has 3 microb"),
        (lambda: search_schedule(shape, 2, 2).schedule(), "its blocks are no tasks"),
        (lambda: shape_of(gpipe(1, 1), Durations(forward=0.5)), "takes 1/2, wanted whole"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    kept = Block("F", (0,), 1, memory=2)
    with pytest.raises(ValueError, match="a microbatch leaves 2 on device 0; wanted 0"):
        find_repetend((kept,), 4)
    assert find_repetend((kept, replace(kept, memory=-2, after=(0,))), 1) is None
