"""Sequences of very different lengths, each on as many devices as it needs (FlexSP).

Sharding every sequence over all devices (Ulysses) wastes communication on short ones; one device
per sequence has no room for long ones. So devices are divided into groups of different sizes, and
sequences are assigned to groups to minimise the time of the slowest: a small integer program that
SciPy's HiGHS solves while the previous step runs.

Source: Wang et al., "FlexSP: Accelerating large language model training via flexible sequence
parallelism", ASPLOS 2025 (arXiv:2412.01523), and its released planner.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from toolkit._checks import check_fields, checked
from toolkit.parallel.sequences.classes import bucket_lengths, check_lengths, divide_evenly

MOST_DEVICES, MOST_CELLS = 1024, 8192
_MEGABYTE = 2**20


@dataclass(frozen=True)
class SequenceCosts:
    """The cost of a sequence of s tokens on d devices that share its heads (Ulysses).

        milliseconds(s, d) = (quadratic s^2 + linear s) / d + sent(s, d) / bandwidth[d]
        sent(s, d) = 8 * layers * width * s * 2 bytes / d          all-to-alls, there and back

    The defaults are the source's, for 7 billion parameters on GPUs of the A100's class.

    Attributes:
        quadratic: milliseconds per token squared (attention).
        linear: milliseconds per token (everything else).
        constant: milliseconds per group and step.
        bandwidth: gigabytes per second of an all-to-all within d devices, by d.
        layers: layers of the model.
        width: width of its residual stream.
        memory_megabytes: memory of a device.
        megabytes_per_token: activations per token.
        parameters: parameters of the model; a device keeps 16 / `shards` bytes of each.
        shards: devices that shard parameters and optimiser state (ZeRO-3).

    Example:
        >>> costs = SequenceCosts()
        >>> costs.capacity, round(costs.milliseconds(8192, 8), 3)
        (14349, 248.315)
    """

    quadratic: float = 5.128e-6
    linear: float = 0.1839576
    constant: float = 629.3563
    bandwidth: Mapping[int, float] = field(
        default_factory=lambda: {2: 154.0, 4: 137.0, 8: 121.0, 16: 8.7}
    )
    layers: int = 32
    width: int = 4096
    memory_megabytes: float = 80 * 1024.0
    megabytes_per_token: float = 4.71
    parameters: float = 7 * 2.0**30
    shards: int = 8

    def __post_init__(self):
        check_fields(self)
        for name in ("layers", "width", "memory_megabytes", "megabytes_per_token", "shards"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted more than 0")
        for name in ("quadratic", "linear", "constant", "parameters"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, wanted 0 or more")
        for degree, rate in self.bandwidth.items():
            if not isinstance(degree, int) or not isinstance(rate, int | float) or not rate > 0:
                raise ValueError(f"bandwidth: got {degree!r}: {rate!r}, wanted degree: GB/s")

    @property
    def capacity(self) -> int:
        """Tokens that fit on one device besides its share of the model."""
        room = self.memory_megabytes - 16 * self.parameters / self.shards / _MEGABYTE
        return max(0, int(room / self.megabytes_per_token))

    def milliseconds(self, tokens: int, degree: int) -> float:
        """Time of a sequence in a group of `degree` devices, without the group's constant."""
        compute = (self.quadratic * tokens**2 + self.linear * tokens) / degree
        if degree == 1:
            return compute
        sent = 8 * self.layers * self.width * tokens * 2 / _MEGABYTE / degree
        return compute + sent / self.bandwidth[degree]


@dataclass(frozen=True)
class SequenceGroup:
    """Devices that work on the same sequences.

    Attributes:
        degree: number of devices.
        sequences: indices into the planned lengths.
        milliseconds: predicted time.

    Example:
        >>> plan_sequence_groups([30000, 8000, 4000], devices=4, capacity=14349)[0].degree
        4
    """

    degree: int
    sequences: tuple[int, ...]
    milliseconds: float


