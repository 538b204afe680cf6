"""Replicas of different sizes in one step: which sizes, and which sequences where.

    min T    with    sum_r x_ir = 1,    sum_i x_ir t(s_i, d_r) <= T,
             and     x_ir = 0 if s_i > capacity d_r

Groups of FlexSP work side by side on one micro-batch; a replica works through many sequences, and
gradients are summed once, weighted by tokens. All ways to divide the chips into powers of two are
tried, the most promising first: longest sequence first onto the replica that ends soonest, then an
integer program. Within a replica, sequences are packed into micro-batches by time, not by tokens.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from toolkit._annotations import Positive
from toolkit._checks import checked
from toolkit.measure import in_words

MOST_BINARIES, MOST_CHIPS = 400, 64
Seconds = Callable[[int, int], float]


class ReplicaPlan(NamedTuple):
    """Replicas for the sequences of one step.

    Attributes:
        sizes: chips of each replica.
        sequences: indices into the lengths, per replica.
        seconds: until the last replica ends.
        equal_sizes, equal_seconds: the best replicas of one size; empty and infinity if none hold
            the sequences.
        bound: seconds that no division of these chips beats.
        is_exact: whether every integer program was solved to its end.

    Example:
        >>> cost = lambda length, degree: length / degree
        >>> plan_replicas([8, 4, 2, 2], chips=4, seconds=cost, capacity=8).seconds
        4.0
    """

    sizes: tuple[int, ...]
    sequences: tuple[tuple[int, ...], ...]
    seconds: float
    equal_sizes: tuple[int, ...]
    equal_seconds: float
    bound: float
    is_exact: bool

    def __str__(self) -> str:
        lines = [
            f"replica of {size}: {len(mine)} sequences"
            for size, mine in zip(self.sizes, self.sequences, strict=True)
        ]
        took, least = in_words(self.seconds, "seconds"), in_words(self.bound, "seconds")
        equal = "no equal replicas hold them"
        if self.equal_sizes:
            sizes = f"{len(self.equal_sizes)} x {self.equal_sizes[0]}"
            equal = f"equal replicas, {sizes}: {in_words(self.equal_seconds, 'seconds')}"
        lines.append(f"{took} per step, at least {least}; {equal} (Hydraulis; modelled)")
        return "\n".join(lines)


@checked
def plan_replicas(
    lengths: Sequence[int],
    *,
    chips: int,
    seconds: Callable[[int, int], float],
    capacity: float,
    limit: Annotated[float, Positive()] = 10.0,
) -> ReplicaPlan:
    """Divide chips into replicas of different sizes for the sequences of a step.

        min over sizes with sum d_r = chips, and over x, of the longest replica

    Args:
        lengths: tokens of each sequence.
        chips: how many, at most 64; a replica has a power of two of them.
        seconds: of a sequence of so many tokens on a replica of so many chips.
        capacity: tokens that a chip holds.
        limit: seconds of each integer program.

    Returns:
        A `ReplicaPlan`; no slower than equal replicas.

    Raises:
        ValueError: when a sequence fits on no replica.

    Cost: one integer program per division that may be better than the best so far; beyond 400
        binary variables the longest-first rule alone.

    Source: "Hydraulis", 2024, arXiv:2412.07894, dispatching; the program is ours.

    Example:
        >>> cost = lambda length, degree: length / degree * (1 + 0.1 * (degree > 1))
        >>> plan_replicas([32, 4, 4, 4, 4], chips=8, seconds=cost, capacity=8).sizes
        (8,)
    """
    if not lengths or min(lengths) < 1:
        raise ValueError("lengths must be one or more numbers of at least 1 token")
    if not 1 <= chips <= MOST_CHIPS or not capacity > 0:
        raise ValueError(
            f"want 1 to {MOST_CHIPS} chips and capacity above 0; got {chips} and {capacity}"
        )
    largest = 2 ** int(math.log2(chips))
    if max(lengths) > capacity * largest:
        raise ValueError(
            f"lengths: got a sequence of {max(lengths):,} tokens; nearest that works: at most "
            f"{int(capacity * largest):,}, on {largest} chips together"
        )
    degrees = [2**power for power in range(int(math.log2(largest)) + 1)]
    # What a sequence takes of all chips at least, on the best replica that holds it.
    work = [min(d * seconds(s, d) for d in degrees if s <= capacity * d) for s in map(int, lengths)]
    bound = sum(work) / chips
    found = {}
    for sizes in divisions(chips):
        if max(lengths) <= capacity * sizes[0]:
            found[sizes] = _longest_first(lengths, sizes, seconds, capacity)
    is_exact, best = True, math.inf
    for sizes in sorted(found, key=lambda sizes: found[sizes][0]):
        few = len(lengths) * len(sizes) <= MOST_BINARIES
        is_exact &= few
        is_equal = len(set(sizes)) == 1
        if few and (is_equal or _least(lengths, sizes, seconds, capacity) < best):
            better, proved = _assigned(lengths, sizes, seconds, capacity, limit)
            is_exact &= proved
            found[sizes] = min(found[sizes], better)
        best = min(best, found[sizes][0])
    sizes = min(found, key=lambda sizes: found[sizes][0])
    equal = {each: took for each, (took, _) in found.items() if len(set(each)) == 1}
    same = min(equal, key=lambda each: equal[each], default=())
    took, owner = found[sizes]
    mine = tuple(
        tuple(i for i, r in enumerate(owner) if r == replica) for replica in range(len(sizes))
    )
    return ReplicaPlan(sizes, mine, took, same, equal.get(same, math.inf), bound, is_exact)


def divisions(chips: int, most: int | None = None) -> list[tuple[int, ...]]:
    """All ways to divide chips into powers of two, largest first."""
    if chips == 0:
        return [()]
    top = min(chips, most or chips)
    return [
        (2**power, *rest)
        for power in range(int(math.log2(top)), -1, -1)
        for rest in divisions(chips - 2**power, 2**power)
    ]


def _least(lengths, sizes, seconds: Seconds, capacity: float) -> float:
    """Seconds that no assignment to these replicas beats."""
    own = set(sizes)
    work = sum(min(d * seconds(s, d) for d in own if s <= capacity * d) for s in lengths)
    return work / sum(sizes)


def _longest_first(lengths, sizes, seconds: Seconds, capacity: float):
    ends, owner = [0.0] * len(sizes), [0] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [r for r, size in enumerate(sizes) if lengths[i] <= capacity * size]
        after = {r: ends[r] + seconds(lengths[i], sizes[r]) for r in fitting}
        owner[i] = min(after, key=after.__getitem__)
        ends[owner[i]] = after[owner[i]]
    return max(ends), tuple(owner)


def _assigned(lengths, sizes, seconds: Seconds, capacity: float, limit: float):
    """The integer program; also whether it was solved to its end."""
    took = np.array([[seconds(s, d) for d in sizes] for s in lengths])
    open_ = np.array([[s <= capacity * d for d in sizes] for s in lengths])
    loads, found = _balanced(took, open_, np.zeros(len(lengths)), math.inf, limit)
    return loads, found


def _balanced(took, allowed, tokens, room: float, limit: float):
    """Items to bins so that the fullest takes least: ((seconds, bin of each), whether proved)."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    items, bins = took.shape
    count = items * bins
    once = np.zeros((items, count + 1))
    loads, used = np.zeros((bins, count + 1)), np.zeros((bins, count + 1))
    for i in range(items):
        once[i, i * bins : (i + 1) * bins] = 1
    for r in range(bins):
        loads[r, r:count:bins], loads[r, count] = took[:, r], -1
        used[r, r:count:bins] = tokens
    most: Any = np.append(allowed.ravel().astype(float), np.inf)
    rows = [LinearConstraint(once, 1.0, 1.0), LinearConstraint(loads, -np.inf, 0.0)]
    if math.isfinite(room):
        rows.append(LinearConstraint(used, -np.inf, room))
    solved = milp(
        np.append(np.zeros(count), 1.0), constraints=rows,
        integrality=np.append(np.ones(count), 0.0),
        bounds=Bounds(0, most),
        options={"time_limit": limit},
    )  # fmt: skip
    if solved.x is None:
        return (math.inf, ()), False
    owner = tuple(int(r) for r in solved.x[:count].reshape(items, bins).argmax(1))
    ends = np.bincount(owner, took[np.arange(items), list(owner)], bins)
    return (float(ends.max()), owner), solved.status == 0


