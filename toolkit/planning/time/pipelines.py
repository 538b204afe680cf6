"""Pipelines: the time of one step, and the assignment of layers to stages."""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from toolkit._checks import checked

MOST_STAGES = 4096
MOST_CUTS = 1 << 26  # stages x layers^2
MOST_TASKS = 1 << 22  # stages x microbatches
PERIODIC = 1e-12  # relative tolerance for equal delays

# Of a stage, [first layer, end]; infinite where it would have no layer.
Cuts = Callable[[int], np.ndarray]


@checked
def pipeline_seconds(
    stages: Sequence[float],
    microbatches: int,
    *,
    forward: Sequence[float] | None = None,
    hops: Sequence[float] | None = None,
    last: Sequence[float] | None = None,
) -> float:
    """The exact time of a 1F1B step for any stages: every task starts as early as its order allows.

        end F(i, s) = f_s + max(end F(i, s-1) + h_{s-1}, end of the task before on stage s)
        end B(i, s) = b_s + max(end B(i, s+1) + h_s, end of the task before on stage s)
        T           = max_s (end B(m-1, s) + g_s - c_s)

    with c = f + b the stages' seconds, h those of a hop, m microbatches, and g (`last`) those of
    the last microbatch, after which gradients are sent. Messages do not queue for a link: in 1F1B a
    microbatch takes at least h + c of every pair of stages, so that links are never the bottleneck.

    Args:
        stages: seconds of one microbatch, forward and backward, stage by stage.
        microbatches: how many.
        forward: seconds of the forward pass, part of `stages`; None: a third.
        hops: seconds from each stage to the next and, for gradients, back; one fewer than stages.
            None: zero.
        last: seconds of the last microbatch including what follows it, such as the communication of
            gradients; None: as `stages`.

    Returns:
        Seconds.

    Cost: Stages x microbatches, or about stages^2 where the step becomes periodic: 0.1 ms for 16
        stages and 512 microbatches.

    Source: Narayanan et al., "PipeDream", 2019 (arXiv:1806.03377), flushed as in Megatron-LM.

    Example:
        >>> pipeline_seconds([3, 3, 12, 3], 16)  # the third alone takes 16 x 12 = 192
        198.0
    """
    c = [float(each) for each in stages]
    count = len(c)
    f = [each / 3 for each in c] if forward is None else list(forward)
    h = [0.0] * (count - 1) if hops is None else list(hops)
    g = c if last is None else list(last)
    if not 1 <= count <= MOST_STAGES or not len(f) == len(g) == len(h) + 1 == count:
        raise ValueError(
            f"stages, forward and last must be equally long, 1 to {MOST_STAGES} numbers, and hops "
            f"one shorter; got {count}, {len(f)}, {len(g)} and {len(h)}"
        )
    b = [whole - part for whole, part in zip(c, f, strict=True)]
    if microbatches < 1 or min(*c, *f, *b, *g, *h, 0.0) < 0:
        raise ValueError(
            "microbatches must be at least 1, seconds not negative and forward a part of stages"
        )
    if count * microbatches > MOST_TASKS:
        raise ValueError(
            f"microbatches must be at most {MOST_TASKS // count:,} for {count} stages; "
            f"got {microbatches:,}"
        )
    ends = stage_ends(f, b, h, h, microbatches)
    return max(end + sent - usual for end, sent, usual in zip(ends, g, c, strict=True))


def stage_ends(
    forward: Sequence[float],
    backward: Sequence[float],
    down: Sequence[float],
    up: Sequence[float],
    microbatches: int,
) -> list[float]:
    """The end of each stage's last backward pass in 1F1B; `down` and `up` are seconds of hops."""
    count, last = len(forward), len(forward) - 1
    arrived = [0.0] * count  # end of each stage's latest forward
    free = [0.0] * count  # end of each stage's latest task
    before, since, wait = [-math.inf] * 2 * count, 0, 1
    hops = [0.0, *up]  # from each stage back to the one before it
    # Round r: stage s runs the forward of microbatch r - s, if there is one, and once all stages
    # have work the backward of microbatch r - last. So 1F1B's orders are met.
    done = 0
    while done < microbatches + last:
        # Comparisons instead of `max`, which takes as long as all the rest.
        for s in range(min(done, last), max(done - microbatches, 0), -1):
            start, ready = arrived[s - 1] + down[s - 1], free[s]
            arrived[s] = free[s] = (start if start > ready else ready) + forward[s]
        if done < microbatches:
            arrived[0] = free[0] = free[0] + forward[0]
        done += 1
        if done < count:
            continue
        start = 0.0
        for s in range(last, -1, -1):
            ready = free[s]
            start = free[s] = (start if start > ready else ready) + backward[s]
            start += hops[s]
        left, since = microbatches - done, since + 1
        if left > 0 and wait:
            # If a round delays all stages by the same time, so do all later ones, as only sums and
            # maxima are involved. Two of the delays are compared first, since few rounds do.
            delay = free[last] - before[-1]
            if delay < math.inf and abs(arrived[0] - before[0] - delay) <= PERIODIC * delay:
                now = arrived + free
                delays = [new - old for new, old in zip(now, before, strict=True)]
                if max(delays) - min(delays) <= PERIODIC * max(delays):
                    times, wait = left // since, 0
                    now = [at + times * delay for at, delay in zip(now, delays, strict=True)]
                    arrived, free, done = now[:count], now[count:], done + times * since
            if since == wait:
                before, since, wait = arrived + free, 0, 2 * wait
    return free


