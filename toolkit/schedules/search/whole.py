"""Whole schedules of a shape: unrolled from a steady state, or listed by rules."""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolkit._checks import checked
from toolkit.schedules.schedule import Schedule, Task, faults
from toolkit.schedules.search.handcrafted import handcrafted
from toolkit.schedules.search.modulo import Repetend, find_repetend
from toolkit.schedules.search.shapes import Shape, shape_of

MOST_COPIES, MOST_COPIED = 3, 12  # microbatches per period that are tried; blocks of such a shape
Starts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Found:
    """A schedule of all microbatches.

    Attributes:
        shape: the blocks of one microbatch.
        starts: [microbatches][blocks], start of each.
        bound: no schedule ends earlier, whatever its memory.
        how: what found it.
        repetend: the steady state that was found on the way.

    Example:
        >>> Found(shape=(), starts=(), bound=0, how="list").how
        'list'
    """

    shape: Shape
    starts: Starts
    bound: int
    how: str
    repetend: Repetend | None = None

    @property
    def makespan(self) -> int:
        """End of the last block."""
        pairs = (zip(row, self.shape, strict=True) for row in self.starts)
        return max(start + block.span for row in pairs for start, block in row)

    @property
    def peak_memory(self) -> tuple[int, ...]:
        """The most that each device holds."""
        return tuple(
            max(itertools.accumulate(self.shape[i].memory for _, i, _ in row), default=0)
            for row in _rows(self.shape, self.starts)
        )

    def faults(self, memory: int | None = None) -> list[str]:
        """What is wrong with it, checked block by block; empty if nothing is."""
        found = []
        for r, row in enumerate(self.starts):
            for i, block in enumerate(self.shape):
                for before in block.after:
                    if row[i] < row[before] + self.shape[before].span:
                        found.append(f"{block.name} of {r} starts before {before} ends")
        for device, blocks in enumerate(_rows(self.shape, self.starts)):
            for (start, i, r), (after, j, _) in itertools.pairwise(blocks):
                if start + self.shape[i].span > after:
                    found.append(f"blocks {i} of {r} and {j} overlap on device {device}")
            if memory is not None and self.peak_memory[device] > memory:
                found.append(f"device {device} holds {self.peak_memory[device]} of {memory}")
        return found

    def schedule(self, name: str = "searched") -> Schedule:
        """The order as a `Schedule`, for a shape made by `shape_of`."""
        if not all(isinstance(block.name, Task) for block in self.shape):
            raise ValueError("shape: its blocks are no tasks of stages; wanted one of shape_of")
        names = [block.name for block in self.shape if isinstance(block.name, Task)]
        rows = _rows(self.shape, self.starts)
        orders = tuple(tuple(names[i]._replace(microbatch=r) for _, i, r in row) for row in rows)
        forwards = (
            (task.stage, block.devices[0])
            for task, block in zip(names, self.shape, strict=True)
            if task.kind == "F"
        )
        return Schedule(name, len(self.starts), tuple(d for _, d in sorted(forwards)), orders)


def _rows(shape: Shape, starts: Starts) -> list[list[tuple[int, int, int]]]:
    """For each device (start, block, microbatch) in their order."""
    devices = 1 + max((d for block in shape for d in block.devices), default=-1)
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(devices)]
    for r, row in enumerate(starts):
        for i, start in enumerate(row):
            for device in shape[i].devices:
                rows[device].append((start, i, r))
    return [sorted(row) for row in rows]


