r"""DeepSeek sparse attention: softmax attention to the k tokens that an indexer picks.

    o_t = sum_{s in S_t} softmax_s(scale q_t . k_s) v_s
    S_t = the k earlier tokens with the largest I_ts (of equal scores the earliest), all of them
          if there are no more than k

I is the lightning indexer's (`indexer.py`). All heads share one selection, which passes no
gradient: the index inputs get none from here, see `indexer_loss`. When the context fits in k,
nothing is scored and this is softmax attention.

Numbers: as in `softmax/softmax_attention.py`. A number that is not finite shows in the queries that
attend to it, in the index keys in all queries that may see it.
"""

from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from toolkit._checks import checked
from toolkit.attention._attend import (
    Mask,
    attend,
    fixed_scale,
    packed,
)
from toolkit.attention._caches import (
    check_room,
    continue_rows,
    cut_as_arrays_are,
    show_overflow,
    write_token,
)
from toolkit.attention._cores import free_cores, over_cores
from toolkit.attention._derivatives import without_transpose
from toolkit.attention._shapes import (
    HeadValue,
    HeadValues,
    Queries,
    Query,
    SegmentIds,
    SharedKey,
    SharedKeys,
    SharedValue,
    SharedValues,
)
from toolkit.attention.sparse.selection import selected_indices, top_mask
from toolkit.attention.sparse.train.cache import IndexedCache
from toolkit.attention.sparse.train.indexer import INDEX, SelectedTokens, index_scores, past
from toolkit.attention.sparse.train.spread import (
    Selection,
    attend_to_past,
    each,
    in_cheaper_form,
    over_queries,
)


@checked
def deepseek_sparse_attention(
    q: Queries,
    k: SharedKeys,
    v: SharedValues,
    index_q: Annotated[Float[Array, "batch time index_heads index"], INDEX],
    index_k: Annotated[Float[Array, "batch time index"], INDEX],
    index_weights: Float[Array, "batch time index_heads"],
    *,
    scale: float | None = None,
    selected_tokens: SelectedTokens = 2048,
    segment_ids: SegmentIds | None = None,
    initial_state: IndexedCache | None = None,
    implementation: Selection | None = None,
) -> tuple[HeadValues, IndexedCache | None]:
    """Softmax attention of every token to the earlier tokens with the largest index scores.

        o_t = sum_{s in top-k of I_t} softmax_s(scale q_t . k_s) v_s

    Args:
        q: queries [batch, time, heads, key].
        k: keys [batch, time, key_value_heads, key]; heads is a multiple of key_value_heads.
        v: values [batch, time, key_value_heads, value].
        index_q: queries of the indexer [batch, time, index_heads, index].
        index_k: its keys [batch, time, index], one per token.
        index_weights: weights of its heads [batch, time, index_heads], any scale included.
        scale: factor of the scores; None for key ** -0.5.
        selected_tokens: how many tokens a query attends to, itself among them if it is selected.
        segment_ids: document number of every token [batch, time]; equal numbers in a row are one
            document, and a token sees its own.
        initial_state: tokens before these, the first document of which these continue; they are
            seen too, and the new ones are appended. One without values takes the first channels of
            its keys for them, as v must be.
        implementation: "masked" (one product with all keys, a mask keeps the selected),
            "gathered" (each query copies its own), or None for the cheaper by its count of FLOPs
            and bytes. Both compute the same function.

    Returns:
        The output [batch, time, heads, value] in q's dtype, and the new cache (None without
        `initial_state`).

    Raises:
        ValueError: shapes that do not fit, selected_tokens below 1, an unknown implementation, a
            cache with room for fewer tokens.
        TypeError: not floating point, different dtypes, segment_ids that are not integers.

    Cost:
        Scores: 2 batch time^2 index_heads (index + 1) FLOPs. Attention: 2 batch heads time
        (key + value) FLOPs times selected_tokens when gathered, times all keys when masked. Three
        times that with the backward pass, which recomputes a chunk of queries at a time; memory
        linear in time.

    Source: DeepSeek-V3.2 technical report (2025), section 2.

    Example:
        >>> q = k = v = index_q = jnp.ones((1, 3, 2, 4))
        >>> index = index_q, jnp.ones((1, 3, 4)), jnp.ones((1, 3, 2))
        >>> out, _ = deepseek_sparse_attention(q, k, v, *index, selected_tokens=2)
        >>> out.shape
        (1, 3, 2, 4)
    """
    arrays = {"q": q, "k": k, "v": v, "index_q": index_q, "index_k": index_k}
    arrays |= {"index_weights": index_weights, "segment_ids": segment_ids}
    if initial_state is not None:
        check_room(initial_state, q.shape[1], segment_ids)
    arrays["q"], scale = fixed_scale(q, scale)
    how = scale, selected_tokens, implementation
    if initial_state is not None:
        return _continue(how, *arrays.values(), initial_state)
    return _spread(free_cores(), how, *arrays.values()), None


