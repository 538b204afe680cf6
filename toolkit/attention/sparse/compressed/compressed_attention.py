r"""Compressed attention: a window of tokens, and one entry for every block of tokens before it.

    o_t = ( sum_{s in W_t} e(k_s) v_s + sum_{b in B_t} e(k'_b) v'_b ) / ( sums of e + exp(sink) )
    e(k) = exp(scale q_t . k)

W_t are the last tokens, the query's own among them. An entry (k', v') stands for the tokens of a
block that is complete when the query comes; blocks are counted from the start of a document. B_t
are all of them (heavily compressed attention, blocks of 128 tokens in DeepSeek-V4), or those with
the largest scores of an indexer (compressed sparse attention, blocks of 4). One softmax spans both
kinds, so a recent token may be read twice: as itself and in its block.

An entry is given in the row of its block's last token; rows of other tokens are not read. `pooling`
makes entries. The selection passes no gradient, so the index inputs get none.

Numbers: as in `softmax/softmax_attention.py`; a number of the index that is not finite shows in
all queries that may see it.
"""

from functools import partial
from typing import Annotated, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

import toolkit.attention._shapes as shapes
from toolkit._annotations import AtLeast
from toolkit._checks import checked
from toolkit.attention._attend import fixed_scale
from toolkit.attention._caches import check_room, show_overflow, write_token
from toolkit.attention.execution.derivatives import without_transpose
from toolkit.attention.softmax.cache import softmax_attention_step
from toolkit.attention.softmax.softmax_attention import softmax_attention
from toolkit.attention.sparse.compressed.cache import CompressedCache
from toolkit.attention.sparse.compressed.entries import entries_seen, merged_parts, picked_entries
from toolkit.attention.sparse.train.indexer import INDEX
from toolkit.attention.sparse.train.spread import (
    Selection,
    attend_selected,
    by_heads,
    each,
    in_cheaper_form,
    over_queries,
)

SelectedEntries = Annotated[int, AtLeast(1)]
Sinks = Float[Array, "heads"]
IndexQueries = Annotated[Float[Array, "batch time index_heads index"], INDEX]
IndexKeys = Annotated[Float[Array, "batch time index"], INDEX]
HEADS = (2, 2, 2, 2, 2, None, None, None, 0, None)
HEADS_OF_STEP = (1, 1, 1, 1, 1, None, None, None, 0)


@checked
def heavily_compressed_attention(
    q: shapes.Queries, k: shapes.SharedKeys, v: shapes.SharedValues,
    block_k: shapes.SharedKeys, block_v: shapes.SharedValues, *,
    sinks: Sinks | None = None, scale: float | None = None,
    block_size: shapes.TokenCount = 128, sliding_window: shapes.TokenCount = 128,
    segment_ids: shapes.SegmentIds | None = None, initial_state: CompressedCache | None = None,
    implementation: Literal["masked"] | None = None,
) -> tuple[shapes.HeadValues, CompressedCache | None]:  # fmt: skip
    """Softmax attention of every token to a window, and to an entry per block before it.

        o_t = softmax of (window, all entries of complete blocks, sink) times (v, v', 0)

    Args:
        q: queries [batch, time, heads, key].
        k: keys [batch, time, key_value_heads, key]; heads is a multiple of key_value_heads.
        v: values [batch, time, key_value_heads, value].
        block_k: keys of entries, each in the row of the last token of its block; the other rows
            are not read [batch, time, key_value_heads, key].
        block_v: their values, likewise [batch, time, key_value_heads, value].
        sinks: score per head of a key without a value [heads]; None for none.
        scale: factor of the scores; None for key ** -0.5.
        block_size: tokens per entry, counted from the start of a document.
        sliding_window: tokens of the window, the query's own included.
        segment_ids: document of every token [batch, time].
        initial_state: tokens before these, the first document of which these continue.
        implementation: "masked", the only form.

    Returns:
        The outputs in q's dtype, and the new cache (None without `initial_state`).

    Cost:
        2 batch heads time (sliding_window + time / block_size / 2) (key + value) FLOPs, three times
        that with the backward pass, which recomputes a chunk of queries at a time; memory linear
        in time.

    Source: DeepSeek-V4 technical report (2026), section 2.3.2, and its modelling file in Hugging
        Face transformers.

    Example:
        >>> q = k = v = jnp.ones((1, 5, 2, 4))
        >>> how = {"block_size": 2, "sliding_window": 2}
        >>> heavily_compressed_attention(q, k, v, k, v, **how)[0].shape
        (1, 5, 2, 4)
    """
    how = block_size, sliding_window, None, implementation
    tokens = q, k, v, block_k, block_v, None, None, None, sinks, segment_ids
    return _mixed(tokens, initial_state, scale, how)


