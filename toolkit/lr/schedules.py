"""Learning-rate schedules that optax lacks, as optax schedules.

Each is a jittable function step -> rate: `optax.adamw(warmup_stable_decay_schedule(...))`. The
first update uses the rate of step 0.
"""

from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
import optax

from toolkit._annotations import AtLeast, Positive
from toolkit._checks import check_choice, checked
from toolkit.lr.shapes import FALLS, envelope

Count = Annotated[int, AtLeast(1)]
Rate = Annotated[float, Positive()]


@checked
def cooldown_schedule(peak: Rate, steps: Count, *, shape: str = "sqrt") -> optax.Schedule:
    """Fall from `peak` to zero, for the end of a run at a constant rate.

        rate(t) = peak * (1 - t / steps)                   "linear"
        rate(t) = peak * (1 + cos(pi t / steps)) / 2       "cosine"
        rate(t) = peak * (1 - sqrt(t / steps))             "sqrt": fast at first, then slowly

    Args:
        peak: the rate at step 0.
        steps: the step at which the rate reaches zero; it stays there.
        shape: "linear", "cosine" or "sqrt".

    Returns:
        A schedule, step -> rate.

    Source: Hägele et al., Scaling laws and compute-optimal training beyond fixed training
        durations (arXiv:2405.18392), section 3.

    Example:
        >>> schedule = cooldown_schedule(0.1, 100)
        >>> round(float(schedule(25)), 6)
        0.05
    """
    return warmup_stable_decay_schedule(peak, steps, cooldown_steps=steps, shape=shape)


@checked
def warmup_stable_decay_schedule(
    peak: Rate, total_steps: int, *,
    warmup_steps: int = 0, cooldown_steps: int, shape: str = "linear",
) -> optax.Schedule:  # fmt: skip
    """Rise linearly, stay at `peak`, then cool down to zero (WSD).

        rate(t) = peak * (t + 1) / warmup                         t < warmup
        rate(t) = peak                                            t < total - cooldown
        rate(t) = peak * fall((t - total + cooldown) / cooldown)  after

    The rates before the cooldown do not depend on `total_steps`, so that a run can be prolonged and
    several cooldowns can branch off. The rise counts from one, so that no update has a rate of
    zero.

    Args:
        peak: the highest rate.
        total_steps: the step at which the rate reaches zero.
        warmup_steps: steps of the rise.
        cooldown_steps: steps of the fall, the last ones of the run.
        shape: of the fall, as for `cooldown_schedule`.

    Returns:
        A schedule, step -> rate.

    Source: Hu et al., MiniCPM (arXiv:2404.06395), section 4; for the shape, arXiv:2405.18392.

    Example:
        >>> import optax
        >>> schedule = warmup_stable_decay_schedule(0.3, 100, warmup_steps=10, cooldown_steps=20)
        >>> optimizer = optax.adamw(schedule)
        >>> [round(float(schedule(step)), 3) for step in (0, 50, 90, 100)]
        [0.03, 0.3, 0.15, 0.0]
    """
    if warmup_steps < 0 or cooldown_steps < 1 or warmup_steps + cooldown_steps > total_steps:
        raise ValueError(
            "need warmup_steps >= 0, cooldown_steps >= 1 and their sum <= total_steps, got "
            f"{warmup_steps}, {cooldown_steps} and total_steps={total_steps}"
        )
    check_choice("shape", shape, FALLS)
    parts = total_steps, warmup_steps, cooldown_steps, shape
    return lambda step: peak * envelope(jnp.asarray(step), *parts, jnp)


