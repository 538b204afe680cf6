"""Redundant branches of which the first to end are kept: SART, and the lengths of DARTS' rollouts.

DARTS shapes rollouts for reinforcement learning by the same order statistics: a step of training
waits for its slowest prompt, so a further sample goes where it shortens the longest wait
(`spread_samples`). Whoever keeps the texts that end first favours short ones: the gradient of the
policy is biased towards them. No training is done here.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from toolkit._checks import checked


@checked
def first_of(law: Any, branches: int, wanted: int) -> tuple[float, float]:
    """Expected time and tokens of branches that all stop when some have ended.

        E[time]   = int P(Bin(N, p) < M) dx                          p = F(x)
        E[tokens] = int N (1 - p) P(Bin(N - 1, p) < M) dx

    Exponential lengths cost M tokens of mean length whatever N.

    Args:
        law: of a branch's length: a frozen distribution of `scipy.stats`.
        branches: N, independent.
        wanted: M, at most N.

    Returns:
        Time and tokens, in the unit of the lengths.

    Source: SART, 2025, section on redundant sampling; order statistics as in David and Nagaraja,
        "Order Statistics", 2003.

    Example:
        >>> from scipy import stats
        >>> [round(x, 4) for x in first_of(stats.expon(), 8, 4)]
        [0.6345, 4.0]
    """
    from scipy import integrate, special

    if not 1 <= wanted <= branches:
        raise ValueError(f"wanted: got {wanted}, wanted 1 to branches, {branches}")
    # Fewer than `wanted` have ended; the same of the others, beside one that goes on.
    alive = (
        lambda x: special.bdtr(wanted - 1, branches, law.cdf(x)),
        lambda x: branches * law.sf(x) * special.bdtr(wanted - 1, branches - 1, law.cdf(x)),
    )
    quantiles = (1e-6, 0.01, 0.1, 0.5, 0.9, 0.99, 1 - 1e-6, 1 - 1e-13)
    parts = [0.0, *(float(law.ppf(p)) for p in quantiles)]
    time, tokens = (
        sum(integrate.quad(f, a, b, limit=200)[0] for a, b in itertools.pairwise(parts) if b > a)
        for f in alive
    )
    return float(time), float(tokens)


@checked
def spread_samples(laws: Sequence[Any], wanted: int, budget: int) -> list[int]:
    """Samples per prompt, so that the slowest prompt's expected time is least.

    Greedy: one more sample where E[X_(M:N)] is largest; exact, as only its own term falls.

    Args:
        laws: of each prompt's lengths, as in `first_of`.
        wanted: samples kept per prompt.
        budget: of all prompts, at least `wanted` for each.

    Returns:
        Samples of each prompt; they sum to the budget.

    Source: DARTS, 2025, whose allocation adapts to prompts; the greedy rule is ours.

    Example:
        >>> from scipy import stats
        >>> spread_samples([stats.expon(), stats.expon(scale=4)], wanted=2, budget=8)
        [2, 6]
    """
    if budget < wanted * len(laws):
        raise ValueError(f"budget: got {budget}, wanted at least {wanted * len(laws)}")
    counts = [wanted] * len(laws)
    times = [first_of(law, wanted, wanted)[0] for law in laws]
    for _ in range(budget - sum(counts)):
        slowest = int(np.argmax(times))
        counts[slowest] += 1
        times[slowest] = first_of(laws[slowest], counts[slowest], wanted)[0]
    return counts


@checked
def prune(
    scores: Callable[[int, int], float], lengths: Sequence[int], wanted: int, *,
    every: int, bar: float, most: int,
) -> tuple[int, int, list[int]]:  # fmt: skip
    """Branches of which the worst are given up early: tokens, latency and those that ended.

    Every `every` steps branches with a score below `bar` stop, at most `most` of all, until
    `wanted` have ended; that many are always left (SART, whose two phases are two bars).

    Args:
        scores: (branch, step) -> how good a branch looks.
        lengths: steps of each branch.
        wanted: branches that are waited for.
        every: steps between two looks.
        bar: the score below which a branch may stop.
        most: branches that may be stopped.

    Returns:
        Tokens of all branches, steps, and the branches that ended.

    Example:
        >>> prune(lambda branch, step: branch, [4, 4, 8], 1, every=2, bar=0.5, most=1)
        (10, 4, [1])
    """  # fmt: skip
    alive, ended, pruned, tokens, step = dict(enumerate(lengths)), list[int](), 0, 0, 0
    while alive and len(ended) < wanted:
        step += 1
        tokens += len(alive)
        now = [branch for branch, length in alive.items() if length == step]
        ended += now[: wanted - len(ended)]
        for branch in now:
            del alive[branch]
        if step % every:
            continue
        for branch in sorted(alive, key=lambda branch: scores(branch, step)):
            enough = len(alive) + len(ended) > wanted
            if enough and pruned < most and scores(branch, step) < bar:
                del alive[branch]
                pruned += 1
    return tokens, step, ended
