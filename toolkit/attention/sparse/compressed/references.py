"""Attention to compressed blocks and to blocks by their index, as equations to be read."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

import toolkit.attention._shapes as shapes
import toolkit.attention.sparse.train.equations as equations
from toolkit._checks import checked
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.sparse.compressed.compressed_attention import (
    IndexKeys,
    IndexQueries,
    SelectedEntries,
    Sinks,
)
from toolkit.attention.sparse.train.indexer import SelectedTokens


@checked
def heavily_compressed_attention_reference(
    q: shapes.Queries, k: shapes.SharedKeys, v: shapes.SharedValues,
    block_k: shapes.SharedKeys, block_v: shapes.SharedValues, *,
    sinks: Sinks | None = None, scale: float | None = None,
    block_size: shapes.TokenCount = 128, sliding_window: shapes.TokenCount = 128,
    segment_ids: shapes.SegmentIds | None = None,
) -> tuple[shapes.HeadValues, None]:  # fmt: skip
    """The equation of `heavily_compressed_attention`, to be read; the oracle of the fast form.

        o_t = softmax of (window, all entries of complete blocks, sink) times (v, v', 0)

    Arguments as `heavily_compressed_attention`.
    """
    where = equations.places(segment_ids, q.shape[0], q.shape[1], block_size)
    rows = q, k, v, block_k, block_v
    return _attended(rows, sinks, scale, sliding_window, where, where.seen), None


@checked
def compressed_sparse_attention_reference(
    q: shapes.Queries, k: shapes.SharedKeys, v: shapes.SharedValues,
    block_k: shapes.SharedKeys, block_v: shapes.SharedValues,
    index_q: IndexQueries, index_k: IndexKeys,
    index_weights: Float[Array, "batch time index_heads"], *,
    sinks: Sinks | None = None, scale: float | None = None,
    block_size: shapes.TokenCount = 4, selected_entries: SelectedEntries = 512,
    sliding_window: shapes.TokenCount = 128, segment_ids: shapes.SegmentIds | None = None,
) -> tuple[shapes.HeadValues, None]:  # fmt: skip
    """The equation of `compressed_sparse_attention`, to be read; the oracle of the fast forms.

        o_t = softmax of (window, top-k entries by I_tb, sink) times (v, v', 0)

    Arguments as `compressed_sparse_attention`.
    """
    where = equations.places(segment_ids, q.shape[0], q.shape[1], block_size)
    scores = _index_scores(index_q, index_k, index_weights)
    # A stable sort of the negated scores puts the earlier of two equal entries first.
    order = jnp.argsort(jnp.where(where.seen, -scores, jnp.inf), axis=-1, stable=True)
    picked = where.seen & (jnp.argsort(order, axis=-1) < selected_entries)
    rows = q, k, v, block_k, block_v
    return _attended(rows, sinks, scale, sliding_window, where, picked), None


@checked
def qwen_sparse_attention_reference(
    q: shapes.Queries, k: shapes.SharedKeys, v: shapes.SharedValues,
    index_q: IndexQueries, index_k: IndexKeys, *,
    scale: float | None = None, block_size: shapes.TokenCount = 64,
    selected_tokens: SelectedTokens = 2048, segment_ids: shapes.SegmentIds | None = None,
) -> tuple[shapes.HeadValues, None]:  # fmt: skip
    """The equation of `qwen_sparse_attention`, to be read; the oracle of the fast forms.

        o_t = sum_{s in S_t} softmax_s(scale q_t . k_s) v_s

    Arguments as `qwen_sparse_attention`.
    """
    where = equations.places(segment_ids, q.shape[0], q.shape[1], block_size)
    scores = _index_scores(index_q, index_k, jnp.ones(index_q.shape[:3], index_q.dtype))
    # A query that ends a block has no unfinished one.
    own = jnp.where(where.query - where.own == block_size - 1, where.query + 1, where.own)
    where = where._replace(own=own, earlier=where.seen)
    read = equations.read_tokens(scores[:, None], where, selected_tokens // block_size + 1)
    group, dtype = q.shape[2] // k.shape[2], q.dtype
    scale = float(q.shape[3] ** -0.5 if scale is None else scale)
    q, k, v = (x.astype(accumulator(dtype)) for x in (q, k, v))
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    return equations.attend(q, k, v, read, scale)[0].astype(dtype), None


def _index_scores(index_q, index_k, index_weights) -> Array:
    """sum_j w_tj ReLU(q_tj . k_s) of every query and token, without a gradient."""
    wide = accumulator(index_q.dtype)
    index_q, index_k, index_weights = (x.astype(wide) for x in (index_q, index_k, index_weights))
    relu = jnp.maximum(jnp.einsum("bthi,bsi->bths", index_q, index_k), 0)
    return lax.stop_gradient(jnp.einsum("bth,bths->bts", index_weights, relu))


def _attended(rows, sinks, scale, sliding_window, where, picked) -> Array:
    """One softmax over the window, the picked entries and the sink."""
    dtype, heads = rows[0].dtype, rows[0].shape[2]
    scale = float(rows[0].shape[3] ** -0.5 if scale is None else scale)
    q, *others = (x.astype(accumulator(dtype)) for x in rows)
    k, v, block_k, block_v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in others)
    window = where.past & (where.query - where.token < sliding_window)
    seen = jnp.concatenate([window, picked], axis=2)[:, None]
    keys, values = jnp.concatenate([k, block_k], axis=1), jnp.concatenate([v, block_v], axis=1)
    scores = scale * jnp.einsum("bthk,bshk->bhts", q, keys)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(q.dtype)[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sink], axis=3)
        seen = jnp.pad(seen, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=True)
        values = jnp.pad(values, ((0, 0), (0, 1), (0, 0), (0, 0)))
    weights = jax.nn.softmax(scores, axis=-1, where=seen)
    return jnp.einsum("bhts,bshv->bthv", weights, values).astype(dtype)