@checked
def pack_by_time(
    lengths: Sequence[int],
    *,
    seconds: Callable[[int, int], float],
    microbatches: int,
    room: float,
    stages: int = 1,
    limit: Annotated[float, Positive()] = 10.0,
) -> tuple[tuple[tuple[int, ...], ...], float]:
    """Sequences into micro-batches of at most so many tokens, so that a pipeline ends soonest.

        step = (sum_j T_j + (p - 1) max_j T_j) / p          stages of equal time

    Args:
        lengths: tokens of each sequence.
        seconds: of a sequence of so many tokens through all stages, on 1 replica.
        microbatches: how many.
        room: tokens of a micro-batch, at most.
        stages: p.
        limit: seconds of the integer program.

    Returns:
        (indices of the sequences of each micro-batch, seconds of the step).

    Raises:
        ValueError: when the micro-batches do not hold the sequences.

    Source: "Hydraulis", 2024, arXiv:2412.07894, packing; the program is ours.

    Example:
        >>> square = lambda length, degree: length * length / 100
        >>> pack_by_time([8, 4, 4, 4, 4], seconds=square, microbatches=2, room=16)[0]
        ((0,), (1, 2, 3, 4))
    """
    if not lengths or microbatches < 1 or stages < 1:
        raise ValueError("want lengths, and microbatches and stages of at least 1")
    each = np.array([seconds(s, 1) for s in lengths])
    took = np.repeat(each[:, None], microbatches, 1)
    (most, owner), _ = _balanced(took, took >= 0, np.asarray(lengths, float), room, limit)
    if not owner:
        raise ValueError(
            f"room: {microbatches} micro-batches of {room:g} tokens do not hold {sum(lengths):,}"
        )
    packs = sorted(tuple(i for i, r in enumerate(owner) if r == j) for j in range(microbatches))
    return tuple(packs), float((each.sum() + (stages - 1) * most) / stages)


