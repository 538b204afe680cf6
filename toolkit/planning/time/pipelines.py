"""Pipelines: what one step takes, and where to cut the layers.

Source: Hetu-Galvatron's released cost model.
"""

import itertools
import math
from collections.abc import Callable, Sequence

from toolkit._checks import checked

MOST_STAGES = 4096
MOST_CUTS = 1 << 26  # stages x layers^2

Of = Callable[[int, int, int], float]


@checked
def pipeline_seconds(
    stages: Sequence[float], microbatches: int, *, last: Sequence[float] | None = None
) -> float:
    """Seconds of a 1F1B step of microbatches through stages, a third of each forward.

        T = max(sum c + (m-1) c_last, warm-up + steady state of the first stage) + late gradients

    with c the stages' seconds, m microbatches, and g (`last`) those of the microbatch that also
    sends gradients: max(0, max_i (g_i - sum_{j<=i} c_j)).

    Args:
        stages: seconds of one microbatch, forward and backward, stage by stage.
        microbatches: how many.
        last: seconds with the communication of gradients; None: the same.

    Returns:
        Seconds.

    Raises:
        ValueError: no stages, more than 4096, a negative number, or other lengths.

    Cost:
        Proportional to the stages.

    Source: Hetu-Galvatron, pipeline cost of the search engine.

    Example:
        >>> pipeline_seconds([4, 3, 2, 1], 8, last=[4.5, 3.5, 2.5, 1.5])
        32.5
    """
    c, g = list(stages), list(stages if last is None else last)
    if not 1 <= len(c) <= MOST_STAGES or len(g) != len(c):
        raise ValueError(f"stages and last must be equally long, 1 to {MOST_STAGES} numbers")
    if microbatches < 1 or min(*c, *g) < 0:
        raise ValueError("microbatches must be at least 1 and seconds not negative")
    count, m = len(c), microbatches
    waves = min(count - 1, m - 1)
    forward = max(waves * c[0] / 3, sum(c[1:]) / 3)
    backward = max(waves * 2 * c[0] / 3, sum(c[1:]) * 2 / 3)
    total = max(sum(c) + c[-1] * (m - 1), forward + backward + c[0] * max(0, m + 1 - count))
    return total + max(0.0, *(g[i] - sum(c[: i + 1]) for i in range(count)))


@checked
def cut_evenly(weights: Sequence[float], stages: int) -> tuple[int, ...]:
    """Layers per stage so that the heaviest of consecutive stages is as light as can be.

    Args:
        weights: of each layer, such as seconds or bytes.
        stages: how many, each with one layer at least.

    Returns:
        Number of layers of every stage.

    Raises:
        ValueError: more stages than layers, or a negative weight.

    Cost:
        layers^2 x stages.

    Example:
        >>> cut_evenly([1, 1, 1, 3], 2)
        (3, 1)
    """
    count = len(weights)
    if not 1 <= stages <= count or count > MOST_STAGES:
        raise ValueError(f"stages must be 1 to {min(count, MOST_STAGES)}, the layers; got {stages}")
    if min(weights) < 0:
        raise ValueError("weights must not be negative")
    sums = [0.0, *itertools.accumulate(weights)]
    found = _lightest(count, stages, lambda _, start, end: sums[end] - sums[start])
    assert found is not None
    return found[1]


@checked
def balance_stages(
    seconds: Sequence[float], memory: Sequence[Sequence[float]], *, limit: float
) -> tuple[int, ...] | None:
    """Layers per stage so that the slowest stage is as fast as memory allows (Galvatron-BMW).

        min over cuts of max_k sum_{i in k} seconds[i]    with    sum_{i in k} memory[k][i] <= limit

    Of the cuts that reach it, the one whose fullest stage is least full. The source moves layers
    between stages step by step; here both are exact.

    Args:
        seconds: of each layer.
        memory: [stages][layers], what each layer would take on each stage; early ones hold more
            microbatches (1F1B).
        limit: what a stage has.

    Returns:
        Number of layers of every stage, or None where nothing fits.

    Raises:
        ValueError: more stages than layers, tables of other shapes, or a negative number.

    Cost:
        layers^2 x stages, twice.

    Source: Wang et al., 2023 (Galvatron-BMW), section 5, bi-objective optimisation.

    Example:
        >>> balance_stages([1, 1, 1, 1], [[4, 4, 4, 4], [2, 2, 2, 2]], limit=8)
        (2, 2)
        >>> balance_stages([1, 1, 1, 1], [[4, 4, 4, 4], [2, 2, 2, 2]], limit=6)
        (1, 3)
    """
    count, stages = len(seconds), len(memory)
    if not 1 <= stages <= count or count > MOST_STAGES or count**2 * stages > MOST_CUTS:
        raise ValueError(
            f"memory must have a row for each of 1 to {min(count, MOST_STAGES)} stages; "
            f"got {stages} for {count} layers"
        )
    if any(len(row) != count for row in memory):
        raise ValueError(f"memory must have {count} numbers per stage, one for each layer")
    if min(seconds) < 0 or min(map(min, memory)) < 0 or limit < 0:
        raise ValueError("seconds, memory and limit must not be negative")
    times = [0.0, *itertools.accumulate(seconds)]
    held = [[0.0, *itertools.accumulate(row)] for row in memory]
    return balanced(
        count,
        stages,
        lambda _, start, end: times[end] - times[start],
        lambda stage, start, end: held[stage][end] - held[stage][start],
        limit,
    )


def balanced(
    count: int, stages: int, seconds: Of, memory: Of, limit: float
) -> tuple[int, ...] | None:
    """`balance_stages` of functions (stage, first layer, end) -> seconds and bytes."""

    def fitting(stage: int, start: int, end: int) -> float:
        took = seconds(stage, start, end)
        return took if memory(stage, start, end) <= limit else math.inf

    found = _lightest(count, stages, fitting)
    if found is None:
        return None
    slowest = found[0] * (1 + 1e-12)
    lightest = _lightest(
        count,
        stages,
        lambda *cut: memory(*cut) if fitting(*cut) <= slowest else math.inf,
    )
    assert lightest is not None
    return lightest[1]


def _lightest(count: int, stages: int, weight: Of) -> tuple[float, tuple[int, ...]] | None:
    """The heaviest stage of the best cut and the stages' sizes; None where all weigh infinity."""
    best, cuts = [0.0, *[math.inf] * count], []
    for stage in range(stages):
        found = []
        for end in range(count + 1):
            starts = (start for start in range(end) if best[start] < math.inf)
            pairs = ((max(best[start], weight(stage, start, end)), start) for start in starts)
            found.append(min(pairs, default=(math.inf, 0)))
        best = [value for value, _ in found]
        cuts.append([cut for _, cut in found])
    if best[count] == math.inf:
        return None
    sizes, end = [], count
    for row in reversed(cuts):
        sizes.append(end - row[end])
        end = row[end]
    return best[count], tuple(reversed(sizes))
