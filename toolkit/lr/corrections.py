"""Changes of course in the middle of a run: what if the rest of the schedule were higher or lower?

Each multiple of the remaining schedule, squeezed into a few steps, is followed down to its end:
only after the decay can losses at different rates be compared. One multiple is taken if it beats
the schedule as it stands by more than two standard deviations of the paired differences.
"""

import numpy as np

from toolkit.lr.peak import surely_better
from toolkit.lr.shapes import resampled

MULTIPLIERS = (0.35, 0.6, 1.0, 1.7, 2.8)
FACTOR_BOUNDS = (0.25, 4.0)  # of all corrections together


def corrected_schedules(plan: np.ndarray, steps: int) -> np.ndarray:
    """The rest of a schedule in `steps` steps, times each multiplier [multipliers, steps]."""
    return np.multiply.outer(MULTIPLIERS, resampled(plan, steps)).astype(np.float32)


def guarded_multiplier(losses: np.ndarray, factor: float) -> float:
    """The multiplier of the lowest loss after the decay, or 1 where none is surely better.

    Args:
        losses: [multipliers, points], on the same batches.
        factor: what earlier corrections have come to.

    Returns:
        One of `MULTIPLIERS`, less where the factor would leave its bounds.
    """
    best = surely_better(losses, MULTIPLIERS.index(1.0))
    return float(np.clip(factor * MULTIPLIERS[best], *FACTOR_BOUNDS) / factor)
