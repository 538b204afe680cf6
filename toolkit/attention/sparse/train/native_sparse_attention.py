r"""Native sparse attention: blocks seen as their means, a few blocks seen whole, a window.

    o_t = g^c_t A(q_t; block means) + g^s_t A(q_t; tokens of selected blocks) + g^w_t A(q_t; window)

A is softmax attention and g are gates, one per branch, token and head. Blocks are counted from the
start of a document. A query attends to the means of the blocks that are complete when it comes;
the weights it gives them, averaged over the query heads of its key head, say which blocks it reads
whole: `selected_blocks` of them, the first, the previous and its own always. Of equal weights the
earliest block wins. The selection passes no gradient; all three branches do, the first one through
the means to every key and value of a block.

The three branches share keys and values, and means take the place of a learned compression, as in
flash-linear-attention; the paper gives each branch its own projections.

Numbers: as in `softmax/softmax_attention.py`; means are float32, since a selection depends on their
last digits.
Documents of a packed sequence are runs of equal segment_ids.
"""

from dataclasses import replace
from functools import partial
from typing import Annotated

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

import toolkit.attention._shapes as shapes
import toolkit.attention.sparse.train.equations as equations
from toolkit._annotations import AtLeast
from toolkit._checks import checked
from toolkit.attention._attend import attend, fixed_scale
from toolkit.attention._caches import show_overflow
from toolkit.attention.execution.derivatives import without_transpose
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.sparse.train.blocks import attend_to_blocks, block_means
from toolkit.attention.sparse.train.by_block import attend_by_block, check_blocks, step_by_block
from toolkit.attention.sparse.train.cache import BlockCache
from toolkit.attention.sparse.train.spread import (
    Selection,
    attend_to_past,
    by_heads,
    over_queries,
)

SelectedBlocks = Annotated[int, AtLeast(3, ", for the first, the previous and the query's own")]


@checked
def native_sparse_attention(
    q: shapes.Queries, k: shapes.SharedKeys, v: shapes.SharedValues,
    compressed_gate: shapes.HeadGates, selected_gate: shapes.HeadGates,
    window_gate: shapes.HeadGates, *,
    scale: float | None = None, block_size: shapes.TokenCount = 64,
    selected_blocks: SelectedBlocks = 16, sliding_window: shapes.TokenCount = 512,
    segment_ids: shapes.SegmentIds | None = None, initial_state: BlockCache | None = None,
    implementation: Selection | None = None,
) -> tuple[shapes.HeadValues, BlockCache | None]:  # fmt: skip
    """Gated sum of attention to block means, to selected blocks and to a window.

        o = g^c A(q; means) + g^s A(q; selected blocks) + g^w A(q; window)

    Arguments and results as `mixture_of_block_attention`, and:

    Args:
        compressed_gate: weight of the attention to means [batch, time, heads].
        selected_gate: weight of the attention to selected blocks [batch, time, heads].
        window_gate: weight of the attention to the window [batch, time, heads].
        selected_blocks: blocks a query reads whole; three are the first, the previous, its own. The
            query heads of a key head select together.
        sliding_window: tokens of the window, the query's own included.

    Cost:
        2 batch heads time (key + value) FLOPs times time / block_size / 2 means, times
        sliding_window, and times selected_blocks block_size tokens when gathered or all keys when
        masked. Three times that with the backward pass, which recomputes a chunk of queries at a
        time; memory linear in time.

    Source: Yuan et al. (2025), arXiv:2502.11089, section 3.

    Example:
        >>> q = k = v = jnp.ones((1, 5, 2, 4))
        >>> gates = [jnp.ones((1, 5, 2))] * 3
        >>> out, _ = native_sparse_attention(q, k, v, *gates, block_size=2)
        >>> out.shape
        (1, 5, 2, 4)
    """
    if initial_state is not None:
        check_blocks(initial_state, q.shape[1], block_size, segment_ids)
    q, scale = fixed_scale(q, scale)
    tokens = q, k, v, (compressed_gate, selected_gate, window_gate), segment_ids
    how = scale, block_size, selected_blocks, sliding_window, implementation
    return by_heads(_attend, tokens, initial_state, (2, 2, 2, 2, None), *how)


def _attend(
    q, k, v, gates, segment_ids, initial_state,
    scale, block_size, selected_blocks, sliding_window, implementation,
):  # fmt: skip
    def branches(blocking, blocks, q, own, k, v):
        means = block_means(k, blocks, block_size), block_means(v, blocks, block_size)
        return over_queries(partial(attend_to_blocks, blocking, blocks, k, v, *means), q, own)

    outs, past, cache = attend_by_block(
        branches, q, k, v, segment_ids, initial_state,
        scale=scale, block_size=block_size, selected_blocks=selected_blocks,
        implementation=implementation,
    )  # fmt: skip
    mask = replace(past.mask, window=(sliding_window - 1, 0))
    window = attend_to_past(q, past.keys, past.values, mask, scale)
    out = without_transpose(_gated(gates, (*outs, window)).astype(q.dtype))
    return (out if cache is None else show_overflow(out, cache)), cache


