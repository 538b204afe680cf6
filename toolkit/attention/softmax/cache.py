"""The cache of keys and values, and one step of decoding with it.

A decode step reads every cached key and value once and does two multiplications with each, so it
runs at the speed of memory. The layout decides whether it does: with time last, the scores of one
head are one pass over rows that are contiguous in time, and so is the weighted sum of the values.

Under a sliding window the cache is a ring: the token at position p lives in slot p % capacity, so a
capacity of the window suffices and the oldest token is overwritten. Without a window the token
lives in slot p, and a token that finds no slot is an error (`_caches.py`).

A row of the cache remembers one document, the last that was read into it. `start` says where that
document begins, so sequences of different lengths decode together: what fills a shorter one up in
front is a document of its own, and forgotten.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from toolkit.attention._attend import fixed_scale, masked_softmax
from toolkit.attention._caches import check_cache, check_room, show_overflow, write_tokens
from toolkit.attention._checks import check_count, check_inputs, check_sizes
from toolkit.attention._precision import accumulator
from toolkit.attention._shapes import HeadValue, Query, SegmentIds, SharedKey, SharedValue
from toolkit.attention._visibility import Extent, Segments, documents_after


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens seen so far; a pytree.

    Donate it (`jax.jit(step, donate_argnames="cache")`) so that a step writes in place.

    Attributes:
        keys: [batch, key_value_heads, key, capacity].
        values: [batch, key_value_heads, value, capacity].
        length: tokens seen so far, int32; in a ring it grows past the capacity.
        start: tokens before the document that a row remembers, int32 [batch]; None for no tokens.

    Example:
        >>> cache = KVCache.empty(1, 2, 4, 4, capacity=8)
        >>> cache.keys.shape, int(cache.length)
        ((1, 2, 4, 8), 0)
    """

    keys: Float[Array, "batch key_value_heads key capacity"]
    values: Float[Array, "batch key_value_heads value capacity"]
    length: Int[Array, ""]
    start: Int[Array, "batch"] | None = None

    @classmethod
    def empty(
        cls,
        batch: int,
        key_value_heads: int,
        key_size: int,
        value_size: int,
        capacity: int,
        dtype=jnp.float32,
    ) -> "KVCache":
        """Make a cache without tokens, with room for `capacity` of them."""
        check_sizes(
            "a KVCache",
            batch=batch,
            key_value_heads=key_value_heads,
            key_size=key_size,
            value_size=value_size,
            capacity=capacity,
        )
        keys = jnp.zeros((batch, key_value_heads, key_size, capacity), dtype)
        values = jnp.zeros((batch, key_value_heads, value_size, capacity), dtype)
        return cls(keys, values, jnp.zeros((), jnp.int32))

    @property
    def capacity(self) -> int:
        """Slots for tokens."""
        return self.keys.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes


