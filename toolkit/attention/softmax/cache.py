"""The cache of keys and values, and one step of decoding with it.

A decode step reads every cached key and value once and does two multiplications with each, so it
runs at the speed of memory. The layout decides whether it does: with time last, the scores of one
head are one pass over rows that are contiguous in time, and so is the weighted sum of the values.

Under a sliding window the cache is a ring: token p lives in slot p % capacity, so a capacity of the
window suffices and the oldest token is overwritten. Without a window token p lives in slot p, and a
token that finds no slot is an error (`_caches.py`).

Every row has a length of its own, so sequences of different lengths decode together, and a row
whose sequence has ended takes in another while the others go on (`free`, `insert`).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from toolkit._annotations import Known
from toolkit._checks import checked
from toolkit._pytrees import register_dataclass
from toolkit.attention._attend import Mask, Segments, Window, fixed_scale, masked_softmax
from toolkit.attention._caches import (
    Rows,
    check_lengths,
    check_room,
    cleared,
    continue_rows,
    cut_as_arrays_are,
    show_overflow,
    write_token,
)
from toolkit.attention._checks import check_choice, check_dtype, check_sizes
from toolkit.attention._shapes import TOKENS, Query, SegmentIds, SharedKey, SharedValue, TokenCount
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.softmax.merge import with_sinks
from toolkit.attention.softmax.rounding import NumberFormat, calibrated, floats, stored
from toolkit.attention.softmax.scores import Options, at_ages, capped, checked_cap, window_of
from toolkit.attention.softmax.slots import dot_keys, weighted_values


@register_dataclass
@dataclass(frozen=True)
class KVCache(Rows):
    """Keys and values of the tokens seen so far; a pytree, all of whose arrays begin with batch.

    Donate it (`jax.jit(step, donate_argnames="cache")`) so that a step writes in place.

    A quantised cache holds 8 bits per number and a scale per token and head: a quarter of the bytes
    of float32 and 4 more per token and head. Keys are divided by a factor per channel first, which
    the first tokens of a row fix: a channel that is always large costs the others no precision.
    `quantisation_error` measures the error. Queries have derivatives then; new keys and values,
    which are rounded, have none, and asking for one is an error.

    Attributes:
        keys: [batch, key_value_heads, key, capacity].
        values: [batch, key_value_heads, value, capacity].
        length: tokens seen so far by each row, int32; in a ring it grows past the capacity.
        forgotten: of these, how many a ring has written over, int32; 0 without a window. It exceeds
            length - capacity once `truncate` has taken tokens back.
        key_scales: what the keys of a token are multiplied by; None if they are not quantised.
        value_scales: likewise.
        key_channels: what every channel of the keys is multiplied by besides, at least 1.

    Example:
        >>> cache = KVCache.empty(1, 2, 4, 4, capacity=8)
        >>> cache.keys.shape, cache.length.tolist()
        ((1, 2, 4, 8), [0])
    """

    keys: Annotated[Num[Array, "batch key_value_heads key capacity"], TOKENS]
    values: Annotated[Num[Array, "batch key_value_heads value capacity"], TOKENS]
    length: Int[Array, "batch"]
    forgotten: Int[Array, "batch"]
    key_scales: Float[Array, "batch key_value_heads capacity"] | None = None
    value_scales: Float[Array, "batch key_value_heads capacity"] | None = None
    key_channels: Float[Array, "batch key_value_heads key"] | None = None

    @classmethod
    def empty(
        cls, batch: int, key_value_heads: int, key_size: int, value_size: int, capacity: int,
        dtype=jnp.float32, *,
        is_quantised: bool = False, number_format: NumberFormat = "int8",
    ) -> "KVCache":  # fmt: skip
        """Make a cache without tokens, with room for `capacity` of them in every row.

        One that `is_quantised` holds its numbers in `number_format` and takes tokens of any dtype;
        `dtype` is then that of the scales. "float8_e4m3fn" has a relative error of up to 1/16
        for every number, where "int8" has an absolute one per token.
        """
        check_sizes(
            "a KVCache",
            batch=batch,
            key_value_heads=key_value_heads,
            key_size=key_size,
            value_size=value_size,
            capacity=capacity,
        )
        check_dtype(dtype)
        check_choice("number_format", number_format, get_args(NumberFormat))
        of_numbers = number_format if is_quantised else dtype
        keys = jnp.zeros((batch, key_value_heads, key_size, capacity), of_numbers)
        values = jnp.zeros((batch, key_value_heads, value_size, capacity), of_numbers)
        # Arrays of their own, since a donated buffer is given away once.
        cache = cls(keys, values, *(jnp.zeros(batch, jnp.int32) for _ in range(2)))
        if not is_quantised:
            return cache
        precise, of_heads = accumulator(dtype), (batch, key_value_heads)
        return replace(
            cache,
            key_scales=jnp.zeros((*of_heads, capacity), precise),
            value_scales=jnp.zeros((*of_heads, capacity), precise),
            key_channels=jnp.ones((*of_heads, key_size), precise),
        )

    def free(self, rows: Int[Array, "rows"] | Bool[Array, "batch"]) -> "KVCache":
        """Forget the tokens of some rows, so that other sequences can take their place."""
        return replace(super().free(rows), forgotten=cleared(self.forgotten, rows))

    @property
    def capacity(self) -> int:
        """Slots for tokens."""
        return self.keys.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, and of their scales."""
        return sum(x.nbytes for x in jax.tree.leaves(self)) - 2 * self.length.nbytes


