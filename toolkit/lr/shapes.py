"""The shapes that the rate of a whole run may have, each a table with peak 1.

A shape says how the rate falls; the peak by which it is multiplied is another question, and the
best peak of one shape is not that of another.
"""

import numpy as np

SHAPES = ("constant", "linear", "cosine", "wsd", "wsd_sqrt", "trapezoid")
COOLDOWNS = {"wsd": 0.2, "wsd_sqrt": 0.2, "trapezoid": 0.5}  # fractions of a run


def shape_rates(shape: str, steps: int, warmup_steps: int = 0) -> np.ndarray:
    """The rates of a whole run with peak 1.

        left(t) = min(1, (steps - t) / cooldown)
        rate(t) = min(1, (t + 1) / warmup) * fall(left(t))
        fall = 1   left   (1 + cos(pi (1 - left))) / 2   left    1 - sqrt(1 - left)
               constant   linear   cosine                wsd     wsd_sqrt

    with a cooldown of a fifth of the run for "wsd" and "wsd_sqrt", of half for "trapezoid" (a WSD
    that is never far from the better of linear and WSD), of all after the warm-up for "linear" and
    "cosine". The step after the last would have rate 0.

    Args:
        shape: a name in `SHAPES`.
        steps: of the run.
        warmup_steps: of a linear rise, which counts from one.

    Returns:
        [steps] float64, in [0, 1].

    Raises:
        ValueError: the shape is unknown, or not 0 <= warmup_steps < steps.

    Source: Hägele et al. (arXiv:2405.18392), section 3, for the cooldowns; Loshchilov and Hutter
        (arXiv:1608.03983) for the cosine.
    """
    if shape not in SHAPES:
        raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    if not 0 <= warmup_steps < steps:
        raise ValueError(f"need 0 <= warmup_steps < steps, got {warmup_steps} and steps={steps}")
    times = np.arange(steps)
    cooldown = steps - warmup_steps
    if shape in COOLDOWNS:
        cooldown = min(max(round(COOLDOWNS[shape] * steps), 1), cooldown)
    left = np.minimum(1.0, (steps - times) / cooldown)
    fall = {
        "constant": np.ones(steps),
        "linear": left,
        "cosine": (1 + np.cos(np.pi * (1 - left))) / 2,
        "wsd": left,
        "wsd_sqrt": 1 - np.sqrt(1 - left),
        "trapezoid": left,
    }[shape]
    return np.minimum(1.0, (times + 1) / max(warmup_steps, 1)) * fall


def resampled(rates: np.ndarray, steps: int) -> np.ndarray:
    """The same curve in another number of steps, by linear interpolation in time."""
    old, new = (np.arange(count) / count for count in (len(rates), steps))
    # One past the last step a schedule that ends is at zero.
    end = 0.0 if rates[-1] < rates.max() else rates[-1]
    return np.interp(new, [*old, 1.0], [*rates, end])
