r"""Softmax attention, exact: causal or not, grouped queries, a sliding window, packed documents.

    o_i = sum_j p_ij v_j        p_ij = exp(s_ij) / sum_j' exp(s_ij')        s_ij = scale q_i . k_j

where j runs over the keys that query i sees. `softmax_attention_reference` is this equation;
"dense" computes it with the whole matrix of scores, and "blockwise" in tiles (`blockwise.py`).

Numbers: scores, exponentials and sums are float32 for bfloat16 and float16 inputs, and float64
for float64. A query that sees no key gives 0. What a query does not see never shows in its output
or in the gradients of a loss on it, even NaN; a query that sees a number that is not finite gives
NaN.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from toolkit.attention._checks import check_choice, check_heads, check_segment_ids
from toolkit.attention._precision import accumulator
from toolkit.attention._visibility import Extent, Segments, sees
from toolkit.attention.softmax.blockwise import blockwise_attention
from toolkit.attention.softmax.cache import KVCache, append, check_cache, check_room, check_window

# Measured on one CPU core, 8 heads of 64: dense is 1.3x faster forward up to 256 keys, blockwise
# is 1.6x faster forward and backward from 128 keys on.
DENSE_UP_TO = 128


def softmax_attention(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time key_value_heads key"],
    v: Float[Array, "batch time key_value_heads value"],
    *,
    scale: float | None = None,
    is_causal: bool = True,
    sliding_window: int | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
    initial_state: KVCache | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "batch time heads value"], KVCache | None]:
    """Softmax attention of every token to the tokens it sees.

        o_i = sum_j softmax_j(scale q_i . k_j) v_j

    Args:
        q: queries [batch, time, heads, key].
        k: keys [batch, time, key_value_heads, key]; heads is a multiple of key_value_heads, and
            consecutive query heads share a key head (grouped queries).
        v: values [batch, time, key_value_heads, value].
        scale: factor of the scores; None for key ** -0.5.
        is_causal: a token sees no token after itself.
        sliding_window: tokens seen, itself included (on each side if not causal); None for all.
        segment_ids: document number of every token [batch, time]; a token sees its own document.
        initial_state: tokens before these, the first document of which these continue; they are
            seen too, and the new ones are appended.
        implementation: "dense", "blockwise", or None for dense on short and blockwise on long
            inputs. Both compute the same function.

    Returns:
        The output [batch, time, heads, value] in q's dtype, and the new cache (None without
        `initial_state`).

    Raises:
        ValueError: shapes that do not fit, a window below 1 or above the cache's capacity, an
            unknown implementation, a full cache.
        TypeError: not floating point, different dtypes, segment_ids that are not integers.

    Cost:
        2 batch heads time^2 (key + value) FLOPs, half of it when causal, time * window instead of
        time^2 in a window; the backward pass 2.5 times that. Memory: linear in time when blockwise,
        batch heads time^2 when dense.

    Source: Vaswani et al. (2017), arXiv:1706.03762, section 3.2.1; Ainslie et al. (2023),
        arXiv:2305.13245 (grouped queries); Beltagy et al. (2020), arXiv:2004.05150 (window).
    """
    _check(q, k, v, sliding_window, segment_ids, initial_state)
    check_choice("implementation", implementation, (None, "dense", "blockwise"))
    scale = float(q.shape[3] ** -0.5 if scale is None else scale)
    time = q.shape[1]
    keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 3, 1)
    extent, cache = Extent(0, 0, time), None
    segments = None if segment_ids is None else Segments(segment_ids, segment_ids)
    if initial_state is not None:
        keys, values, extent, segments, cache = append(
            initial_state, keys, values, segment_ids, sliding_window=sliding_window
        )
    is_short = keys.shape[3] <= DENSE_UP_TO
    is_dense = is_short if implementation is None else implementation == "dense"
    attend = dense_attention if is_dense else blockwise_attention
    out = attend(
        q,
        keys,
        values,
        extent,
        segments,
        scale=scale,
        is_causal=is_causal,
        sliding_window=sliding_window,
    )
    if cache is not None and sliding_window is None:
        out = jnp.where(cache.length <= cache.capacity, out, jnp.nan)  # overflow must show
    return out, cache


def dense_attention(
    q: Float[Array, "batch query_time heads key"],
    k: Float[Array, "batch key_heads key key_time"],
    v: Float[Array, "batch key_heads value key_time"],
    extent: Extent,
    segments: Segments | None,
    *,
    scale: float,
    is_causal: bool,
    sliding_window: int | None,
) -> Float[Array, "batch query_time heads value"]:
    """Softmax attention of `q` over `k, v` (time last) with the whole matrix of scores.

    Differentiable any number of times and in forward mode, unlike the blockwise form.

    Args:
        q: [batch, query_time, heads, key].
        k: [batch, key_heads, key, key_time]; heads is a multiple of key_heads.
        v: [batch, key_heads, value, key_time].
        extent: where queries and keys lie in time.
        segments: document numbers, or None for one document.
        scale: factor of the scores.
        is_causal: a query sees no key after itself.
        sliding_window: keys a query sees, itself included; None for all.

    Returns:
        Output [batch, query_time, heads, value] in q's dtype; 0 for a query that sees no key.

    Cost:
        2 batch heads query_time key_time (key + value) FLOPs; as many scores in memory.
    """
    batch, time, heads, key_size = q.shape
    key_heads, key_time = k.shape[1], k.shape[3]
    precise = accumulator(q.dtype)
    query_index = extent.query_start + jnp.arange(time, dtype=jnp.int32)[:, None]
    visible = sees(
        query_index,
        jnp.arange(key_time, dtype=jnp.int32)[None, :],
        extent,
        is_causal=is_causal,
        sliding_window=sliding_window,
    )[None]
    if segments is not None:
        visible = visible & (segments.query[:, :, None] == segments.key[:, None, :])
    visible = visible[:, None, None]  # [batch, key_heads, group, query_time, key_time]

    # 0 * NaN is NaN, so products see finite numbers only; NaN returns to the rows that saw one.
    q = q.reshape(batch, time, key_heads, heads // key_heads, key_size).transpose(0, 2, 3, 1, 4)
    q_is_finite, k_is_finite, v_is_finite = (jnp.isfinite(x) for x in (q, k, v))
    key_is_finite = k_is_finite.all(axis=2) & v_is_finite.all(axis=2)
    sees_finite = (key_is_finite[:, :, None, None, :] | ~visible).all(axis=-1)
    is_sound = sees_finite & q_is_finite.all(axis=-1)
    q, k, v = (
        jnp.where(q_is_finite, q, 0),
        jnp.where(k_is_finite, k, 0),
        jnp.where(v_is_finite, v, 0),
    )

    scores = jnp.einsum("bhgtk,bhks->bhgts", q, k, preferred_element_type=precise) * scale
    scores = jnp.where(visible, scores, -jnp.inf)
    # The maximum of a row that sees nothing is the lowest *finite* number: -inf + inf is NaN.
    lowest = float(jnp.finfo(precise).min)
    largest = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True, initial=lowest))
    p = jnp.exp(scores - largest)
    total = p.sum(axis=-1, keepdims=True)
    p = p / jnp.where(total == 0, 1, total)
    out = jnp.einsum("bhgts,bhvs->bhgtv", p.astype(v.dtype), v, preferred_element_type=precise)
    out = out + jnp.where(is_sound, 0, jnp.nan)[..., None]
    return out.astype(q.dtype).transpose(0, 3, 1, 2, 4).reshape(batch, time, heads, v.shape[2])


def softmax_attention_reference(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time key_value_heads key"],
    v: Float[Array, "batch time key_value_heads value"],
    *,
    scale: float | None = None,
    is_causal: bool = True,
    sliding_window: int | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
    initial_state: KVCache | None = None,
) -> tuple[Float[Array, "batch time heads value"], KVCache | None]:
    """The equation of softmax attention, to be read; the oracle of the fast forms.

        o_i = sum_j softmax_j(scale q_i . k_j) v_j

    It runs eagerly where a cache is given, because it reads the cache's length.

    Args:
        q: queries [batch, time, heads, key].
        k: keys [batch, time, key_value_heads, key].
        v: values [batch, time, key_value_heads, value].
        scale: factor of the scores; None for key ** -0.5.
        is_causal: a token sees no token after itself.
        sliding_window: tokens seen, itself included (on each side if not causal); None for all.
        segment_ids: document number of every token [batch, time]; a token sees its own document.
        initial_state: tokens before these; they are seen too, and the new ones are appended.

    Returns:
        The output [batch, time, heads, value] and the new cache (None without `initial_state`).

    Raises:
        ValueError: as `softmax_attention`.
        TypeError: as `softmax_attention`.

    Source: Vaswani et al. (2017), arXiv:1706.03762, section 3.2.1.
    """
    _check(q, k, v, sliding_window, segment_ids, initial_state)
    scale = float(q.shape[3] ** -0.5 if scale is None else scale)
    cache, past, remembered = None, 0, None
    if initial_state is not None:
        # Token number p lives in slot p, or p % capacity in a ring that forgets the oldest tokens.
        capacity, length = initial_state.capacity, int(initial_state.length)
        past = min(length, capacity)
        old = length - past + jnp.arange(past)
        slots = old % capacity
        new_slots = (length + jnp.arange(k.shape[1]))[-capacity:] % capacity
        start = initial_state.start
        if segment_ids is not None or start is not None:
            # Documents by number: 1 goes on from the cache, 0 is what the cache has forgotten.
            start = jnp.zeros(k.shape[0], jnp.int32) if start is None else start
            ids = jnp.ones(k.shape[:2], jnp.int32) if segment_ids is None else segment_ids
            is_first = jnp.diff(ids, axis=1, prepend=ids[:, :1]) != 0
            segment_ids = 1 + jnp.cumsum(is_first, axis=1, dtype=jnp.int32)
            remembered = (old[None] >= start[:, None]).astype(jnp.int32)
            new = length + jnp.arange(k.shape[1], dtype=jnp.int32)
            start = jnp.where(is_first, new[None], start[:, None]).max(axis=1)
        cache = KVCache(
            initial_state.keys.at[..., new_slots].set(k[:, -capacity:].transpose(0, 2, 3, 1)),
            initial_state.values.at[..., new_slots].set(v[:, -capacity:].transpose(0, 2, 3, 1)),
            initial_state.length + k.shape[1],
            start,
        )
        k = jnp.concatenate([initial_state.keys[..., slots].transpose(0, 3, 1, 2), k], axis=1)
        v = jnp.concatenate([initial_state.values[..., slots].transpose(0, 3, 1, 2), v], axis=1)

    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    query, key = past + jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None, :]
    visible = jnp.ones((query.size, key.size), bool)
    if is_causal:
        visible &= key <= query
    if sliding_window is not None:
        visible &= abs(query - key) < sliding_window
    visible = visible[None, None]
    if segment_ids is not None:
        documents = segment_ids
        if remembered is not None:
            documents = jnp.concatenate([remembered, segment_ids], axis=1)
        visible = visible & (segment_ids[:, :, None] == documents[:, None, :])[:, None]

    scores = scale * jnp.einsum("bihk,bjhk->bhij", q, k)
    # where= keeps the softmax of a row that sees nothing at 0.
    p = jax.nn.softmax(scores, axis=-1, where=visible)
    return jnp.einsum("bhij,bjhv->bihv", p, v), cache


def _check(q, k, v, sliding_window, segment_ids, initial_state) -> None:
    check_heads(q, k, v)
    check_window(sliding_window)
    check_segment_ids(segment_ids, q.shape[0], q.shape[1])
    if initial_state is None:
        return
    check_cache(initial_state, k, v)
    check_room(initial_state, q.shape[1], sliding_window)
