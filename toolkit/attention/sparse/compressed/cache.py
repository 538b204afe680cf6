"""The cache of compressed attention: a ring of the last tokens, and an entry per complete block."""

from dataclasses import dataclass, field, replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from toolkit._pytrees import register_dataclass
from toolkit.attention._caches import Rows, cleared
from toolkit.attention._checks import check_dtype, check_sizes
from toolkit.attention._shapes import HeldKeys, HeldValues
from toolkit.attention.softmax.cache import KVCache


@register_dataclass
@dataclass(frozen=True)
class CompressedCache(Rows):
    """What compressed attention keeps: the window, and an entry per complete block; a pytree.

    Attributes:
        keys: of the window, a ring [batch, key_value_heads, key, window].
        values: likewise [batch, key_value_heads, value, window].
        forgotten: as in `KVCache`.
        block_keys: entries [batch, key_value_heads, blocks, key].
        block_values: likewise [batch, key_value_heads, blocks, value].
        index_keys: keys of the index [batch, blocks, index]; None where all entries are read.
        length: tokens seen so far by each row, int32.
        block_size: tokens per entry.

    Example:
        >>> cache = CompressedCache.empty(1, 2, 4, 4, capacity=32, block_size=8, sliding_window=6)
        >>> cache.keys.shape, cache.block_keys.shape
        ((1, 2, 4, 6), (1, 2, 4, 4))
    """

    keys: Float[Array, "batch key_value_heads key window"]
    values: Float[Array, "batch key_value_heads value window"]
    forgotten: Int[Array, "batch"]
    block_keys: HeldKeys
    block_values: HeldValues
    index_keys: Float[Array, "batch blocks index"] | None
    length: Int[Array, "batch"]
    block_size: int = field(metadata={"static": True})

    @classmethod
    def empty(
        cls, batch: int, key_value_heads: int, key_size: int, value_size: int, capacity: int,
        dtype=jnp.float32, *,
        block_size: int, sliding_window: int, index_size: int | None = None,
    ) -> "CompressedCache":  # fmt: skip
        """Make a cache without tokens, with room for `capacity` of them in every row."""
        check_sizes(
            "a CompressedCache",
            batch=batch,
            key_value_heads=key_value_heads,
            key_size=key_size,
            value_size=value_size,
            capacity=capacity,
            block_size=block_size,
            sliding_window=sliding_window,
            index_size=1 if index_size is None else index_size,
        )
        check_dtype(dtype)
        blocks = max(capacity // block_size, 1)
        recent = KVCache.empty(batch, key_value_heads, key_size, value_size, sliding_window, dtype)
        entries = (batch, key_value_heads, blocks)
        return cls(
            recent.keys,
            recent.values,
            recent.forgotten,
            jnp.zeros((*entries, key_size), dtype),
            jnp.zeros((*entries, value_size), dtype),
            None if index_size is None else jnp.zeros((batch, blocks, index_size), dtype),
            recent.length,
            block_size,
        )

    def free(self, rows: Int[Array, "rows"] | Bool[Array, "batch"]) -> "CompressedCache":
        """Forget the tokens of some rows, so that other sequences can take their place."""
        return replace(super().free(rows), forgotten=cleared(self.forgotten, rows))

    @property
    def capacity(self) -> int:
        """Tokens for which there is room: those of an unfinished block need no entry."""
        return (self.block_keys.shape[2] + 1) * self.block_size - 1

    @property
    def recent(self) -> KVCache:
        """The window as a cache of its own."""
        return KVCache(self.keys, self.values, self.length, self.forgotten)

    def added(self, length: Int[Array, "batch"], **entries: Array) -> "CompressedCache":
        """The same rows with other entries, and so many tokens."""
        return replace(self, length=length, **entries)

    def with_recent(self, recent: KVCache) -> "CompressedCache":
        """The same entries with another window."""
        return replace(self, keys=recent.keys, values=recent.values, forgotten=recent.forgotten)
