"""Caches of sparse attention: one row per token, so that a selected token is one contiguous read.

Softmax attention reads all keys, channel by channel, and keeps time last (`KVCache`). Here a query
reads a few tokens from anywhere; with time last, each of their numbers would cost a cache line.

As in `KVCache`, every row has a length of its own, and a token that finds no room is an error
(`_caches.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

import toolkit.attention._shapes as shapes
from toolkit._pytrees import register_dataclass
from toolkit.attention._attend import Mask, packed
from toolkit.attention._caches import Rows, continue_rows, show_overflow, write_token
from toolkit.attention._checks import check_dtype, check_sizes
from toolkit.attention._shapes import HeldKeys, HeldValues
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.sparse.train.spread import each


@register_dataclass
@dataclass(frozen=True)
class BlockCache(Rows):
    """Keys and values of the tokens seen so far, and the means of their complete blocks; a pytree.

    Attributes:
        keys: [batch, key_value_heads, capacity, key].
        values: [batch, key_value_heads, capacity, value].
        pooled_keys: means of complete blocks [batch, key_value_heads, blocks, key], at least
            float32: which blocks are selected depends on their last digits.
        pooled_values: [batch, key_value_heads, blocks, value].
        length: tokens seen so far by each row, int32.

    Example:
        >>> cache = BlockCache.empty(1, 2, 4, 4, capacity=8, block_size=2)
        >>> cache.keys.shape, cache.pooled_keys.shape
        ((1, 2, 8, 4), (1, 2, 4, 4))
    """

    keys: HeldKeys
    values: HeldValues
    pooled_keys: Float[Array, "batch key_value_heads blocks key"]
    pooled_values: Float[Array, "batch key_value_heads blocks value"]
    length: Int[Array, "batch"]

    @classmethod
    def empty(
        cls, batch: int, key_value_heads: int, key_size: int, value_size: int, capacity: int,
        dtype=jnp.float32, *,
        block_size: int = 64,
    ) -> "BlockCache":  # fmt: skip
        """Make a cache without tokens, with room for `capacity` of them."""
        check_sizes(
            "a BlockCache",
            batch=batch,
            key_value_heads=key_value_heads,
            key_size=key_size,
            value_size=value_size,
            capacity=capacity,
            block_size=block_size,
        )
        check_dtype(dtype)
        tokens, blocks = ((batch, key_value_heads, n) for n in (capacity, capacity // block_size))
        precise = accumulator(dtype)
        return cls(
            jnp.zeros((*tokens, key_size), dtype),
            jnp.zeros((*tokens, value_size), dtype),
            jnp.zeros((*blocks, key_size), precise),
            jnp.zeros((*blocks, value_size), precise),
            jnp.zeros(batch, jnp.int32),
        )

    @property
    def capacity(self) -> int:
        """Slots for tokens."""
        return self.keys.shape[2]


@register_dataclass
@dataclass(frozen=True)
class IndexedCache(Rows):
    """Keys, values and index keys of the tokens seen so far; a pytree.

    Attributes:
        keys: [batch, key_value_heads, capacity, key].
        values: [batch, key_value_heads, capacity, value]; None if a value is the first channels of
            its key.
        index_keys: [batch, capacity, index], shared by all heads.
        length: tokens seen so far by each row, int32.

    Example:
        >>> cache = IndexedCache.empty(1, 2, 4, 4, index_size=3, capacity=8)
        >>> cache.keys.shape, cache.index_keys.shape
        ((1, 2, 8, 4), (1, 8, 3))
    """

    keys: HeldKeys
    values: HeldValues | None
    index_keys: Float[Array, "batch capacity index"]
    length: Int[Array, "batch"]

    @classmethod
    def empty(
        cls, batch: int, key_value_heads: int, key_size: int, value_size: int | None,
        index_size: int, capacity: int, dtype=jnp.float32,
    ) -> "IndexedCache":  # fmt: skip
        """Make a cache without tokens, with room for `capacity` of them.

        `value_size` None: values are the first channels of their keys, and are not kept.
        """
        check_sizes(
            "an IndexedCache",
            batch=batch,
            key_value_heads=key_value_heads,
            key_size=key_size,
            value_size=1 if value_size is None else value_size,
            index_size=index_size,
            capacity=capacity,
        )
        check_dtype(dtype)
        tokens = (batch, key_value_heads, capacity)
        return cls(
            jnp.zeros((*tokens, key_size), dtype),
            None if value_size is None else jnp.zeros((*tokens, value_size), dtype),
            jnp.zeros((batch, capacity, index_size), dtype),
            jnp.zeros(batch, jnp.int32),
        )

    @property
    def capacity(self) -> int:
        """Slots for tokens."""
        return self.keys.shape[2]

    def values_for(self, v: Array) -> Array:
        """Values of the size of new ones: those kept, or the first channels of the keys."""
        return self.keys[..., : v.shape[-1]] if self.values is None else self.values


def with_past(
    cache: BlockCache | IndexedCache | None, segment_ids: shapes.SegmentIds | None,
    k: shapes.SharedKeys, v: shapes.SharedValues, **others: Array,
) -> tuple[dict[str, Array], Mask, Any]:  # fmt: skip
    """Keys, values and other rows after those of a cache, where they lie, and the cache then."""
    rows: dict[str, Any] = {"keys": k.swapaxes(1, 2), "values": v.swapaxes(1, 2), **others}
    if cache is None:
        return rows, Mask(documents=packed(segment_ids)), None
    found, mask, cache = continue_rows(cache, segment_ids, axis=-2, **rows)
    return {"values": found["keys"][..., : v.shape[-1]], **found}, mask, cache


def indexed_step(
    sequence: Callable[..., Array], q_t: shapes.Query, k_t: shapes.SharedKey,
    v_t: shapes.SharedValue,
    index_k_t: Float[Array, "batch index"], cache: IndexedCache, *index: Array,
) -> tuple[shapes.HeadValue, IndexedCache]:  # fmt: skip
    """One more token of every row: the outputs of sequence(q, keys, values, index keys, position,
    *index), and the cache."""
    position, (batch, heads, key) = cache.length, q_t.shape
    cache = write_token(cache, position, axis=-2, keys=k_t, values=v_t, index_keys=index_k_t)
    q = q_t.reshape(batch, k_t.shape[1], -1, key)
    arrays = q, cache.keys, cache.values_for(v_t), cache.index_keys, position, *index
    out = show_overflow(each(sequence, *arrays, at_once=True), cache).astype(q_t.dtype)
    return out.reshape(batch, heads, v_t.shape[2]), cache


def pool_blocks(cache: BlockCache, block_size: int) -> BlockCache:
    """The cache with the means of all complete blocks, and zeros for the others."""
    blocks = cache.pooled_keys.shape[2]
    ends = block_size * jnp.arange(1, blocks + 1, dtype=jnp.int32)
    is_complete = (ends[None] <= cache.length[:, None])[:, None, :, None]

    def means(rows, pooled):
        tokens = rows[:, :, : blocks * block_size].reshape(*pooled.shape[:3], block_size, -1)
        return jnp.where(is_complete, tokens.mean(axis=3, dtype=pooled.dtype), 0)

    pooled_keys = means(cache.keys, cache.pooled_keys)
    return replace(
        cache, pooled_keys=pooled_keys, pooled_values=means(cache.values, cache.pooled_values)
    )


def pool_last_block(cache: BlockCache, block_size: int) -> BlockCache:
    """Add the mean of the last block in the rows where it is complete."""
    length, pooled_before = cache.length, (cache.pooled_keys, cache.pooled_values)
    blocks = pooled_before[0].shape[2]
    is_complete = (length % block_size == 0) & (length <= cache.capacity)
    if not blocks:
        return cache

    def write():
        last = jax.vmap(lambda rows, n: lax.dynamic_slice_in_dim(rows, n, block_size, axis=1))
        # Rows whose block is unfinished write nowhere.
        place = jnp.where(is_complete, length // block_size - 1, blocks)
        to = (jnp.arange(place.shape[0]), slice(None), place)
        return tuple(
            pooled.at[to].set(
                last(rows, length - block_size).mean(axis=2, dtype=pooled.dtype), mode="drop"
            )
            for rows, pooled in zip((cache.keys, cache.values), pooled_before, strict=True)
        )

    pooled_keys, pooled_values = lax.cond(is_complete.any(), write, lambda: pooled_before)
    return replace(cache, pooled_keys=pooled_keys, pooled_values=pooled_values)