def softmax_attention_step(
    q_t: Query,
    k_t: SharedKey,
    v_t: SharedValue,
    cache: KVCache,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> tuple[HeadValue, KVCache]:
    """Append one token to the cache and attend to all tokens in it.

        o_t = sum_{i <= t} softmax_i(scale q_t . k_i) v_i

    Arguments as `softmax_attention`, without the time axis; `cache` holds the tokens before this
    one. Values in slots without a token never show in the output, even NaN.

    Cost:
        2 batch heads capacity (key + value) FLOPs, and one read of the cache, which decides the
        time; in place when the cache is donated. Every slot is read, also those without a token.

    Source: Shazeer (2019), arXiv:1911.02150, section 2.3 (incremental multi-head attention).

    Example:
        >>> q = k = v = jnp.ones((1, 2, 4))
        >>> cache = KVCache.empty(1, 2, 4, 4, capacity=8)
        >>> out, cache = softmax_attention_step(q, k, v, cache)
        >>> out.shape, int(cache.length)
        ((1, 2, 4), 1)
    """
    sizes = check_inputs(softmax_attention_step, q_t=q_t, k_t=k_t, v_t=v_t)
    sliding_window = check_window(sliding_window)
    check_kv_cache(cache, sizes, k_t, sliding_window)
    q_t, scale = fixed_scale(q_t, scale)
    return _step(q_t, k_t, v_t, cache, scale=scale, sliding_window=sliding_window)


# Compiled as a whole, or an eager call would compile its conditionals anew every time.
@partial(jax.jit, static_argnames=("scale", "sliding_window"))
def _step(q_t, k_t, v_t, cache, *, scale, sliding_window):
    batch, heads, key_size = q_t.shape
    key_heads = k_t.shape[1]
    length, capacity, is_ring = cache.length, cache.capacity, sliding_window is not None
    slot = length % capacity if is_ring else length
    cache = write_tokens(cache, slot, axis=-1, keys=k_t[..., None], values=v_t[..., None])
    age = length - jnp.arange(capacity, dtype=length.dtype)
    if is_ring:
        age %= capacity
    visible = (age >= 0) & (age <= length)
    if sliding_window is not None:
        visible &= age < sliding_window
    visible = visible[None]
    if cache.start is not None:
        visible = visible & ((length - age)[None] >= cache.start[:, None])

    q_t = q_t.reshape(batch, key_heads, heads // key_heads, key_size)
    out = _attend_to_slots(q_t, cache.keys, cache.values, visible[:, None, None], scale)
    out = (out if is_ring else show_overflow(out, cache)).astype(q_t.dtype)
    return out.reshape(batch, heads, v_t.shape[2]), cache


def _attend_to_slots(
    q: Float[Array, "batch key_heads group key"],
    keys: Float[Array, "batch key_heads key slots"],
    values: Float[Array, "batch key_heads value slots"],
    visible: Bool[Array, "batch_or_1 1 1 slots"],
    scale: float,
) -> Float[Array, "batch key_heads group value"]:
    """Softmax of one query per head over the visible slots."""
    precise = accumulator(q.dtype)
    scores = jnp.einsum("bhgk,bhks->bhgs", q, keys, preferred_element_type=precise) * scale
    p, total, _ = masked_softmax(scores, visible)
    weights = p.astype(values.dtype)
    out = jnp.einsum("bhgs,bhvs->bhgv", weights, values, preferred_element_type=precise)
    # 0 * NaN is NaN: where a slot without a token holds one, sum again without those slots, slowly.
    out = lax.cond(
        jnp.isfinite(out).all(),
        lambda: out,
        lambda: jnp.where(
            visible[..., None, :], p[..., None, :] * values.astype(precise)[:, :, None], 0
        ).sum(axis=-1),
    )
    return out / total


def append(
    cache: KVCache,
    k: Float[Array, "batch key_value_heads key time"],
    v: Float[Array, "batch key_value_heads value time"],
    segment_ids: SegmentIds | None,
    *,
    sliding_window: int | None,
) -> tuple[Array, Array, Extent, Segments | None, KVCache]:
    """Append several tokens, and lay out the keys and values their queries may see in order.

    Without a window the keys are the whole cache; with one they are the ring, unrolled, and the
    new tokens. The first document of `segment_ids` continues the cache's.
    """
    time, capacity, length = k.shape[-1], cache.capacity, cache.length
    if sliding_window is None:
        new_cache = write_tokens(cache, length, axis=-1, keys=k, values=v)
        keys, values = new_cache.keys, new_cache.values
        extent = Extent(length, 0, length + time)
    else:
        keys = jnp.concatenate([jnp.roll(cache.keys, -length, axis=-1), k], axis=-1)
        values = jnp.concatenate([jnp.roll(cache.values, -length, axis=-1), v], axis=-1)
        extent = Extent(capacity, capacity - jnp.minimum(length, capacity), capacity + time)
        kept = [jnp.roll(x[..., time:], length + time, axis=-1) for x in (keys, values)]
        new_cache = KVCache(kept[0], kept[1], length + time)
    segments, start = documents_after(
        length, cache.start, segment_ids, (k.shape[0], time), extent.query_start, keys.shape[-1]
    )
    return keys, values, extent, segments, replace(new_cache, start=start)


def check_window(sliding_window: int | None) -> int | None:
    """A window as an int; refuses one that is not a positive whole number."""
    if sliding_window is None:
        return None
    check_count("sliding_window", sliding_window, 1, " token")
    return int(sliding_window)


def check_kv_cache(cache: KVCache, sizes: Mapping[str, int], k: Array, sliding_window) -> None:
    """Refuse a cache that does not fit, a ring shorter than its window, or tokens without room."""
    check_cache(cache, KVCache, sizes, k)
    if sliding_window is None:
        check_room(cache, sizes.get("time", 1))
    elif cache.capacity < sliding_window:
        raise ValueError(
            f"a cache for sliding_window={sliding_window} needs at least that capacity; "
            f"got {cache.capacity}."
        )
