r"""Qwen sparse attention (QSA): softmax attention to the blocks of tokens that an indexer picks.

    o_t = sum_{s in S_t} softmax_s(scale q_t . k_s) v_s
    S_t = the tokens of the best complete blocks, and those after the last complete block
    I_tb = sum_j ReLU(q^I_tj . k^I_b)          k^I_b: made of the mean of the block's index keys

Blocks are counted from the start of a document, and a block that ends at the query is complete. All
heads share one selection, which passes no gradient. The index key of a block is given in the row of
its last token; rows of other tokens are not read (`pooling` makes the means).

Numbers: as in `softmax/softmax_attention.py`; a number of the index that is not finite shows in all
queries that may see it.
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
from toolkit.attention.sparse.compressed.compressed_attention import IndexKeys, IndexQueries
from toolkit.attention.sparse.selection import top_mask
from toolkit.attention.sparse.train.blocks import (
    Blocking,
    attend_to_chosen,
    layout_from_zero,
    layouts,
)
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
def qwen_sparse_attention(
    q: shapes.Queries, k: shapes.SharedKeys, v: shapes.SharedValues,
    index_q: IndexQueries, index_k: IndexKeys, *,
    scale: float | None = None, block_size: shapes.TokenCount = 64,
    selected_tokens: SelectedTokens = 2048,
    segment_ids: shapes.SegmentIds | None = None, initial_state: IndexedCache | None = None,
    implementation: Selection | None = None,
) -> tuple[shapes.HeadValues, IndexedCache | None]:  # fmt: skip
    """Softmax attention of every token to the blocks with the largest index scores.

        o_t = sum_{s in S_t} softmax_s(scale q_t . k_s) v_s

    Arguments and results as `mixture_of_block_attention`, except:

    Args:
        index_q: queries of the indexer [batch, time, index_heads, index].
        index_k: keys of blocks, each in the row of the last token of its block; the other rows are
            not read [batch, time, index].
        block_size: tokens per block.
        selected_tokens: tokens of complete blocks that a query attends to, a multiple of
            `block_size`; those after the last complete block come in addition.

    Cost:
        Scores: batch time^2 / block_size index_heads (index + 1) FLOPs. Attention: 2 batch heads
        time (key + value) FLOPs times selected_tokens when gathered, times all keys when masked.
        Three times that with the backward pass; memory linear in time.

    Source: Qwen4-Exp, its modelling file in Hugging Face transformers ("qwen4_exp").

    Example:
        >>> q = k = v = index_q = jnp.ones((1, 5, 2, 4))
        >>> how = {"block_size": 2, "selected_tokens": 2}
        >>> qwen_sparse_attention(q, k, v, index_q, jnp.ones((1, 5, 4)), **how)[0].shape
        (1, 5, 2, 4)
    """
    _check_budget(block_size, selected_tokens)
    if initial_state is not None:
        check_room(initial_state, q.shape[1], segment_ids)
    q, scale = fixed_scale(q, scale)
    tokens = q, k, v, index_q, index_k, segment_ids
    how = scale, block_size, selected_tokens // block_size, implementation
    return by_heads(_attend, tokens, initial_state, (2, 2, 2, None, None, None), *how)


def _check_budget(block_size: int, selected_tokens: int) -> None:
    if selected_tokens % block_size:
        raise ValueError(
            f"selected_tokens must be a multiple of block_size {block_size}; got {selected_tokens}."
        )


def _attend(
    q, k, v, index_q, index_k, segment_ids, initial_state,
    scale, block_size, selected, implementation,
):  # fmt: skip
    batch, time, heads, key = q.shape
    rows, mask, cache = with_past(initial_state, segment_ids, k, v, index_keys=index_k)
    keys, values, index_k = rows["keys"], rows["values"], rows["index_keys"]
    groups, length = keys.shape[1:3]
    if isinstance(length, int) and length // block_size <= selected:
        out = attend_to_past(q, keys, values, mask, scale)
    else:
        where = layouts(mask, batch, time, length, block_size)

        def sequence(is_gathered, q, k, v, index_q, index_k, where):
            blocking = Blocking(scale, block_size, selected + 1, is_gathered)
            blocks, own = where
            index_k = index_k[jnp.minimum(blocks.last, length - 1)]

            def chunk(q, index_q, own):
                return _attend_picked(blocking, blocks, k, v, index_k, q, index_q, own)

            return over_queries(chunk, q, index_q, _unfinished(own, block_size))

        index_q, index_k = lax.stop_gradient(index_q), lax.stop_gradient(index_k)
        out = in_cheaper_form(
            lambda is_gathered: partial(each, partial(sequence, is_gathered)),
            *(q.reshape(batch, time, groups, heads // groups, key), keys, values),
            *(index_q, index_k, where),
            keys=length,
            selected=(selected + 1) * block_size,
            group=heads // groups,
            implementation=implementation,
        )
        out = out.reshape(batch, time, heads, values.shape[3]).astype(q.dtype)
    out = without_transpose(out)
    return (out if cache is None else show_overflow(out, cache)), cache


def _unfinished(own, block_size):
    """Places of queries whose own block is the unfinished one; it is empty after a block's end."""
    is_end = own.position - own.block == block_size - 1
    return own._replace(block=jnp.where(is_end, own.position + 1, own.block))


