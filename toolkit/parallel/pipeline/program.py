"""A schedule as a program of ticks: who does what when, and where each array waits.

In one tick every device runs at most one task and sends at most one message; what is sent in a tick
can be used in the next. All of this is known before anything is compiled.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit._checks import checked
from toolkit.schedules import Durations, Schedule, Task, faults

NOWHERE = -1
Slots = tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """A schedule tick by tick.

    Attributes:
        schedule: what it runs.
        tied: for each stage the row of weights that it uses; stages with one row share it.
        kinds: for each stage its kind: stages of one kind run the same code and store the same.
        stores: for each kind the number of the buffers in which it stores; kinds of which one
            stores as much as the others, and more, may share them.
        ticks: for each task its tick, from 0.
        channels: permutations (sender, receiver) of the devices, each run once per tick.
        message_slots: places for messages that wait, needed on the fullest device.
        carry_slots: places for what slices of a sequence pass on to the next, or its gradient.
        kept_slots: for each store, places for what a forward keeps for its backward.
        split_slots: for each store, places for what an input gradient keeps for the weight
            gradient.
        columns: name -> array [ticks, devices], or for "arrival" [ticks, devices, channels]: the
            tables that the devices read.

    Example:
        >>> from toolkit.schedules import one_forward_one_backward
        >>> program = program_of(one_forward_one_backward(devices=4, microbatches=8))
        >>> program.length, program.kept_slots, program.channels[0]
        (22, (4,), ((0, 1), (1, 2), (2, 3)))
    """

    schedule: Schedule
    tied: tuple[int, ...]
    kinds: tuple[int, ...]
    stores: tuple[int, ...]
    ticks: Mapping[Task, int]
    channels: tuple[tuple[tuple[int, int], ...], ...]
    message_slots: int
    carry_slots: int
    kept_slots: Slots
    split_slots: Slots
    columns: Mapping[str, Any]

    @property
    def length(self) -> int:
        """Number of ticks."""
        return 1 + max(self.ticks.values())

    @property
    def permutes(self) -> int:
        """Permutations that one step runs for each array of an activation: ticks x channels."""
        return self.length * len(self.channels)

    @property
    def messages(self) -> int:
        """Messages with content among them: there and back for every hop of every microbatch."""
        return 2 * self.schedule.hops * self.schedule.microbatches

    @property
    def codes(self) -> tuple[tuple[str, int], ...]:
        """(kind of task, kind of stage) that each number in the table `code` means; 0 is idle."""
        return _codes(self.schedule, self.kinds)

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """For each device its rows of weights."""
        return rows_of(self.schedule, self.tied)

    def makespan(self, durations: Durations | None = None) -> float:
        """Modelled time when all devices wait for the slowest task of every tick, and a message.

        A whole backward delays devices that run a forward in the same tick; halves do not.
        """
        durations = durations or Durations()
        durations.check(self.schedule)
        longest = [0.0] * self.length
        for task, tick in self.ticks.items():
            took = durations.of(task.kind) / self.schedule.chunks * durations.factor(task)
            longest[tick] = max(longest[tick], float(took))
        return sum(longest) + self.length * float(durations.delay)

    def bubble(self, durations: Durations | None = None) -> float:
        """Share of `makespan` in which a device idles."""
        durations = durations or Durations()
        work = sum(
            durations.of(task.kind) / self.schedule.chunks * durations.factor(task)
            for task in self.ticks
        )
        return 1 - float(work) / self.schedule.devices / self.makespan(durations)


@checked
def program_of(
    schedule: Schedule, *,
    tied: Sequence[int] | None = None, kinds: Sequence[int] | None = None,
    stores: Sequence[int] | None = None,
) -> Program:  # fmt: skip
    """Lay out a schedule in ticks, and give every array that waits a place to wait in.

        tick(task) = 1 + max(tick of the device's task before, ticks of what it waits for)

    Places are reused as soon as they are free, so that their number is the most arrays that wait
    at once (lifetimes are intervals). For 1F1B it does not grow with the microbatches.

    Args:
        schedule: a schedule without faults.
        tied: for each stage its row of weights, counted from 0, all stages of a row on one device;
            None: a row for each stage.
        kinds: for each stage its kind, counted from 0; None: all alike.
        stores: for each kind its store, counted from 0; None: one each.

    Cost: A few microseconds per task.

    Example:
        >>> from toolkit.schedules import gpipe
        >>> program_of(gpipe(devices=2, microbatches=3)).kept_slots
        (3,)
    """
    if wrong := faults(schedule):
        raise ValueError(f"schedule: {schedule.name!r} cannot run: {wrong[0]}")
    stages = range(schedule.stages)
    tied = tuple(stages) if tied is None else tuple(tied)
    kinds = (0,) * schedule.stages if kinds is None else tuple(kinds)
    count = max(kinds, default=0) + 1
    stores = tuple(range(count)) if stores is None else tuple(stores)
    for name, given, each in (
        ("tied", tied, f"the {len(stages)} stages"),
        ("kinds", kinds, f"the {len(stages)} stages"),
        ("stores", stores, f"the {count} kinds"),
    ):
        wanted = count if name == "stores" else len(stages)
        if len(given) != wanted or sorted(set(given)) != list(range(len(set(given)))):
            raise ValueError(f"{name}: got {given}, wanted for each of {each} a number from 0")
    for row, stage in zip(tied, stages, strict=True):
        home = schedule.placement[tied.index(row)]
        if schedule.placement[stage] != home:
            raise ValueError(
                f"tied: stages {tied.index(row)} and {stage} share weights, and lie on devices "
                f"{home} and {schedule.placement[stage]}"
            )
    counts = [len(rows) for rows in rows_of(schedule, tied)]
    if len(set(counts)) > 1:
        raise ValueError(f"schedule: devices hold {counts} stages' weights, wanted equally many")
    ticks = _ticks(schedule)
    channels = _channels(schedule)
    stored = tuple(stores[kind] for kind in kinds)
    places = _Places(schedule, stored, ticks)
    columns = _columns(schedule, tied, kinds, stored, ticks, channels, places)
    return Program(
        schedule, tied, kinds, stores, ticks, channels, places.count("message"),
        places.count("carry"),
        tuple(places.count(("kept", store)) for store in range(max(stores) + 1)),
        tuple(places.count(("split", store)) for store in range(max(stores) + 1)),
        columns,
    )  # fmt: skip


def rows_of(schedule: Schedule, tied: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """For each device its rows of weights, in the order of their first stages."""
    homes = {row: schedule.placement[tied.index(row)] for row in tied}
    return tuple(
        tuple(row for row in dict.fromkeys(tied) if homes[row] == device)
        for device in range(schedule.devices)
    )


def _codes(schedule: Schedule, kinds: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    tasks = itertools.chain(*schedule.orders)
    return tuple(sorted({(task.kind, kinds[task.stage]) for task in tasks}))


def _ticks(schedule: Schedule) -> dict[Task, int]:
    ticks: dict[Task, int] = {}
    at, now = [0] * schedule.devices, 0
    while len(ticks) < sum(map(len, schedule.orders)):
        ran = []
        for device, order in enumerate(schedule.orders):
            if at[device] < len(order):
                task = order[at[device]]
                if all(other in ticks for other in schedule.waits_for(task)):
                    ran.append(task)
                    at[device] += 1
        ticks |= dict.fromkeys(ran, now)
        now += 1
    return ticks


def _channels(schedule: Schedule) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Pairs of devices between which messages travel, as few permutations as first fit finds."""
    pairs = dict.fromkeys(
        pair
        for step in (1, -1)
        for pair in itertools.pairwise(schedule.placement[::step])
        if pair[0] != pair[1]
    )
    channels: list[list[tuple[int, int]]] = []
    for pair in pairs:
        for channel in channels:
            if all(pair[0] != a and pair[1] != b for a, b in channel):
                channel.append(pair)
                break
        else:
            channels.append([pair])
    return tuple(map(tuple, channels))


class _Places:
    """For each device and array that waits there, the slot in which it waits.

    An array is written at the end of one tick and last read within another, at whose end its slot
    can be written again.
    """

    def __init__(self, schedule: Schedule, stored: tuple[int, ...], ticks: Mapping[Task, int]):
        waits: dict[tuple[int, Any], list[tuple[int, int, Any]]] = {}
        last = schedule.stages - 1
        for i, stage in itertools.product(range(schedule.microbatches), range(schedule.stages)):
            device, store = schedule.placement[stage], stored[stage]
            forward, backward = Task("F", i, stage), schedule.backward(i, stage)
            # The last stage's output waits like a message until its loss is differentiated.
            gradient = forward if stage == last else schedule.backward(i, stage + 1)
            spans = [
                ("message", gradient, backward, ("gradient", i, stage)),
                (("kept", store), forward, backward, (i, stage)),
            ]
            if stage:
                before = Task("F", i, stage - 1)
                spans.append(("message", before, forward, ("activation", i, stage)))
            if i % schedule.slices:  # from the slice before, and its gradient back
                before = Task("F", i - 1, stage)
                spans.append(("carry", before, forward, ("carry", i, stage)))
                after = schedule.backward(i - 1, stage)
                spans.append(("carry", backward, after, ("carried gradient", i - 1, stage)))
            if backward.kind == "I":
                spans.append((("split", store), backward, Task("W", i, stage), (i, stage)))
            for buffer, start, end, name in spans:
                waits.setdefault((device, buffer), []).append((ticks[start], ticks[end], name))
        self.slots: dict[tuple[Any, Any], int] = {}
        self.counts: Counter[Any] = Counter()
        for (_, buffer), spans in waits.items():
            busy: list[int] = []  # the tick at whose end each slot is free again
            for start, end, name in sorted(spans):
                free = next((k for k, until in enumerate(busy) if until <= start), len(busy))
                busy[free : free + 1] = [end]
                self.slots[buffer, name] = free
            self.counts[buffer] = max(self.counts[buffer], len(busy))

    def count(self, buffer: Any) -> int:
        return self.counts[buffer]

    def __getitem__(self, key: tuple[Any, Any]) -> int:
        return self.slots[key]


def _columns(
    schedule: Schedule, tied: tuple[int, ...], kinds: tuple[int, ...], stored: tuple[int, ...],
    ticks: Mapping[Task, int], channels: Iterable[tuple[tuple[int, int], ...]], places: _Places,
) -> dict[str, Any]:  # fmt: skip
    shape = (1 + max(ticks.values()), schedule.devices)
    names = ("microbatch", "stage", "row", "read", "kept", "split")
    columns: dict[str, Any] = {name: np.zeros(shape, np.int32) for name in ("code", *names)}
    for name in ("own", "carry_read", "carry_write"):
        columns[name] = np.full(shape, NOWHERE, np.int32)
    via = {pair: index for index, channel in enumerate(channels) for pair in channel}
    columns["arrival"] = np.full((*shape, max(len(set(via.values())), 1)), NOWHERE, np.int32)
    codes = {code: 1 + index for index, code in enumerate(_codes(schedule, kinds))}
    rows, last = rows_of(schedule, tied), schedule.stages - 1
    for task, tick in ticks.items():
        _, i, stage = task
        device, kind, store = schedule.placement[stage], kinds[stage], stored[stage]
        at = (tick, device)
        columns["code"][at] = codes[task.kind, kind]
        columns["microbatch"][at], columns["stage"][at] = i, stage
        columns["row"][at] = rows[device].index(tied[stage])
        if task.kind != "W":
            columns["kept"][at] = places[("kept", store), (i, stage)]
        if task.kind in "IW":
            columns["split"][at] = places[("split", store), (i, stage)]
        if task.kind != "W":
            name = "carry" if task.kind == "F" else "carried gradient"
            other = i + 1 if task.kind == "F" else i - 1
            for column, number in (("carry_read", i), ("carry_write", other)):
                if ("carry", (name, number, stage)) in places.slots:
                    columns[column][at] = places["carry", (name, number, stage)]
        goes = None  # the stage and place of what this task sends
        if task.kind == "F":
            if stage:
                columns["read"][at] = places["message", ("activation", i, stage)]
            here = ("gradient", i, last) if stage == last else ("activation", i, stage + 1)
            goes = (min(stage + 1, last), places["message", here])
        elif task.kind in "BI":
            columns["read"][at] = places["message", ("gradient", i, stage)]
            if stage:
                goes = (stage - 1, places["message", ("gradient", i, stage - 1)])
        if goes is not None:
            there = schedule.placement[goes[0]]
            if there == device:
                columns["own"][at] = goes[1]
            else:
                columns["arrival"][tick, there, via[device, there]] = goes[1]
    return columns
