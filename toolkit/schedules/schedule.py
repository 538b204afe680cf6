"""A pipeline schedule as data: for each device, its tasks in their order."""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from toolkit._checks import checked

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


class Task(NamedTuple):
    """One piece of work: what is done, for which microbatch, at which stage of the model.

    Attributes:
        kind: "F" forward, "B" the whole backward pass, or its halves: "I", the gradient with
            respect to the stage's input, which the stage before waits for, and "W", that of its
            weights, for which no other device waits. The letters are those of PyTorch's pipelining.
        microbatch: counted from 0.
        stage: of the model, counted from 0.

    Example:
        >>> Task("F", microbatch=2, stage=0)
        F2@0
    """

    kind: str
    microbatch: int
    stage: int

    def __repr__(self) -> str:
        return f"{self.kind}{self.microbatch}@{self.stage}"


@dataclass(frozen=True)
class Schedule:
    """For each device, its tasks in the order in which it runs them.

    Attributes:
        name: name for titles.
        microbatches: number of microbatches.
        placement: the device of every stage.
        orders: for each device its tasks.
        slices: consecutive microbatches that are slices of one causal sequence: the forward of a
            slice needs those before it at the same stage, and its backward those after it.

    Example:
        >>> from toolkit.schedules import gpipe
        >>> gpipe(devices=2, microbatches=1).orders
        ((F0@0, B0@0), (F0@1, B0@1))
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    orders: tuple[tuple[Task, ...], ...]
    slices: int = 1

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.orders)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.placement)

    @property
    def chunks(self) -> int:
        """Stages per device, at most."""
        return max(Counter(self.placement).values())

    @functools.cached_property
    def is_split(self) -> bool:
        """Whether backward passes are split into input and weight gradients."""
        return any(task.kind == "W" for order in self.orders for task in order)

    @property
    def hops(self) -> int:
        """How often a microbatch crosses from a device to another on its way forward."""
        return sum(a != b for a, b in itertools.pairwise(self.placement))

    @functools.cached_property
    def _halved(self) -> frozenset[tuple[int, int]]:
        """(microbatch, stage) of the backward passes that are split."""
        return frozenset(task[1:] for order in self.orders for task in order if task.kind in "IW")

    @functools.cached_property
    def _runnable(self) -> tuple[tuple[int, Task, tuple[int, ...]], ...]:
        """(device, task, places here of what it waits for), in an order in which all can run.

        Every device's order is kept, up to where it would wait for ever.
        """
        found: list[tuple[int, Task, tuple[int, ...]]] = []
        places: dict[Task, int] = {}
        at, moved = [0] * self.devices, True
        while moved:
            moved = False
            for device, order in enumerate(self.orders):
                while at[device] < len(order):
                    before = [places.get(other, -1) for other in self.waits_for(order[at[device]])]
                    if -1 in before:
                        break
                    places[order[at[device]]] = len(found)
                    found.append((device, order[at[device]], tuple(before)))
                    at[device], moved = at[device] + 1, True
        return tuple(found)

    @functools.cached_property
    def _faults(self) -> tuple[str, ...]:
        """The errors of a schedule apart from its memory; see `faults`."""
        if self.slices < 1 or self.microbatches % self.slices:
            return (f"{self.microbatches} microbatches are not sequences of {self.slices}.",)
        found = []
        counts = Counter(task for order in self.orders for task in order)
        wanted = set()
        for i in range(self.microbatches):
            for stage in range(self.stages):
                is_whole = (i, stage) not in self._halved
                is_whole &= not self.is_split or Task("B", i, stage) in counts
                wanted.update(Task(kind, i, stage) for kind in ("FB" if is_whole else "FIW"))
        for task in sorted(wanted - counts.keys()):
            found.append(f"{task} is missing: {KINDS[task.kind]} of microbatch {task.microbatch}.")
        for task, count in counts.items():
            if task not in wanted:
                found.append(f"{task} is not a task of this pipeline.")
            elif count > 1:
                found.append(f"{task} is scheduled {count} times.")
        for device, order in enumerate(self.orders):
            for task in order:
                if task in wanted and self.placement[task.stage] != device:
                    found.append(
                        f"{task} is on device {device}; stage {task.stage} lies on device "
                        f"{self.placement[task.stage]}."
                    )
        return tuple(found or waiting(self, started(self)))

    def backward(self, microbatch: int, stage: int) -> Task:
        """The task that makes the gradient of a stage's input: I, or B where it is not split."""
        return Task("I" if (microbatch, stage) in self._halved else "B", microbatch, stage)

    def waits_for(self, task: Task) -> Iterator[Task]:
        """The tasks that must end before `task` starts.

        F(i, s) waits for F(i, s-1); B or I(i, s) for F(i, s) and that of stage s+1; W for its I. Of
        a sequence in slices, F(i, s) also waits for F(i-1, s), and B or I(i, s) for that of i+1.
        """
        kind, i, stage = task
        if kind == "W":
            yield Task("I", i, stage)
        elif kind == "F":
            if stage:
                yield Task("F", i, stage - 1)
            if i % self.slices:
                yield Task("F", i - 1, stage)
        else:
            yield Task("F", i, stage)
            if stage + 1 < self.stages:
                yield self.backward(i, stage + 1)
            if (i + 1) % self.slices:
                yield self.backward(i + 1, stage)

    def activations(self, device: int) -> Iterator[int]:
        """After the start of each task of a device: the stages' activations that it holds.

        They are held from a forward to the end of its backward or input gradient; their number
        follows from the order alone, whatever the durations.
        """
        count = 0
        for task in self.orders[device]:
            count += task.kind == "F"
            yield count
            count -= task.kind in "BI"

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """The most activations of stages that each device holds at once."""
        return tuple(max(self.activations(device), default=0) for device in range(self.devices))


