r"""Keys and values as a quantised cache holds them: 8 bits each, and what they are multiplied by.

    k_c ~ a_c s n_c        v_c ~ s' n'_c        s, s': one per token and head;  a: one per channel

The largest number of a token decides its step. A channel that is large in every key would leave the
others few steps, so keys are divided by a first: how much larger a channel is than the median one
among the first tokens that a row reads, and at least 1. It stays as it is until the row is empty
again; tokens that are larger than those still fit, since s is their own.
"""

from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

NumberFormat = Literal["int8", "float8_e4m3fn"]
_LARGEST = {jnp.dtype("int8"): 127, jnp.dtype("float8_e4m3fn"): 448}


def calibrated(cache: Any, k: Float[Array, "batch heads key *time"]) -> Any:
    """The cache with factors of the channels for rows that are about to read their first tokens."""
    if cache.key_channels is None:
        return cache
    is_empty = cache.length == 0

    def of_first_tokens() -> Array:
        size = jnp.abs(lax.stop_gradient(k)).astype(cache.key_channels.dtype)
        size = jnp.where(jnp.isfinite(size), size, 0).reshape(*k.shape[:3], -1).max(axis=3)
        typical = jnp.median(size, axis=2, keepdims=True)
        factors = jnp.maximum(size / jnp.where(typical > 0, typical, 1), 1)
        factors = jnp.where(typical > 0, factors, 1)
        return jnp.where(is_empty[:, None, None], factors, cache.key_channels)

    channels = lax.cond(is_empty.any(), of_first_tokens, lambda: cache.key_channels)
    return replace(cache, key_channels=channels)


def stored(cache: Any, k: Array, v: Array) -> dict[str, Array]:
    """Keys and values as the cache holds them, [batch, key_value_heads, size, *time]."""
    if cache.key_scales is None:
        return {"keys": k, "values": v}
    dtype, numbers = cache.key_scales.dtype, cache.keys.dtype
    channels = cache.key_channels.reshape(*k.shape[:3], *(1,) * (k.ndim - 3))
    keys, key_scales = quantised(k.astype(dtype) / channels, numbers)
    values, value_scales = quantised(v.astype(dtype), numbers)
    return {
        "keys": keys,
        "values": values,
        "key_scales": key_scales,
        "value_scales": value_scales,
    }


def floats(cache: Any, dtype) -> tuple[Array, Array]:
    """Keys and values of a cache, quantised or not, as floating point."""
    if cache.key_scales is None:
        return cache.keys.astype(dtype), cache.values.astype(dtype)
    pairs = (cache.keys, cache.key_scales), (cache.values, cache.value_scales)
    keys, values = (x.astype(s.dtype) * s[:, :, None] for x, s in pairs)
    return (keys * cache.key_channels[..., None]).astype(dtype), values.astype(dtype)


def quantised(
    x: Float[Array, "batch heads size *time"], numbers: Any
) -> tuple[Num[Array, "batch heads size *time"], Float[Array, "batch heads *time"]]:
    """The nearest of the numbers of 8 bits, and what they are to be multiplied by."""
    x, largest = _without_derivative(x), _LARGEST[jnp.dtype(numbers)]
    scales = jnp.abs(x).max(axis=2) / largest
    # A token of zeros has the scale 0; one with NaN or inf has no other numbers any more.
    steps = x / jnp.where(scales == 0, 1, scales)[:, :, None]
    steps = jnp.where(jnp.isfinite(steps), steps, 0)
    return (jnp.round(steps) if largest == 127 else steps).astype(numbers), scales


@jax.custom_jvp
def _without_derivative(x: Array) -> Array:
    return x


@_without_derivative.defjvp
def _refuse_derivative(primals, tangents):
    raise NotImplementedError(
        "keys and values that a quantised cache rounds have no derivative; use a cache that is not "
        "quantised, or jax.lax.stop_gradient of both."
    )
