r"""Which engines on which chips: DistServe's enumeration, and OServe's linear programme.

Prompts alone are nearly deterministic work, so a pool that only reads is an M/D/1 queue, with a
service of D seconds and R requests per second on average:

    one chip            D + R D^2 / (2 (1 - R D))
    two stages          D + R D^2 / (4 (2 - R D))
    two-way tensor      D/K + R D^2 / (2 K (K - R D))                      K < 2 times as fast

Tensor parallelism wins at a low rate and stages at a high one (DistServe, section 3.1).
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from toolkit._checks import checked
from toolkit.serving.policies import PrefillFirst, WriteOnly
from toolkit.serving.runs import Work
from toolkit.serving.scheduler import Scheduler
from toolkit.serving.simulation.simulate import Instance


@checked
def reading_seconds(service: float, rate: float, *, stages: int = 1, speed: float = 1.0) -> float:
    """Mean seconds to the first token of a pool that only reads prompts; infinite if overloaded.

        D/K + r s^2 / (2 (1 - r s)),   s = D / (K stages),  r = rate: the wait at the first stage

    Args:
        service: D, seconds of a prompt on one chip.
        rate: requests per second.
        stages: of a pipeline, 1 or 2 here.
        speed: K, of a prompt's chips together, in tensor parallelism.

    Returns:
        Seconds (modelled).

    Source: Zhong et al., "DistServe", 2024 (arXiv:2401.09670), equations 1 to 3.

    Example:
        >>> round(reading_seconds(1.0, 0.5, stages=2), 4)
        1.0833
        >>> round(reading_seconds(1.0, 0.5, speed=1.5), 4)
        0.8333
    """
    if service <= 0 or rate < 0 or speed <= 0 or stages < 1:
        raise ValueError(
            f"service, rate, speed, stages: got {service}, {rate}, {speed} and {stages}; wanted "
            "positive numbers"
        )
    slowest = service / speed / stages
    if rate * slowest >= 1:
        return float("inf")
    return service / speed + rate * slowest**2 / (2 * (1 - rate * slowest))


class Pools(NamedTuple):
    """Engines on chips: of one kind, or readers and writers.

    Attributes:
        kind: "joint" reads prompts first, "chunked" reads them beside the rows, "split" in a pool.
        counts: engines of each pool.
        tensor: chips of an engine of each pool.

    Example:
        >>> Pools("split", (2, 1), (1, 2)).chips
        4
    """

    kind: str
    counts: tuple[int, ...]
    tensor: tuple[int, ...]

    @property
    def chips(self) -> int:
        """Chips of all engines."""
        return sum(map(int.__mul__, self.counts, self.tensor))

    def instances(
        self, costs: Mapping[int, Callable[[Work], float]], *, batch: int, chunk: int
    ) -> list[Instance]:
        """Engines for `simulate`: `costs` by chips of an engine, tokens of a batch of prompts."""
        if self.kind == "split":
            (readers, writers), (reading, writing) = self.counts, (costs[x] for x in self.tensor)
            return [
                *(Instance(PrefillFirst(batch), reading, role="prefill") for _ in range(readers)),
                *(Instance(WriteOnly(), writing, role="decode") for _ in range(writers)),
            ]
        is_joint, cost = self.kind == "joint", costs[self.tensor[0]]
        each = range(self.counts[0])
        return [Instance(PrefillFirst(batch) if is_joint else Scheduler(chunk), cost) for _ in each]


@checked
def placements(chips: int, tensor: Sequence[int]) -> Iterator[Pools]:
    """Every choice of pools that uses all chips: DistServe's search, by brute force.

    Args:
        chips: of all engines.
        tensor: chips that an engine may have.

    Returns:
        Pools, "joint" and "chunked" ones first.

    Example:
        >>> len(list(placements(4, (1, 2))))
        10
    """
    for kind, size in itertools.product(("joint", "chunked"), tensor):
        if chips % size == 0:
            yield Pools(kind, (chips // size,), (size,))
    for reading, writing in itertools.product(tensor, repeat=2):
        for readers in range(1, chips):
            left = chips - readers * reading
            if left > 0 and left % writing == 0:
                yield Pools("split", (readers, left // writing), (reading, writing))


class Mixed(NamedTuple):
    """Replicas of different sizes, and which part of their time each class of requests takes.

    Attributes:
        counts: replicas of each size.
        scale: the largest multiple of all rates that they sustain (theta).
        shares: of each replica's time, by class.

    Example:
        >>> Mixed((1,), 1.5, ((0.5, 0.5),)).scale
        1.5
    """

    counts: tuple[int, ...]
    scale: float
    shares: tuple[tuple[float, ...], ...]


@checked
def mix_replicas(
    chips: int, throughput: Mapping[int, Sequence[float]], rates: Sequence[float]
) -> list[Mixed]:
    """Unlike replicas for unlike requests: all choices of sizes, the best first.

        max theta,   sum_j x_rj <= 1,   sum_r c_rj x_rj >= theta lambda_j,   x >= 0

    Args:
        chips: of all replicas; not all need be used.
        throughput: chips of a replica -> requests per second of each class alone.
        rates: requests per second of each class.

    Returns:
        Every choice, the one of the largest `scale` first.

    Cost: a linear programme per choice of sizes.

    Source: OServe, 2025, whose programme this is as its abstract describes it; our form.

    Example:
        >>> best = mix_replicas(8, {1: (6, 1), 2: (13, 5), 4: (24, 14)}, (30, 8))[0]
        >>> best.counts, round(best.scale, 4)
        ((0, 2, 1), 1.1438)
    """
    from scipy.optimize import linprog

    sizes, classes = list(throughput), len(rates)
    if any(len(row) != classes for row in throughput.values()) or min(rates) <= 0:
        raise ValueError(f"rates: got {list(rates)}; wanted positive ones, one per class of rows")
    found = []
    for counts in itertools.product(*(range(chips // size + 1) for size in sizes)):
        used = sum(map(int.__mul__, counts, sizes))
        if used > chips or any(used + size <= chips for size in sizes):
            continue  # too many chips, or room for a replica more
        rows = [throughput[size] for size, n in zip(sizes, counts, strict=True) for _ in range(n)]
        # Variables: theta, then shares by replica and class.
        limits = np.zeros((len(rows) + classes, 1 + len(rows) * classes))
        for replica, row in enumerate(rows):
            own = slice(1 + replica * classes, 1 + (replica + 1) * classes)
            limits[replica, own] = 1
            limits[len(rows) :, own] = -np.diag(row)
        limits[len(rows) :, 0] = rates
        bounds = [1.0] * len(rows) + [0.0] * classes
        best = linprog([-1, *[0] * (limits.shape[1] - 1)], limits, bounds, method="highs").x
        shares = best[1:].reshape(-1, classes).tolist()
        found.append(Mixed(counts, float(best[0]), tuple(map(tuple, shares))))
    return sorted(found, key=lambda each: -each.scale)


@checked
def switch_pays(before: float, after: float, horizon: float, seconds: float) -> bool:
    """Whether to change replicas: what is gained until `horizon` exceeds what `seconds` of standing
    still lose, horizon (after - before) > seconds before, of two throughputs (OServe).

    Args:
        before, after: throughputs.
        horizon: seconds for which the load will stay as it is.
        seconds: of the switch.

    Returns:
        Whether it pays.

    Example:
        >>> switch_pays(10.0, 12.0, horizon=60.0, seconds=10.0)
        True
    """
    return horizon * (after - before) > seconds * before