def _gated(gates, branches) -> Array:
    """Sum of gate times branch; what is not finite shows in its own head and token only."""
    total = jnp.zeros((), accumulator(branches[0].dtype))
    for gate, branch in zip(gates, branches, strict=True):
        gate, branch = gate[..., None].astype(total.dtype), branch.astype(total.dtype)
        is_finite = jnp.isfinite(gate) & jnp.isfinite(branch)
        gate, branch = (jnp.where(is_finite, x, 0) for x in (gate, branch))
        total = gate * branch + jnp.where(is_finite, total, jnp.nan)
    return total


@checked
def native_sparse_attention_step(
    q_t: shapes.Query, k_t: shapes.SharedKey, v_t: shapes.SharedValue,
    compressed_gate_t: shapes.HeadGate, selected_gate_t: shapes.HeadGate,
    window_gate_t: shapes.HeadGate, cache: BlockCache, *,
    scale: float | None = None, block_size: shapes.TokenCount = 64,
    selected_blocks: SelectedBlocks = 16, sliding_window: shapes.TokenCount = 512,
) -> tuple[shapes.HeadValue, BlockCache]:  # fmt: skip
    """Append one token to the cache and attend by the three branches.

        o = g^c A(q; means) + g^s A(q; selected blocks) + g^w A(q; window)

    Arguments as `native_sparse_attention`, without the time axis; `cache` holds the tokens before
    this one.

    Cost:
        2 batch heads (key + value) FLOPs times capacity / block_size means, selected_blocks
        block_size tokens and sliding_window tokens, and a read of those rows alone.

    Example:
        >>> q = k = v = jnp.ones((1, 2, 4))
        >>> gates = [jnp.ones((1, 2))] * 3
        >>> cache = BlockCache.empty(1, 2, 4, 4, capacity=8, block_size=2)
        >>> out, cache = native_sparse_attention_step(q, k, v, *gates, cache, block_size=2)
        >>> out.shape, cache.length.tolist()
        ((1, 2, 4), [1])
    """
    check_blocks(cache, 1, block_size)
    q_t, scale = fixed_scale(q_t, scale)
    tokens = q_t, k_t, v_t, (compressed_gate_t, selected_gate_t, window_gate_t)
    how = scale, block_size, selected_blocks, sliding_window
    return by_heads(_step, tokens, cache, (1, 1, 1, 1), *how)


def _step(q_t, k_t, v_t, gates, cache, scale, block_size, selected_blocks, sliding_window):
    seen = min(sliding_window, cache.capacity)

    def branches(blocking, blocks, q, own, k, v, mean_keys, mean_values):
        outs = attend_to_blocks(blocking, blocks, k, v, mean_keys, mean_values, q, own)
        position = own.position[0]
        first = jnp.clip(position - seen + 1, 0, k.shape[0] - seen)
        slots = first + jnp.arange(seen, dtype=jnp.int32)[None]
        visible = (slots <= position) & (slots > position - sliding_window)
        k, v = (lax.dynamic_slice_in_dim(rows, first, seen) for rows in (k, v))
        return *outs, attend(q, k, v, visible, scale=scale).out

    outs, cache = step_by_block(
        branches, q_t, k_t, v_t, cache,
        scale=scale, block_size=block_size, selected_blocks=selected_blocks,
    )  # fmt: skip
    out = _gated(gates, outs)
    return show_overflow(out, cache).astype(q_t.dtype), cache


@checked
def native_sparse_attention_reference(
    q: shapes.Queries, k: shapes.SharedKeys, v: shapes.SharedValues,
    compressed_gate: shapes.HeadGates, selected_gate: shapes.HeadGates,
    window_gate: shapes.HeadGates, *,
    scale: float | None = None, block_size: shapes.TokenCount = 64,
    selected_blocks: SelectedBlocks = 16, sliding_window: shapes.TokenCount = 512,
    segment_ids: shapes.SegmentIds | None = None,
) -> tuple[shapes.HeadValues, None]:  # fmt: skip
    """The equation of `native_sparse_attention`, to be read; the oracle of the fast form.

        o = g^c A(q; means) + g^s A(q; selected blocks) + g^w A(q; window)

    Arguments as `native_sparse_attention`.
    """
    batch, time, _, key = q.shape
    scale = float(key**-0.5 if scale is None else scale)
    groups, group, dtype = k.shape[2], q.shape[2] // k.shape[2], q.dtype
    q, k, v = (x.astype(accumulator(dtype)) for x in (q, k, v))
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    where = equations.places(segment_ids, batch, time, block_size)
    past, query, token = where.past, where.query, where.token

    mean_keys, mean_values = (equations.means(x, block_size) for x in (k, v))
    compressed, p = equations.attend(q, mean_keys, mean_values, where.seen[:, None], scale)

    # The heads of a key head select together, the first and the previous block always.
    importance = p.reshape(batch, groups, group, time, time).mean(axis=2)
    is_first = token == query - where.in_document[..., None] + block_size - 1
    is_forced = (is_first | (token == where.own - 1))[:, None]
    read = equations.read_tokens(jnp.where(is_forced, jnp.inf, importance), where, selected_blocks)
    selected, _ = equations.attend(q, k, v, jnp.repeat(read, group, axis=1), scale)

    window = (past & (query - token < sliding_window))[:, None]
    window, _ = equations.attend(q, k, v, window, scale)
    gates = (compressed_gate, selected_gate, window_gate)
    c, s, w = (gate[..., None].astype(q.dtype) for gate in gates)
    return (c * compressed + s * selected + w * window).astype(dtype), None
