"""Tiles of one key head's scores: which are walked, what they see, what adds to them.

A row of scores is one query of one query head; heads that share a key head lie side by side, in
the order (time, group).

What costs time to compile are kernels, not lines: XLA's CPU backend spends some 20 ms on each that
is not like another, whatever its size, and nothing on products. So one loop walks over all tiles of
all heads, arrays of tokens have one layout, [heads, rows, size], and all are cut alike.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

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
    def rows(self) -> int:
        """Rows of a tile."""
        return self.query_tile * self.group


def largest_tile(keys: int) -> int:
    """Side of the largest tile, in keys or rows.

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
    return array if widths[axis] == (0, 0) else jnp.pad(array, widths, constant_values=value)


class Tiles(NamedTuple):
    """The tiles of the heads whose arrays are walked over.

    Attributes:
        keys: of a sequence.
        bias, mask: padded to whole tiles.
        slopes: of ALiBi, [key_heads, rows] of any query tile.
        count: (query tiles, key tiles) of a head.
        first_head: number of the first of the heads among those of all sequences.
        is_share: whether other heads are walked over side by side with these.
    """

    options: Options
    tiling: Tiling
    context: Context
    keys: int
    bias: Float[Array, "#batch #heads #query_time #key_time"] | None
    slopes: Float[Array, "key_heads rows"] | None
    count: tuple[int, int]
    first_head: Array | int = 0
    is_share: bool = False

    def walk(self, heads: int, step: Callable[..., Any], carry: Any) -> Any:
        """Fold `step(tile, carry)` over the tiles of which any query sees any key.

        A query tile that sees none has one. Tiles of which all queries see all keys are masked like
        the others: a mask costs little beside the products, and a loop of their own would be
        compiled and traced besides. The tile's number, (head, query tile, key tile) in this order,
        is all that the loop counts.
        """
        end = heads * self.count[0] * self.count[1]
        if end == 1:
            return step(self.at(jnp.uint32(0)), carry)

        def body(state):
            number, carry = state
            tile = self.at(number)
            carry = step(tile, carry)
            row = lax.div(number, jnp.uint32(self.count[1])) + 1
            is_last = (tile.j + 1) * self.tiling.key_tile >= self._reach(tile.head, tile.i)[1]
            return lax.select(is_last, self._entry(row), number + 1), carry

        # In `shard_map` the first number varies over the axes that the others do.
        stop = self._reach(jnp.int32(0), jnp.int32(0))[1]
        first = self._entry(jnp.uint32(0)) + jnp.zeros_like(stop, jnp.uint32)
        return lax.while_loop(lambda state: state[0] < end, body, (first, carry))[1]

    def at(self, number: Array) -> "Tile":
        """The tile of a number, which is unsigned: dividing it is cheaper."""
        down, across = (jnp.uint32(count) for count in self.count)
        row = lax.div(number, across)
        places = lax.div(row, down), lax.rem(row, down), lax.rem(number, across)
        return Tile(self, *(place.astype(jnp.int32) for place in places))

    def _entry(self, row: Array) -> Array:
        """Number of the first tile that is seen of a row of tiles."""
        tile = self.at(row * jnp.uint32(self.count[1]))
        first = lax.div(self._reach(tile.head, tile.i)[0], jnp.int32(self.tiling.key_tile))
        first = jnp.minimum(first, jnp.int32(self.count[1]) - 1).astype(jnp.uint32)
        return row * jnp.uint32(self.count[1]) + first

    def _reach(self, head: Array, i: Array) -> tuple[Array, Array]:
        """The first key that a query tile sees, and the end of its keys."""
        query_tile, (left, right) = self.tiling.query_tile, self.context.mask.window
        query_start, first, stop = self.context.mask.places(self.keys)
        if right is not None:
            stop = jnp.minimum(stop, query_start + (i + 1) * query_tile + right)
        if left is not None:
            first = jnp.maximum(first, query_start + i * query_tile - left)
        # Heads side by side are walked over together: a loop of which each ends at its own time
        # would select among all that it carries.
        if self.is_share:
            return first.min(), stop.max()
        return self.of_sequence(first, head), self.of_sequence(stop, head)

    def of_sequence(self, x: Array, head: Array) -> Array:
        """What a head's sequence has of numbers for all, or one per sequence."""
        if x.ndim == 0:
            return x
        entry = lax.div(self.first_head + head, jnp.int32(self.tiling.key_heads))
        return lax.dynamic_index_in_dim(x, entry, keepdims=False)