@checked
def plan_sequence_groups(
    lengths: Sequence[int], *,
    devices: int, capacity: int | None = None, costs: SequenceCosts | None = None,
    degrees: Sequence[int] | None = None, buckets: int | None = None, seconds: float = 10.0,
) -> list[SequenceGroup]:  # fmt: skip
    """Divide devices into groups and assign sequences, minimising the time of the slowest group.

        minimise M  over  A[k, p] in {0, 1}: sequence k in group p,   m[p] in {0, 1}: p is there
        sum_p A[k, p] = 1;          A[k, p] <= m[p];          sum_p d[p] m[p] <= devices
        sum_k s[k] A[k, p] <= capacity d[p];     sum_k T(s[k], d[p]) A[k, p] + constant m[p] <= M

    Args:
        lengths: tokens of each sequence.
        devices: number of devices, a power of two.
        capacity: tokens that fit on one device; None for `costs.capacity`.
        costs: cost of a sequence; None for the source's example.
        degrees: sizes that groups may have; None for 2, 4, ... up to devices, as in the source.
        buckets: number of classes of lengths to plan with; None plans with every length.
        seconds: time limit; the best plan found so far is used.

    Returns:
        The groups with sequences, largest first; some devices may stay idle.

    Cost: an integer program of len(lengths) * (devices - 1) variables; `buckets` keep it small.

    Source: FlexSP, 2025, section 4.

    Example:
        >>> lengths = [30000, 8000, 4000, 4000, 2000, 2000, 1000, 1000]
        >>> groups = plan_sequence_groups(lengths, devices=8, capacity=8192)
        >>> max(round(group.milliseconds, 3) for group in groups)
        2577.365
    """
    costs = costs or SequenceCosts()
    capacity = costs.capacity if capacity is None else capacity
    degrees = _degrees(devices, costs) if degrees is None else sorted(set(degrees))
    _check(lengths, devices, capacity, degrees, costs, seconds)
    if sum(lengths) > capacity * devices:
        raise _DoesNotFitError(
            f"lengths: got {sum(lengths)} tokens, wanted at most {capacity * devices}, what "
            f"{devices} devices hold; see plan_micro_batches"
        )
    if max(lengths) > capacity * degrees[-1]:
        raise _DoesNotFitError(
            f"lengths: got a sequence of {max(lengths)} tokens, wanted at most "
            f"{capacity * degrees[-1]}, what {degrees[-1]} devices hold"
        )
    ends, members = _classes(lengths, buckets)
    slots = [degree for degree in reversed(degrees) for _ in range(devices // degree)]
    if len(ends) * len(slots) > MOST_CELLS:
        raise ValueError(
            f"buckets: got {len(ends)} classes of lengths for {len(slots)} possible groups, wanted "
            f"at most {max(1, MOST_CELLS // len(slots))}"
        )
    counts = _solve(ends, [len(m) for m in members], slots, devices, capacity, costs, seconds)
    if counts is None:
        raise _DoesNotFitError(
            f"lengths: {len(lengths)} sequences of {sum(lengths)} tokens do not fit into groups of "
            f"{devices} devices of {capacity} tokens each; see plan_micro_batches"
        )
    groups = []
    waiting = [list(m) for m in members]
    for slot, degree in enumerate(slots):
        mine = [waiting[q].pop() for q in range(len(ends)) for _ in range(counts[q, slot])]
        if mine:
            time = sum(costs.milliseconds(lengths[index], degree) for index in mine)
            groups.append(SequenceGroup(degree, tuple(sorted(mine)), costs.constant + time))
    return groups


@checked
def plan_micro_batches(
    lengths: Sequence[int], *,
    devices: int, capacity: int | None = None, costs: SequenceCosts | None = None,
    buckets: int | None = None, seconds: float = 10.0,
) -> list[list[SequenceGroup]]:  # fmt: skip
    """Divide a step's sequences into the fewest micro-batches that fit, and plan the groups of
    each.

    Args:
        lengths: tokens of each sequence of the step.
        devices: number of devices, a power of two.
        capacity, costs, buckets: as in `plan_sequence_groups`.

        seconds: time limit of each micro-batch.

    Returns:
        The groups of each micro-batch, whose sequences are indices into `lengths`.

    Source: FlexSP, 2025, section 4 (sequence blaster).

    Example:
        >>> plans = plan_micro_batches([8000] * 6, devices=4, capacity=8192)
        >>> [sum(len(group.sequences) for group in plan) for plan in plans]
        [3, 3]
    """
    costs = costs or SequenceCosts()
    capacity = costs.capacity if capacity is None else capacity
    how = {"devices": devices, "capacity": capacity, "costs": costs, "buckets": buckets}
    _check(lengths, devices, capacity, _degrees(devices, costs), costs, seconds)
    fewest, reason = -(-sum(lengths) // (capacity * devices)), None
    most = min(len(lengths), 2 * fewest + 8)  # beyond, a single sequence is what does not fit
    for parts in range(fewest, most + 1):
        plans = []
        try:
            for part in divide_evenly(lengths, parts):
                mine = [lengths[index] for index in part]
                groups = plan_sequence_groups(mine, seconds=seconds, **how)
                plans.append([
                    replace(group, sequences=tuple(part[index] for index in group.sequences))
                    for group in groups
                ])  # fmt: skip
            return plans
        except _DoesNotFitError as error:
            reason = error
    raise ValueError(f"lengths: no {fewest} to {most} micro-batches hold them ({reason})")


class _DoesNotFitError(ValueError):
    """More or longer sequences than the devices hold at once."""


def _solve(
    ends: list[int], numbers: list[int], slots: list[int], devices: int, capacity: int,
    costs: SequenceCosts, seconds: float,
) -> np.ndarray | None:  # fmt: skip
    """Sequences of each class in each slot; None if they cannot be placed."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    classes, groups = len(ends), len(slots)
    cells = classes * groups
    size = cells + groups + 1  # A, m, M
    tokens, degrees = np.asarray(ends, float), np.asarray(slots, float)
    column = np.arange(cells).reshape(classes, groups)
    present = cells + np.arange(groups)
    constraints = []

    def require(rows: np.ndarray, low: object, high: object) -> None:
        constraints.append(LinearConstraint(rows, low, high))  # pyright: ignore

    placed = np.zeros((classes, size))
    for q in range(classes):
        placed[q, column[q]] = 1
    require(placed, numbers, numbers)
    room, time, order = (np.zeros((groups, size)) for _ in range(3))
    for p in range(groups):
        room[p, column[:, p]] = tokens
        room[p, present[p]] = -capacity * degrees[p]  # so an absent group has no sequences
        time[p, column[:, p]] = [costs.milliseconds(end, slots[p]) for end in ends]
        time[p, present[p]], time[p, -1] = costs.constant, -1
        if p and slots[p] == slots[p - 1]:  # of like groups the first ones are there
            order[p, present[p]], order[p, present[p - 1]] = 1, -1
    for rows in (room, time, order):
        require(rows, -np.inf, 0)
    used = np.zeros((1, size))
    used[0, present] = degrees
    require(used, 0, devices)
    fits = tokens[:, None] <= capacity * degrees[None]
    most = np.where(fits, np.asarray(numbers, float)[:, None], 0).ravel()
    result = milp(
        c=np.eye(size)[-1],
        constraints=constraints,
        integrality=np.r_[np.ones(size - 1), 0],
        bounds=Bounds(np.zeros(size), np.r_[most, np.ones(groups), np.inf]),  # pyright: ignore
        options={"time_limit": seconds},
    )
    if result.x is None:
        return None
    return np.round(result.x[:cells]).astype(int).reshape(classes, groups)


def _classes(lengths: Sequence[int], buckets: int | None) -> tuple[list[int], list[list[int]]]:
    """The longest length of each class, and the indices of its sequences."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    exact = sorted(Counter(lengths).items())
    ends, members, start = [], [], 0
    for end, number in exact if buckets is None else bucket_lengths(lengths, buckets):
        ends.append(end)
        members.append(order[start : start + number])
        start += number
    return ends, members


def _degrees(devices: int, costs: SequenceCosts) -> list[int]:
    powers = [2**power for power in range(1, 11) if 2**power <= devices]
    return [degree for degree in powers if degree in costs.bandwidth] or [1]


def _check(
    lengths: Sequence[int], devices: int, capacity: int, degrees: Sequence[int],
    costs: SequenceCosts, seconds: float,
) -> None:  # fmt: skip
    check_lengths(lengths)
    if not 1 <= devices <= MOST_DEVICES or math.log2(devices) % 1:
        raise ValueError(f"devices: got {devices}, wanted a power of two up to {MOST_DEVICES}")
    if capacity < 1:
        raise ValueError(f"capacity: got {capacity}, wanted at least 1 token")
    if seconds <= 0:
        raise ValueError(f"seconds: got {seconds}, wanted more than 0")
    for degree in degrees or [0]:
        is_known = degree == 1 or degree in costs.bandwidth
        if not is_known or devices % max(1, degree):
            known = ", ".join(map(str, [1, *costs.bandwidth]))
            raise ValueError(
                f"degrees: got {degree}, wanted divisors of {devices} whose bandwidth is known "
                f"({known})"
            )
