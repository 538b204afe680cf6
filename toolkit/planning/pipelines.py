"""Pipelines: what one step takes, and where to cut the layers.

Source: Hetu-Galvatron's released cost model.
"""

from collections.abc import Sequence

from toolkit._checks import checked

MOST_STAGES = 4096


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
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    best, cuts = [0.0, *[float("inf")] * count], []
    for _ in range(stages):
        found = [
            min(((max(best[j], sums[i] - sums[j]), j) for j in range(i)), default=(float("inf"), 0))
            for i in range(count + 1)
        ]
        best = [value for value, _ in found]
        cuts.append([cut for _, cut in found])
    sizes, end = [], count
    for row in reversed(cuts):
        sizes.append(end - row[end])
        end = row[end]
    return tuple(reversed(sizes))