@checked
def search_schedule(
    shape: Shape, microbatches: int, memory: int, *,
    known: Sequence[Schedule] = (), seconds: float = 10.0,
) -> Found:  # fmt: skip
    """The best schedule of a shape that is found, with a bound beside it.

    Candidates are the steady state of `find_repetend`, unrolled and tightened; the handcrafted
    schedules of this placement, if there are any (1F1B and GPipe of a chain, the zero-bubble ones
    if backwards are split, the chunked ones of loops and Vs); and list schedules:
    whenever a device is free it starts the block that a rule puts first, of those that may start
    and fit. The rules: by the steady state's starts, by the work that must follow, and with
    gradients or forwards first and what nobody waits for last.

    Args:
        shape: the blocks of one microbatch.
        microbatches: how many.
        memory: of every device, in the unit of the blocks'.
        known: more schedules of this shape, as further candidates: what is found is no worse.
        seconds: for each integer program.

    Raises:
        ValueError: nothing fits the memory.
        ImportError: OR-tools is missing (extra `search`).

    Cost: 1 to 3 s for 16 stages, split backwards, and 64 microbatches.

    Source: Lin et al., "Tessel", 2023 (arXiv:2311.15269), for unrolling a repetend.

    Example:
        >>> from toolkit.schedules.search import tessel_shape
        >>> found = search_schedule(tessel_shape("V", devices=2), microbatches=4, memory=2)
        >>> found.makespan, found.bound
        (20, 20)
    """
    if microbatches < 1 or memory < 0 or not shape:
        raise ValueError(
            f"microbatches must be at least 1, memory at least 0 and shape not empty; got "
            f"{microbatches}, {memory} and {len(shape)} blocks"
        )
    where = {(block.name, block.devices) for block in shape}
    for each in known:
        if wrong := faults(each):
            raise ValueError(f"known: {each.name!r} cannot run: {wrong[0]}")
        if each.microbatches != microbatches or where != {
            (block.name, block.devices) for block in shape_of(each)
        }:
            raise ValueError(
                f"known: {each.name!r} has {each.microbatches} microbatches on devices "
                f"{each.placement}; wanted {microbatches}, and the blocks of this shape"
            )
    repetend = _steady(shape, memory, microbatches, seconds)
    bound, tails = lower_bound(shape, microbatches), _tails(shape)
    ends = {before for block in shape for before in block.after}
    free = [0 if i in ends else 1 for i in range(len(shape))]  # 1: nobody waits for it
    rules: dict[str, Callable[[int, int], tuple]] = {
        "longest rest first": lambda i, r: (-tails[i], r),
        "shortest rest first": lambda i, r: (free[i], tails[i], r),
        "gradients first": lambda i, r: (free[i], shape[i].memory > 0, r, -i),
        "forwards first": lambda i, r: (free[i], shape[i].memory <= 0, r, -i),
        "oldest first": lambda i, r: (free[i], r, -i),
        "oldest first, none last": lambda i, r: (r, -i),
    }
    candidates: list[tuple[str, Starts | None]] = []
    if repetend is not None:
        unrolled = tuple(map(repetend.row, range(microbatches)))
        rules["steady state"] = lambda i, r: (unrolled[r][i],)
        rules["steady state, free last"] = lambda i, r: (free[i], unrolled[r][i])
        candidates.append(("repetend", tightened(shape, unrolled)))
    seeds = [*known, *handcrafted(shape, microbatches)]
    candidates += [(each.name, _of_schedule(shape, each)) for each in seeds]
    for name, rule in rules.items():
        candidates.append((name, _listed(shape, microbatches, memory, rule)))
    found = [Found(shape, starts, bound, name, repetend) for name, starts in candidates if starts]
    found = [each for each in found if not each.faults(memory)]
    if not found:
        raise ValueError(f"memory: got {memory}, in which no schedule of this shape was found")
    return min(found, key=lambda each: each.makespan)


def _steady(shape: Shape, memory: int, microbatches: int, seconds: float) -> Repetend | None:
    """The fastest steady state; several microbatches per period where one leaves devices idle."""
    best = find_repetend(shape, memory, seconds=seconds)
    if best is None or len(shape) > MOST_COPIED:
        return best
    for copies in range(2, min(MOST_COPIES, microbatches) + 1):
        if best.period <= best.bound:
            break
        found = find_repetend(shape, memory, copies=copies, seconds=seconds)
        if found is not None and found.rate < best.rate:
            best = found
    return best