@checked
def power_schedule(
    peak: Rate, total_steps: int, *,
    tokens_per_step: Count, amplitude: Rate, exponent: float = -0.51,
    warmup_steps: int = 0, cooldown_steps: int, shape: str = "linear",
) -> optax.Schedule:  # fmt: skip
    """A power of the tokens seen, bounded by `peak`, with warm-up and cooldown.

        n(t) = (t + 1) * tokens_per_step
        rate(t) = min(peak, amplitude * n(t)^exponent) * envelope(t)

    where the envelope is that of `warmup_stable_decay_schedule` with peak 1. The best constant rate
    is a power of the number of tokens; a schedule that follows it suits runs of every length. The
    paper sets amplitude to a constant times the batch size.

    Args:
        peak: the highest rate.
        total_steps: the step at which the rate reaches zero.
        tokens_per_step: tokens of one update.
        amplitude: rate at one token, in the paper a * batch size.
        exponent: of the tokens, negative.
        warmup_steps, cooldown_steps, shape: as for `warmup_stable_decay_schedule`.

    Returns:
        A schedule, step -> rate.

    Source: Shen et al., Power scheduler (arXiv:2408.13359).

    Example:
        >>> schedule = power_schedule(
        ...     0.02, 1000, tokens_per_step=4096, amplitude=4.0, cooldown_steps=100)
        >>> float(schedule(900)) < float(schedule(100)) <= 0.02
        True
    """
    if not exponent < 0:
        raise ValueError(f"exponent must be negative, got {exponent}")
    around = {"warmup_steps": warmup_steps, "cooldown_steps": cooldown_steps, "shape": shape}
    of_one = warmup_stable_decay_schedule(1.0, total_steps, **around)

    def rate(step: Any) -> Any:
        tokens = (jnp.asarray(step) + 1) * jnp.float32(tokens_per_step)
        return jnp.minimum(peak, amplitude * tokens**exponent) * of_one(step)

    return rate


@checked
def refined_schedule(
    gradient_norms: Any,
    peak: Rate,
    total_steps: Annotated[int, AtLeast(2)] | None = None,
    *,
    smoothing: float = 0.1,
) -> optax.Schedule:
    """The schedule that a convex last-iterate bound prefers, given a past run's gradient norms.

        w_t = G_t^-2;   rate(t) = peak * u_t / max(u),   u_t = w_t * sum_{p > t} w_p

    Constant norms give linear decay; norms that grow near the end make it fall sooner. G is first
    smoothed by a running median whose window is a fraction of the run, reflected at its ends, and
    the whole is stretched to `total_steps` by linear interpolation.

    Args:
        gradient_norms: [steps], of the unclipped gradients of a run with any sensible schedule.
        peak: the highest rate.
        total_steps: length of the new run; None for that of the old one.
        smoothing: window of the median as a fraction of the run, in [0, 1].

    Returns:
        A schedule, step -> rate.

    Source: Defazio et al., When, why and how much? Adaptive learning rate scheduling by refinement
        (arXiv:2310.07831), section 3.

    Example:
        >>> schedule = refined_schedule([1.0] * 101, 0.5)  # constant norms: linear decay
        >>> round(float(schedule(50)), 6)
        0.25
    """
    from scipy.ndimage import median_filter

    norms = np.asarray(gradient_norms, np.float64)
    if norms.ndim != 1 or len(norms) < 2:
        raise ValueError(f"gradient_norms must be [steps] with steps >= 2, got {norms.shape}")
    if not (np.isfinite(norms) & (norms > 0)).all():
        raise ValueError("gradient_norms must be positive and finite in every step")
    if not 0 <= smoothing <= 1:
        raise ValueError(f"smoothing must lie in [0, 1], got {smoothing}")
    total_steps = len(norms) if total_steps is None else total_steps
    half = min(int(smoothing * len(norms) / 2), len(norms) - 1)
    weights = median_filter(norms, 2 * half + 1, mode="mirror") ** -2.0
    weights /= weights.max()
    later = np.cumsum(weights[::-1])[::-1] - weights
    shape = weights * later
    old, new = np.linspace(0.0, 1.0, len(norms)), np.linspace(0.0, 1.0, total_steps)
    return tabulated_schedule(np.interp(new, old, peak * shape / shape.max()))


@checked
def tabulated_schedule(rates: Any) -> optax.Schedule:
    """One rate per step from a table; the last one stays after its end.

        rate(t) = rates[min(t, steps - 1)]

    Args:
        rates: [steps], kept as float32.

    Returns:
        A schedule, step -> rate, a constant of 4 bytes per step in the compiled program.

    Example:
        >>> schedule = tabulated_schedule([0.1, 0.2, 0.3])
        >>> [round(float(schedule(step)), 3) for step in (0, 2, 9)]
        [0.1, 0.3, 0.3]
    """
    table = np.asarray(rates, np.float32)
    if table.ndim != 1 or not len(table):
        raise ValueError(f"rates must be [steps] with steps >= 1, got shape {table.shape}")
    if not (np.isfinite(table) & (table >= 0)).all():
        raise ValueError("rates must be finite and not negative in every step")
    return lambda step: jnp.asarray(table)[jnp.clip(step, 0, len(table) - 1)]