@checked
def ranks_of(lengths: Sequence[int], capacity: float, *, offloaded: float = 0.0) -> tuple[int, ...]:
    """Chips that each sequence needs for its activations, of which a share waits on the host.

        d(s) = ceil((1 - r) s / capacity)

    Args:
        lengths: tokens of each sequence.
        capacity: tokens that a chip holds.
        offloaded: share of activations kept on the host.

    Returns:
        Chips, per sequence.

    Source: "ByteScale", 2025, arXiv:2502.21231: hybrid data parallelism.

    Example:
        >>> ranks_of([4, 12, 28], 8), ranks_of([28], 8, offloaded=0.5)
        ((1, 2, 4), (2,))
    """
    if not capacity > 0 or not 0 <= offloaded < 1:
        raise ValueError(
            f"want capacity above 0 and offloaded in [0, 1); got {capacity}, {offloaded}"
        )
    return tuple(max(1, math.ceil((1 - offloaded) * s / capacity)) for s in lengths)


def rings_in_words(lengths: Sequence[int], capacity: float) -> str:
    """Chips that each sequence needs, and what rings of so many send, against one ring for all."""
    ranks = ranks_of(lengths, capacity)
    own = sum(s * (d - 1) for s, d in zip(lengths, ranks, strict=True))
    fixed = sum(lengths) * (max(ranks) - 1)
    counts = ", ".join(f"{ranks.count(d)} on {d}" for d in sorted(set(ranks)))
    return (
        f"sequences on as few chips as hold them: {counts}; keys and values of {own:,} tokens are "
        f"sent on, against {fixed:,} with {max(ranks)} chips for each (ByteScale; modelled)"
    )