@checked
def compressed_sparse_attention(
    q: shapes.Queries, k: shapes.SharedKeys, v: shapes.SharedValues,
    block_k: shapes.SharedKeys, block_v: shapes.SharedValues,
    index_q: IndexQueries, index_k: IndexKeys,
    index_weights: Float[Array, "batch time index_heads"], *,
    sinks: Sinks | None = None, scale: float | None = None,
    block_size: shapes.TokenCount = 4, selected_entries: SelectedEntries = 512,
    sliding_window: shapes.TokenCount = 128,
    segment_ids: shapes.SegmentIds | None = None, initial_state: CompressedCache | None = None,
    implementation: Selection | None = None,
) -> tuple[shapes.HeadValues, CompressedCache | None]:  # fmt: skip
    """Softmax attention of every token to a window, and to the entries that an indexer picks.

        o_t = softmax of (window, top-k entries by I_tb, sink) times (v, v', 0)
        I_tb = sum_j w_tj ReLU(q^I_tj . k^I_b)

    All heads share one selection. Arguments and results as `heavily_compressed_attention`, and:

    Args:
        index_q: queries of the indexer [batch, time, index_heads, index].
        index_k: its keys, each in the row of the last token of its block [batch, time, index].
        index_weights: weights of its heads [batch, time, index_heads], any scale included.
        selected_entries: entries that a query attends to, beside the window. Of equal scores the
            earliest wins.
        implementation: "masked" or "gathered"; None for the cheaper one.

    Cost:
        Scores: batch time^2 / block_size index_heads (index + 1) FLOPs. Attention: 2 batch heads
        time (key + value) FLOPs times the window, and times selected_entries when gathered or all
        entries when masked. Three times that with the backward pass; memory linear in time.

    Source: DeepSeek-V4 technical report (2026), section 2.3.1, and its modelling file in Hugging
        Face transformers.

    Example:
        >>> q = k = v = index_q = jnp.ones((1, 5, 2, 4))
        >>> index = index_q, jnp.ones((1, 5, 4)), jnp.ones((1, 5, 2))
        >>> how = {"block_size": 2, "sliding_window": 2, "selected_entries": 1}
        >>> compressed_sparse_attention(q, k, v, k, v, *index, **how)[0].shape
        (1, 5, 2, 4)
    """
    how = block_size, sliding_window, selected_entries, implementation
    tokens = q, k, v, block_k, block_v, index_q, index_k, index_weights, sinks, segment_ids
    return _mixed(tokens, initial_state, scale, how)


@checked
def heavily_compressed_attention_step(
    q_t: shapes.Query, k_t: shapes.SharedKey, v_t: shapes.SharedValue,
    block_k_t: shapes.SharedKey, block_v_t: shapes.SharedValue, cache: CompressedCache, *,
    sinks: Sinks | None = None, scale: float | None = None,
    block_size: shapes.TokenCount = 128, sliding_window: shapes.TokenCount = 128,
) -> tuple[shapes.HeadValue, CompressedCache]:  # fmt: skip
    """Append one token, and its entry if it ends a block, and attend to the window and all entries.

        o_t = softmax of (window, all entries of complete blocks, sink) times (v, v', 0)

    Arguments as `heavily_compressed_attention`, without the time axis; `cache` holds the tokens
    before this one.

    Cost:
        2 batch heads (sliding_window + capacity / block_size) (key + value) FLOPs, and a read of
        those rows.

    Example:
        >>> q = k = v = jnp.ones((1, 2, 4))
        >>> how = {"block_size": 2, "sliding_window": 3}
        >>> cache = CompressedCache.empty(1, 2, 4, 4, capacity=8, **how)
        >>> out, cache = heavily_compressed_attention_step(q, k, v, k, v, cache, **how)
        >>> out.shape, cache.length.tolist()
        ((1, 2, 4), [1])
    """
    how = block_size, sliding_window, None
    return _mixed_step((q_t, k_t, v_t, block_k_t, block_v_t, *[None] * 3, sinks), cache, scale, how)