_HEADS = (2, 2, 2, None, None, None, None)  # on which axis; of q, k, v, the index, segment_ids


# Compiled as a whole, or an eager call would compile its loops anew every time.
@partial(jax.jit, static_argnums=(0, 1))
def _spread(cores, how, *arrays):
    share = lambda *arrays: _attend(*(*arrays, None, *how))[0]  # noqa: E731
    return over_cores(cores, share, arrays, heads=_HEADS, heads_out=2)


@partial(jax.jit, static_argnums=0)
def _continue(how, *arrays):
    *tokens, cache = arrays
    share = lambda *arrays: _attend(*arrays, *how)  # noqa: E731
    return cut_as_arrays_are(share, tokens, cache, heads=_HEADS, heads_out=(2,))


def _attend(
    q, k, v, index_q, index_k, index_weights, segment_ids, initial_state,
    scale, selected_tokens, implementation,
):  # fmt: skip
    batch, time, heads, key = q.shape
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
    mask, cache = Mask(documents=packed(segment_ids)), None
    if initial_state is not None:
        rows = {"keys": keys, "values": values, "index_keys": index_k}
        arrays, mask, cache = continue_rows(initial_state, segment_ids, axis=-2, **rows)
        keys, index_k = arrays["keys"], arrays["index_keys"]
        values = arrays.get("values", keys[..., : v.shape[-1]])
    length, groups = keys.shape[2], keys.shape[1]

    if isinstance(length, int) and length <= selected_tokens:
        out = attend_to_past(q, keys, values, mask, scale)
    else:
        group = heads // groups
        first, start, _ = (jnp.broadcast_to(x, (batch,)) for x in mask.places(length))

        def sequence(
            is_gathered, q, k, v, index_q, index_k, index_weights, first, start, documents
        ):
            queries, keys = (None, None) if documents is None else documents
            positions = first + jnp.arange(time, dtype=jnp.int32)
            exists = (jnp.arange(length, dtype=jnp.int32) >= start)[None]

            def chunk(q, index_q, index_weights, position, document):
                visible = past(position, document, length, keys) & exists
                scores = index_scores(index_q, index_k, index_weights)
                is_sound = (jnp.isfinite(scores) | ~visible).all(axis=-1)
                out = _attend_selected(
                    q, k, v, top_mask(scores, visible, selected_tokens),
                    scale, selected_tokens if is_gathered else None,
                )  # fmt: skip
                return out + jnp.where(is_sound, 0, jnp.nan)[:, None, None, None]

            return over_queries(chunk, q, index_q, index_weights, positions, queries)

        index = (lax.stop_gradient(x) for x in (index_q, index_k, index_weights))
        grouped = q.reshape(batch, time, groups, group, key)
        out = in_cheaper_form(
            lambda is_gathered: partial(each, partial(sequence, is_gathered)),
            *(grouped, keys, values, *index, first, start, mask.documents),
            keys=length,
            selected=selected_tokens,
            group=group,
            implementation=implementation,
        )
        out = out.reshape(batch, time, heads, values.shape[3]).astype(q.dtype)
    out = without_transpose(out)
    return (out if cache is None else show_overflow(out, cache)), cache


