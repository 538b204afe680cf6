"""Pipeline schedules by name, their times for any stages, and what each device holds."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from toolkit import schedules
from toolkit.parallel.pipeline import program_of
from toolkit.planning.strategy import SLICED, Strategy, listed
from toolkit.planning.time.pipelines import stage_ends
from toolkit.planning.time.seconds import Seconds
from toolkit.schedules import Schedule

MOST_TASKS = 1 << 18  # of a schedule that is simulated task by task
_MAKERS: dict[str, Callable[..., Schedule]] = {
    "1f1b": schedules.one_forward_one_backward,
    "gpipe": schedules.gpipe,
    "interleaved": schedules.interleaved,
    "breadth-first": schedules.breadth_first,
    "zb-h1": schedules.zero_bubble_h1,
    "zb-h2": schedules.zero_bubble_h2,
    "zb-v": schedules.zero_bubble_v,
    "dualpipe-v": schedules.dual_pipe_v,
}
NONE = -1


class Step(NamedTuple):
    """A task as a simulation needs it.

    Attributes:
        device: where it runs.
        kind: F, B, I or W.
        stage: of the model.
        before: number of the task of another stage that it waits for, or NONE.
        hop: the lower stage of the message in between, or NONE if both lie on one device.
    """

    device: int
    kind: str
    stage: int
    before: int
    hop: int


def schedule_of(strategy: Strategy) -> Schedule:
    """The schedule of a strategy, task by task."""
    return _made(*_given(strategy))


def _given(strategy: Strategy) -> tuple[str, int, int, int, int]:
    return (
        strategy.schedule, strategy.pipeline, strategy.microbatches, strategy.chunks,
        strategy.slices,
    )  # fmt: skip


@functools.lru_cache(maxsize=32)
def _made(name: str, devices: int, microbatches: int, chunks: int, slices: int) -> Schedule:
    if name not in _MAKERS:
        return listed(name, slices)
    if 3 * devices * microbatches * chunks * slices > MOST_TASKS:
        raise ValueError(
            f"microbatches: {microbatches:,} of schedule {name!r} on pipeline {devices} are more "
            f"tasks than {MOST_TASKS:,}; nearest that works: "
            f"{MOST_TASKS // (3 * devices * chunks * slices):,}"
        )
    more = (chunks,) if name in ("interleaved", "breadth-first") else ()
    more = (slices,) if name in SLICED else more
    return _MAKERS[name](devices, microbatches, *more)


def steps_of(strategy: Strategy) -> tuple[Step, ...]:
    """The tasks of a schedule in an order in which each comes after all that it waits for."""
    return _steps(*_given(strategy))


@functools.lru_cache(maxsize=32)
def _steps(*given: Any) -> tuple[Step, ...]:
    schedule = _made(*given)
    devices = schedule.devices
    at, numbers, found = [0] * devices, {}, []
    last, moved = schedule.stages - 1, True
    while moved:
        moved = False
        for device, order in enumerate(schedule.orders):
            while at[device] < len(order):
                task = kind, i, stage = order[at[device]]
                # A device's own earlier tasks have ended: its order says so.
                other = NONE
                if kind == "F" and stage:
                    other = stage - 1
                elif kind in "BI" and stage < last:
                    other = stage + 1
                before, hop = NONE, NONE
                if other != NONE:
                    of = "F" if kind == "F" else schedule.backward(i, other).kind
                    before = numbers.get((of, i, other), NONE)
                    if before == NONE:
                        break
                    if schedule.placement[other] != device:
                        hop = min(stage, other)
                numbers[task] = len(found)
                found.append(Step(device, kind, stage, before, hop))
                at[device] += 1
                moved = True
    assert len(found) == sum(map(len, schedule.orders))
    return tuple(found)


def device_ends(
    steps: Sequence[Step],
    forward: Sequence[float],
    backward: Sequence[float],
    weight: Sequence[float],
    hops: Sequence[float],
) -> list[float]:
    """The end of each device's last task: every task starts as early as its order allows.

    Seconds of one microbatch for each stage; `weight` is the part of `backward` that makes the
    gradients of weights, and `hops[s]` the time of a message between stages s and s + 1.
    """
    inner = [b - w for b, w in zip(backward, weight, strict=True)]
    took = {"F": forward, "B": backward, "I": inner, "W": weight}
    devices = 1 + max(step.device for step in steps)
    free, ends = [0.0] * devices, [0.0] * len(steps)
    for number, (device, kind, stage, before, hop) in enumerate(steps):
        start = free[device]
        if before != NONE:
            ready = ends[before] + (hops[hop] if hop != NONE else 0.0)
            start = max(start, ready)
        ends[number] = free[device] = start + took[kind][stage]
    return free


def most_waiting(strategy: Strategy, stores: Sequence[int]) -> dict[int, tuple[int, int]]:
    """For each store the most microbatches that wait in it on a device at once: from a forward to
    its backward, and from the gradient of an input to that of the weights; `stores` are those of
    the stages."""
    return _most_waiting(tuple(stores), *_given(strategy))


@functools.lru_cache(maxsize=256)
def _most_waiting(kinds: tuple[int, ...], *given: Any) -> dict[int, tuple[int, int]]:
    now: Counter[Any] = Counter()
    most: Counter[Any] = Counter()
    for device, task, stage, _, _ in _steps(*given):
        for waits, start, end in ((0, "F", "BI"), (1, "I", "W")):
            now[device, kinds[stage], waits] += (task == start) - (task in end)
            here = waits, kinds[stage]
            most[here] = max(most[here], now[device, kinds[stage], waits])
    return {kind: (most[0, kind], most[1, kind]) for kind in dict.fromkeys(kinds)}


def step_through(strategy: Strategy, busy: Sequence[Seconds], hop: float, slowdown: float) -> float:
    """Seconds of a step through the stages of a pipeline, in the order of its schedule.

    `busy` has the seconds of all microbatches for each stage, and `hop` is that of a message.
    """
    count = strategy.parts
    forward = [part.forward_total(slowdown) / count for part in busy]
    backward = [part.backward_total(slowdown) / count for part in busy]
    hops = [hop] * (len(busy) - 1)
    if strategy.schedule == "1f1b" and strategy.slices == 1:
        ends = stage_ends(forward, backward, hops, hops, count)
    else:
        weight = [part.weight_gradient / count for part in busy]
        ends = device_ends(steps_of(strategy), forward, backward, weight, hops)
    updates = (sum(busy[s].update for s in mine) for mine in strategy.stages_by_device)
    return max(end + update for end, update in zip(ends, updates, strict=True))


def step_in_ticks(
    strategy: Strategy, busy: Sequence[Seconds], hop: float, slowdown: float
) -> float:
    """`step_through` where all devices wait for the slowest task of every tick, and for a message:
    a whole backward delays those that run a forward beside it."""
    count, longest = strategy.parts, {}
    for task, tick in program_of(schedule_of(strategy)).ticks.items():
        part = busy[task.stage]
        forward, weight = part.forward_total(slowdown), part.weight_gradient
        backward = part.backward_total(slowdown)
        took = {"F": forward, "B": backward, "I": backward - weight, "W": weight}[task.kind]
        longest[tick] = max(longest.get(tick, 0.0), took / count)
    updates = (sum(busy[s].update for s in mine) for mine in strategy.stages_by_device)
    return sum(longest.values()) + len(longest) * hop + max(updates)


def least_through(
    strategy: Strategy, busy: Sequence[Seconds], hop: float, slowdown: float
) -> float:
    """A lower bound on `step_through`: each device's work after the way to it; and, if backward
    passes are whole, before the way back to the first."""
    count, is_split = strategy.parts, strategy.is_split
    there = back = least = 0.0
    ways, took = [], {}
    for part in busy:
        if id(part) not in took:  # equal stages share their seconds
            forward, backward = part.forward_total(slowdown), part.backward_total(slowdown)
            took[id(part)] = forward / count + hop, backward / count + hop, part.total(slowdown)
        ways.append((there, back))
        there += took[id(part)][0]
        back += took[id(part)][1]
    by_device = strategy.stages_by_device
    updates = [sum(busy[s].update for s in mine) for mine in by_device]
    for mine, update in zip(by_device, updates, strict=True):
        work = sum(took[id(busy[s])][2] for s in mine) - update
        there, back = ways[mine[0]]
        least = max(least, there + work + update)
        if not is_split:
            least = max(least, there + work + back + updates[0])
    return least