@checked
def compressed_sparse_attention_step(
    q_t: shapes.Query, k_t: shapes.SharedKey, v_t: shapes.SharedValue,
    block_k_t: shapes.SharedKey, block_v_t: shapes.SharedValue,
    index_q_t: Annotated[Float[Array, "batch index_heads index"], INDEX],
    index_k_t: Annotated[Float[Array, "batch index"], INDEX],
    index_weights_t: Float[Array, "batch index_heads"], cache: CompressedCache, *,
    sinks: Sinks | None = None, scale: float | None = None,
    block_size: shapes.TokenCount = 4, selected_entries: SelectedEntries = 512,
    sliding_window: shapes.TokenCount = 128,
) -> tuple[shapes.HeadValue, CompressedCache]:  # fmt: skip
    """Append one token, and its entry if it ends a block, and attend to the window and the entries
    that its index scores select.

        o_t = softmax of (window, top-k entries by I_tb, sink) times (v, v', 0)

    Arguments as `compressed_sparse_attention`, without the time axis; `cache` holds the tokens
    before this one.

    Cost:
        2 batch capacity / block_size index_heads (index + 1) FLOPs and a read of the index keys;
        then 2 batch heads (sliding_window + selected_entries) (key + value) FLOPs and a read of
        those rows. A cache whose entries are all selected is not scored.

    Example:
        >>> q = k = v = jnp.ones((1, 2, 4))
        >>> how, index = {"block_size": 2, "sliding_window": 3}, (q, jnp.ones((1, 4)), q[:, :, 0])
        >>> cache = CompressedCache.empty(1, 2, 4, 4, capacity=8, index_size=4, **how)
        >>> out, cache = compressed_sparse_attention_step(q, k, v, k, v, *index, cache, **how)
        >>> out.shape, cache.length.tolist()
        ((1, 2, 4), [1])
    """
    how = block_size, sliding_window, selected_entries
    tokens = q_t, k_t, v_t, block_k_t, block_v_t, index_q_t, index_k_t, index_weights_t, sinks
    return _mixed_step(tokens, cache, scale, how)


def _mixed(tokens, cache, scale, how):
    q, *others = tokens
    if cache is not None:
        _check_blocks(cache, q.shape[1], how[0], tokens[-1])
    q, scale = fixed_scale(q, scale)
    return by_heads(_attend, (q, *others), cache, HEADS, scale, *how)


def _mixed_step(tokens, cache, scale, how):
    _check_blocks(cache, 1, how[0])
    q_t, *others = tokens
    q_t, scale = fixed_scale(q_t, scale)
    return by_heads(_step, (q_t, *others), cache, HEADS_OF_STEP, scale, *how)


def _check_blocks(cache: CompressedCache, time: int, block_size: int, segment_ids=None) -> None:
    """Refuse a cache without room for the tokens, or with another block size."""
    if cache.block_size != block_size:
        raise ValueError(
            f"block_size must be {cache.block_size}, that of the cache; got {block_size}."
        )
    check_room(cache, time, segment_ids)


