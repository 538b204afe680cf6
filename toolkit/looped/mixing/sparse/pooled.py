"""What layers that pool blocks of tokens have in common: a pooled projection, and their cache."""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from toolkit.attention import block_pooling
from toolkit.attention._caches import cleared, picked
from toolkit.looped.layers import linear


class PooledCache(NamedTuple):
    """The decode-time state of a layer that also needs rows of the last tokens, as pooling does."""

    state: Any  # the mixer's cache, which knows its `length`
    # those rows, of which the next blocks are made; a pytree whose arrays begin with batch
    tail: Any

    @property
    def length(self) -> Int[Array, "batch"]:
        """Tokens of each row's document so far."""
        return self.state.length

    def free(self, rows: Int[Array, "rows"] | Bool[Array, "batch"]) -> "PooledCache":
        """Clear some rows for other sequences."""
        return jax.tree.map(lambda array: cleared(array, rows), self)

    def truncate(self, lengths: Int[Array, "batch"]) -> NoReturn:
        """Refused: the rows of the last tokens are gone once others follow; see `restore`."""
        raise TypeError(
            "a cache of rows of the last tokens cannot take tokens back; keep the cache before "
            "they were added and call cache.restore([before], which)."
        )

    def restore(
        self, earlier: Sequence["PooledCache"], which: Int[Array, "batch"]
    ) -> "PooledCache":
        """Go back to an earlier state, row b to that of earlier[which[b]]."""
        return jax.tree.map(lambda *arrays: picked(arrays, which), *earlier)


class Compressor(nnx.Module):
    """Rows of blocks: c_b = RMSNorm( sum_j softmax_j(x_j W_g + bias_j) (x_j W) ).

    Attributes:
        series: 2 where a block also pools rows of the block before, by a projection of their own.

    Source: DeepSeek-V4 technical report (2026), section 2.3.
    """

    def __init__(self, config: Any, size: int, block_size: int, series: int, rngs: nnx.Rngs):
        width, dtype, std = config.width, config.compute_dtype, config.width**-0.5
        self.value = linear(width, series * size, dtype, rngs, std=std)
        self.gate = linear(width, series * size, dtype, rngs, std=std)
        self.bias = nnx.Param(jnp.zeros((block_size, series * size)))
        self.norm = nnx.RMSNorm(size, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)
        self.block_size, self.series = block_size, series

    @classmethod
    def empty_tail(cls, batch: int, size: int, block_size: int, series: int, dtype: Any) -> Array:
        """What it keeps before the first token."""
        return jnp.zeros((batch, series * block_size - 1, 2 * series * size), dtype)

    def __call__(
        self, x: Float[Array, "batch time width"], past: dict[str, Any]
    ) -> tuple[Float[Array, "batch time size"], Array]:
        """The row of every block in place of its last token, and the new tail."""
        how = {"block_size": self.block_size, "series": self.series}
        rows, tail = block_pooling(self.value(x), self.gate(x), self.bias[...], **how, **past)
        return self.norm(rows), tail
