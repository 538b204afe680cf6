r"""Softmax attention, exact: causal or not, grouped queries, a sliding window, packed documents.

    o_i = sum_j p_ij v_j        p_ij = exp(s_ij) / sum_j' exp(s_ij')        s_ij = scale q_i . k_j

where j runs over the keys that query i sees. `softmax_attention_reference` is this equation;
"dense" computes it with the whole matrix of scores, and "blockwise" in tiles (`blockwise.py`).

Numbers: scores, exponentials and sums are float32 for bfloat16 and float16 inputs, and float64
for float64. A query that sees no key gives 0. What a query does not see never shows in its output
or in the gradients of a loss on it, even NaN; a query that sees a number that is not finite gives
NaN.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from toolkit.attention._attend import attend, fixed_scale
from toolkit.attention._caches import show_overflow, write_token
from toolkit.attention._checks import check_choice, check_inputs
from toolkit.attention._precision import accumulator
from toolkit.attention._shapes import HeadValues, Queries, SegmentIds, SharedKeys, SharedValues
from toolkit.attention._visibility import (
    Extent,
    Segments,
    packed,
    positions_in_documents,
    run_numbers,
    sees,
)
from toolkit.attention.softmax.blockwise import blockwise_attention
from toolkit.attention.softmax.cache import (
    KVCache,
    append,
    check_kv_cache,
    check_window,
    floats,
    stored,
)

# Measured on one CPU core, 8 heads of 64: dense is 1.3x faster forward up to 256 keys, blockwise
# is 1.6x faster forward and backward from 128 keys on.
DENSE_UP_TO = 128


def softmax_attention(
    q: Queries,
    k: SharedKeys,
    v: SharedValues,
    *,
    scale: float | None = None,
    is_causal: bool = True,
    sliding_window: int | None = None,
    segment_ids: SegmentIds | None = None,
    initial_state: KVCache | None = None,
    implementation: str | None = None,
) -> tuple[HeadValues, KVCache | None]:
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
        segment_ids: document number of every token [batch, time]; equal numbers in a row are one
            document, and a token sees its own.
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

    Example:
        >>> q = k = v = jnp.ones((1, 3, 2, 4))
        >>> out, _ = softmax_attention(q, k, v)
        >>> out.shape
        (1, 3, 2, 4)
    """
    sliding_window = check_window(sliding_window)
    _check(q, k, v, sliding_window, segment_ids, initial_state)
    check_choice("implementation", implementation, (None, "dense", "blockwise"))
    q, scale = fixed_scale(q, scale)
    return _attend(
        q,
        k,
        v,
        segment_ids,
        initial_state,
        scale=scale,
        is_causal=is_causal,
        sliding_window=sliding_window,
        implementation=implementation,
    )


