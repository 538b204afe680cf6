"""The best peak rate, and its dependence on the length of a run.

    peak(horizon) = peak(probe) * (max(probe, saturation) / max(horizon, saturation))^exponent

A long run on a noisy quadratic needs a lower peak, because remaining noise weighs more. Between
twenty steps and a few hundred the best peak of annealed runs rises on some problems and falls on
others, and is not changed.
"""

from dataclasses import dataclass

import numpy as np

EXPONENT = 0.2
SATURATION = 300  # steps; a compromise between five small problems
CLIFF = 2.0  # times the rise on the other side: a diverged neighbour only means "higher"
MOST_TAIL_POINTS = 16
TAIL = 0.2  # fraction of a curve that is its end
RISEN, SURE = 2.0, 3.0  # standard deviations of paired differences


@dataclass(frozen=True)
class PeakRate:
    """The minimum of loss against the logarithm of the rate."""

    log_rate: float  # where it is
    edge: int  # -1 or 1 if it is the lowest or the highest rate tried, otherwise 0
    is_open: bool = False  # whether noise leaves a better one open


def find_peak(rates: np.ndarray, ends: np.ndarray, middle: float) -> PeakRate | None:
    """Fit a parabola in log rate to the best rate and its neighbours; None if all diverged.

    The best is the lowest rate above which the losses `ends` [candidates, points] surely rise. A
    lower loss beyond that rise belongs to a run that broke down: early on, a model that predicts
    the average is not the worst. By noise alone the best of a few is often far away, so that it is
    drawn to the nearest to `middle`, a log rate, from which on none is surely worse than the next:

        log peak = near + min(1, sureness(near, best) / sure) * (log peak of the best - near)
    """
    order = np.argsort(rates)
    x, ends = np.log(rates[order]), ends[order]
    best = first_before_a_rise(ends)
    if not np.isfinite(ends[best]).all():
        return None
    peak, near = _parabola(x, ends.mean(-1), best), best
    # Of two as near to the middle the one nearer to the best.
    goal = min(range(len(x)), key=lambda at: (round(abs(x[at] - middle), 6), abs(at - best)))
    while near != goal:
        following = near + int(np.sign(goal - near))
        if sureness(ends[following], ends[near]) >= SURE:
            break
        near = following
    if near == best:
        return peak
    share = np.clip(sureness(ends[near], ends[best]) / SURE, 0, 1)
    return PeakRate(float(x[near] + share * (peak.log_rate - x[near])), 0, is_open=bool(share < 1))


def _parabola(x: np.ndarray, y: np.ndarray, best: int) -> PeakRate:
    if best in (0, len(x) - 1):
        return PeakRate(float(x[best]), 0 if len(x) == 1 else -1 if best == 0 else 1)
    left, right = y[best - 1] - y[best], y[best + 1] - y[best]
    if not np.isfinite(left):  # a lower rate diverged, and no parabola goes through it
        return PeakRate(float(x[best]), 0)
    if not np.isfinite(right) or y[best + 1] > y[0]:  # worse than the lowest: about to diverge
        right = min(right, CLIFF * left)
    below, above = x[best] - x[best - 1], x[best + 1] - x[best]
    curvature = max((left / below + right / above) / (below + above), 1e-300)
    slope = (right / above * below - left / below * above) / (below + above)
    offset = float(np.clip(-slope / (2 * curvature), -below / 2, above / 2))
    return PeakRate(float(x[best] + offset), 0)


def first_before_a_rise(ends: np.ndarray) -> int:
    """The first, by ascending rate, after which losses [candidates, points] surely rise; or else
    the best.
    """
    best = 0
    for at in range(1, len(ends)):
        if not np.isfinite(ends[best]).all() or ends[at].mean() < ends[best].mean():
            best = at
        elif sureness(ends[at], ends[best]) >= RISEN:
            break
    return best


def sureness(losses: np.ndarray, others: np.ndarray) -> float:
    """By how many standard deviations of the mean difference `losses` [points] are higher.

        t = mean(losses - others) / (std(losses - others) / sqrt(points))

    A difference without noise, as of a single point, counts as it is: infinity if higher, else 0.
    """
    if not np.isfinite(losses).all():
        return np.inf
    rises = losses - others
    noise = rises.std(ddof=1) / len(rises) ** 0.5 if len(rises) > 1 else 0.0
    return float(rises.mean() / noise) if noise else np.inf if rises.mean() > 0 else 0.0


def peak_at(horizon: int, peak: PeakRate, steps: int) -> float:
    """The peak rate for a run of `horizon` steps, given that of probes of `steps`.

    If probes prefer the highest rate tried, their peak lies beyond it, and it is not lowered.
    """
    shorter = min(max(steps, SATURATION) / max(horizon, SATURATION), 1.0)
    return float(np.exp(peak.log_rate) * (1.0 if peak.edge == 1 else shorter**EXPONENT))


def tail_scores(ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean losses at the ends [candidates, points] of curves, infinity if one diverged, and the
    variances of their *differences*, in which noise of the shared batches cancels.
    """
    points, means, variances = ends.shape[-1], ends.mean(-1), np.zeros(len(ends))
    finite = np.isfinite(means)
    if points > 1 and finite.sum() > 1:
        alone = ends[finite] - np.median(ends[finite], axis=0)
        variances[finite] = alone.var(-1, ddof=1) / points
    return means, variances


def curve_ends(losses: np.ndarray, tail: float = TAIL) -> np.ndarray:
    """The last points [candidates, points] of each curve, infinity if it diverged."""
    finite = np.isfinite(losses).all(-1, keepdims=True)
    # Of a long decay the last fifth is not its end.
    points = int(np.clip(tail * losses.shape[1] + 1e-9, 1, MOST_TAIL_POINTS))
    return np.where(finite, losses, np.inf)[:, -points:]
