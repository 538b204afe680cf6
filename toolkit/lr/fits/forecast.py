"""Extrapolation of a loss curve by an exponential, with its variance.

    loss(t) = amplitude * exp(-t / time_constant) + asymptote

The loss of a noisy quadratic at a constant rate has exactly this form. Two fits are offered: a
robust one that knows its own variance, and AutoLRS's published one, kept for comparison. Both run
on the host in float64: a window is a few hundred numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit._checks import checked

# Grid of time constants, finer than the error of a well-determined one (2 % for 100 points).
SHORTEST_TIME_CONSTANT = 0.1  # steps: the curve is flat from the second point on
LONGEST_TIME_CONSTANT = 20.0  # windows: beyond, an exponential looks like a line
GRID_SIZE = 512
HUBER_THRESHOLD = 1.345  # standard deviations; 95 % efficient under normal noise
ROUNDS = 10  # of weighting


@dataclass(frozen=True)
class Forecast:
    """A forecast of the loss.

    Attributes:
        mean: the expected loss at the horizon; infinity if the curve diverged.
        variance: variance of the forecast, without the noise of a loss measured there.
        time_constant: time constant of the exponential, in points; None if none was fitted.
        reason: how the forecast was made, in words.

    Example:
        >>> forecast = forecast_loss([1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125], horizon=20)
        >>> forecast.reason, round(forecast.time_constant, 3)
        ('exponential', 1.443)
    """

    mean: float
    variance: float
    time_constant: float | None
    reason: str


@checked
def forecast_loss(losses: Any, horizon: float) -> Forecast:
    """Extrapolate a loss curve by a robust exponential, with a variance.

        minimise over time constants s:  min over a, c of  sum_i w_i (y_i - a e^(-i/s) - c)^2
        variance = sum_s p(s) [(f_s - mean)^2 + var(f_s | s)],   p(s) ~ exp(-fit(s) / (2 sigma^2))

    The inner minimum is linear least squares (variable projection); s runs over a log grid, and
    the best is polished. Huber weights w_i suppress outliers. The variance sums
    over the whole grid, so that it reflects disagreement between time constants that fit equally
    well, as happens if they exceed the window. If the longest one fits best, the curve is
    indistinguishable from a line, and the forecast is the mean of its last tenth.

    Args:
        losses: [points], equally spaced, the first at time 0.
        horizon: time of the forecast, in points; usually beyond the last.

    Cost: About 512 * 11 fits of two numbers, each O(points): some 10 ms for 100 points.

    Source: Golub and Pereyra (1973) for variable projection; Huber (1964) for the weights; the
        model is AutoLRS's (arXiv:2105.10762).

    Example:
        >>> times = jnp.arange(50)
        >>> forecast = forecast_loss(2 * jnp.exp(-times / 10) + 1, horizon=500)
        >>> round(forecast.mean, 4)
        1.0
    """
    curve = _check_curve(losses, horizon)
    if not np.isfinite(curve).all():
        return Forecast(np.inf, 0.0, None, "the loss is not finite")
    if len(curve) < 5:
        return _tail(curve, "too few points to fit a curve")
    times = np.arange(len(curve), dtype=np.float64)
    longest = LONGEST_TIME_CONSTANT * len(curve)
    grid = np.geomspace(SHORTEST_TIME_CONSTANT, longest, GRID_SIZE)
    # All time constants share the weights, so that their fits are comparable.
    weights = np.ones_like(curve)
    for _ in range(ROUNDS):
        fits, _, _ = _project(curve, times, grid, weights)
        residuals = curve - fits[np.argmin((weights * (curve - fits) ** 2).sum(-1))]
        weights = _huber_weights(residuals, curve)
    fits, means, variances = _project(curve, times, grid, weights, horizon)
    misfits = (weights * (curve - fits) ** 2).sum(-1)
    best = int(np.argmin(misfits))
    mean, constant, reason = _tail(curve, "").mean, None, "a line: mean of the last tenth"
    misfit, variance = misfits[best], variances[best]
    if best < GRID_SIZE - 1:
        reason = "exponential"
        constant = _polish(curve, times, weights, grid[best], grid[1] / grid[0])
        fit, mean, variance = (
            column[0] for column in _project(curve, times, np.array([constant]), weights, horizon)
        )
        misfit = (weights * (curve - fit) ** 2).sum()
    sigma2 = misfit / max(weights.sum() - 3, 1.0) + np.finfo(np.float64).tiny
    # The polished point counts like one of the grid; for a noiseless curve it is the only one.
    odds = np.exp(-0.5 * np.maximum(misfits - misfit, 0.0) / sigma2)
    spread = odds @ ((means - mean) ** 2 + sigma2 * variances) + sigma2 * variance
    return Forecast(float(mean), float(spread / (odds.sum() + 1)), constant, reason)


@checked
def published_forecast(
    losses: Any, horizon: float, *, is_validation: bool = False, ceiling: float = np.inf
) -> Forecast:
    """AutoLRS's own forecast: an outlier-trimmed spline, then an exponential through the spline.

    Ten times (once for validation losses), fit a quadratic smoothing spline to the points left and
    drop the 3 % of them (the one) farthest from it, unless their *place among those left* is as far
    as half the window: late points stay. Fit the spline again; find the exponential nearest to its
    values by Nelder-Mead over log(-b) from b = -1 per point. With SciPy's default smoothing the
    spline of losses around 1 is one parabola, so the exponential is fitted to that. With too few
    points to drop 3 % of, where the published code fails, nothing more is dropped.

    Args:
        losses: [points], equally spaced, the first at time 0.
        horizon: time of the forecast, in points.
        is_validation: whether these are few validation losses rather than many training losses.
        ceiling: if any validation loss reaches it, the last loss is the forecast.

    Returns:
        A `Forecast` with variance 0, as the published method has none.

    Cost: Up to 11 spline fits and some 30 least-squares fits, about 10 ms.

    Source: Jin et al., AutoLRS (arXiv:2105.10762), section 4.3, and its published code.

    Example:
        >>> times = jnp.arange(50)
        >>> forecast = published_forecast(2 * jnp.exp(-times / 10) + 1, horizon=500)
        >>> forecast.reason, forecast.variance
        ('exponential through a spline', 0.0)
    """
    from scipy.optimize import fmin

    curve = _check_curve(losses, horizon)
    if not np.isfinite(curve).all():
        return Forecast(np.inf, 0.0, None, "the loss is not finite")
    if is_validation and (curve >= ceiling).any():
        return Forecast(float(curve[-1]), 0.0, None, "above the first loss: the last one")
    times = np.arange(len(curve), dtype=np.float64)
    kept, bound = times, (len(curve) - 1) // 2
    for _ in range(1 if is_validation else 10):
        count = 1 if is_validation else round(0.03 * len(kept))
        if not count or len(kept) - count < 4:
            break
        misfits = np.abs(curve[kept.astype(int)] - _published_spline(curve, kept)(kept))
        farthest = np.argsort(misfits, kind="stable")[-count:]
        kept = np.delete(kept, farthest[farthest < bound])
    if len(kept) < 4:
        return Forecast(float(curve[-1]), 0.0, None, "too few points for a spline: the last one")
    smooth = _published_spline(curve, kept)(times)

    def fitted(log_rate: np.ndarray) -> tuple[np.ndarray, float]:
        decay = np.exp(-np.exp(log_rate) * times)
        columns = np.stack([decay, np.ones_like(decay)], axis=1)
        (amplitude, asymptote), misfit, _, _ = np.linalg.lstsq(columns, smooth, rcond=None)
        ahead = amplitude * np.exp(-np.exp(log_rate) * horizon) + asymptote
        # lstsq returns no residual if the two columns are linearly dependent.
        return ahead, float(misfit[0]) if len(misfit) else np.inf

    found = fmin(lambda at: fitted(at)[1], np.zeros(1), xtol=1e-5, ftol=1e-5, disp=False)
    log_rate = np.asarray(found)
    mean, constant = fitted(log_rate)[0], np.exp(-log_rate)
    return Forecast(float(mean[0]), 0.0, float(constant[0]), "exponential through a spline")


def _published_spline(curve: np.ndarray, kept: np.ndarray) -> Callable:
    from scipy.interpolate import UnivariateSpline

    return UnivariateSpline(kept, curve[kept.astype(int)], k=2)


def _project(
    curve: np.ndarray,
    times: np.ndarray,
    constants: np.ndarray,
    weights: np.ndarray,
    horizon: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each time constant the best a and c: values [constants, points], and the mean and the
    variance (of unit noise) of the value at the horizon [constants].
    """
    decay = np.exp(-times / constants[:, None])
    total = weights.sum()
    decay_mean, curve_mean = decay @ weights / total, curve @ weights / total
    centred = decay - decay_mean[:, None]
    energy = np.maximum((centred**2) @ weights, 1e-300)
    amplitude = (centred * (curve - curve_mean)) @ weights / energy
    fits = curve_mean + amplitude[:, None] * centred
    ahead = np.exp(-horizon / constants) - decay_mean
    return fits, curve_mean + amplitude * ahead, 1 / total + ahead**2 / energy


