r"""Mixture of block attention: a query reads its own block and those whose mean key suits it best.

    gate_ti = q_t . mean of the keys of block i          o_t = A(q_t; tokens of the top blocks)

A is softmax attention, causal in the query's own block, which is always read and counted. Blocks
are counted from the start of a document; only those that are complete when a query comes and end
before its own block compete, and of equal gates the earliest wins. Every query head selects for
itself. There is nothing to learn but q, k and v: the selection passes no gradient, the attention
does, and reads fewer tokens than dense attention would with the same parameters.

Numbers: as in `softmax/softmax_attention.py`; means are float32, since a selection depends on their
last digits.
"""

from functools import partial
from typing import Annotated

import jax.numpy as jnp

import toolkit.attention._shapes as shapes
import toolkit.attention.sparse.train.equations as equations
from toolkit._annotations import AtLeast
from toolkit._checks import checked
from toolkit.attention._attend import fixed_scale
from toolkit.attention._caches import show_overflow
from toolkit.attention.execution.derivatives import without_transpose
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.sparse.train.blocks import attend_to_best_blocks, block_means
from toolkit.attention.sparse.train.by_block import (
    attend_by_block,
    check_blocks,
    repeated,
    step_by_block,
)
from toolkit.attention.sparse.train.cache import BlockCache
from toolkit.attention.sparse.train.spread import Selection, by_heads, each, over_queries

SelectedBlocks = Annotated[int, AtLeast(1, ", the query's own")]


@checked
def mixture_of_block_attention(
    q: shapes.Queries, k: shapes.SharedKeys, v: shapes.SharedValues, *,
    scale: float | None = None, block_size: shapes.TokenCount = 512,
    selected_blocks: SelectedBlocks = 3,
    segment_ids: shapes.SegmentIds | None = None, initial_state: BlockCache | None = None,
    implementation: Selection | None = None,
) -> tuple[shapes.HeadValues, BlockCache | None]:  # fmt: skip
    """Attention to the query's own block and the earlier ones with the most similar mean key.

        o = A(q; own block and top blocks by q . mean(k))

    Args:
        q: queries [batch, time, heads, key].
        k: keys [batch, time, key_value_heads, key]; heads is a multiple of key_value_heads.
        v: values [batch, time, key_value_heads, value].
        scale: factor of the scores; None for key ** -0.5.
        block_size: tokens of a block.
        selected_blocks: blocks a query reads, its own included.
        segment_ids: document number of every token [batch, time]; equal numbers in a row are one
            document, and a token sees its own.
        initial_state: tokens before these, the first document of which these continue; they are
            seen too, and the new ones are appended.
        implementation: "masked" (one product with all keys, a mask keeps the selected blocks),
            "gathered" (each query head copies its own blocks), or None for the cheaper by its
            count of FLOPs and bytes. Both compute the same function.

    Returns:
        The output [batch, time, heads, value] in q's dtype, and the new cache (None without
        `initial_state`).

    Cost:
        2 batch heads time FLOPs times key time / block_size / 2 means, and times (key + value)
        selected_blocks block_size tokens when gathered or all keys when masked.

    Source: Lu et al. (2025), arXiv:2502.13189.

    Example:
        >>> q = k = v = jnp.ones((1, 5, 2, 4))
        >>> out, _ = mixture_of_block_attention(q, k, v, block_size=2)
        >>> out.shape
        (1, 5, 2, 4)
    """
    if initial_state is not None:
        check_blocks(initial_state, q.shape[1], block_size, segment_ids)
    q, scale = fixed_scale(q, scale)
    how = scale, block_size, selected_blocks, implementation
    return by_heads(_attend, (q, k, v, segment_ids), initial_state, (2, 2, 2, None), *how)