@checked
def faults(schedule: Schedule, *, most_activations: int | None = None) -> list[str]:
    """The errors of a schedule, in words; an empty list if it can run.

    Every microbatch passes every stage once, forward and backward (whole or in two halves), on the
    device where the stage lies, no device waits for ever, and none holds too much.

    Args:
        schedule: any schedule, even one written by hand.
        most_activations: of stages, that a device may hold at once; None: any number.

    Returns:
        One sentence per fault: tasks that are missing, doubled, unknown or on a foreign device;
        if there is none of those, the tasks at which the devices wait for one another, and those
        at which memory is exceeded.

    Example:
        >>> order = (Task("F", 0, 0), Task("F", 0, 0), Task("B", 0, 0))
        >>> faults(Schedule("mine", microbatches=1, placement=(0,), orders=(order,)))
        ['F0@0 is scheduled 2 times.']
    """
    found = list(schedule._faults)
    if found or most_activations is None:
        return found
    for device, order in enumerate(schedule.orders):
        for task, count in zip(order, schedule.activations(device), strict=True):
            if count > most_activations:
                found.append(
                    f"device {device} holds {count} activations at {task}; {most_activations} fit."
                )
                break
    return found


def started(schedule: Schedule) -> list[int]:
    """The number of tasks that each device can run before a deadlock."""
    counts = Counter(device for device, *_ in schedule._runnable)
    return [counts[device] for device in range(schedule.devices)]


def waiting(schedule: Schedule, at: list[int]) -> list[str]:
    """For each device in a deadlock, the tasks for which it waits."""
    done = {task for order, end in zip(schedule.orders, at, strict=True) for task in order[:end]}
    return [
        f"device {device} waits for ever at {order[end]}: it needs "
        f"{', '.join(repr(task) for task in schedule.waits_for(order[end]) if task not in done)}."
        for device, (order, end) in enumerate(zip(schedule.orders, at, strict=True))
        if end < len(order)
    ]


@checked
def to_csv(schedule: Schedule) -> str:
    """A schedule in the format of PyTorch's pipelining: a row per device, cells such as `2F0`.

    Args:
        schedule: the schedule; a cell is stage, kind, microbatch.

    Returns:
        The text of the file.

    Source: PyTorch, torch.distributed.pipelining, `_PipelineScheduleRuntime`.

    Example:
        >>> from toolkit.schedules import gpipe
        >>> print(to_csv(gpipe(devices=2, microbatches=1)))
        0F0,0B0
        1F0,1B0
    """
    rows = ((f"{t.stage}{t.kind}{t.microbatch}" for t in order) for order in schedule.orders)
    return "\n".join(",".join(row) for row in rows)


@checked
def from_csv(text: str, name: str = "from a file") -> Schedule:
    """Read a schedule that `to_csv` or PyTorch's pipelining wrote; empty cells are skipped.

    Args:
        text: a row per device, a cell per task: stage, kind (F, B, I, W), microbatch.
        name: name for titles.

    Returns:
        The schedule; `faults` checks whether it can run.

    Raises:
        ValueError: a cell is not a task, or a stage is on two devices or on none.

    Source: PyTorch, torch.distributed.pipelining, `_PipelineScheduleRuntime`.

    Example:
        >>> from_csv("0F0,0B0").orders
        ((F0@0, B0@0),)
    """
    orders, place = [], {}
    for device, row in enumerate(text.strip().splitlines()):
        order = []
        for cell in filter(None, (cell.strip() for cell in row.split(","))):
            match = re.fullmatch(r"(\d+)([FBIW])(\d+)", cell)
            if match is None:
                raise ValueError(
                    f"text: row {device} has {cell!r}; wanted stage, one of F, B, I, W, and "
                    "microbatch, such as 2F0"
                )
            stage, kind, microbatch = int(match[1]), match[2], int(match[3])
            if place.setdefault(stage, device) != device:
                raise ValueError(f"text: stage {stage} is on devices {place[stage]} and {device}")
            order.append(Task(kind, microbatch, stage))
        orders.append(tuple(order))
    if sorted(place) != list(range(len(place))) or not place:
        raise ValueError(f"text: stages are {sorted(place)}; wanted 0, 1, 2, ... without a gap")
    most = max(task.microbatch for order in orders for task in order)
    return Schedule(name, most + 1, tuple(place[s] for s in range(len(place))), tuple(orders))