def _polish(
    curve: np.ndarray, times: np.ndarray, weights: np.ndarray, constant: float, ratio: float
) -> float:
    """The best time constant within a grid step of `constant`."""
    from scipy.optimize import minimize_scalar

    def misfit(steps: float) -> float:
        fits, _, _ = _project(curve, times, np.array([constant * ratio**steps]), weights)
        return float(weights @ (curve - fits[0]) ** 2)

    found: Any = minimize_scalar(misfit, bounds=(-1, 1), method="bounded", options={"xatol": 1e-12})
    return float(constant * ratio**found.x)


def _huber_weights(residuals: np.ndarray, curve: np.ndarray) -> np.ndarray:
    # 0.6745 makes the median of |normal noise| its standard deviation.
    scale = np.median(np.abs(residuals)) / 0.6745
    scale = max(float(scale), 1e-12 * float(np.abs(curve).max()), 1e-300)
    return np.minimum(1.0, HUBER_THRESHOLD * scale / np.maximum(np.abs(residuals), 1e-300))


def _tail(curve: np.ndarray, reason: str) -> Forecast:
    tail = curve[-max(len(curve) // 10, 1) :]
    variance = float(curve.var()) if len(tail) < 2 else float(tail.var(ddof=1)) / len(tail)
    return Forecast(float(tail.mean()), variance, None, reason)


def _check_curve(losses: Any, horizon: float) -> np.ndarray:
    curve = np.asarray(losses, np.float64)
    if curve.ndim != 1 or not len(curve):
        raise ValueError(f"losses must be [points] with points >= 1, got shape {curve.shape}")
    if not (np.isfinite(horizon) and horizon >= 0):
        raise ValueError(f"horizon must be a finite number of points >= 0, got {horizon}")
    return curve
