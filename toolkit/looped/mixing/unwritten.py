"""A step of softmax attention that reads a cache and leaves writing to the caller.

A branch of a conditional that returned the cache itself would copy it; one that returns the new
token's keys and values does not.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from toolkit._pytrees import register_dataclass
from toolkit.attention import KVCache
from toolkit.attention._attend import fixed_scale
from toolkit.attention._caches import write_token
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.softmax.cache import attend_to_slots, forgotten_after, lost
from toolkit.attention.softmax.merge import with_sinks
from toolkit.attention.softmax.scores import Options, capped, window_of


class NewToken(NamedTuple):
    """The keys and values of a token that is in no cache yet."""

    keys: Float[Array, "batch key_value_heads key"]
    values: Float[Array, "batch key_value_heads value"]


@register_dataclass
@dataclass(frozen=True)
class UnwrittenCache:
    """A `KVCache`, in floats, that a step reads only; the step returns its token in place of it."""

    cache: KVCache

    @property
    def length(self) -> Array:
        """Tokens of each row."""
        return self.cache.length

    def step(
        self, q_t: Array, k_t: Array, v_t: Array, *,
        sliding_window: int | None, sinks: Array | None, logits_soft_cap: float | None,
    ) -> tuple[Array, NewToken]:  # fmt: skip
        """`softmax_attention_step` of what the cache holds and of the token itself, merged."""
        cache, (batch, heads, size) = self.cache, q_t.shape
        q, scale = fixed_scale(q_t, None)
        options = Options(scale, logits_soft_cap)
        q, window = q.reshape(batch, k_t.shape[1], -1, size), window_of(True, sliding_window)
        length, (reach, _) = cache.length[:, None], window
        age = length - jnp.arange(cache.capacity, dtype=cache.length.dtype)[None]
        if reach is not None:
            age %= cache.capacity
        visible = (age >= 1) & (age <= length)
        if reach is not None:
            visible &= age <= reach
        past, residual = attend_to_slots(q, cache, visible[:, None, None], None, options)
        precise = accumulator(q.dtype)
        own = jnp.einsum("bhgk,bhk->bhg", q, k_t, preferred_element_type=precise)
        own = capped(own, options)
        residual = residual.reshape(own.shape)
        total = jnp.logaddexp(residual, own)
        out = jnp.exp(residual - total)[..., None] * past
        out += jnp.exp(own - total)[..., None] * v_t[:, :, None]
        out, total = out.reshape(batch, 1, heads, -1), total.reshape(batch, 1, heads)
        if sinks is not None:
            out, _ = with_sinks(out, total, sinks)
        wrong = lost(cache, length, window)
        if reach is None:
            wrong |= length >= cache.capacity
        out = jnp.where(wrong[..., None, None], jnp.nan, out)
        return out[:, 0].astype(q_t.dtype), NewToken(k_t, v_t)


def written(cache: KVCache, token: NewToken, *, is_ring: bool) -> KVCache:
    """The cache with the token in it."""
    slot = cache.length % cache.capacity if is_ring else cache.length
    cache = write_token(cache, slot, axis=-1, **token._asdict())
    return replace(cache, forgotten=forgotten_after(cache, None, is_ring=is_ring))