def _attend_picked(blocking, blocks, k, v, index_k, q, index_q, own, *, at_once=False) -> Array:
    """Outputs [queries, key_value_heads, group, value] of a chunk of queries."""
    position, document, _ = (index[:, None] for index in own)
    last = blocks.last[None]
    visible = (last <= position) & (last >= document)
    ones = jnp.ones(index_q.shape[:2], index_q.dtype)
    scores = index_scores(index_q, index_k, ones)
    is_sound = (jnp.isfinite(scores) | ~visible).all(axis=-1)
    chosen = top_mask(scores, visible, blocking.selected_blocks - 1)

    def head(q, k, v):
        return attend_to_chosen(blocking, blocks, k, v, chosen, q, own)

    out = each(head, q.swapaxes(0, 1), k, v, at_once=at_once).swapaxes(0, 1)
    return out + jnp.where(is_sound, 0, jnp.nan)[:, None, None, None]


@checked
def qwen_sparse_attention_step(
    q_t: shapes.Query, k_t: shapes.SharedKey, v_t: shapes.SharedValue,
    index_q_t: Annotated[Float[Array, "batch index_heads index"], INDEX],
    index_k_t: Annotated[Float[Array, "batch index"], INDEX], cache: IndexedCache, *,
    scale: float | None = None, block_size: shapes.TokenCount = 64,
    selected_tokens: SelectedTokens = 2048,
) -> tuple[shapes.HeadValue, IndexedCache]:  # fmt: skip
    """Append one token to the cache and attend to the blocks its index scores select.

        o_t = sum_{s in S_t} softmax_s(scale q_t . k_s) v_s

    Arguments as `qwen_sparse_attention`, without the time axis; `cache` holds the tokens before
    this one.

    Cost:
        2 batch capacity / block_size index_heads (index + 1) FLOPs; then 2 batch heads
        (selected_tokens + block_size) (key + value) FLOPs and a read of those rows. A cache whose
        blocks are all selected is not scored but read whole.

    Example:
        >>> q = k = v = index_q = jnp.ones((1, 2, 4))
        >>> cache = IndexedCache.empty(1, 2, 4, 4, index_size=4, capacity=8)
        >>> out, cache = qwen_sparse_attention_step(q, k, v, index_q, jnp.ones((1, 4)), cache)
        >>> out.shape, cache.length.tolist()
        ((1, 2, 4), [1])
    """
    _check_budget(block_size, selected_tokens)
    check_room(cache, 1)
    q_t, scale = fixed_scale(q_t, scale)
    tokens = q_t, k_t, v_t, index_q_t, index_k_t
    how = scale, block_size, selected_tokens // block_size
    return by_heads(_step, tokens, cache, (1, 1, 1, None, None), *how)


def _step(q_t, k_t, v_t, index_q_t, index_k_t, cache, scale, block_size, selected):
    capacity = cache.capacity
    blocking = Blocking(scale, block_size, selected + 1, is_gathered=True)

    def sequence(q, k, v, index_k, position, index_q):
        if capacity // block_size <= selected:
            visible = past(position[None], None, capacity, None)
            return attend_selected(q[None], k, v, visible, scale, None, at_once=True)[0][0]
        blocks, own = layout_from_zero(position[None], capacity, block_size)
        index_k, own = index_k[blocks.last], _unfinished(own, block_size)
        chunk = q[None], index_q[None], own
        return _attend_picked(blocking, blocks, k, v, index_k, *chunk, at_once=True)[0]

    return indexed_step(sequence, q_t, k_t, v_t, index_k_t, cache, index_q_t)
