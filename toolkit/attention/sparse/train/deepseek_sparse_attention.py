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

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

import toolkit.attention._shapes as shapes
from toolkit._checks import checked
from toolkit.attention._attend import fixed_scale
from toolkit.attention._caches import check_room, show_overflow
from toolkit.attention.execution.derivatives import without_transpose
from toolkit.attention.sparse.selection import top_mask
from toolkit.attention.sparse.train.cache import IndexedCache, indexed_step, with_past
from toolkit.attention.sparse.train.indexer import INDEX, SelectedTokens, index_scores, past
from toolkit.attention.sparse.train.spread import (
    Selection,
    attend_selected,
    attend_to_past,
    by_heads,
    each,
    in_cheaper_form,
    over_queries,
)


@checked
def deepseek_sparse_attention(
    q: shapes.Queries, k: shapes.SharedKeys, v: shapes.SharedValues,
    index_q: Annotated[Float[Array, "batch time index_heads index"], INDEX],
    index_k: Annotated[Float[Array, "batch time index"], INDEX],
    index_weights: Float[Array, "batch time index_heads"], *,
    scale: float | None = None, selected_tokens: SelectedTokens = 2048,
    segment_ids: shapes.SegmentIds | None = None, initial_state: IndexedCache | None = None,
    implementation: Selection | None = None,
) -> tuple[shapes.HeadValues, IndexedCache | None]:  # fmt: skip
    """Softmax attention of every token to the earlier tokens with the largest index scores.

        o_t = sum_{s in top-k of I_t} softmax_s(scale q_t . k_s) v_s

    Arguments and results as `mixture_of_block_attention`, with tokens for blocks, except:

    Args:
        index_q: queries of the indexer [batch, time, index_heads, index].
        index_k: its keys [batch, time, index], one per token.
        index_weights: weights of its heads [batch, time, index_heads], any scale included.
        selected_tokens: how many tokens a query attends to, itself among them if it is selected.
        initial_state: tokens before these, as there. A cache without values takes the first
            channels of its keys as values, as v must be.

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
    if initial_state is not None:
        check_room(initial_state, q.shape[1], segment_ids)
    q, scale = fixed_scale(q, scale)
    tokens = q, k, v, index_q, index_k, index_weights, segment_ids
    heads = 2, 2, 2, None, None, None, None
    how = scale, selected_tokens, implementation
    return by_heads(_attend, tokens, initial_state, heads, *how)


def _attend(
    q, k, v, index_q, index_k, index_weights, segment_ids, initial_state,
    scale, selected_tokens, implementation,
):  # fmt: skip
    batch, time, heads, key = q.shape
    rows, mask, cache = with_past(initial_state, segment_ids, k, v, index_keys=index_k)
    keys, values, index_k = rows["keys"], rows["values"], rows["index_keys"]
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
                out, _ = attend_selected(
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


@checked
def deepseek_sparse_attention_step(
    q_t: shapes.Query, k_t: shapes.SharedKey, v_t: shapes.SharedValue,
    index_q_t: Annotated[Float[Array, "batch index_heads index"], INDEX],
    index_k_t: Annotated[Float[Array, "batch index"], INDEX],
    index_weights_t: Float[Array, "batch index_heads"], cache: IndexedCache, *,
    scale: float | None = None, selected_tokens: SelectedTokens = 2048,
) -> tuple[shapes.HeadValue, IndexedCache]:  # fmt: skip
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
    check_room(cache, 1)
    q_t, scale = fixed_scale(q_t, scale)
    tokens = q_t, k_t, v_t, index_q_t, index_k_t, index_weights_t
    return by_heads(_step, tokens, cache, (1, 1, 1, None, None, None), scale, selected_tokens)


def _step(
    q_t, k_t, v_t, index_q_t, index_k_t, index_weights_t, cache, scale, selected_tokens
):  # fmt: skip
    def sequence(q, k, v, index_k, position, index_q, index_weights):
        visible = past(position[None], None, cache.capacity, None)
        if cache.capacity <= selected_tokens:
            return attend_selected(q[None], k, v, visible, scale, None, at_once=True)[0][0]
        scores = index_scores(index_q[None], index_k, index_weights[None])
        mask = top_mask(scores, visible, selected_tokens)
        out = attend_selected(q[None], k, v, mask, scale, selected_tokens, at_once=True)[0][0]
        return out + jnp.where((jnp.isfinite(scores) | ~visible).all(), 0, jnp.nan)

    return indexed_step(sequence, q_t, k_t, v_t, index_k_t, cache, index_q_t, index_weights_t)
