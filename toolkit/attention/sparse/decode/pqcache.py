"""PQCache: a key is the nearest of a few centroids in each part of its channels.

    q . k_i ~ sum_j q^(j) . c^(j)[code_ij]        asymmetric distance: the query is not rounded

Half of the budget goes to the most recent tokens, the other half to the tokens with the largest
sum, over the query heads of a group, of the softmax of these estimates. That softmax is over the
tokens that can be selected, as in the released code, so that the share of sinks and recent tokens,
which are always read, does not weaken a head's vote.

A token's codes are those of its nearest centroids. Centroids are recomputed whenever the number of
tokens has grown by half. The release keeps those of the prompt, which describe little after a short
prompt.

Two codes of up to eight bits are kept as one number of 16, so that two parts cost one look-up in a
table of their sums. How many tokens have each number is counted: a group's votes are then found per
number, and looked up once per token. Counts that are as long as a short context are not worth it.

Source: Zhang et al. (2025), arXiv:2407.12820.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt16

from toolkit._pytrees import register_dataclass
from toolkit.attention._checks import check_choice, check_count
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.sparse.decode.kmeans import k_means, nearest_of_parts
from toolkit.attention.sparse.selector import HalfRecent, setting


class Codes(NamedTuple):
    """Centroids of every part, codes of the tokens, two parts in one number, how many tokens have
    each number, sinks left out, and how many there were when the centroids were computed."""

    centroids: Float[Array, "parts clusters size"]
    codes: UInt16[Array, "pairs capacity"]
    counts: Int[Array, "pairs numbers"]
    clustered: Int[Array, ""]


@register_dataclass
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
        position = jnp.arange(capacity)
        is_row = (position >= self.sinks) & (position < length)
        clusters = 2**self.bits
        centroids, codes = k_means(
            keys, self.sinks, length, clusters, self.iterations, clusters, self.parts
        )
        codes, clustered = self._join(codes), jnp.asarray(length, jnp.int32)
        none = jnp.zeros((codes.shape[0], 4**self.bits), jnp.int32)
        return Codes(centroids.astype(keys.dtype), codes, _add(none, codes, is_row), clustered)

    def is_due(self, index: Codes, length) -> Array:
        now, then = (x.astype(jnp.float32) - self.sinks for x in (length, index.clustered))
        return now >= (1 + self.growth) * jnp.maximum(then, 1)

    def refresh(self, index: Codes, keys: Array, values: Array, length) -> Codes:
        return self.build(keys, values, length)

    def update(self, index: Codes, k: Array, v: Array, position) -> Codes:
        rows = k.reshape(self.parts, 1, -1)
        is_used = jnp.ones(2**self.bits, bool)
        code = nearest_of_parts(rows.astype(index.centroids.dtype), index.centroids, is_used)
        code = self._join(code)
        counts = _add(index.counts, code, jnp.reshape(position >= self.sinks, 1))
        return index._replace(codes=index.codes.at[:, position].set(code[:, 0]), counts=counts)

    def _join(self, codes: Array) -> Array:
        """Pairs of codes [parts, rows] as one number each."""
        return ((codes[::2] << self.bits) | codes[1::2]).astype(jnp.uint16)

    def _tables(self, index: Codes, q: Array) -> Float[Array, "group pairs numbers"]:
        """What each number adds to a score."""
        precise = accumulator(q.dtype)
        rows = q.reshape(q.shape[0], self.parts, -1)
        table = jnp.einsum("gpd,pcd->gpc", rows, index.centroids, preferred_element_type=precise)
        pairs = table[:, ::2, :, None] + table[:, 1::2, None, :]
        return pairs.reshape(*pairs.shape[:2], -1)

    def scores(self, index: Codes, keys: Array, q: Array, length) -> Array:
        return jax.vmap(
            lambda table: jax.vmap(jnp.take)(table, index.codes.astype(jnp.int32)).sum(axis=0)
        )(self._tables(index, q))

    def _counts(self, index: Codes) -> bool:
        """Whether counts are read: they are few, and decide alone, as with one number per token."""
        return index.codes.shape[0] == 1 and index.codes.shape[1] >= 4 * index.counts.shape[1]

    def together(
        self, index: Codes, q: Array, length, start, recent_slots: int,
        reduce: Callable[[Array], Array],
    ) -> Array | None:  # fmt: skip
        if not self._counts(index):
            return None
        slots = min(recent_slots, index.codes.shape[1])
        first = jnp.clip(length - slots, 0, index.codes.shape[1] - slots)
        position = first + jnp.arange(slots, dtype=jnp.int32)
        is_recent = (position >= jnp.maximum(start, self.sinks)) & (position < length)
        recent = lax.dynamic_slice_in_dim(index.codes, first, slots, axis=1)
        counts = (index.counts + _add(jnp.zeros_like(index.counts), recent, is_recent, -1))[0]
        table = self._tables(index, q)[:, 0]
        total = jax.nn.logsumexp(table, axis=1, b=counts[None].astype(table.dtype), keepdims=True)
        votes = reduce(table - total)
        # A scatter is never fused: XLA would take these logarithms anew for every token.
        votes = jnp.zeros_like(votes).at[:, jnp.arange(votes.shape[1])].set(votes)
        return votes[:, index.codes[0].astype(jnp.int32)]

    def index_bytes(self, index: Codes, q: Array, length) -> Array:
        read = length * (2 * index.codes.shape[0]) + index.centroids.size * q.dtype.itemsize
        return read + 4 * index.counts.size * (q.shape[0] > 1 and self._counts(index))


def _add(counts: Array, codes: Array, is_row: Array, times: int = 1) -> Array:
    """Counts [pairs, numbers] with the tokens that are rows, counted so many times."""
    numbers = jnp.broadcast_to(is_row.astype(counts.dtype) * times, codes.shape)
    pair = jnp.arange(codes.shape[0], dtype=jnp.int32)[:, None]
    return counts.at[pair, codes.astype(jnp.int32)].add(numbers)