def _of_schedule(shape: Shape, schedule: Schedule) -> Starts:
    """A known order, run as early as possible; of a whole backward the halves follow each other."""
    numbers = {block.name: i for i, block in enumerate(shape)}
    orders = []
    for order in schedule.orders:
        tasks = itertools.chain.from_iterable(
            (task._replace(kind="I"), task._replace(kind="W"))
            if task._replace(microbatch=0) not in numbers
            else (task,)
            for task in order
        )
        orders.append([(numbers[t._replace(microbatch=0)], t.microbatch) for t in tasks])
    found = [[-1] * len(shape) for _ in range(schedule.microbatches)]
    at, free, moved = [0] * len(orders), [0] * len(orders), True
    while moved:
        moved = False
        for device, order in enumerate(orders):
            while at[device] < len(order):
                i, r = order[at[device]]
                if any(found[r][before] < 0 for before in shape[i].after):
                    break
                ends = [found[r][before] + shape[before].span for before in shape[i].after]
                found[r][i] = max(free[device], *ends, 0)
                free[device] = found[r][i] + shape[i].span
                at[device], moved = at[device] + 1, True
    return tuple(map(tuple, found))


def lower_bound(shape: Shape, microbatches: int) -> int:
    """max over devices of (work + the shortest way to it + the shortest way on from it)."""
    heads = [0] * len(shape)
    for i, block in enumerate(shape):
        heads[i] = max((heads[b] + shape[b].span for b in block.after), default=0)
    tails = _tails(shape)
    bound = max(h + t for h, t in zip(heads, tails, strict=True))
    for device in {d for block in shape for d in block.devices}:
        mine = [i for i, block in enumerate(shape) if device in block.devices]
        work = microbatches * sum(shape[i].span for i in mine)
        way_on = min(tails[i] - shape[i].span for i in mine)
        bound = max(bound, work + min(heads[i] for i in mine) + way_on)
    return bound


def _tails(shape: Shape) -> list[int]:
    """From the start of each block to the end of all that needs it."""
    tails = [block.span for block in shape]
    for i in reversed(range(len(shape))):
        for before in shape[i].after:
            tails[before] = max(tails[before], shape[before].span + tails[i])
    return tails


def tightened(shape: Shape, starts: Starts) -> Starts:
    """Every block as early as the order on its devices allows; memory stays as it is."""
    order = sorted((start, i, r) for r, row in enumerate(starts) for i, start in enumerate(row))
    free: dict[int, int] = {}
    found = [list(row) for row in starts]
    for _, i, r in order:
        block = shape[i]
        ready = [free.get(device, 0) for device in block.devices]
        ready += [found[r][before] + shape[before].span for before in block.after]
        found[r][i] = max(ready)
        free |= dict.fromkeys(block.devices, found[r][i] + block.span)
    return tuple(map(tuple, found))


def _listed(
    shape: Shape, microbatches: int, memory: int, rule: Callable[[int, int], tuple]
) -> Starts | None:
    """A list schedule; None if its rule leads into a dead end."""
    count = len(shape)
    free, in_use = (
        {d: 0 for b in shape for d in b.devices},
        {d: 0 for b in shape for d in b.devices},
    )
    following = [0] * count  # the next microbatch of each block
    starts = [[-1] * count for _ in range(microbatches)]
    now, events = 0, [0]
    left = count * microbatches
    while left:
        ready = [
            (rule(i, r), i, r)
            for i, r in enumerate(following)
            if r < microbatches
            and all(0 <= starts[r][b] <= now - shape[b].span for b in shape[i].after)
        ]
        for _, i, r in sorted(ready):
            block = shape[i]
            fits = all(free[d] <= now and in_use[d] + block.memory <= memory for d in block.devices)
            if fits:
                starts[r][i], following[i], left = now, r + 1, left - 1
                for d in block.devices:
                    free[d], in_use[d] = now + block.span, in_use[d] + block.memory
                heapq.heappush(events, now + block.span)
        while events and events[0] <= now:
            heapq.heappop(events)
        if left and not events:
            return None
        now = events[0] if events else now
    return tuple(map(tuple, starts))
