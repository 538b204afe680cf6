"""Changes of course in the middle of a run: what if its rest were higher, lower, or fell later?

Each way to go on, squeezed into a few steps, is followed down to its end: only after the decay can
losses at different rates be compared. One is taken if it beats the schedule as it stands by more
than two standard deviations of the paired differences.

Squeezing favours low rates and late falls, as every short horizon does, so that a squeeze by ten
does more harm than good on the noisy quadratic; corrections are for those who can afford long ones.
"""

import numpy as np

from toolkit.lr.shapes import resampled

MULTIPLIERS = (1.0, 0.35, 0.6, 1.7, 2.8)  # of the rest as planned, which comes first
HOLDS = (0.6, 1.0, 1.7)  # multiples of the present rate, held for a stage before the fall


def possible_plans(plan: np.ndarray, hold: int, highest: float) -> np.ndarray:
    """Ways to go on [ways, steps], the plan itself first: multiples of it, and a plateau of `hold`
    steps with a linear fall; none exceeds `highest`.
    """
    steps = len(plan)
    left = np.minimum(1.0, (steps - np.arange(steps)) / max(steps - hold, 1))
    present = plan.max() if plan.argmax() else plan[0]  # a warm-up still to come leads to the peak
    ways = [*np.multiply.outer(MULTIPLIERS, plan), *np.multiply.outer(HOLDS, present * left)]
    return np.minimum(ways, max(highest, plan.max())).astype(np.float32)


def squeezed(plans: np.ndarray, steps: int) -> np.ndarray:
    """The same schedules in fewer steps [ways, steps]."""
    return np.array([resampled(plan, steps) for plan in plans], np.float32)