class Tile(NamedTuple):
    """One tile: query tile i and key tile j of a head, counted from the first of `tiles`."""

    tiles: Tiles
    head: Array
    i: Array
    j: Array

    def of_queries(self, array: Shaped[Array, "heads rows *size"]) -> Shaped[Array, "tile *size"]:
        """Its rows of an array."""
        return _part(array, *self._rows(array))[0]

    def of_keys(self, array: Shaped[Array, "heads keys size"]) -> Shaped[Array, "tile size"]:
        """Its keys of an array."""
        width = self.tiles.tiling.key_tile
        start = self.head, self.j * width, jnp.int32(0)
        return _part(array, start, (1, width, array.shape[2]))[0]

    def put(self, array: Array, new: Array) -> Array:
        """The array with other rows."""
        return _replaced(array, new[None], self._rows(array)[0])

    def add_to_queries(self, array: Array, new: Array, factor: Array | None = None) -> Array:
        """The array with its rows multiplied by a factor each, and something added."""
        start, sizes = self._rows(array)
        old = _part(array, start, sizes)
        if factor is not None:
            old = factor.reshape(1, -1, *(1,) * (old.ndim - 2)) * old
        return _replaced(array, old + new[None], start)

    def add_to_keys(self, array: Float[Array, "heads size keys"], new: Array) -> Array:
        """The array with something added to its keys, which are the last axis here."""
        start = self.head, jnp.int32(0), self.j * self.tiles.tiling.key_tile
        return _replaced(array, _part(array, start, (1, *new.shape)) + new[None], start)

    def visible(self) -> Array:
        """Which keys (columns) each row sees."""
        tiles, mask = self.tiles, self.tiles.context.mask
        ends = (self._own(x) for x in mask.places(tiles.keys)[1:])
        visible = mask.sees(*self._positions(), *ends)
        if mask.documents is not None:
            query, key = (self._own(x) for x in mask.documents)
            rows, columns = tiles.tiling.rows, tiles.tiling.key_tile
            query = _part(query, (self.i * rows,), (rows,))
            key = _part(key, (self.j * columns,), (columns,))
            visible &= query[:, None] == key[None, :]
        if mask.allowed is not None:
            visible &= self._tile_of(mask.allowed)
        if tiles.bias is not None:
            visible &= self._tile_of(tiles.bias) != -jnp.inf
        return visible

    def scores(self, products: Array, *, is_backward: bool = False):
        """The scores, and the cap's slope at them (None without a cap)."""
        tiles = self.tiles
        cap, scores = tiles.options.logits_soft_cap, capped(products, tiles.options)
        slope = None if cap is None else 1 - (scores / cap) ** 2
        if tiles.bias is not None:
            bias = self._tile_of(tiles.bias).astype(scores.dtype)
            # The backward pass works on finite scores; rows that saw others have NaN in lse.
            scores = scores + (jnp.where(bias < jnp.inf, bias, 0) if is_backward else bias)
        if tiles.slopes is not None:
            number = lax.rem(tiles.first_head + self.head, jnp.int32(tiles.tiling.key_heads))
            slopes = lax.dynamic_index_in_dim(tiles.slopes, number, keepdims=False)
            scores = scores - slopes[:, None] * self.distance(scores.dtype)
        return scores, slope

    def distance(self, dtype: Any) -> Array:
        """|query - key|."""
        query, key = self._positions()
        return jnp.abs(query - key).astype(dtype)

    def dropped(self, weights: Array) -> Array:
        """Weights after dropout, or what reaches them on the way back."""
        options, tiling = self.tiles.options, self.tiles.tiling
        if not options.dropout_rate:
            return weights
        row = jnp.arange(tiling.rows, dtype=jnp.int32)[:, None]
        keep = kept(
            self.tiles.context.dropout_key,
            options.dropout_rate,
            self._entry().reshape(1, 1),
            self._first_head() + row % tiling.group,
            self.i * tiling.query_tile + row // tiling.group,
            self._keys()[None],
        )
        return jnp.where(keep, weights / (1 - options.dropout_rate), 0)

    def add_to_bias(self, d_bias: Array, d_scores: Array) -> Array:
        """The bias's gradient with that of a tile of scores added."""
        start, sizes = self._place(d_bias)
        tiling = self.tiles.tiling
        d_scores = d_scores.reshape(tiling.query_tile, tiling.group, -1).swapaxes(0, 1)
        shared = tuple(axis for axis, size in enumerate(sizes[1:]) if size == 1)
        d_tile = d_scores.sum(axis=shared, keepdims=True)[None]
        return _replaced(d_bias, _part(d_bias, start, sizes) + d_tile, start)

    def _own(self, x: Array) -> Array:
        return self.tiles.of_sequence(x, self.head)

    def _entry(self) -> Array:
        return lax.div(self.tiles.first_head + self.head, jnp.int32(self.tiles.tiling.key_heads))

    def _first_head(self) -> Array:
        key_heads = self.tiles.tiling.key_heads
        number = lax.rem(self.tiles.first_head + self.head, jnp.int32(key_heads))
        return number * self.tiles.tiling.group

    def _rows(self, array: Array) -> tuple[tuple, tuple[int, ...]]:
        """Where its rows of an array lie, and their sizes."""
        width, rest = self.tiles.tiling.rows, array.shape[2:]
        return (self.head, self.i * width, *(jnp.int32(0) for _ in rest)), (1, width, *rest)

    def _positions(self) -> tuple[Array, Array]:
        tiling = self.tiles.tiling
        row = lax.div(jnp.arange(tiling.rows, dtype=jnp.int32), jnp.int32(tiling.group))
        start = self._own(self.tiles.context.mask.places(self.tiles.keys)[0])
        return (start + self.i * tiling.query_tile + row)[:, None], self._keys()[None]

    def _keys(self) -> Array:
        width = self.tiles.tiling.key_tile
        return self.j * width + jnp.arange(width, dtype=jnp.int32)

    def _place(self, array: Array):
        """Where a tile lies in what broadcasts to [batch, heads, queries, keys], and its sizes."""
        tiling = self.tiles.tiling
        wanted = (1, tiling.group, tiling.query_tile, tiling.key_tile)
        sizes = tuple(min(size, tile) for size, tile in zip(array.shape, wanted, strict=True))
        # An index past an axis of 1 is moved back to 0.
        start = (
            self._entry(),
            self._first_head(),
            self.i * tiling.query_tile,
            self.j * tiling.key_tile,
        )
        return start, sizes

    def _tile_of(self, array: Array) -> Array:
        """A tile [rows, keys or 1] of what broadcasts to [batch, heads, queries, keys]."""
        tiling = self.tiles.tiling
        found = _part(array, *self._place(array))[0].swapaxes(0, 1)
        wide = (tiling.query_tile, tiling.group, found.shape[2])
        return jnp.broadcast_to(found, wide).reshape(-1, found.shape[2])


# Places are never negative; JAX would make sure of it for each.
def _part(array: Array, start: tuple[Array, ...], sizes: tuple[int, ...]) -> Array:
    return lax.dynamic_slice(array, start, sizes, allow_negative_indices=False)


def _replaced(array: Array, part: Array, start: tuple[Array, ...]) -> Array:
    return lax.dynamic_update_slice(array, part, start, allow_negative_indices=False)
