"""The assignment of pipeline stages to nodes when links differ in speed (Pipette).

In a large cluster, links of one kind differ between nodes, and the time of a pipeline depends on
which nodes are neighbours. Bandwidths between nodes are measured, and an order of nodes is
searched.

Source: Jeon et al., "Pipette: Automatic fine-grained large language model training configurator for
real-world clusters", DATE 2024 (arXiv:2405.18093), and its released code.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from toolkit._checks import checked
from toolkit._files import bounded_json
from toolkit.looped import parameter_count
from toolkit.measure import in_words
from toolkit.planning.memory.sizes import FLOAT32
from toolkit.planning.search.plan import Plan
from toolkit.planning.time.pipelines import stage_ends

MOST_NODES, MOST_STEPS = 1024, 1_000_000
COOLING = 0.999


class Placement(NamedTuple):
    """An assignment of nodes to pipeline stages.

    Attributes:
        nodes: [pipelines][stages], the node of each stage of each pipeline.
        seconds: of a step.
        seconds_as_counted: of a step with the nodes in their given order.

    Example:
        >>> links = [[0, 1, 9], [1, 0, 9], [9, 9, 0]]
        >>> sizes = {"stage_seconds": 1.0, "stage_bytes": 1.0, "microbatches": 3}
        >>> found = place_stages(links, stages=3, **sizes)
        >>> found.seconds <= found.seconds_as_counted
        True
    """

    nodes: tuple[tuple[int, ...], ...]
    seconds: float
    seconds_as_counted: float


@checked
def place_stages(
    bandwidth: Sequence[Sequence[float]],
    *,
    stages: int,
    stage_seconds: float,
    stage_bytes: float,
    gradient_bytes: float = 0.0,
    microbatches: int,
    steps: int = 5000,
    seed: int = 0,
) -> Placement:
    """Assign pipeline stages to nodes by simulated annealing over the order of the nodes.

        step = max over pipelines of 1F1B(c, m, stage_bytes / bandwidth) + gradients
        gradients = max over stages of 2 (d - 1)/d gradient_bytes / slowest link of their ring

    with d pipelines, m microbatches and c seconds of a stage, forward and backward. 1F1B is exact,
    as in `pipeline_seconds`; the source rounds m down to a multiple of the stages.

    Args:
        bandwidth: [nodes][nodes], measured bytes per second between nodes; the diagonal is ignored.
        stages: stages per pipeline, a divisor of the number of nodes.
        stage_seconds: seconds of one microbatch on one stage, forward and backward.
        stage_bytes: bytes per microbatch sent to the next stage and, for gradients, back.
        gradient_bytes: bytes of a stage's gradients, which the pipelines sum once per step.
        microbatches: per pipeline and step.
        steps: number of orders to try.
        seed: random seed of the search.

    Returns:
        A `Placement`, never slower than the given order.

    Cost: About 20 microseconds per step and pipeline of four stages.

    Source: Pipette, sections 4 and 5: measured links and annealing, with its moves.

    Example:
        >>> links = [[0, 1, 9, 9], [1, 0, 9, 9], [9, 9, 0, 1], [9, 9, 1, 0]]
        >>> sizes = {"stage_seconds": 0.0, "stage_bytes": 9.0, "microbatches": 2}
        >>> found = place_stages(links, stages=2, **sizes)
        >>> found.seconds, found.seconds_as_counted
        (2.0, 18.0)
    """
    rates = _rates(bandwidth)
    count = len(rates)
    for name, value, low, high in (
        ("stages", stages, 1, count),
        ("microbatches", microbatches, 1, 1 << 20),
        ("steps", steps, 0, MOST_STEPS),
        ("seed", seed, 0, (1 << 63) - 1),
        ("stage_seconds", stage_seconds, 0, 1e12),
        ("stage_bytes", stage_bytes, 0, 1e18),
        ("gradient_bytes", gradient_bytes, 0, 1e18),
    ):
        if not low <= value <= high:
            raise ValueError(f"{name} must lie in [{low}, {high:g}]; got {value}")
    if count % stages:
        nearest = max(n for n in range(1, stages) if count % n == 0)
        raise ValueError(
            f"stages {stages} do not divide the {count} nodes; nearest that works: {nearest}"
        )
    pipelines = count // stages
    summed = 2 * (pipelines - 1) / pipelines * gradient_bytes
    passes = [stage_seconds / 3] * stages, [2 * stage_seconds / 3] * stages

    @functools.lru_cache(maxsize=1 << 16)  # a move changes few pipelines
    def pipeline(*nodes: int) -> float:
        down = [stage_bytes / rates[a, b] for a, b in itertools.pairwise(nodes)]
        up = [stage_bytes / rates[b, a] for a, b in itertools.pairwise(nodes)]
        return max(stage_ends(*passes, down, up, microbatches))

    def seconds(order: np.ndarray) -> float:
        rows = order.reshape(pipelines, stages)
        ring = rates[rows, np.roll(rows, -1, axis=0)].min() if pipelines > 1 else math.inf
        return float(max(pipeline(*row) for row in rows.tolist()) + summed / ring)

    counted = np.arange(count)
    best, first = counted, seconds(counted)
    now, before, least, heat = counted, first, first, 1.0
    rng = np.random.default_rng(seed)
    for _ in range(steps if count > 1 else 0):
        tried = _moved(now, rng)
        after = seconds(tried)
        worse = after - before
        # Scaled below one, as in the source, to be independent of the unit of time.
        scaled = worse / 10 ** (math.floor(math.log10(worse)) + 1) if worse > 0 else 0.0
        if worse <= 0 or rng.random() < math.exp(-scaled / max(heat, 1e-12)):
            now, before = tried, after
        if after < least:
            best, least = tried, after
        heat *= COOLING
    rows = best.reshape(pipelines, stages).tolist()
    return Placement(tuple(map(tuple, rows)), least, first)


def placed_in_words(found: Plan, path: Path) -> str:
    """The placement of a file's nodes in a plan's fastest pipelines, and what it saves."""
    best = next((p for p in (found.best, *found.runners_up) if p.strategy.pipeline > 1), None)
    if best is None:
        raise ValueError("links: no plan among the fastest has pipeline stages to place")
    bandwidth = bounded_json(path.read_text(encoding="utf-8"), f"links {path}")
    strategy, nodes = best.strategy, len(bandwidth) if isinstance(bandwidth, list) else 0
    if nodes < 1 or best.cluster.chips % nodes or nodes % strategy.pipeline:
        raise ValueError(
            f"links {path}: {nodes} nodes must divide {best.cluster.chips} chips and be a multiple "
            f"of {strategy.pipeline} stages ({strategy})"
        )
    count, stages = strategy.microbatches, strategy.pipeline
    tokens = best.batch * best.sequence_length // count
    size = best.config.compute_dtype.itemsize
    computing = ("forward", "backward", "recomputed", "tensor communication")
    busy = sum(best.seconds[name] for name in computing)
    placement = place_stages(
        bandwidth,
        stages=stages,
        stage_seconds=busy / count,
        # Bytes sent by all chips of a stage, by its nodes.
        stage_bytes=tokens * best.config.width * size / (nodes // stages),
        gradient_bytes=FLOAT32 * parameter_count(best.config) / stages,
        microbatches=count,
    )
    rows = "; ".join(" -> ".join(map(str, row)) for row in placement.nodes)
    took, before = placement.seconds, placement.seconds_as_counted
    return (
        f"{strategy} on these {nodes} nodes, stage by stage: {rows}: "
        f"{in_words(took, 'seconds')} per step, {in_words(before, 'seconds')} as counted (modelled)"
    )


def _moved(order: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One of the source's moves: a segment reversed, moved, or moved reversed; two nodes swapped;
    one node inserted elsewhere."""
    low, high = sorted(rng.choice(len(order) + 1, 2, replace=False))
    kind = rng.integers(5)
    if kind == 0:
        return np.concatenate([order[:low], order[low:high][::-1], order[high:]])
    if kind == 1:
        swapped = order.copy()
        swapped[[low, high - 1]] = swapped[[high - 1, low]]
        return swapped
    high = low + 1 if kind == 2 and low < len(order) else high
    part, rest = order[low:high], np.concatenate([order[:low], order[high:]])
    at = int(rng.integers(len(rest) + 1))
    return np.concatenate([rest[:at], part[::-1] if kind == 3 else part, rest[at:]])


def _rates(bandwidth) -> np.ndarray:
    try:
        rates = np.array(bandwidth, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("bandwidth must be a table of numbers [nodes][nodes]") from None
    if rates.ndim != 2 or rates.shape[0] != rates.shape[1] or not 1 <= len(rates) <= MOST_NODES:
        raise ValueError(
            f"bandwidth must be a table [nodes][nodes] of 1 to {MOST_NODES} nodes; "
            f"got shape {rates.shape}"
        )
    np.fill_diagonal(rates, 1.0)  # ring and pipelines have no such link, but for one node
    if not (np.isfinite(rates) & (rates > 0)).all():
        raise ValueError("bandwidth must be positive and finite between all nodes")
    return rates
