"""Loops, slices, DualPipeV, unequal stages, memory limits: bounds, refusals of what is mutated."""

import random
from dataclasses import replace
from fractions import Fraction as Q

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.planning import pipeline_seconds
from toolkit.schedules import (
    Durations,
    Task,
    breadth_first,
    dual_pipe_v,
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

MAKERS = [
    gpipe,
    one_forward_one_backward,
    interleaved,
    breadth_first,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
    dual_pipe_v,
    lambda p, m: gpipe(p, m, slices=3),
    lambda p, m: one_forward_one_backward(p, m, slices=3),
]


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 3), (4, 3, 4), (3, 1, 9)])
def test_breadth_first_has_the_bubble_of_interleaving_in_the_memory_of_gpipe(p, v, m):
    line = simulate(breadth_first(p, m, v), Durations(2, 3, 1))
    assert line.makespan - line.busy == Q(6 * (p - 1), v)
    assert line.peak_memory() == (m,) * p
    assert line.schedule.hops == p * v - 1


def test_dual_pipe_v():
    for p in range(1, 7):
        for m in (2 * p, 2 * p + 1, 5 * p):
            schedule = dual_pipe_v(p, m)
            line = simulate(schedule)
            assert faults(schedule) == []
            assert line.makespan - line.busy == Q(p - 1, 2)
            assert schedule.peak_activations == (2 * p + 1,) * p
            assert from_csv(to_csv(schedule), schedule.name) == schedule
    kinds = {task.kind for task in dual_pipe_v(4, 8).orders[0]}
    assert kinds == set("FBIW")  # whole and split backwards in one schedule


def test_slices():
    """A pipeline of tokens fills as one of m k microbatches; backward from the last slice."""
    for p, m, k in [(2, 3, 2), (4, 2, 5), (3, 4, 1)]:
        plain, late = gpipe(p, m, slices=k), one_forward_one_backward(p, m, slices=k)
        times = simulate(gpipe(p, m * k)).makespan
        assert simulate(plain).makespan == times
        assert late.peak_activations == tuple(min(p - d + k - 1, m * k) for d in range(p))
        for schedule in (plain, late):
            assert faults(schedule) == []
        if k > 1:  # control: the order without slices runs the first slice's backward first
            wrong = replace(one_forward_one_backward(p, m * k), slices=k)
            assert "waits for ever" in faults(wrong)[0]
    causal = simulate(gpipe(2, 1, slices=3), Durations(microbatches=(1, 2, 3)))
    assert causal.busy == 3 * 6


def test_unequal_stages_and_hops_agree_with_the_planner():
    draw = random.Random(3)
    for _ in range(20):
        p, m = draw.randint(1, 6), draw.randint(1, 9)
        weights = tuple(draw.randint(1, 9) for _ in range(p))
        hops = tuple(draw.randint(0, 3) for _ in range(p - 1))
        times = Durations(hops=hops, stages=weights)
        line = simulate(one_forward_one_backward(p, m), times)
        assert float(line.makespan) == pytest.approx(
            pipeline_seconds([3 * w for w in weights], m, hops=hops), rel=1e-12
        )
        assert line.makespan >= max(line.work)
    with pytest.raises(ValueError, match="stages: got 2 numbers; 'GPipe' wants 3"):
        simulate(gpipe(3, 1), Durations(stages=(1, 2)))
    with pytest.raises(ValueError, match="hops: got 1 numbers; 'GPipe' wants 2"):
        simulate(gpipe(3, 1), Durations(hops=(1,)))
    with pytest.raises(ValueError, match="microbatches: got 0, wanted a positive"):
        Durations(microbatches=(1, 0))


def test_limits_of_memory():
    schedule = gpipe(4, 8)
    assert schedule.peak_activations == (8,) * 4
    assert faults(schedule, most_activations=8) == []
    assert faults(schedule, most_activations=5)[0] == "device 0 holds 6 activations at F5@0; 5 fit."
    assert one_forward_one_backward(4, 8).peak_activations == (4, 3, 2, 1)
    assert zero_bubble_v(4, 8).peak_activations == (8,) * 4


@settings(deadline=None, max_examples=60)
@given(
    make=st.sampled_from(MAKERS),
    p=st.integers(1, 4),
    groups=st.integers(2, 3),
    lengths=st.tuples(*[st.integers(1, 5)] * 3),
    seed=st.integers(0, 999),
)
def test_any_schedule_runs_above_its_bounds_and_its_mutations_are_refused(
    make, p, groups, lengths, seed
):
    schedule, draw = make(p, groups * p), random.Random(seed)
    assert faults(schedule) == []
    line = simulate(schedule, Durations(*lengths))
    whole = sum(lengths)
    assert line.makespan >= max(*line.work, whole if schedule.slices == 1 else 0)
    assert line.peak_memory() == tuple(
        Q(count, schedule.chunks) for count in schedule.peak_activations
    )
    device = draw.randrange(p)
    order = schedule.orders[device]
    at = draw.randrange(len(order))
    task = order[at]

    def changed(new):
        orders = list(schedule.orders)
        orders[device] = tuple(new)
        return faults(replace(schedule, orders=tuple(orders)))

    assert any("missing" in fault for fault in changed(order[:at] + order[at + 1 :]))
    assert f"{task} is scheduled 2 times." in changed((*order, task))
    other = Task(task.kind, schedule.microbatches, task.stage)
    assert f"{other} is not a task of this pipeline." in changed((*order, other))
    if p > 1:
        moved = [order[:at] + order[at + 1 :] if d == device else row
                 for d, row in enumerate(schedule.orders)]  # fmt: skip
        moved[(device + 1) % p] += (task,)
        found = faults(replace(schedule, orders=tuple(moved)))
        assert any(f"{task} is on device {(device + 1) % p}" in fault for fault in found)
    if task.kind in "BI":  # before its own forward: nothing can run it
        forward = order.index(Task("F", *task[1:]))
        swapped = list(order)
        swapped[at], swapped[forward] = swapped[forward], swapped[at]
        assert any("waits for ever" in fault for fault in changed(swapped))
