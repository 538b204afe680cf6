"""A bound on the last iterate of a schedule on convex problems.

It predicts the loss curves of language models closely enough to rank schedules. Unlike on the noisy
quadratic, the best peak falls with the horizon.
"""

from typing import Any

import numpy as np

from toolkit._checks import checked


@checked
def last_iterate_bound(rates: Any, gradient_norms: Any = 1.0, distance: float = 1.0) -> float:
    """The bound on the loss after a schedule, above the best.

        S_k = sum_{t >= k} rate_t
        bound = (D^2 + sum rate_t^2 G_t^2) / (2 S_0)
              + sum_{k < T-1} rate_k / (S_{k+1} S_k) * sum_{t >= k} rate_t^2 G_t^2 / 2

    For constant norms it is lowest close to linear decay from D / (G sqrt(T)).

    Args:
        rates: [steps], positive.
        gradient_norms: [steps] or one number, G.
        distance: from the start to the optimum, D.

    Returns:
        The bound.

    Source: Defazio et al. (arXiv:2310.07831), theorem 10; Schaipp et al. (arXiv:2501.18965) for
        its agreement with training.

    Example:
        >>> peak = 1 / 100 ** 0.5
        >>> bound = last_iterate_bound(peak * shape_rates("linear", 100))
        >>> bound < last_iterate_bound([peak] * 100)
        True
    """
    rates = np.asarray(rates, np.float64)
    if rates.ndim != 1 or not len(rates) or not (rates > 0).all():
        raise ValueError("rates must be [steps] with steps >= 1, all positive")
    energy = rates**2 * np.broadcast_to(np.asarray(gradient_norms, np.float64) ** 2, rates.shape)
    left = np.cumsum(rates[::-1])[::-1]
    energy_left = np.cumsum(energy[::-1])[::-1]
    average = (distance**2 + energy_left[0]) / (2 * left[0])
    last = rates[:-1] / (left[1:] * left[:-1]) * energy_left[:-1]
    return float(average + last.sum() / 2)
