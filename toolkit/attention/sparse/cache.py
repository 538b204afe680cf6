"""Caches of sparse attention: a row a token, so that a selected token is one contiguous read.

Softmax attention reads all keys, channel by channel, and keeps time last (`KVCache`). Here a query
reads a few tokens from anywhere: in that layout each of its numbers would cost a cache line.

As in `KVCache`, a row remembers one document, and `start` says where it begins.

A token that finds no room is an error: ValueError when the length is known, NaN output from then
on under `jax.jit`.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from toolkit.attention._checks import check_same_dtype, check_shape, check_sizes
from toolkit.attention._precision import accumulator


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockCache:
    """Keys and values of the tokens seen so far, and the means of their complete blocks; a pytree.

    Attributes:
        keys: [batch, key_value_heads, capacity, key].
        values: [batch, key_value_heads, capacity, value].
        pooled_keys: means of complete blocks [batch, key_value_heads, blocks, key], at least
            float32: which blocks are selected hangs on their last digits.
        pooled_values: [batch, key_value_heads, blocks, value].
        length: tokens seen so far, int32.
        start: tokens before the document that a row remembers, whose blocks count from there,
            int32 [batch]; None for no tokens.
    """

    keys: Float[Array, "batch key_value_heads capacity key"]
    values: Float[Array, "batch key_value_heads capacity value"]
    pooled_keys: Float[Array, "batch key_value_heads blocks key"]
    pooled_values: Float[Array, "batch key_value_heads blocks value"]
    length: Int[Array, ""]
    start: Int[Array, "batch"] | None = None

    @classmethod
    def empty(
        cls,
        batch: int,
        key_value_heads: int,
        key_size: int,
        value_size: int,
        capacity: int,
        dtype=jnp.float32,
        *,
        block_size: int = 64,
    ) -> "BlockCache":
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
        tokens, blocks = ((batch, key_value_heads, n) for n in (capacity, capacity // block_size))
        precise = accumulator(dtype)
        return cls(
            jnp.zeros((*tokens, key_size), dtype),
            jnp.zeros((*tokens, value_size), dtype),
            jnp.zeros((*blocks, key_size), precise),
            jnp.zeros((*blocks, value_size), precise),
            jnp.zeros((), jnp.int32),
        )

    @property
    def capacity(self) -> int:
        """Slots for tokens."""
        return self.keys.shape[2]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class IndexedCache:
    """Keys, values and index keys of the tokens seen so far; a pytree.

    Attributes:
        keys: [batch, key_value_heads, capacity, key].
        values: [batch, key_value_heads, capacity, value]; None if a value is the first channels of
            its key.
        index_keys: [batch, capacity, index], shared by all heads.
        length: tokens seen so far, int32.
        start: tokens before the document that a row remembers, int32 [batch]; None for no tokens.
    """

    keys: Float[Array, "batch key_value_heads capacity key"]
    values: Float[Array, "batch key_value_heads capacity value"] | None
    index_keys: Float[Array, "batch capacity index"]
    length: Int[Array, ""]
    start: Int[Array, "batch"] | None = None

    @classmethod
    def empty(
        cls,
        batch: int,
        key_value_heads: int,
        key_size: int,
        value_size: int | None,
        index_size: int,
        capacity: int,
        dtype=jnp.float32,
    ) -> "IndexedCache":
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
        tokens = (batch, key_value_heads, capacity)
        return cls(
            jnp.zeros((*tokens, key_size), dtype),
            None if value_size is None else jnp.zeros((*tokens, value_size), dtype),
            jnp.zeros((batch, capacity, index_size), dtype),
            jnp.zeros((), jnp.int32),
        )

    @property
    def capacity(self) -> int:
        """Slots for tokens."""
        return self.keys.shape[2]


SparseCache = TypeVar("SparseCache", BlockCache, IndexedCache)


def append_rows(cache: SparseCache, **new: Float[Array, "... time size"]) -> SparseCache:
    """Write new tokens after those the cache holds, or nothing if they do not fit.

    Args:
        cache: tokens so far.
        **new: arrays [..., time, size] by the names of the cache's.

    Returns:
        The cache with the tokens, its length longer by `time` even if they did not fit.
    """
    time = next(iter(new.values())).shape[-2]
    held = {name: getattr(cache, name) for name in new if getattr(cache, name) is not None}

    def write():
        return {
            name: lax.dynamic_update_slice_in_dim(rows, new[name], cache.length, axis=-2)
            for name, rows in held.items()
        }

    # Inside a conditional, or XLA makes a second copy for the reads that follow.
    rows = lax.cond(cache.length + time <= cache.capacity, write, lambda: held)
    return replace(cache, **rows, length=cache.length + time)


def check_sparse_cache(cache: SparseCache, kind: type, k: Array, v: Array) -> None:
    """Refuse a cache of another kind, or one that does not fit k and v [batch, time, heads, size].

    Args:
        cache: what a caller passed.
        kind: the class wanted.
        k: new keys.
        v: new values.

    Raises:
        ValueError: sizes that do not fit, or tokens that a cache of known length cannot hold.
        TypeError: another class, or other dtypes.
    """
    if not isinstance(cache, kind):
        raise TypeError(f"the state must be a {kind.__name__}; got {type(cache).__name__}.")
    batch, time, heads, key = k.shape
    axes = "batch key_value_heads capacity size"
    check_shape("cache.keys", cache.keys, (batch, heads, cache.capacity, key), axes)
    if cache.values is not None:
        check_shape("cache.values", cache.values, (batch, heads, cache.capacity, v.shape[3]), axes)
    check_same_dtype(k=k, v=v, cache_keys=cache.keys)
    if cache.start is not None:
        check_shape("cache.start", cache.start, (batch,), "batch")
    try:
        length = int(cache.length)
    except jax.errors.ConcretizationTypeError:
        length = 0
    if length + time > cache.capacity:
        raise ValueError(
            f"the cache holds {length} of {cache.capacity} tokens and cannot take {time} more; "
            "make it with a larger capacity."
        )


def check_blocks(cache: BlockCache, block_size: int) -> None:
    """Refuse a cache made for blocks of another size."""
    blocks = cache.pooled_keys.shape[2]
    if blocks != cache.capacity // block_size:
        raise ValueError(
            f"a cache of {cache.capacity} tokens in blocks of {block_size} has "
            f"{cache.capacity // block_size} of them; got {blocks}."
        )
