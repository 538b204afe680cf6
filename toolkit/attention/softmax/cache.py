"""The cache of keys and values, and one step of decoding with it.

A decode step reads every cached key and value once and does two multiplications with each, so it
runs at the speed of memory. The layout decides whether it does: with time last, the scores of one
head are one pass over rows that are contiguous in time, and so is the weighted sum of the values.

Under a sliding window the cache is a ring: the token at position p lives in slot p % capacity, so a
capacity of the window suffices and the oldest token is overwritten. Without a window the token
lives in slot p, and a token that finds no slot is an error: ValueError when the length is known,
NaN output from then on under `jax.jit`.

A row of the cache remembers one document, the last that was read into it. `start` says where that
document begins, so sequences of different lengths decode together: what fills a shorter one up in
front is a document of its own, and forgotten.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from toolkit.attention._checks import (
    check_multiple,
    check_rank,
    check_same_dtype,
    check_shape,
    check_sizes,
)
from toolkit.attention._precision import accumulator
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
    q_t: Float[Array, "batch heads key"],
    k_t: Float[Array, "batch key_value_heads key"],
    v_t: Float[Array, "batch key_value_heads value"],
    cache: KVCache,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> tuple[Float[Array, "batch heads value"], KVCache]:
    """Append one token to the cache and attend to all tokens in it.

        o_t = sum_{i <= t} softmax_i(scale q_t . k_i) v_i

    Args:
        q_t: query of the new token [batch, heads, key].
        k_t: its key [batch, key_value_heads, key]; heads is a multiple of key_value_heads.
        v_t: its value [batch, key_value_heads, value].
        cache: tokens before it.
        scale: factor of the scores; None for key ** -0.5.
        sliding_window: tokens seen, the new one included; None for all.

    Returns:
        The output [batch, heads, value] in q_t's dtype, and the cache with the token. Values in
        slots without a token never show in the output, even NaN.

    Raises:
        ValueError: shapes that do not fit, a window below 1 or above the capacity, a full cache.
        TypeError: not floating point, or different dtypes.

    Cost:
        2 batch heads capacity (key + value) FLOPs, and one read of the cache, which decides the
        time; in place when the cache is donated. Every slot is read, also those without a token.

    Source: Shazeer (2019), arXiv:1911.02150, section 2.3 (incremental multi-head attention).
    """
    _check_step(q_t, k_t, v_t, cache)
    check_window(sliding_window)
    check_room(cache, 1, sliding_window)
    batch, heads, key_size = q_t.shape
    factor = float(key_size**-0.5 if scale is None else scale)
    key_heads = k_t.shape[1]

    is_ring = sliding_window is not None
    slot = cache.length % cache.capacity if is_ring else cache.length
    has_room = slot < cache.capacity
    # Writing inside a conditional matters: of a bare update XLA makes a second copy for the reads
    # below, and one for the result, which triples the time of a step.
    keys, values = lax.cond(
        has_room,
        lambda: (_write(cache.keys, k_t, slot), _write(cache.values, v_t, slot)),
        lambda: (cache.keys, cache.values),
    )
    age = cache.length - jnp.arange(cache.capacity, dtype=cache.length.dtype)
    if is_ring:
        age %= cache.capacity
    visible = (age >= 0) & (age <= cache.length)
    if is_ring:
        visible &= age < sliding_window
    visible = visible[None]
    if cache.start is not None:
        visible = visible & ((cache.length - age)[None] >= cache.start[:, None])

    q_t = q_t.reshape(batch, key_heads, heads // key_heads, key_size)
    out = _attend_to_slots(q_t, keys, values, visible[:, None, None], factor)
    out = jnp.where(has_room, out, jnp.nan).astype(q_t.dtype)
    cache = KVCache(keys, values, cache.length + 1, cache.start)
    return out.reshape(batch, heads, values.shape[2]), cache


def _write(slots: Array, token: Array, slot: Int[Array, ""]) -> Array:
    return lax.dynamic_update_slice_in_dim(slots, token[..., None], slot, axis=-1)


def _attend_to_slots(
    q: Float[Array, "batch key_heads group key"],
    keys: Float[Array, "batch key_heads key slots"],
    values: Float[Array, "batch key_heads value slots"],
    visible: Bool[Array, "batch_or_1 1 1 slots"],
    scale: float,
) -> Float[Array, "batch key_heads group value"]:
    """Softmax of one query a head over the visible slots."""
    precise = accumulator(q.dtype)
    scores = jnp.einsum("bhgk,bhks->bhgs", q, keys, preferred_element_type=precise) * scale
    scores = jnp.where(visible, scores, -jnp.inf)
    p = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    total = p.sum(axis=-1, keepdims=True)
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
    segment_ids: Int[Array, "batch time"] | None,
    *,
    sliding_window: int | None,
) -> tuple[Array, Array, Extent, Segments | None, KVCache]:
    """Append several tokens, and lay out the keys and values their queries may see in order.

    Args:
        cache: tokens so far.
        k: keys of the new tokens, time last.
        v: values of the new tokens, time last.
        segment_ids: documents of the new tokens; the first continues the cache's. None for one.
        sliding_window: the window; not None makes the cache a ring.

    Returns:
        Keys and values in the order of time, the extent of the new queries on their axis, the
        documents of both (None if there is one only), and the new cache. Without a window the keys
        are the whole cache; with one they are the ring, unrolled, and the new tokens.
    """
    time, capacity, length = k.shape[-1], cache.capacity, cache.length
    if sliding_window is None:
        keys = lax.dynamic_update_slice_in_dim(cache.keys, k, length, axis=-1)
        values = lax.dynamic_update_slice_in_dim(cache.values, v, length, axis=-1)
        extent = Extent(length, 0, length + time)
        kept_keys, kept_values = keys, values
    else:
        keys = jnp.concatenate([jnp.roll(cache.keys, -length, axis=-1), k], axis=-1)
        values = jnp.concatenate([jnp.roll(cache.values, -length, axis=-1), v], axis=-1)
        extent = Extent(capacity, capacity - jnp.minimum(length, capacity), capacity + time)
        kept_keys = jnp.roll(keys[..., time:], length + time, axis=-1)
        kept_values = jnp.roll(values[..., time:], length + time, axis=-1)
    segments, start = documents_after(
        length, cache.start, segment_ids, (k.shape[0], time), extent.query_start, keys.shape[-1]
    )
    new_cache = KVCache(kept_keys, kept_values, length + time, start)
    return keys, values, extent, segments, new_cache


def check_window(sliding_window: int | None) -> None:
    """Refuse a window that is not a positive whole number."""
    if sliding_window is None:
        return
    if not isinstance(sliding_window, int) or isinstance(sliding_window, bool):
        raise TypeError(f"sliding_window must be an int or None; got {sliding_window!r}.")
    if sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1 token; got {sliding_window}.")


def check_room(cache: KVCache, time: int, sliding_window: int | None) -> None:
    """Refuse a ring shorter than its window, or tokens that a cache of known length cannot hold."""
    if sliding_window is not None:
        if cache.capacity < sliding_window:
            raise ValueError(
                f"a cache for sliding_window={sliding_window} needs at least that capacity; "
                f"got {cache.capacity}."
            )
        return
    if time > cache.capacity:
        raise ValueError(
            f"{time} tokens do not fit in a cache of {cache.capacity}; give it a larger capacity."
        )
    try:
        length = int(cache.length)
    except jax.errors.ConcretizationTypeError:
        return
    if length + time > cache.capacity:
        raise ValueError(
            f"the cache holds {length} of {cache.capacity} tokens and cannot take {time} more; "
            "make it with a larger capacity."
        )


def check_cache(cache: KVCache, k: Array, v: Array) -> None:
    """Refuse a cache that does not fit keys and values [batch, time, heads, size]."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"initial_state must be a KVCache; got {type(cache).__name__}.")
    batch, _, key_heads, key_size = k.shape
    axes = "batch key_value_heads size capacity"
    check_shape("cache.keys", cache.keys, (batch, key_heads, key_size, cache.capacity), axes)
    check_shape("cache.values", cache.values, (batch, key_heads, v.shape[3], cache.capacity), axes)
    check_same_dtype(k=k, cache_keys=cache.keys, cache_values=cache.values)
    if cache.start is not None:
        check_shape("cache.start", cache.start, (batch,), "batch")


def _check_step(q_t: Array, k_t: Array, v_t: Array, cache: KVCache) -> None:
    check_rank("q_t", q_t, "batch heads key")
    check_rank("k_t", k_t, "batch key_value_heads key")
    check_rank("v_t", v_t, "batch key_value_heads value")
    batch, heads, key_size = q_t.shape
    key_heads = k_t.shape[1]
    check_shape("k_t", k_t, (batch, key_heads, key_size), "batch key_value_heads key")
    check_shape("v_t", v_t, (batch, key_heads, v_t.shape[2]), "batch key_value_heads value")
    check_multiple("the heads of q_t", heads, "the heads of k_t and v_t", key_heads)
    check_same_dtype(q_t=q_t, k_t=k_t, v_t=v_t)
    check_cache(cache, k_t[:, None], v_t[:, None])
