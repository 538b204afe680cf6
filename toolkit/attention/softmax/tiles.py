"""Tiles of one key head's scores: which are walked, what they see, what adds to them.

Scores are stored keys x queries. Query heads that share a key head lie side by side in the columns,
in the order (time, group).
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from toolkit.attention._attend import Window
from toolkit.attention._shapes import known
from toolkit.attention.softmax.scores import Context, Options, capped, kept


class Tiling(NamedTuple):
    """How the matrix is cut; fixed when compiling.

    Attributes:
        query_tile: queries in a tile, counted in time steps.
        key_tile: keys in a tile.
        group: query heads that share one key head.
        key_heads: key heads of a sequence.
        at_once: all heads side by side, also on a CPU.
    """

    query_tile: int
    key_tile: int
    group: int
    key_heads: int
    at_once: bool

    @property
    def columns(self) -> int:
        """Columns of a tile."""
        return self.query_tile * self.group


def largest_tile(keys: int) -> int:
    """Side of the largest tile, in keys or columns.

    On one core 256 x 256 float32 scores, 256 kB, stay in its L2 cache. XLA spreads one product over
    several cores only from some 16 MFLOP on, which 512 x 512 scores reach. In `shard_map` it is the
    devices that share the cores. For a few tokens narrower tiles skip more of what is not seen.
    """
    if known(keys) <= 256:
        return 128
    is_linux = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1
    return 512 if cores > 1 and not jax.sharding.get_abstract_mesh().manual_axes else 256


def tiling(
    time: int, keys: int, heads: int, key_heads: int, window: Window, largest: int | None = None
) -> Tiling:
    """How `blockwise` cuts the scores, into tiles no larger than `largest` if given."""
    largest, (left, right) = largest or largest_tile(keys), window
    if left is not None and right is not None:
        # In a window, narrower tiles waste less work on keys outside it.
        largest = min(largest, max(64, left + right + 1))
    group = heads // key_heads
    query_tile, key_tile = even_tile(time, max(largest // group, 16)), even_tile(keys, largest)
    return Tiling(query_tile, key_tile, group, key_heads, at_once=False)


def even_tile(time: int, largest: int) -> int:
    """Split `time` in as few equal tiles as `largest` allows, a multiple of 16 wide."""
    if not isinstance(time, int):  # of any length: not one tile of all of it either
        return max(16, largest // 16 * 16) if isinstance(largest, int) else 128
    tiles = -(-time // largest)
    return -(-time // (16 * tiles)) * 16


def pad(array: Array, tile: int, *, axis: int, value: float = 0) -> Array:
    """Lengthen `axis` to a whole number of tiles."""
    widths = [(0, 0)] * array.ndim
    size = array.shape[axis]
    widths[axis] = (0, -(-size // tile) * tile - size)
    return jnp.pad(array, widths, constant_values=value)


def tile(array: Array, number: Array, width: int, axis: int = -1) -> Array:
    """Tile `number` of an array."""
    return lax.dynamic_slice_in_dim(array, number * width, width, axis)


def add_to_tile(array: Array, number: Array, addition: Array, axis: int) -> Array:
    """The array with something added to one tile of it."""
    width = addition.shape[axis]
    total = tile(array, number, width, axis) + addition
    return lax.dynamic_update_slice_in_dim(array, total, number * width, axis)


class HeadTiles(NamedTuple):
    """Tiles (i, j) of one key head: query tile i, key tile j.

    Attributes:
        keys: of a sequence.
        head: number of the key head among those of all sequences.
        bias, mask: padded to whole tiles.
        slopes: of ALiBi, [columns] of any query tile.
    """

    options: Options
    tiling: Tiling
    context: Context
    keys: int
    head: Array
    bias: Float[Array, "#batch #heads #query_time #key_time"] | None
    slopes: Float[Array, "columns"] | None

    @property
    def entry(self) -> Array:
        """Number of the sequence."""
        return self.head // self.tiling.key_heads

    @property
    def places(self) -> tuple[Array, ...]:
        """The first query, the first key and the end of the keys of the sequence."""
        places = self.context.mask.places(self.keys)
        return tuple(x if x.ndim == 0 else x[self.entry] for x in places)

    def walk(self, i: Array, step: Callable[..., Any], carry: Any) -> Any:
        """Fold `step(j, carry)` over the key tiles that query tile `i` sees any of.

        Tiles of which all queries see all keys are masked like the others: a mask costs little
        beside the products, and a loop of their own would be compiled and traced besides.
        """
        query_tile, key_tile, mask = self.tiling.query_tile, self.tiling.key_tile, self.context.mask
        query_start, first, stop = self.places
        left, right = mask.window
        if right is not None:
            last_query = query_start + (i + 1) * query_tile - 1
            stop = jnp.minimum(stop, last_query + right + 1)
        if left is not None:
            first = jnp.maximum(first, query_start + i * query_tile - left)
        return lax.fori_loop(first // key_tile, -(-stop // key_tile), step, carry)

    def visible(self, i: Array, j: Array) -> Array:
        """Which keys (rows) each query column sees."""
        mask = self.context.mask
        visible = mask.sees(*self._positions(i, j), *self.places[1:])
        if mask.documents is not None:
            query, key = (x[self.entry] for x in mask.documents)
            query, key = tile(query, i, self.tiling.columns), tile(key, j, self.tiling.key_tile)
            visible &= key[:, None] == query[None, :]
        if mask.allowed is not None:
            visible &= self._tile_of(mask.allowed, i, j)
        if self.bias is not None:
            visible &= self._tile_of(self.bias, i, j) != -jnp.inf
        return visible

    def scores(self, i: Array, j: Array, products: Array, *, is_backward: bool = False):
        """The scores, and the cap's slope at them (None without a cap)."""
        cap, scores = self.options.logits_soft_cap, capped(products, self.options)
        slope = None if cap is None else 1 - (scores / cap) ** 2
        if self.bias is not None:
            bias = self._tile_of(self.bias, i, j).astype(scores.dtype)
            # The backward pass works on finite scores; rows that saw others have NaN in lse.
            scores = scores + (jnp.where(bias < jnp.inf, bias, 0) if is_backward else bias)
        if self.slopes is not None:
            scores = scores - self.slopes[None, :] * self.distance(i, j, scores.dtype)
        return scores, slope

    def distance(self, i: Array, j: Array, dtype: Any) -> Array:
        """|query - key| of a tile."""
        query, key = self._positions(i, j)
        return jnp.abs(query - key).astype(dtype)

    def dropped(self, i: Array, j: Array, weights: Array) -> Array:
        """Weights after dropout, or what reaches them on the way back."""
        if not self.options.dropout_rate:
            return weights
        tiling = self.tiling
        column = jnp.arange(tiling.columns, dtype=jnp.int32)[None, :]
        keep = kept(
            self.context.dropout_key,
            self.options.dropout_rate,
            self.entry.reshape(1, 1),
            self._first_head() + column % tiling.group,
            i * tiling.query_tile + column // tiling.group,
            self._keys(j),
        )
        return jnp.where(keep, weights / (1 - self.options.dropout_rate), 0)

    def add_to_bias(self, d_bias: Array, i: Array, j: Array, d_scores: Array) -> Array:
        """The bias's gradient with that of a tile of scores added."""
        start, sizes = self._place(d_bias, i, j)
        d_scores = d_scores.reshape(-1, self.tiling.query_tile, self.tiling.group)
        shared = tuple(a for a, size in zip((0, 1, 2), sizes[:0:-1], strict=True) if size == 1)
        d_tile = d_scores.sum(axis=shared, keepdims=True).transpose(2, 1, 0)[None]
        return lax.dynamic_update_slice(
            d_bias, lax.dynamic_slice(d_bias, start, sizes) + d_tile, start
        )

    def _first_head(self) -> Array:
        return self.head % self.tiling.key_heads * self.tiling.group

    def _positions(self, i: Array, j: Array) -> tuple[Array, Array]:
        column = jnp.arange(self.tiling.columns, dtype=jnp.int32) // self.tiling.group
        query = self.places[0] + i * self.tiling.query_tile + column
        return query[None, :], self._keys(j)

    def _keys(self, j: Array) -> Array:
        width = self.tiling.key_tile
        return (j * width + jnp.arange(width, dtype=jnp.int32))[:, None]

    def _place(self, array: Array, i: Array, j: Array):
        """Where a tile lies in what broadcasts to [batch, heads, queries, keys], and its sizes."""
        tiling = self.tiling
        wanted = (1, tiling.group, tiling.query_tile, tiling.key_tile)
        sizes = tuple(min(size, tile) for size, tile in zip(array.shape, wanted, strict=True))
        # An index past an axis of 1 is moved back to 0.
        start = (self.entry, self._first_head(), i * tiling.query_tile, j * tiling.key_tile)
        return start, sizes

    def _tile_of(self, array: Array, i: Array, j: Array) -> Array:
        """A tile [keys or 1, columns] of what broadcasts to [batch, heads, queries, keys]."""
        found = lax.dynamic_slice(array, *self._place(array, i, j))[0].transpose(2, 1, 0)
        wide = (found.shape[0], self.tiling.query_tile, self.tiling.group)
        return jnp.broadcast_to(found, wide).reshape(found.shape[0], -1)
