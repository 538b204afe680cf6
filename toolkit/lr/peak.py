"""Where the best peak rate lies, how sure that is, and how it moves with the length of a run.

    peak(horizon) = peak(probe) * (max(probe, saturation) / horizon)^exponent

A longer run wants a lower peak, since what noise leaves behind weighs more. Two lengths of probe
estimate the exponent; few and noisy as they are, it is drawn towards what is usual.
"""

from dataclasses import dataclass

import numpy as np

EXPONENT = 0.2  # usual
EXPONENT_DEVIATION = 0.1  # of it from problem to problem
LENGTH_ERROR = 0.2  # by which two short lengths mistake the exponent of a long one
SATURATION = 80  # steps; a shorter probe sees little noise, and wants no higher a peak for that
EXPONENT_BOUNDS = (0.0, 0.5)
CLIFF = 2.0  # times the rise on the other side: a diverged neighbour says no more than "higher"
MOST_TAIL_POINTS = 16
GUARD = 2.0  # standard deviations of paired differences
GRID_ERROR = 1 / 8  # of a spacing: what a parabola through three points is wrong by


@dataclass(frozen=True)
class Peak:
    """The minimum of loss against the logarithm of the rate.

    Attributes:
        log_rate: where it is.
        deviation: of that, from noise and from the coarseness of the grid.
        edge: -1 or 1 if it is the lowest or the highest rate tried, otherwise 0.
    """

    log_rate: float
    deviation: float
    edge: int


def find_peak(rates: np.ndarray, losses: np.ndarray, variances: np.ndarray) -> Peak | None:
    """A parabola in log rate through the best rate and its two neighbours; None if all diverged.

    Args:
        rates: [candidates].
        losses: [candidates], infinity for those that diverged.
        variances: [candidates], of the losses.

    Returns:
        A `Peak`, never beyond the neighbours.
    """
    order = np.argsort(rates)
    x, y, noise = np.log(rates[order]), losses[order], np.sqrt(variances[order])
    best = int(np.argmin(y))
    if not np.isfinite(y[best]):
        return None
    if len(x) == 1:
        return Peak(float(x[0]), 1.0, 0)
    if best in (0, len(x) - 1):
        edge, inner = (-1, 1) if best == 0 else (1, best - 1)
        spacing = abs(x[inner] - x[best])
        slope = (y[inner] - y[best]) / spacing
        return Peak(float(x[best]), _deviation(spacing, noise[best], slope), edge)
    left, right = y[best - 1] - y[best], y[best + 1] - y[best]
    if y[best + 1] > y[0]:  # worse than the gentlest rate: it is on its way to infinity
        right = min(right, CLIFF * left)
    below, above = x[best] - x[best - 1], x[best + 1] - x[best]
    curvature = max((left / below + right / above) / (below + above), 1e-300)
    slope = (right / above * below - left / below * above) / (below + above)
    offset = float(np.clip(-slope / (2 * curvature), -below / 2, above / 2))
    spacing = (below + above) / 2
    return Peak(float(x[best] + offset), _deviation(spacing, noise[best], curvature * spacing), 0)


def horizon_exponent(short: Peak, long: Peak, ratio: float) -> float:
    """The exponent from two lengths of probe, drawn towards the usual one.

        measured = (log peak_short - log peak_long) / log(ratio)
        exponent = mean of measured and usual, weighted by 1 / variance

    Where both lengths prefer the same highest rate, their peaks lie beyond it, and lowering it
    would lower what is too low already: the exponent is 0.

    Args:
        short: peak of the shorter probes.
        long: peak of the longer ones.
        ratio: of their lengths.

    Returns:
        A number in `EXPONENT_BOUNDS`.
    """
    if short.edge == long.edge == 1 and np.isclose(short.log_rate, long.log_rate):
        return 0.0
    measured = (short.log_rate - long.log_rate) / np.log(ratio)
    variance = (short.deviation**2 + long.deviation**2) / np.log(ratio) ** 2
    variance += LENGTH_ERROR**2
    weights = np.array([1 / variance, 1 / EXPONENT_DEVIATION**2])
    exponent = weights @ [measured, EXPONENT] / weights.sum()
    return float(np.clip(exponent, *EXPONENT_BOUNDS))


def peak_at(horizon: int, peak: Peak, steps: int, exponent: float) -> float:
    """The peak rate for a run of `horizon` steps, given that of probes of `steps`."""
    return float(np.exp(peak.log_rate) * min(max(steps, SATURATION) / horizon, 1.0) ** exponent)


def _deviation(spacing: float, noise: float, slope: float) -> float:
    from_noise = min(noise / slope, spacing) if slope > 0 else spacing
    return float(np.hypot(GRID_ERROR * spacing, from_noise))


def tail_scores(losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Losses at the end of each curve: their means, and the variances of these *against each
    other*. What a batch does to all candidates alike is no noise between them.

    Args:
        losses: [candidates, points]; not finite where a candidate diverged.

    Returns:
        Means [candidates], infinity where diverged, and variances [candidates].
    """
    points = _tail_points(losses)
    tail = np.where(np.isfinite(losses).all(-1, keepdims=True), losses, np.inf)[:, -points:]
    means, variances = tail.mean(-1), np.zeros(len(tail))
    finite = np.isfinite(means)
    if points > 1 and finite.sum() > 1:
        alone = tail[finite] - np.median(tail[finite], axis=0)
        variances[finite] = alone.var(-1, ddof=1) / points
    return means, variances


def surely_better(losses: np.ndarray, base: int) -> int:
    """The candidate of the lowest loss at the end, if it beats the base by more than two standard
    deviations of the differences between them on the same batches; otherwise the base.

    Args:
        losses: [candidates, points].
        base: which candidate is to be beaten.

    Returns:
        A candidate.
    """
    means, _ = tail_scores(losses)
    best = int(np.argmin(means))
    if best == base or not np.isfinite(means[base]):
        return best
    gains = (losses[base] - losses[best])[-_tail_points(losses) :]
    noise = gains.std(ddof=1) / np.sqrt(len(gains)) if len(gains) > 1 else 0.0
    return best if gains.mean() > GUARD * noise else base


def _tail_points(losses: np.ndarray) -> int:
    # Of a long decay the last fifth is not its end.
    return int(np.clip(losses.shape[1] // 5, 1, MOST_TAIL_POINTS))