# Compiled as a whole, or an eager call would compile its loops anew every time.
@partial(
    jax.jit,
    static_argnames=("scale", "is_causal", "sliding_window", "implementation"),
)
def _attend(
    q, k, v, segment_ids, initial_state, *, scale, is_causal, sliding_window, implementation
):
    time = q.shape[1]
    keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 3, 1)
    extent, cache = Extent(0, 0, time), None
    segments = packed(segment_ids)
    if initial_state is not None:
        keys, values, extent, segments, cache = append(
            initial_state, keys, values, segment_ids, is_ring=sliding_window is not None
        )
    is_short = keys.shape[3] <= DENSE_UP_TO
    is_dense = is_short if implementation is None else implementation == "dense"
    form = dense_attention if is_dense else blockwise_attention
    options = {"is_causal": is_causal, "sliding_window": sliding_window}
    out = form(q, keys, values, extent, segments, scale=scale, **options)
    if cache is not None and sliding_window is None:
        out = show_overflow(out, cache)
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
    """
    batch, time, heads, key = q.shape
    key_heads, key_time = k.shape[1], k.shape[3]
    extent = Extent(*(jnp.asarray(index).reshape(-1, 1, 1) for index in extent))
    query_index = extent.query_start + jnp.arange(time, dtype=jnp.int32)[None, :, None]
    key_index = jnp.arange(key_time, dtype=jnp.int32)[None, None]
    visible = sees(
        query_index, key_index, extent, is_causal=is_causal, sliding_window=sliding_window
    )
    if segments is not None:
        visible &= segments.query[:, :, None] == segments.key[:, None, :]
    visible, of_batch = (visible[0], None) if visible.shape[0] == 1 else (visible, 0)

    def head(q, k, v, visible):
        return attend(q, k.T, v.T, visible, scale=scale).out

    every_head = jax.vmap(jax.vmap(head, (0, 0, 0, None)), (0, 0, 0, of_batch))
    grouped = q.reshape(batch, time, key_heads, heads // key_heads, key).swapaxes(1, 2)
    out = every_head(grouped, k, v, visible).astype(q.dtype)
    return out.swapaxes(1, 2).reshape(batch, time, heads, v.shape[2])


def softmax_attention_reference(
    q: Queries,
    k: SharedKeys,
    v: SharedValues,
    *,
    scale: float | None = None,
    is_causal: bool = True,
    sliding_window: int | None = None,
    segment_ids: SegmentIds | None = None,
    initial_state: KVCache | None = None,
) -> tuple[HeadValues, KVCache | None]:
    """The equation of `softmax_attention`, to be read; the oracle of the fast forms.

        o_i = sum_j softmax_j(scale q_i . k_j) v_j

    Arguments as `softmax_attention`. It runs eagerly where a cache is given, because it reads the
    cache's length.

    Example:
        >>> q = k = v = jnp.ones((1, 3, 2, 4))
        >>> out, _ = softmax_attention_reference(q, k, v)
        >>> out.shape
        (1, 3, 2, 4)
    """
    sliding_window = check_window(sliding_window)
    _check(q, k, v, sliding_window, segment_ids, initial_state)
    scale = float(q.shape[3] ** -0.5) if scale is None else scale
    segment_ids = None if segment_ids is None else run_numbers(segment_ids)
    cache, past, documents = None, 0, segment_ids
    if initial_state is not None:
        # Token p of a row's document is in slot p, or p % capacity in a ring that forgets the
        # oldest. Rows that hold fewer tokens than others begin with some of no document.
        cache, capacity, length = initial_state, initial_state.capacity, initial_state.length
        past = min(int(length.max()), capacity)
        old = length[:, None] - past + jnp.arange(past, dtype=jnp.int32)[None]
        slots = (old % capacity)[:, None, None]
        if segment_ids is None:
            segment_ids = jnp.ones(k.shape[:2], jnp.int32)
        documents = jnp.concatenate([jnp.where(old < 0, 0, 1), segment_ids], axis=1)
        for t, place in enumerate(positions_in_documents(segment_ids, length).T):
            new = stored(cache, k[:, t], v[:, t])
            cache = write_token(replace(cache, length=place), place % capacity, axis=-1, **new)
        before = (
            jnp.take_along_axis(x, slots, axis=-1).transpose(0, 3, 1, 2)
            for x in floats(initial_state, k.dtype)
        )
        k, v = (jnp.concatenate(pair, axis=1) for pair in zip(before, (k, v), strict=True))

    group, dtype = q.shape[2] // k.shape[2], q.dtype
    q, k, v = (x.astype(accumulator(dtype)) for x in (q, k, v))
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    query, key = past + jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None, :]
    visible = jnp.ones((query.size, key.size), bool)
    if is_causal:
        visible &= key <= query
    if sliding_window is not None:
        visible &= abs(query - key) < sliding_window
    visible = visible[None, None]
    if segment_ids is not None and documents is not None:
        visible = visible & (segment_ids[:, :, None] == documents[:, None, :])[:, None]

    scores = scale * jnp.einsum("bihk,bjhk->bhij", q, k)
    # where= keeps the softmax of a row that sees nothing at 0.
    p = jax.nn.softmax(scores, axis=-1, where=visible)
    return jnp.einsum("bhij,bjhv->bihv", p, v).astype(dtype), cache


def _check(q, k, v, sliding_window, segment_ids, initial_state) -> None:
    sizes = check_inputs(softmax_attention, q=q, k=k, v=v, segment_ids=segment_ids)
    if initial_state is not None:
        check_kv_cache(initial_state, sizes, k, sliding_window, segment_ids)