def _attend_selected(q, k, v, mask, scale, copies, *, at_once=False):
    """Outputs [queries, key_value_heads, group, value]; `copies` keys are gathered, or None."""
    index, filled = (None, mask) if copies is None else selected_indices(mask, copies)

    def head(q, k, v):
        if index is not None:
            k, v = k[index], v[index]
        return attend(q, k, v, filled, scale=scale).out

    return each(head, q.swapaxes(0, 1), k, v, at_once=at_once).swapaxes(0, 1)


@checked
def deepseek_sparse_attention_step(
    q_t: Query,
    k_t: SharedKey,
    v_t: SharedValue,
    index_q_t: Annotated[Float[Array, "batch index_heads index"], INDEX],
    index_k_t: Annotated[Float[Array, "batch index"], INDEX],
    index_weights_t: Float[Array, "batch index_heads"],
    cache: IndexedCache,
    *,
    scale: float | None = None,
    selected_tokens: SelectedTokens = 2048,
) -> tuple[HeadValue, IndexedCache]:
    """Append one token to the cache and attend to the tokens its index scores select.

        o_t = sum_{s in top-k of I_t} softmax_s(scale q_t . k_s) v_s

    Arguments as `deepseek_sparse_attention`, without the time axis; `cache` holds the tokens
    before this one.

    Cost:
        2 batch capacity index_heads (index + 1) FLOPs and one read of the index keys; then
        2 batch heads selected_tokens (key + value) FLOPs and a read of those rows alone. A cache
        that fits in selected_tokens is not scored but read whole.

    Example:
        >>> q = k = v = index_q = jnp.ones((1, 2, 4))
        >>> cache = IndexedCache.empty(1, 2, 4, 4, index_size=4, capacity=8)
        >>> index = index_q, jnp.ones((1, 4)), jnp.ones((1, 2))
        >>> out, cache = deepseek_sparse_attention_step(q, k, v, *index, cache)
        >>> out.shape, cache.length.tolist()
        ((1, 2, 4), [1])
    """
    arrays = {"q_t": q_t, "k_t": k_t, "v_t": v_t, "index_q_t": index_q_t, "index_k_t": index_k_t}
    arrays["index_weights_t"] = index_weights_t
    check_room(cache, 1)
    arrays["q_t"], scale = fixed_scale(q_t, scale)
    return _step(*arrays.values(), cache, scale=scale, selected_tokens=selected_tokens)


@partial(jax.jit, static_argnames=("scale", "selected_tokens"))
def _step(*arrays, **how):
    *tokens, cache = arrays
    share = partial(_step_share, **how)
    return cut_as_arrays_are(share, tokens, cache, heads=(1, 1, 1, *(None,) * 3), heads_out=(1,))


def _step_share(
    q_t, k_t, v_t, index_q_t, index_k_t, index_weights_t, cache, *, scale, selected_tokens
):
    batch, heads, key = q_t.shape
    groups = k_t.shape[1]
    slot = cache.length
    rows = {"keys": k_t, "values": v_t, "index_keys": index_k_t}
    cache = write_token(cache, slot, axis=-2, **rows)

    def sequence(q, k, v, index_q, index_k, index_weights, slot):
        visible = past(slot[None], None, cache.capacity, None)
        if cache.capacity <= selected_tokens:
            return _attend_selected(q[None], k, v, visible, scale, None, at_once=True)[0]
        scores = index_scores(index_q[None], index_k, index_weights[None])
        mask = top_mask(scores, visible, selected_tokens)
        out = _attend_selected(q[None], k, v, mask, scale, selected_tokens, at_once=True)[0]
        return out + jnp.where((jnp.isfinite(scores) | ~visible).all(), 0, jnp.nan)

    out = each(
        sequence,
        q_t.reshape(batch, groups, heads // groups, key),
        cache.keys,
        cache.values_for(v_t),
        index_q_t,
        cache.index_keys,
        index_weights_t,
        slot,
        at_once=True,
    )
    out = show_overflow(out, cache).astype(q_t.dtype)
    return out.reshape(batch, heads, v_t.shape[2]), cache