@checked
def cut_evenly(weights: Sequence[float], stages: int) -> tuple[int, ...]:
    """Layers per stage that minimise the weight of the heaviest stage.

    Args:
        weights: weight of each layer, such as seconds or bytes.
        stages: number of stages, each with at least one layer.

    Returns:
        Number of layers of every stage.

    Cost: layers^2 x stages.

    Example:
        >>> cut_evenly([1, 1, 1, 3], 2)
        (3, 1)
    """
    count = len(weights)
    if not 1 <= stages <= count or count > MOST_STAGES:
        raise ValueError(f"stages must be 1 to {min(count, MOST_STAGES)}, the layers; got {stages}")
    if min(weights) < 0:
        raise ValueError("weights must not be negative")
    cuts = _cuts_of_sums(weights)
    found = _lightest(count, stages, lambda _: cuts)
    assert found is not None
    return found[1]


@checked
def balance_stages(
    seconds: Sequence[float], memory: Sequence[Sequence[float]], *, limit: float
) -> tuple[int, ...] | None:
    """Layers per stage so that the slowest stage is as fast as memory allows (Galvatron-BMW).

        min over cuts of max_k sum_{i in k} seconds[i]    with    sum_{i in k} memory[k][i] <= limit

    Ties are broken by the memory of the fullest stage. The source moves layers step by step; here
    both minima are exact.

    Args:
        seconds: of each layer.
        memory: [stages][layers], memory of each layer on each stage; early stages hold more
            microbatches (1F1B).
        limit: memory of a stage.

    Returns:
        Number of layers of every stage, or None if nothing fits.

    Cost: layers^2 x stages, twice.

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
    times = _cuts_of_sums(seconds)
    return balanced(
        count, stages, lambda _: times, lambda stage: _cuts_of_sums(memory[stage]), limit
    )


def balanced(
    count: int, stages: int, seconds: Cuts, memory: Cuts, limit: float
) -> tuple[int, ...] | None:
    """`balance_stages` for tables of the seconds and bytes of every cut of a stage."""

    def fitting(stage: int) -> np.ndarray:
        return np.where(memory(stage) <= limit, seconds(stage), math.inf)

    found = _lightest(count, stages, fitting)
    if found is None:
        return None
    slowest = found[0] * (1 + 1e-12)
    lightest = _lightest(
        count,
        stages,
        lambda stage: np.where(fitting(stage) <= slowest, memory(stage), math.inf),
    )
    assert lightest is not None
    return lightest[1]


def cuts_by_size(by_size: Sequence[float]) -> np.ndarray:
    """[first layer, end], from what a stage of 1, 2, ... equal layers has; infinite where a stage
    would have none."""
    ends = np.arange(len(by_size) + 1)
    return np.array([math.inf, *by_size])[np.maximum(ends - ends[:, None], 0)]


def _cuts_of_sums(each: Sequence[float]) -> np.ndarray:
    """[first layer, end], from what each layer has; infinite where a stage would have none."""
    sums = np.array([0.0, *itertools.accumulate(each)])
    return np.where(np.tri(len(sums), dtype=bool), math.inf, sums - sums[:, None])


def _lightest(count: int, stages: int, weights: Cuts) -> tuple[float, tuple[int, ...]] | None:
    """The weight of the heaviest stage and the stages' sizes; None if all weights are infinite."""
    best, cuts = np.array([0.0, *[math.inf] * count]), []
    for stage in range(stages):
        heaviest = np.maximum(best[:, None], weights(stage))
        cuts.append(heaviest.argmin(axis=0))
        best = heaviest.min(axis=0)
    if best[count] == math.inf:
        return None
    sizes, end = [], count
    for row in reversed(cuts):
        start = int(row[end])
        sizes.append(end - start)
        end = start
    return float(best[count]), tuple(reversed(sizes))