@checked
def softmax_attention_step(
    q_t: Query, k_t: SharedKey, v_t: SharedValue, cache: KVCache, *,
    scale: float | None = None, sliding_window: TokenCount | None = None,
    logits_soft_cap: Annotated[float, Known()] | None = None,
    alibi_slopes: Float[Array, "heads"] | None = None,
    relative_bias: Float[Array, "batch heads distances"] | None = None,
    sinks: Float[Array, "heads"] | Float[Array, "batch heads"] | None = None,
    return_residual: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """Append one token to the cache and attend to all tokens in it.

        o_t = sum_{i <= t} softmax_i(s_ti) v_i
        s_ti = c tanh(scale q_t . k_i / c) + relative_bias_t,t-i - slope (t - i)

    Arguments as `softmax_attention`, without the time axis; `cache` holds the tokens before this
    one. Values in slots without a token never show in the output, even NaN.

    Returns:
        The output [batch, heads, value] in q_t's dtype, and the cache with the token in it. With
        `return_residual` third the logarithm of the sum of exponentials, the sink's included,
        [batch, heads], by which devices that hold parts of a cache merge what they found.

    Cost:
        2 batch heads capacity (key + value) FLOPs, and one read of the cache, which decides the
        time; in place when the cache is donated. Every slot is read, also those without a token.

    Source: Shazeer (2019), arXiv:1911.02150, section 2.3 (incremental multi-head attention).

    Example:
        >>> q = k = v = jnp.ones((1, 2, 4))
        >>> cache = KVCache.empty(1, 2, 4, 4, capacity=8)
        >>> out, cache = softmax_attention_step(q, k, v, cache)
        >>> out.shape, cache.length.tolist()
        ((1, 2, 4), [1])
    """
    check_room_of(cache, 1, sliding_window)
    q_t, scale = fixed_scale(q_t, scale)
    options = Options(scale, checked_cap(logits_soft_cap))
    tokens = q_t, k_t, v_t, alibi_slopes, relative_bias, sinks
    window = window_of(True, sliding_window)
    out, residual, cache = _step(*tokens, cache, options=options, window=window)
    return (out, cache, residual) if return_residual else (out, cache)


# Compiled as a whole, or an eager call would compile its conditionals anew every time.
@partial(jax.jit, static_argnames=("options", "window"))
def _step(*arrays, **how):
    *tokens, cache = arrays
    step = partial(_step_share, **how)
    sinks = tokens[-1]
    of_sinks = 0 if sinks is None else sinks.ndim - 1
    heads = (1, 1, 1, 0, 1, of_sinks)
    return cut_as_arrays_are(step, tokens, cache, heads=heads, heads_out=(1, 1))


def _step_share(q_t, k_t, v_t, alibi_slopes, relative_bias, sinks, cache, *, options, window):
    batch, heads, key_size = q_t.shape
    key_heads = k_t.shape[1]
    length, capacity, is_ring = cache.length, cache.capacity, window[0] is not None
    slot = length % capacity if is_ring else length
    is_lost = lost(cache, length[:, None], window)
    cache = calibrated(cache, k_t)
    cache = write_token(cache, slot, axis=-1, **stored(cache, k_t, v_t))
    cache = replace(cache, forgotten=forgotten_after(cache, None, is_ring=is_ring))
    age = length[:, None] - jnp.arange(capacity, dtype=length.dtype)[None]
    if is_ring:
        age %= capacity
    visible = (age >= 0) & (age <= length[:, None])
    if is_ring:
        visible &= age <= window[0]

    q_t = q_t.reshape(batch, key_heads, heads // key_heads, key_size)
    penalty = None
    if alibi_slopes is not None:
        slopes = alibi_slopes.astype(accumulator(q_t.dtype)).reshape(1, *q_t.shape[1:3], 1)
        penalty = slopes * age[:, None, None].astype(slopes.dtype)
    if relative_bias is not None:
        nearer = at_ages(relative_bias, age[:, None], relative_bias.shape[-1])
        nearer = nearer.reshape(*q_t.shape[:3], capacity).astype(accumulator(q_t.dtype))
        penalty = -nearer if penalty is None else penalty - nearer
    out, residual = attend_to_slots(q_t, cache, visible[:, None, None], penalty, options)
    out = out.reshape(batch, 1, heads, v_t.shape[2])
    residual = residual.reshape(batch, 1, heads)
    if sinks is not None:
        sinks = sinks if sinks.ndim == 1 else sinks[:, None]
        out, residual = with_sinks(out, residual, sinks)
    out = jnp.where(is_lost[..., None, None], jnp.nan, out)
    out = (out if is_ring else show_overflow(out, cache)).astype(q_t.dtype)
    return out[:, 0], residual[:, 0], cache


def attend_to_slots(
    q: Float[Array, "batch key_heads group key"],
    cache: KVCache,
    visible: Bool[Array, "batch 1 1 slots"],
    penalty: Float[Array, "batch key_heads group slots"] | None,
    options: Options,
) -> tuple[Float[Array, "batch key_heads group value"], Float[Array, "batch key_heads group 1"]]:
    """Softmax of one query per head over the visible slots, and its log-sum-exp."""
    precise = accumulator(q.dtype)
    if cache.key_channels is not None:  # of the keys, moved to the one query
        q = (q.astype(precise) * cache.key_channels[:, :, None]).astype(q.dtype)
    products = dot_keys(q, cache.keys)
    if cache.key_scales is not None:
        products *= cache.key_scales[:, :, None]
    scores = capped(products, options)
    p, total, lse = masked_softmax(scores if penalty is None else scores - penalty, visible)
    weights = p if cache.value_scales is None else p * cache.value_scales[:, :, None]
    out = weighted_values(weights.astype(q.dtype), cache.values)
    # 0 * NaN is NaN: where a slot without a token holds one, sum again without those slots, slowly.
    out = lax.cond(
        jnp.isfinite(out).all(),
        lambda: out,
        lambda: jnp.where(
            visible[..., None, :],
            p[..., None, :] * floats(cache, precise)[1][:, :, None],
            0,
        ).sum(axis=-1),
    )
    return out / total, lse


def append(
    cache: KVCache, k: Float[Array, "batch key_value_heads key time"],
    v: Float[Array, "batch key_value_heads value time"], segment_ids: SegmentIds | None, *,
    window: Window,
) -> tuple[Array, Array, Mask, KVCache]:  # fmt: skip
    """Append several tokens, and lay out the keys and values their queries may see in order."""
    cache = calibrated(cache, k)
    new = stored(cache, k, v)
    arrays, mask, new_cache = continue_rows(cache, segment_ids, axis=-1, window=window, **new)
    forgotten = forgotten_after(new_cache, mask.documents, is_ring=window[0] is not None)
    keys, values = floats(replace(cache, **arrays), k.dtype)
    return keys, values, mask, replace(new_cache, forgotten=forgotten)


def lost(
    cache: KVCache, positions: Int[Array, "batch time"], window: Window
) -> Bool[Array, "batch time"]:
    """Whether queries that go on from a cache see tokens that a ring has written over."""
    forgotten = cache.forgotten[:, None]
    if window[0] is None:
        return jnp.broadcast_to(forgotten > 0, positions.shape)
    return (forgotten > 0) & (positions - window[0] < forgotten)


def forgotten_after(
    cache: KVCache, segments: Segments | None, *, is_ring: bool
) -> Int[Array, "batch"]:
    """What `KVCache.forgotten` is once new tokens, and so the new length, are in the cache."""
    before = cache.forgotten
    if segments is not None:  # the first document, number 1, is the one that went on
        before = jnp.where(segments.query[:, -1] > 1, 0, before)
    return jnp.maximum(before, cache.length - cache.capacity) if is_ring else before


def check_room_of(
    cache: KVCache, time: int, sliding_window: int | None, segment_ids: SegmentIds | None = None
) -> None:
    """Refuse tokens without room, or a ring shorter than its window."""
    if sliding_window is None:
        return check_room(cache, time, segment_ids)
    check_lengths(cache)
    if cache.capacity < sliding_window:
        raise ValueError(
            f"a cache for sliding_window={sliding_window} needs at least that capacity; "
            f"got {cache.capacity}."
        )
