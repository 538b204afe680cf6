"""One microbatch of a pipeline as blocks on devices: the shapes that a search schedules."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit._checks import check_choice, checked
from toolkit.schedules.schedule import Schedule, Task
from toolkit.schedules.simulation import Durations


@dataclass(frozen=True)
class Block:
    """A piece of one microbatch's work.

    Attributes:
        name: for titles; of a stage's task its `Task` of microbatch 0.
        devices: those it occupies, all at once.
        span: how long, a whole number.
        memory: what it adds to each of its devices from its start; below 0: what it frees.
        after: numbers of the blocks that must end before it starts, all of them smaller.

    Example:
        >>> Block("F0", devices=(0,), span=1, memory=1).after
        ()
    """

    name: str | Task
    devices: tuple[int, ...]
    span: int
    memory: int = 0
    after: tuple[int, ...] = ()


Shape = tuple[Block, ...]


def _chained(blocks: Sequence[tuple[str, tuple[int, ...], int, int]]) -> Shape:
    return tuple(
        Block(name, devices, span, memory, (at - 1,) if at else ())
        for at, (name, devices, span, memory) in enumerate(blocks)
    )


def _ways(devices: Sequence[int]) -> tuple[list, list]:
    down = [(f"F{d}", (d,), 1, 1) for d in devices]
    return down, [(f"B{d}", (d,), 3, -1) for d in reversed(devices)]


@checked
def tessel_shape(name: str, devices: int, *, is_inference: bool = False) -> Shape:
    """The placements of Tessel's evaluation: forwards take 1 and hold 1, backwards take 3.

        "V": a chain there and back         "X": two of them, in opposite directions
        "M": V between two blocks on all devices
        "NN": two half chains, each after a block on all devices, there and back
        "K": two half V joined by a loss on all devices, there and back

    Args:
        name: "V", "X", "M", "NN" or "K".
        devices: how many; an even number for "NN" and "K".
        is_inference: forward blocks only, which hold nothing.

    Returns:
        The blocks of one microbatch.

    Source: Lin et al., "Tessel", 2023 (arXiv:2311.15269), figure 8.

    Example:
        >>> [block.name for block in tessel_shape("V", devices=2)]
        ['F0', 'F1', 'B1', 'B0']
    """
    check_choice("name", name, ("V", "X", "M", "NN", "K"))
    if devices < 1 or (name in ("NN", "K") and devices % 2):
        raise ValueError(f"devices: got {devices}, wanted at least 1, an even number for NN and K")
    blocks = _training_shape(name, devices)
    if not is_inference:
        return blocks
    letters = "FL" if name == "K" else "FEH"
    left = [at for at, block in enumerate(blocks) if str(block.name)[0] in letters]
    return tuple(
        replace(blocks[at], memory=0, after=tuple(map(left.index, blocks[at].after))) for at in left
    )


def _training_shape(name: str, devices: int) -> Shape:
    every = tuple(range(devices))
    half, rest = every[: devices // 2], every[devices // 2 :]
    down, up = _ways(every)
    whole = lambda name: (name, every, 1, 0)  # noqa: E731
    if name == "V":
        return _chained(down + up)
    if name == "M":
        return _chained([whole("E"), *down, *up, whole("G")])
    if name == "NN":
        (a, d), (b, c) = _ways(half), _ways(rest)
        return _chained([whole("E"), *a, whole("H"), *b, *c, whole("L"), *d, whole("G")])
    if name == "X":
        first = _chained(down + up)
        other_down, other_up = _ways(every[::-1])
        return first + _moved(_chained(other_down + other_up), len(first))
    blocks: Shape = ()
    branches = [_ways(part) for part in (half, rest)]
    for forward, _ in branches:
        blocks += _moved(_chained(forward), len(blocks))
    loss = len(blocks)
    blocks += (Block("L", every, 1, 0, (loss // 2 - 1, loss - 1)), Block("G", every, 1, 0, (loss,)))
    for _, backward in branches:
        blocks += _moved(_chained(backward), len(blocks), before=loss + 1)
    return blocks


def _moved(chain: Shape, by: int, before: int | None = None) -> Shape:
    first = () if before is None else (before,)
    return tuple(
        Block(b.name, b.devices, b.span, b.memory, tuple(a + by for a in b.after) or first)
        for b in chain
    )


@checked
def shape_of(schedule: Schedule, durations: Durations | None = None) -> Shape:
    """The blocks of one microbatch of a schedule's placement, to search for a better order.

    A forward holds 1 from its start, until its backward or, where that is split, its weight
    gradient starts.

    Args:
        schedule: a schedule; only its placement, and whether it splits backwards, matters.
        durations: whole numbers, of one stage each; None: all 1.

    Returns:
        The blocks of one microbatch.

    Example:
        >>> from toolkit.schedules import gpipe
        >>> [block.span for block in shape_of(gpipe(devices=2, microbatches=1))]
        [1, 1, 2, 2]
    """
    durations = durations or Durations()
    stages, blocks = range(schedule.stages), []
    where: dict[Task, int] = {}
    letters = "IW" if schedule.is_split else "B"
    tasks = [Task("F", 0, s) for s in stages]
    tasks += [Task(letter, 0, s) for s in reversed(stages) for letter in letters]
    for task in tasks:
        span = durations.of(task.kind) * durations.factor(task)
        if span.denominator > 1:
            raise ValueError(f"durations: {task} takes {span}, wanted whole numbers")
        if task.kind == "W":
            needs = [Task("I", 0, task.stage)]
        elif task.kind == "F":
            needs = [Task("F", 0, task.stage - 1)] if task.stage else []
        else:
            needs = [Task("F", 0, task.stage)]
            needs += [Task(task.kind, 0, task.stage + 1)] if task.stage + 1 in stages else []
        memory = {"F": 1, "B": -1, "W": -1}.get(task.kind, 0)
        where[task] = len(blocks)
        after = tuple(where[other] for other in needs)
        blocks.append(Block(task, (schedule.placement[task.stage],), int(span), memory, after))
    return tuple(blocks)
