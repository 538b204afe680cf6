"""How attention to blocks is spread over sequences and heads: what NSA and MoBA have in common.

A method is a function of one key head: (blocking, blocks, q, own, k, v, ...) -> outputs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from toolkit.attention._attend import Mask
from toolkit.attention._caches import check_room, write_token
from toolkit.attention.sparse.train.blocks import Blocking, Own, layout_from_zero, layouts
from toolkit.attention.sparse.train.cache import (
    BlockCache,
    pool_blocks,
    pool_last_block,
    with_past,
)
from toolkit.attention.sparse.train.spread import each, in_cheaper_form


class Past(NamedTuple):
    """The keys that a pass saw, earlier ones and its own, and where they lie."""

    keys: Array
    values: Array
    mask: Mask


def attend_by_block(
    method: Callable[..., Any],
    q, k, v, segment_ids, initial_state: BlockCache | None,
    *, scale, block_size, selected_blocks, implementation, shares_copies=True,
) -> tuple[Any, Past, BlockCache | None]:  # fmt: skip
    """Outputs of a method [batch, time, heads, value] each, what it saw, and the cache after it.

    `shares_copies`: the query heads of a key head gather the same tokens.
    """
    batch, time, heads, key = q.shape
    rows, mask, cache = with_past(initial_state, segment_ids, k, v)
    keys, values = rows["keys"], rows["values"]
    groups, length = keys.shape[1:3]
    group = heads // groups
    # Every sequence and head brings its own indices, even if they are equal. Otherwise jax would
    # compute the masks of all queries and keys before the loops, and keep them.
    where = layouts(mask, batch, time, length, block_size)

    def sequence(is_gathered, q, k, v, where):
        blocking = Blocking(scale, block_size, selected_blocks, is_gathered)
        blocks, own = where
        head = lambda q, k, v, own: method(blocking, blocks, q, own, k, v)  # noqa: E731
        return each(head, q.transpose(1, 0, 2, 3), k, v, repeated(own, groups))

    outs = in_cheaper_form(
        lambda is_gathered: partial(each, partial(sequence, is_gathered)),
        *(q.reshape(batch, time, groups, group, key), keys, values, where),
        keys=length,
        selected=selected_blocks * block_size,
        group=group if shares_copies else 1,
        implementation=implementation,
    )
    outs = [x.swapaxes(1, 2).reshape(batch, time, heads, -1) for x in outs]
    if cache is not None:
        cache = pool_blocks(cache, block_size)
    return outs, Past(keys, values, mask), cache


def step_by_block(
    method: Callable[..., Any],
    q_t, k_t, v_t, cache: BlockCache,
    *, scale, block_size, selected_blocks,
) -> tuple[Any, BlockCache]:  # fmt: skip
    """Outputs of a method [batch, heads, value] each for one more token, and the cache with it.

    The method is given the cache's means too, and the token's position.
    """
    batch, heads, key = q_t.shape
    groups, capacity = k_t.shape[1], cache.capacity
    is_gathered = selected_blocks * block_size < capacity
    blocking = Blocking(scale, block_size, selected_blocks, is_gathered)
    position = cache.length
    cache = write_token(cache, position, axis=-2, keys=k_t, values=v_t)
    cache = pool_last_block(cache, block_size)

    def sequence(q, position, *rows):
        blocks, own = layout_from_zero(position[None], capacity, block_size)
        head = lambda q, *rows: method(blocking, blocks, q[None], own, *rows)  # noqa: E731
        return each(head, q, *rows, at_once=True)

    q = q_t.reshape(batch, groups, heads // groups, key)
    rows = (cache.keys, cache.values, cache.pooled_keys, cache.pooled_values)
    outs = each(sequence, q, position, *rows, at_once=True)
    return [out.reshape(batch, heads, -1) for out in outs], cache


def check_blocks(cache: BlockCache, time: int, block_size: int, segment_ids=None) -> None:
    """Refuse a cache without room for the tokens, or with another block size."""
    check_room(cache, time, segment_ids)
    blocks, wanted = cache.pooled_keys.shape[2], cache.capacity // block_size
    if blocks != wanted:
        raise ValueError(
            f"a cache of {cache.capacity} tokens in blocks of {block_size} has {wanted} of them; "
            f"got {blocks}."
        )


def repeated(own: Own, times: int) -> Own:
    """The same indices for each of several heads."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (times, *x.shape)), own)
