"""The multi-power law: the loss along any schedule, from a few runs along others.

An exponential at a constant rate cannot say what a decay to zero will bring. This law can: it
credits every fall of the rate with the loss that it takes away, and charges every rise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit._checks import checked

POINTS_PER_CURVE = 60  # of a fit
HUBER_THRESHOLD = 1e-3  # of the logarithm of the loss
MOST_EVALUATIONS = 200  # of the law and its derivatives, in each descent
STARTS = ((0.5, 0.4), (0.3, 0.6))  # alpha, beta


@dataclass(frozen=True)
class MultiPowerLaw:
    """Loss as a function of all rates so far.

        S_1 = sum_{i <= t} rate_i,   S_k = sum_{k <= i <= t} rate_i,   G(x) = 1 - (C x + 1)^-beta
        loss(t) = L_0 + A S_1^-alpha + B sum_{k <= t} (rate_k - rate_{k-1}) G(rate_k^-gamma S_k)

    The paper counts from the end of a warm-up to one peak. Here the rate before the first step is
    0, so that reaching a peak costs up to B times that peak until the rate falls again: without
    it, the higher the peak the lower the loss, and the law could not choose one.

    Attributes:
        floor: L_0.
        amplitude: A.
        alpha: of the sum of rates.
        drop: B.
        scale: C.
        beta: how soon a change of the rate takes effect.
        gamma: how that depends on the rate it led to.

    Example:
        >>> law = MultiPowerLaw(2.0, 0.5, 0.5, 100.0, 1.0, 0.4, 0.5)
        >>> losses = law.predict(0.01 * shape_rates("linear", 100), times=range(100))
        >>> losses.shape, bool(losses[-1] < losses[0])
        ((100,), True)
    """

    floor: float
    amplitude: float
    alpha: float
    drop: float
    scale: float
    beta: float
    gamma: float

    def predict(self, rates: Any, times: Any = None) -> np.ndarray:
        """Losses [points] along a schedule [steps] of positive rates, after each of the steps
        `times`; None for after the last alone. O(points * steps).
        """
        rates = np.asarray(rates, np.float64)
        times = np.array([len(rates) - 1]) if times is None else np.asarray(times)
        total = np.cumsum(rates)
        changes = np.diff(rates, prepend=0.0)
        moved = changes != 0  # a plateau costs no time here
        before, changes, reached = (total - rates)[moved], changes[moved], rates[moved]
        since = np.maximum(total[times][:, None] - before, 0.0)  # S_k, zero for those to come
        reach = 1 - (self.scale * reached**-self.gamma * since + 1) ** -self.beta
        added = (changes * reach).sum(1)
        return self.floor + self.amplitude * total[times] ** -self.alpha + self.drop * added


@checked
def fit_multi_power_law(curves: Sequence[tuple[Any, Any]]) -> MultiPowerLaw:
    """The law of least Huber loss in the logarithm of the loss.

    The curves should differ in how their rates fall, or nothing tells B from A. A law fitted to
    short runs is a guess about long ones: its floor is whatever the short ones did not reach.

    Args:
        curves: pairs of rates [steps] and losses [steps], each before its update; the first tenth
            of a curve is left out, being no power of anything.

    Returns:
        A `MultiPowerLaw`.

    Cost:
        At most 4800 evaluations of the law on 60 points per curve, usually a fifth of that: some
        two seconds for eight curves of 120 steps, and in proportion to their length.

    Source: Luo et al. (arXiv:2503.12811), section 4; Huber (1964).

    Example:
        >>> law = MultiPowerLaw(2.0, 0.5, 0.5, 100.0, 1.0, 0.4, 0.5)
        >>> runs = [peak * shape_rates("wsd", 60, 5) for peak in (0.01, 0.03)]
        >>> curves = [(rates, law.predict(rates, range(60))) for rates in runs]
        >>> fit_multi_power_law(curves).floor < 3
        True
    """
    from scipy.optimize import least_squares

    checked = []
    for rates, losses in curves:
        rates, losses = np.asarray(rates, np.float64), np.asarray(losses, np.float64)
        is_right = rates.ndim == 1 and rates.shape == losses.shape and len(rates) > 2
        if not (is_right and all((np.isfinite(x) & (x > 0)).all() for x in (rates, losses))):
            raise ValueError("curves must be pairs of [steps], positive and finite, steps > 2")
        # The loss before update t + 1 is the one after t.
        times = np.unique(
            np.linspace(len(rates) // 10, len(rates) - 2, POINTS_PER_CURVE, dtype=int)
        )
        checked.append((rates, times, np.log(losses[times + 1])))
    if not checked:
        raise ValueError("curves must hold at least one pair")
    lowest = min(np.exp(logs).min() for _, _, logs in checked)
    highest = max(np.exp(logs).max() for _, _, logs in checked)
    sums = np.median([rates.sum() for rates, _, _ in checked])
    peak = max(rates.max() for rates, _, _ in checked)

    def residuals(logs: np.ndarray) -> np.ndarray:
        law = MultiPowerLaw(*np.exp(logs))
        parts = []
        for rates, times, known in checked:
            predicted = np.nan_to_num(law.predict(rates, times))  # SciPy wants finite ones
            parts.append(np.log(np.maximum(predicted, 1e-3 * lowest)) - known)
        return np.concatenate(parts)

    def fitted(start: np.ndarray, centre: np.ndarray, threshold: float) -> Any:
        with np.errstate(all="ignore"):  # a law tried on the way may be beyond any number
            return least_squares(
                residuals,
                start,
                bounds=(centre - 9, centre + 9),
                loss="huber",
                f_scale=threshold,
                max_nfev=MOST_EVALUATIONS,
            )

    found = []
    for alpha, beta in STARTS:
        amplitude = 0.5 * (highest - lowest) * sums**alpha
        start = np.log((0.7 * lowest, amplitude, alpha, 0.1 * lowest / peak, 1.0, beta, 0.5))
        # Where nearly all points are outliers the way is long: a wide threshold shortens it.
        found.append((fitted(start, start, 10 * HUBER_THRESHOLD), start))
    near, start = min(found, key=lambda pair: pair[0].cost)
    best = fitted(near.x, start, HUBER_THRESHOLD)
    return MultiPowerLaw(*(float(number) for number in np.exp(best.x)))
