"""Shapes of schedules with peak 1, as an envelope and as tables. Different shapes have different
best peaks.
"""

from typing import Any

import numpy as np

from toolkit._checks import check_choice, checked

FALLS = ("linear", "cosine", "sqrt")
COOLDOWNS = {  # shape -> the fall, and its fraction of a run
    "constant": ("linear", 0.0),
    "linear": ("linear", 1.0),
    "cosine": ("cosine", 1.0),
    "wsd": ("linear", 0.2),
    "wsd_sqrt": ("sqrt", 0.2),
    "trapezoid": ("linear", 0.5),
}
SHAPES = tuple(COOLDOWNS)


def envelope(
    times: Any, steps: int, warmup_steps: int, cooldown_steps: int, fall: str, xp: Any = np
) -> Any:
    """Rates as of `shape_rates` at `times`, in arrays of `xp`: numpy, or jax.numpy in a trace."""
    rise = xp.minimum(1.0, (times + 1) / max(warmup_steps, 1))
    if not cooldown_steps:
        return rise
    gone = xp.clip((times - (steps - cooldown_steps)) / cooldown_steps, 0.0, 1.0)
    if fall == "cosine":
        return rise * (1 + xp.cos(np.pi * gone)) / 2
    return rise * (1 - (xp.sqrt(gone) if fall == "sqrt" else gone))


@checked
def shape_rates(shape: str, steps: int, warmup_steps: int = 0) -> np.ndarray:
    """The rates of a whole run with peak 1: a linear rise, a plateau, a fall to zero.

        gone(t) = (t - steps + cooldown) / cooldown, in 0..1
        rate(t) = min(1, (t + 1) / warmup) * fall(gone(t))
        fall = 1          1 - gone   (1 + cos(pi gone)) / 2   1 - gone   1 - sqrt(gone)
               constant   linear     cosine                   wsd        wsd_sqrt

    with a cooldown of a fifth of the run for "wsd" and "wsd_sqrt", of half for "trapezoid" (a WSD
    that is never far from the better of linear and WSD), of all after the warm-up for "linear" and
    "cosine". The step after the last would have rate 0.

    Args:
        shape: a name in `SHAPES`.
        steps: steps of the run.
        warmup_steps: steps of a linear rise, which counts from one.

    Returns:
        [steps] float64, in [0, 1].

    Source: Hägele et al. (arXiv:2405.18392), section 3, for the cooldowns; Loshchilov and Hutter
        (arXiv:1608.03983) for the cosine.

    Example:
        >>> shape_rates("trapezoid", 8, warmup_steps=2)
        array([0.5 , 1.  , 1.  , 1.  , 1.  , 0.75, 0.5 , 0.25])
    """
    check_choice("shape", shape, SHAPES)
    if not 0 <= warmup_steps < steps:
        raise ValueError(f"need 0 <= warmup_steps < steps, got {warmup_steps} and steps={steps}")
    fall, fraction = COOLDOWNS[shape]
    cooldown = min(max(round(fraction * steps), 1), steps - warmup_steps) if fraction else 0
    return envelope(np.arange(steps), steps, warmup_steps, cooldown, fall)


def resampled(rates: np.ndarray, steps: int) -> np.ndarray:
    """The same curve in another number of steps, by linear interpolation in time."""
    old, new = (np.arange(count) / count for count in (len(rates), steps))
    # A schedule that ends reaches zero one step after the last.
    end = 0.0 if rates[-1] < rates.max() else rates[-1]
    return np.interp(new, [*old, 1.0], [*rates, end])
