"""What layers compute from their projections before a mixer: vectors of unit length, log-decays."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from toolkit._checks import checked
from toolkit._kinds import check_floating
from toolkit.attention.execution.precision import accumulator


@checked
def unit_length(x: Float[Array, "... size"]) -> Float[Array, "... size"]:
    """Scale the last axis to Euclidean length one; a longer key would let a delta rule expand.

        y = x / sqrt(sum x^2 + 1e-6)

    Args:
        x: [..., size], queries or keys.

    Returns:
        [..., size] in the dtype of x; summed in float32 (float64 for float64). NaN where that sum
        overflows, beyond a length of 1.8e19.

    Example:
        >>> unit_length(jnp.full((1, 4), 3.0)).round(3).tolist()
        [[0.5, 0.5, 0.5, 0.5]]
    """
    check_floating("x", x)
    wide = x.astype(accumulator(x.dtype))
    square = jnp.sum(wide * wide, axis=-1, keepdims=True)
    # Divided by the length and not multiplied by its inverse, the third power of which is in the
    # gradient, and 0 from a length of 1e13 on.
    length = jnp.where(square < jnp.inf, jnp.sqrt(square + 1e-6), jnp.nan)
    return (wide / length).astype(x.dtype)


@checked
def log_decay(
    raw: Float[Array, "... heads"] | Float[Array, "... heads key"],
    log_rate: Float[Array, "heads"] | Float[Array, "heads 1"],
    bias: Float[Array, "heads"] | Float[Array, "heads key"] | None = None,
    *,
    least: float | None = None,
) -> Float[Array, "... heads"] | Float[Array, "... heads key"]:
    r"""Log-decays `g` from a projection, as Mamba-2, Gated DeltaNet and Kimi Delta Attention do.

        g = -e^(log_rate) softplus(raw + bias)               or, bounded from below,
        g = least sigmoid(e^(log_rate) (raw + bias))

    Args:
        raw: [batch, time, heads], or [batch, time, heads, key] for decays by channel: the tokens'
            projection. One step of decoding has no axis time.
        log_rate: [heads], or [heads, 1] for decays by channel: A_log, a rate per head.
        bias: [heads] or [heads, key]: dt_bias, where steps start; none if None.
        least: below 0; no token forgets more than e^least (the "safe gate" of
            flash-linear-attention, there -5). No bound if None.

    Returns:
        Like raw, at most 0, in float32 (float64 for float64 inputs): a state is multiplied by
        hundreds of decays.

    Source:
        Dao, Gu, "Transformers are SSMs" (arXiv:2405.21060); Kimi Team, "Kimi Linear"
        (arXiv:2510.26692). The bounded form is that of flash-linear-attention.

    Example:
        >>> raw = jnp.asarray([[[-jnp.inf, 0.0, jnp.inf]]])
        >>> log_decay(raw, jnp.zeros(3), least=-5.0).tolist()
        [[[-0.0, -2.5, -5.0]]]
    """
    for name, x in (("raw", raw), ("log_rate", log_rate), ("bias", bias)):
        if x is None:
            continue
        check_floating(name, x)
        if any(a not in (1, b) for a, b in zip(x.shape[::-1], raw.shape[::-1], strict=False)):
            raise ValueError(f"{name} must fit raw {raw.shape} from the right; got {x.shape}.")
    if least is not None and not least < 0:
        raise ValueError(f"least must be below 0; got {least}.")
    precise = accumulator(raw.dtype)
    rate = jnp.exp(jnp.broadcast_to(log_rate.astype(precise), raw.shape))
    step = raw.astype(precise)
    if bias is not None:
        step += jnp.broadcast_to(bias.astype(precise), raw.shape)
    return -rate * jax.nn.softplus(step) if least is None else least * jax.nn.sigmoid(rate * step)