def _attend(
    q, k, v, segment_ids, initial_state, scale, block_size, selected_blocks, implementation
):  # fmt: skip
    def best(blocking, blocks, q, own, k, v):
        means = block_means(k, blocks, block_size)
        attend = partial(attend_to_best_blocks, blocking, blocks, k, v, means)
        head = lambda q, own: over_queries(attend, q[:, None], own)  # noqa: E731
        heads = each(head, q.swapaxes(0, 1), repeated(own, q.shape[1]))
        return (heads[:, :, 0].swapaxes(0, 1),)

    (out,), _, cache = attend_by_block(
        best, q, k, v, segment_ids, initial_state,
        scale=scale, block_size=block_size, selected_blocks=selected_blocks,
        implementation=implementation, shares_copies=False,
    )  # fmt: skip
    out = without_transpose(out.astype(q.dtype))
    return (out if cache is None else show_overflow(out, cache)), cache


@checked
def mixture_of_block_attention_step(
    q_t: shapes.Query, k_t: shapes.SharedKey, v_t: shapes.SharedValue, cache: BlockCache, *,
    scale: float | None = None, block_size: shapes.TokenCount = 512,
    selected_blocks: SelectedBlocks = 3,
) -> tuple[shapes.HeadValue, BlockCache]:  # fmt: skip
    """Append one token to the cache and attend to its block and the best of the earlier ones.

        o = A(q; own block and top blocks by q . mean(k))

    Arguments as `mixture_of_block_attention`, without the time axis; `cache` holds the tokens
    before this one.

    Cost:
        2 batch heads FLOPs times key capacity / block_size means and times (key + value)
        selected_blocks block_size tokens, and a read of those rows alone.

    Example:
        >>> q = k = v = jnp.ones((1, 2, 4))
        >>> cache = BlockCache.empty(1, 2, 4, 4, capacity=8, block_size=2)
        >>> out, cache = mixture_of_block_attention_step(q, k, v, cache, block_size=2)
        >>> out.shape, cache.length.tolist()
        ((1, 2, 4), [1])
    """
    check_blocks(cache, 1, block_size)
    q_t, scale = fixed_scale(q_t, scale)
    how = scale, block_size, selected_blocks
    return by_heads(_step, (q_t, k_t, v_t), cache, (1, 1, 1), *how)


def _step(q_t, k_t, v_t, cache, scale, block_size, selected_blocks):
    def best(blocking, blocks, q, own, k, v, mean_keys, _):
        attend = lambda q: attend_to_best_blocks(blocking, blocks, k, v, mean_keys, q, own)  # noqa: E731
        return (each(attend, q.swapaxes(0, 1)[:, :, None], at_once=True),)

    (out,), cache = step_by_block(
        best, q_t, k_t, v_t, cache,
        scale=scale, block_size=block_size, selected_blocks=selected_blocks,
    )  # fmt: skip
    return show_overflow(out, cache).astype(q_t.dtype), cache


@checked
def mixture_of_block_attention_reference(
    q: shapes.Queries, k: shapes.SharedKeys, v: shapes.SharedValues, *,
    scale: float | None = None, block_size: shapes.TokenCount = 512,
    selected_blocks: SelectedBlocks = 3,
    segment_ids: shapes.SegmentIds | None = None,
) -> tuple[shapes.HeadValues, None]:  # fmt: skip
    """The equation of `mixture_of_block_attention`, to be read; the oracle of the fast form.

        o = A(q; own block and top blocks by q . mean(k))

    Arguments as `mixture_of_block_attention`.
    """
    scale = float(q.shape[3] ** -0.5 if scale is None else scale)
    group, dtype = q.shape[2] // k.shape[2], q.dtype
    q, k, v = (x.astype(accumulator(dtype)) for x in (q, k, v))
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    where = equations.places(segment_ids, q.shape[0], q.shape[1], block_size)
    gates = jnp.einsum("bthk,bshk->bhts", q, equations.means(k, block_size))
    read = equations.read_tokens(gates, where, selected_blocks)
    return equations.attend(q, k, v, read, scale)[0].astype(dtype), None
