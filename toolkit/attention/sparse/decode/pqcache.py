"""PQCache: a key is the nearest of a few centroids in each part of its channels.

    q . k_i ~ sum_j q^(j) . c^(j)[code_ij]        asymmetric distance: the query is not rounded

Half of the budget goes to the most recent tokens, the other half to the tokens with the largest
sum, over the query heads of a group, of the softmax of these estimates. That softmax is over the
tokens that can be selected, as in the released code, so that the share of sinks and recent tokens,
which are always read, does not weaken a head's vote.

A token's codes are those of its nearest centroids. Centroids are recomputed whenever the number of
tokens has grown by half. The release keeps those of the prompt, which describe little after a short
prompt.

Two codes of up to eight bits are kept as one of 16, so that two parts cost one look-up in a table
of their sums.

Source: Zhang et al. (2025), arXiv:2407.12820.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt16

from toolkit.attention._checks import check_choice, check_count
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.sparse.decode.kmeans import k_means, nearest
from toolkit.attention.sparse.selector import HalfRecent, setting


class Codes(NamedTuple):
    """Centroids of every part, codes of the tokens, two parts in one number, and how many tokens
    there were when the centroids were computed."""

    centroids: Float[Array, "parts clusters size"]
    codes: UInt16[Array, "pairs capacity"]
    clustered: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PQCache(HalfRecent):
    """Rank tokens by their scores with product-quantised keys.

    Attributes:
        parts: the number of groups that the channels are cut into; even.
        bits: of a code; 2 ** bits centroids in every part, at most 8.
        iterations: of the k-means that finds them.
        growth: new tokens, as a share of the others, after which they are found again: the work of
            `build`, 2 iterations 2 ** bits key FLOPs for every slot of the cache.
    """

    sinks: int = setting(32)
    parts: int = setting(2)
    bits: int = setting(6)
    iterations: int = setting(10)
    growth: float = setting(0.5)

    group: ClassVar[str] = "sum"

    def __post_init__(self):
        super().__post_init__()
        check_count("parts", self.parts, 2)
        if self.parts % 2:
            raise ValueError(f"parts must be even; got {self.parts}.")
        check_choice("bits", self.bits, range(1, 9))
        check_count("iterations", self.iterations, 0)
        if not self.growth > 0:
            raise ValueError(f"growth must be above 0; got {self.growth}.")

    def build(self, keys: Array, values: Array, length) -> Codes:
        capacity, size = keys.shape
        if size % self.parts:
            raise ValueError(f"parts must divide the keys' size {size}; got {self.parts}.")
        split = keys.reshape(capacity, self.parts, -1).swapaxes(0, 1)
        position = jnp.arange(capacity)
        is_row = (position >= self.sinks) & (position < length)
        clusters = 2**self.bits
        settings = is_row, clusters, self.iterations, clusters
        centroids, codes = jax.vmap(lambda rows: k_means(rows, *settings))(split)
        clustered = jnp.asarray(length, jnp.int32)
        return Codes(centroids.astype(keys.dtype), self._join(codes), clustered)

    def is_due(self, index: Codes, length) -> Array:
        now, then = (x.astype(jnp.float32) - self.sinks for x in (length, index.clustered))
        return now >= (1 + self.growth) * jnp.maximum(then, 1)

    def refresh(self, index: Codes, keys: Array, values: Array, length) -> Codes:
        return self.build(keys, values, length)

    def update(self, index: Codes, k: Array, v: Array, position) -> Codes:
        rows = k.reshape(self.parts, 1, -1)
        code = jax.vmap(nearest, in_axes=(0, 0, None))(
            rows.astype(index.centroids.dtype), index.centroids, jnp.ones(2**self.bits, bool)
        )
        return index._replace(codes=index.codes.at[:, position].set(self._join(code)[:, 0]))

    def _join(self, codes: Array) -> Array:
        """Pairs of codes [parts, rows] as one number each."""
        return ((codes[::2] << self.bits) | codes[1::2]).astype(jnp.uint16)

    def scores(self, index: Codes, keys: Array, q: Array, length) -> Array:
        precise = accumulator(q.dtype)
        rows = q.reshape(q.shape[0], self.parts, -1)
        table = jnp.einsum("gpd,pcd->gpc", rows, index.centroids, preferred_element_type=precise)
        pairs = table[:, ::2, :, None] + table[:, 1::2, None, :]
        pairs = pairs.reshape(*pairs.shape[:2], -1)
        return jax.vmap(
            lambda table: jax.vmap(jnp.take)(table, index.codes.astype(jnp.int32)).sum(axis=0)
        )(pairs)

    def index_bytes(self, index: Codes, q: Array, length) -> Array:
        return length * (2 * index.codes.shape[0]) + index.centroids.size * q.dtype.itemsize
