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

from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from toolkit._annotations import AtLeast
from toolkit._checks import checked
from toolkit.attention._attend import attend, fixed_scale, run_numbers
from toolkit.attention._caches import cut_as_arrays_are, show_overflow
from toolkit.attention._cores import free_cores, over_cores
from toolkit.attention._derivatives import without_transpose
from toolkit.attention._precision import accumulator
from toolkit.attention._shapes import (
    HeadGate,
    HeadGates,
    HeadValue,
    HeadValues,
    Queries,
    Query,
    SegmentIds,
    SharedKey,
    SharedKeys,
    SharedValue,
    SharedValues,
    TokenCount,
)
from toolkit.attention.sparse.train.blocks import attend_to_blocks, block_means
from toolkit.attention.sparse.train.by_block import attend_by_block, check_blocks, step_by_block
from toolkit.attention.sparse.train.cache import BlockCache
from toolkit.attention.sparse.train.spread import Selection, attend_to_past, over_queries

SelectedBlocks = Annotated[int, AtLeast(3, ", for the first, the previous and the query's own")]


@checked
def native_sparse_attention(
    q: Queries,
    k: SharedKeys,
    v: SharedValues,
    compressed_gate: HeadGates,
    selected_gate: HeadGates,
    window_gate: HeadGates,
    *,
    scale: float | None = None,
    block_size: TokenCount = 64,
    selected_blocks: SelectedBlocks = 16,
    sliding_window: TokenCount = 512,
    segment_ids: SegmentIds | None = None,
    initial_state: BlockCache | None = None,
    implementation: Selection | None = None,
) -> tuple[HeadValues, BlockCache | None]:
    """Gated sum of attention to block means, to selected blocks and to a window.

        o = g^c A(q; means) + g^s A(q; selected blocks) + g^w A(q; window)

    Args:
        q: queries [batch, time, heads, key].
        k: keys [batch, time, key_value_heads, key]; heads is a multiple of key_value_heads, and
            the query heads of one key head select together.
        v: values [batch, time, key_value_heads, value].
        compressed_gate: weight of the attention to means [batch, time, heads].
        selected_gate: weight of the attention to selected blocks.
        window_gate: weight of the attention to the window.
        scale: factor of the scores; None for key ** -0.5.
        block_size: tokens of a block.
        selected_blocks: blocks a query reads whole; three are the first, the previous, its own.
        sliding_window: tokens of the window, the query's own included.
        segment_ids: document number of every token [batch, time]; equal numbers in a row are one
            document, and a token sees its own.
        initial_state: tokens before these, the first document of which these continue; they are
            seen too, and the new ones are appended.
        implementation: "masked" (one product with all keys, a mask keeps the selected blocks),
            "gathered" (each query copies its own blocks), or None for the cheaper by its count of
            FLOPs and bytes. Both compute the same function.

    Returns:
        The output [batch, time, heads, value] in q's dtype, and the new cache (None without
        `initial_state`).

    Raises:
        ValueError: shapes that do not fit, a size out of range, an unknown implementation, a cache
            with room for fewer tokens.
        TypeError: not floating point, different dtypes, segment_ids that are not integers.

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
    gates = {"compressed_gate": compressed_gate, "selected_gate": selected_gate}
    gates["window_gate"] = window_gate
    counts = block_size, selected_blocks, sliding_window
    if initial_state is not None:
        check_blocks(initial_state, q.shape[1], block_size, segment_ids)
    q, scale = fixed_scale(q, scale)
    gates = tuple(gates.values())
    how = scale, *counts, implementation
    if initial_state is not None:
        return _continue(how, q, k, v, gates, segment_ids, initial_state)
    return _spread(free_cores(), how, q, k, v, gates, segment_ids), None


# Compiled as a whole, or an eager call would compile its loops anew every time.
@partial(jax.jit, static_argnums=(0, 1))
def _spread(cores, how, *arrays):
    share = lambda *arrays: _attend(*(*arrays, None, *how))[0]  # noqa: E731
    return over_cores(cores, share, arrays, heads=(2, 2, 2, 2, None), heads_out=2)


@partial(jax.jit, static_argnums=0)
def _continue(how, *arrays):
    *tokens, cache = arrays
    share = lambda *arrays: _attend(*arrays, *how)  # noqa: E731
    return cut_as_arrays_are(share, tokens, cache, heads=(2, 2, 2, 2, None), heads_out=(2,))


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
    window = attend_to_past(q, *past, scale=scale, sliding_window=sliding_window)
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
    q_t: Query,
    k_t: SharedKey,
    v_t: SharedValue,
    compressed_gate_t: HeadGate,
    selected_gate_t: HeadGate,
    window_gate_t: HeadGate,
    cache: BlockCache,
    *,
    scale: float | None = None,
    block_size: TokenCount = 64,
    selected_blocks: SelectedBlocks = 16,
    sliding_window: TokenCount = 512,
) -> tuple[HeadValue, BlockCache]:
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
    gates = {"compressed_gate_t": compressed_gate_t, "selected_gate_t": selected_gate_t}
    gates["window_gate_t"] = window_gate_t
    counts = block_size, selected_blocks, sliding_window
    check_blocks(cache, 1, block_size)
    q_t, scale = fixed_scale(q_t, scale)
    return _step(q_t, k_t, v_t, tuple(gates.values()), cache, scale, *counts)


@partial(jax.jit, static_argnums=(5, 6, 7, 8))
def _step(q_t, k_t, v_t, gates, cache, *how):
    tokens = q_t, k_t, v_t, gates
    share = lambda *arrays: _step_share(*arrays, *how)  # noqa: E731
    return cut_as_arrays_are(share, tokens, cache, heads=(1, 1, 1, 1), heads_out=(1,))


def _step_share(q_t, k_t, v_t, gates, cache, scale, block_size, selected_blocks, sliding_window):
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
    q: Queries,
    k: SharedKeys,
    v: SharedValues,
    compressed_gate: HeadGates,
    selected_gate: HeadGates,
    window_gate: HeadGates,
    *,
    scale: float | None = None,
    block_size: TokenCount = 64,
    selected_blocks: SelectedBlocks = 16,
    sliding_window: TokenCount = 512,
    segment_ids: SegmentIds | None = None,
) -> tuple[HeadValues, None]:
    """The equation of `native_sparse_attention`, to be read; the oracle of the fast form.

        o = g^c A(q; means) + g^s A(q; selected blocks) + g^w A(q; window)

    Arguments as `native_sparse_attention`. A block goes by the index of its last token, and every
    other index stands for no block: all matrices are [time, time].

    Example:
        >>> q = k = v = jnp.ones((1, 5, 2, 4))
        >>> gates = [jnp.ones((1, 5, 2))] * 3
        >>> out, _ = native_sparse_attention_reference(q, k, v, *gates, block_size=2)
        >>> out.shape
        (1, 5, 2, 4)
    """
    gates = {"compressed_gate": compressed_gate, "selected_gate": selected_gate}
    gates["window_gate"] = window_gate
    batch, time, heads, key = q.shape
    scale = float(key**-0.5 if scale is None else scale)
    group, dtype = heads // k.shape[2], q.dtype
    q, k, v = (x.astype(accumulator(dtype)) for x in (q, k, v))
    document = jnp.zeros((batch, time), jnp.int32)
    if segment_ids is not None:
        document = run_numbers(segment_ids)
    begins = jnp.diff(document, axis=1, prepend=document[:, :1]) > 0
    index = jnp.arange(time)[None]
    place = index - lax.cummax(jnp.where(begins, index, 0), axis=1)  # in the document
    query, token = index[..., None], index[:, None, :]
    past = (token <= query) & (document[:, :, None] == document[:, None, :])

    # Means of the last block_size tokens; masks see to it that only those of blocks count.
    def means(x):
        shifted = [jnp.roll(x, shift, axis=1) for shift in range(block_size)]
        return jnp.repeat(sum(shifted) / block_size, group, axis=2)

    def attend(k, v, mask):
        scores = scale * jnp.einsum("bthk,bshk->bhts", q, k)
        p = jax.nn.softmax(scores, axis=-1, where=mask)
        return jnp.einsum("bhts,bshv->bthv", p, v), p

    ends_block = place % block_size == block_size - 1
    seen = past & ends_block[:, None, :]
    compressed, p = attend(means(k), means(v), seen[:, None])

    own = query - (place % block_size)[..., None]  # first token of the query's own block
    is_first = token == query - place[..., None] + block_size - 1
    importance = p.reshape(batch, -1, group, time, time).mean(axis=2)
    importance = jnp.where((is_first | (token == own - 1))[:, None], jnp.inf, importance)
    earlier = (seen & (token < own))[:, None]
    # A stable sort of the negated weights puts the earlier of two equal blocks first.
    order = jnp.argsort(jnp.where(earlier, -importance, jnp.nan), axis=-1, stable=True)
    chosen = earlier & (jnp.argsort(order, axis=-1) < selected_blocks - 1)
    last = token + block_size - 1 - (place % block_size)[:, None, :]  # of the token's own block
    last = jnp.broadcast_to(jnp.minimum(last, time - 1)[:, None], (batch, 1, time, time))
    in_chosen = jnp.take_along_axis(chosen, last, axis=-1)

    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    selected = past[:, None] & (in_chosen | (token >= own)[:, None])
    selected, _ = attend(k, v, jnp.repeat(selected, group, axis=1))
    window, _ = attend(k, v, (past & (query - token < sliding_window))[:, None])
    branches = zip(gates.values(), (compressed, selected, window), strict=False)
    gated = [gate[..., None].astype(x.dtype) * x for gate, x in branches]
    return (gated[0] + gated[1] + gated[2]).astype(dtype), None