def _attend(
    q, k, v, block_k, block_v, index_q, index_k, index_weights, sinks, segment_ids, cache,
    scale, block_size, sliding_window, selected_entries, implementation,
):  # fmt: skip
    batch, time, heads, key = q.shape
    groups = k.shape[2]
    out, recent, residual = softmax_attention(
        q, k, v, scale=scale, sliding_window=sliding_window, segment_ids=segment_ids,
        initial_state=None if cache is None else cache.recent, return_residual=True,
    )  # fmt: skip
    rows = {"block_keys": block_k, "block_values": block_v, "index_keys": index_k}
    entries, lacks, cache = entries_seen(rows, segment_ids, cache, block_size)
    count = entries.last.shape[1]
    is_scored = index_k is not None and not (isinstance(count, int) and count <= selected_entries)

    def sequence(is_gathered, q, keys, values, last, documents, index_q, index_k, index_weights):
        queries, of_entries = documents
        copies = selected_entries if is_gathered else None

        def chunk(q, position, document, index_q, index_weights):
            visible = last[None] <= position[:, None]
            if document is not None:
                visible &= of_entries[None] == document[:, None]
            if not is_scored:
                return attend_selected(q, keys, values, visible, scale, None)
            mask, is_sound = picked_entries(
                index_q, index_k, index_weights, visible, selected_entries
            )
            out, residual = attend_selected(q, keys, values, mask, scale, copies)
            return out + jnp.where(is_sound, 0, jnp.nan)[:, None, None, None], residual

        positions = jnp.arange(time, dtype=jnp.int32)
        return over_queries(chunk, q, positions, queries, index_q, index_weights)

    index = index_q, entries.index_keys, index_weights
    index = tuple(None if x is None else lax.stop_gradient(x) for x in index)
    arrays = (
        q.reshape(batch, time, groups, heads // groups, key),
        entries.keys, entries.values, entries.last, entries.documents,
        *(index if is_scored else (None,) * 3),
    )  # fmt: skip
    form = lambda is_gathered: partial(each, partial(sequence, is_gathered))  # noqa: E731
    if is_scored:
        more = in_cheaper_form(
            form, *arrays, keys=count, selected=selected_entries, group=heads // groups,
            implementation=implementation,
        )  # fmt: skip
    else:
        more = form(False)(*arrays)
    of_entries = more[0].reshape(*out.shape), more[1].reshape(*residual.shape)
    out = merged_parts((out, residual), of_entries, sinks)
    if cache is not None:
        out = jnp.where(lacks[..., None, None], jnp.nan, out)
        cache = cache.with_recent(recent)
        out = show_overflow(out, cache)
    return without_transpose(out.astype(q.dtype)), cache


def _step(
    q_t, k_t, v_t, block_k_t, block_v_t, index_q_t, index_k_t, index_weights_t, sinks, cache,
    scale, block_size, sliding_window, selected_entries,
):  # fmt: skip
    batch, heads, key = q_t.shape
    groups, blocks = k_t.shape[1], cache.block_keys.shape[2]
    out, recent, residual = softmax_attention_step(
        q_t, k_t, v_t, cache.recent, scale=scale, sliding_window=sliding_window,
        return_residual=True,
    )  # fmt: skip
    complete = (cache.length + 1) // block_size
    is_end = (cache.length + 1) % block_size == 0
    slot = jnp.where(is_end, complete - 1, cache.capacity)
    rows = {"block_keys": block_k_t, "block_values": block_v_t}
    rows |= {} if index_k_t is None else {"index_keys": index_k_t}
    cache = write_token(cache, slot, axis=-2, **rows).with_recent(recent)
    is_scored = index_k_t is not None and blocks > selected_entries

    def sequence(q, keys, values, complete, index_q, index_k, index_weights):
        visible: Bool[Array, "1 blocks"] = jnp.arange(blocks, dtype=jnp.int32)[None] < complete
        if not is_scored:
            return attend_selected(q[None], keys, values, visible, scale, None, at_once=True)
        index = index_q[None], index_k, index_weights[None]
        mask, is_sound = picked_entries(*index, visible, selected_entries)
        how = {"at_once": True}
        found = attend_selected(q[None], keys, values, mask, scale, selected_entries, **how)
        return found[0] + jnp.where(is_sound, 0, jnp.nan)[:, None, None, None], found[1]

    more = each(
        sequence,
        q_t.reshape(batch, groups, heads // groups, key),
        cache.block_keys,
        cache.block_values,
        complete,
        *((index_q_t, cache.index_keys, index_weights_t) if is_scored else (None,) * 3),
        at_once=True,
    )
    of_entries = more[0].reshape(*out.shape), more[1].reshape(*residual.shape)
    recent_part = out[:, None], residual[:, None]
    out = merged_parts(recent_part, tuple(x[:, None] for x in of_entries), sinks)[:, 0]
    return show_overflow(out, cache).astype(q_t.dtype), cache
