r"""Attention of a whole sequence to the tiles that a selector keeps.

A tile is a block of queries against a block of keys; a selector says which tiles each head keeps,
and may add single keys that every query of the head sees (the columns). Over what is kept, I,

    o_t = sum_{s in I_t} exp(x_ts - lse_t) v_s      lse_t = log sum_{s in I_t} exp(x_ts)

so the mass that was kept is exp(lse_t - lse of all keys). A tile costs nothing unless it is kept:
each block of queries runs through its own list of tiles with the sums of an online softmax. The
length of that list is traced, so another selection compiles nothing; there is no gradient.
"""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from toolkit._checks import check_shape, checked
from toolkit._pytrees import register_dataclass
from toolkit.attention._attend import fixed_scale
from toolkit.attention._checks import check_count
from toolkit.attention._shapes import (
    HeadGates,
    HeadValues,
    OtherKeys,
    OtherValues,
    Queries,
    TokenCount,
)
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.sparse.train.spread import each

_AT_ONCE = 512  # keys that one turn of the loop multiplies

TileMap = Bool[Array, "batch heads query_blocks key_blocks"]
TileMasses = Float[Array, "batch heads query_blocks key_blocks"]


@register_dataclass
@dataclass(frozen=True)
class Tiles:
    """Which tiles each head keeps, and which single keys besides.

    Attributes:
        kept: whether a tile is kept [batch, heads, query_blocks, key_blocks].
        columns: indices of keys that all queries see [batch, heads, count]; a number that is no
            index of a key stands for none. None without any.
        query_block: queries of a tile.
        key_block: keys of a tile.

    Example:
        >>> Tiles(jnp.ones((1, 2, 4, 8), bool), None, query_block=64, key_block=32).kept.shape
        (1, 2, 4, 8)
    """

    kept: TileMap
    columns: Int[Array, "batch heads count"] | None
    query_block: int = field(metadata={"static": True})
    key_block: int = field(metadata={"static": True})


@checked
def attend_tiles(
    q: Queries, k: OtherKeys, v: OtherValues, tiles: Tiles, *,
    is_causal: bool = True, scale: float | None = None,
) -> tuple[HeadValues, HeadGates]:  # fmt: skip
    """Exact softmax attention over the tiles that are kept.

        o_t = sum_{s in I_t} exp(x_ts - lse_t) v_s        lse_t = log sum_{s in I_t} exp(x_ts)

    Args:
        q: queries [batch, time, heads, key].
        k: keys [batch, key_time, key_value_heads, key]; heads is a multiple of key_value_heads.
        v: values [batch, key_time, key_value_heads, value].
        tiles: what each head keeps.
        is_causal: whether a query sees no later key; then key_time must be time.
        scale: factor of the scores; None for key ** -0.5.

    Returns:
        The output [batch, time, heads, value], 0 where nothing is kept, and the logarithm of the
        sum of exponentials [batch, time, heads].

    Cost:
        2 (key + value) FLOPs per pair of a query and a key in a kept tile.

    Source: FlashAttention-2 (arXiv:2307.08691) for the running sums.

    Example:
        >>> q = k = v = jnp.ones((1, 6, 2, 4))
        >>> tiles = Tiles(jnp.ones((1, 2, 3, 3), bool), None, query_block=2, key_block=2)
        >>> out, lse = attend_tiles(q, k, v, tiles)
        >>> out.shape, lse.shape
        ((1, 6, 2, 4), (1, 6, 2))
    """
    check_lengths(q, k, is_causal=is_causal)
    check_tiles(tiles, q, k)
    q, scale = fixed_scale(q, scale)
    return _attend(q, k, v, tiles, is_causal, scale)


def check_lengths(q: Queries, k: OtherKeys, *, is_causal: bool = True) -> None:
    """Refuse causal attention with different numbers of queries and keys."""
    if is_causal and k.shape[1] != q.shape[1]:
        raise ValueError(
            "q and k must be as long for causal attention; "
            f"got {q.shape[1]} and {k.shape[1]} tokens."
        )


def check_tiles(tiles: Tiles, q: Queries, k: OtherKeys) -> None:
    """Refuse a map without a place for every tile."""
    for name in ("query_block", "key_block"):
        check_count(f"tiles.{name}", getattr(tiles, name), 1)
    blocks = -(-q.shape[1] // tiles.query_block), -(-k.shape[1] // tiles.key_block)
    wanted = (*tiles.kept.shape[:2], *blocks)
    check_shape("tiles.kept", tiles.kept, wanted, "batch heads query_blocks key_blocks")


def by_head(x: Array, heads: int) -> Array:
    """[batch, time, key_value_heads, size] as [batch * heads, time, size], one per query head."""
    batch, time, groups, size = x.shape
    x = jnp.repeat(x.swapaxes(1, 2), heads // groups, axis=1)
    return x.reshape(batch * heads, time, size)


def in_blocks(x: Array, block: int) -> Array:
    """[time, ...] as [blocks, block, ...], the last block padded with zeros."""
    x = jnp.pad(x, [(0, -x.shape[0] % block)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(-1, block, *x.shape[1:])


@partial(jax.jit, static_argnums=(4, 5))
def _attend(q, k, v, tiles, is_causal, scale):
    batch, time, heads, _ = q.shape
    value, keys = v.shape[-1], k.shape[1]
    block, size = tiles.query_block, tiles.key_block
    precise = accumulator(q.dtype)
    at_once = max(1, _AT_ONCE // size)

    def head(q, k, v, kept, columns):
        key_blocks, value_blocks = in_blocks(k, size), in_blocks(v, size)

        def rows(q, first, kept):
            """One block of queries, the first of which has the index `first`."""
            query = first + jnp.arange(block, dtype=jnp.int32)[:, None]

            def add(sums, k, v, key, is_kept):
                seen = is_kept[None] & (key < keys)[None]
                seen &= (key[None] <= query) if is_causal else True
                scores = scale * jnp.einsum("qd,sd->qs", q, k, preferred_element_type=precise)
                return _add(sums, jnp.where(seen, scores, -jnp.inf), v)

            sums = (
                jnp.full((block, 1), -jnp.inf, precise),
                jnp.zeros((block, 1), precise),
                jnp.zeros((block, value), precise),
            )
            if columns is not None:
                is_key = (columns >= 0) & (columns < keys)
                at = jnp.where(is_key, columns, 0)
                sums = add(sums, k[at], v[at], at, is_key & ~kept[at // size])
            count = kept.sum(dtype=jnp.int32)
            # Kept tiles first, in their order; the list is read `at_once` tiles at a time.
            order = jnp.argsort(~kept, stable=True).astype(jnp.int32)
            order = jnp.pad(order, (0, -order.size % at_once))

            def turn(index, sums):
                place = index * at_once + jnp.arange(at_once, dtype=jnp.int32)
                tile = lax.dynamic_slice(order, (index * at_once,), (at_once,))
                key = (tile[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]).reshape(-1)
                k, v = (x[tile].reshape(-1, x.shape[-1]) for x in (key_blocks, value_blocks))
                return add(sums, k, v, key, jnp.repeat(place < count, size))

            largest, total, out = lax.fori_loop(0, -(-count // at_once), turn, sums)
            out = out / jnp.where(total == 0, 1, total)
            return out, (largest + jnp.log(total))[:, 0]

        first = block * jnp.arange(kept.shape[0], dtype=jnp.int32)
        out, lse = each(rows, in_blocks(q, block), first, kept)
        return out.reshape(-1, value)[:time], lse.reshape(-1)[:time]

    maps = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (tiles.kept, tiles.columns))
    out, lse = each(head, by_head(q, heads), by_head(k, heads), by_head(v, heads), *maps)
    out = out.reshape(batch, heads, time, value).swapaxes(1, 2).astype(q.dtype)
    return out, lse.reshape(batch, heads, time).swapaxes(1, 2)


def _add(sums, scores, v):
    """The sums of an online softmax, with the scores and values of more keys."""
    largest, total, out = sums
    new = jnp.maximum(largest, scores.max(axis=-1, keepdims=True))
    base = jnp.where(new == -jnp.inf, 0, new)
    old, weights = jnp.exp(largest - base), jnp.exp(scores - base)
    added = jnp.einsum("qs,sv->qv", weights.astype(v.dtype), v, preferred_element_type=out.dtype)
    return new, old * total + weights.sum(axis=-1, keepdims=True), old * out + added


@checked
def tile_masses(
    q: Queries, k: OtherKeys, lse: HeadGates, *,
    query_block: TokenCount = 64, key_block: TokenCount = 64, is_causal: bool = True,
    scale: float | None = None,
) -> TileMasses:  # fmt: skip
    """Softmax weight in every tile, summed over its pairs of a query and a key.

        W_ij = sum_{t in block i} sum_{s in block j} exp(x_ts - lse_t)

    Arguments as `attend_tiles`, and:

    Args:
        lse: logarithms of the sums of exponentials [batch, time, heads], as attention to all keys
            gives them; those of an earlier diffusion step are close enough.
        query_block: queries of a tile.
        key_block: keys of a tile.

    Returns:
        Masses [batch, heads, query_blocks, key_blocks]; those of a row of tiles add up to its
        number of queries.

    Cost:
        2 key FLOPs per pair: half of attention.

    Source: AdaSpa, arXiv:2502.21079, algorithm 1, whose p <- Log(qk - LSE) is exp.

    Example:
        >>> q = k = jnp.ones((1, 4, 2, 4))
        >>> lse = jnp.log(jnp.full((1, 4, 2), 4.0)) + 2
        >>> tile_masses(q, k, lse, query_block=2, key_block=2, is_causal=False)[0, 0].tolist()
        [[1.0, 1.0], [1.0, 1.0]]
    """
    check_lengths(q, k, is_causal=is_causal)
    query_block, key_block = min(query_block, q.shape[1]), min(key_block, k.shape[1])
    q, scale = fixed_scale(q, scale)
    return _masses(q, k, lse, query_block, key_block, is_causal, scale)


@partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _masses(q, k, lse, query_block, key_block, is_causal, scale):
    batch, time, heads, _ = q.shape
    precise = accumulator(q.dtype)
    key = jnp.arange(-(-k.shape[1] // key_block) * key_block, dtype=jnp.int32)[None]

    def head(q, k, lse):
        k = in_blocks(k, key_block).reshape(-1, k.shape[1])
        index = jnp.arange(time, dtype=jnp.int32)

        def rows(q, lse, query):
            scores = scale * jnp.einsum("qd,sd->qs", q, k, preferred_element_type=precise)
            seen = (key < length) & ((key <= query[:, None]) if is_causal else True)
            weights = jnp.exp(jnp.where(seen, scores - lse[:, None], -jnp.inf))
            return weights.sum(axis=0).reshape(-1, key_block).sum(axis=1)

        # A query that pads the last block weighs nothing: its lse is infinite.
        lse = jnp.pad(lse, (0, -time % query_block), constant_values=jnp.inf)
        blocks = (in_blocks(q, query_block), lse.reshape(-1, query_block))
        return each(rows, *blocks, in_blocks(index, query_block))

    length = k.shape[1]
    lse = lse.swapaxes(1, 2).reshape(batch * heads, time).astype(precise)
    masses = each(head, by_head(q, heads), by_head(k, heads), lse)
    return masses.reshape(batch, heads, *masses.shape[1:])


def token_mask(tiles: Tiles, time: int, key_time: int, *, is_causal: bool) -> Array:
    """What is kept, pair by pair [batch, heads, time, key_time]: the oracle of `attend_tiles`."""
    mask = jnp.repeat(jnp.repeat(tiles.kept, tiles.query_block, 2), tiles.key_block, 3)
    mask = mask[:, :, :time, :key_time]
    index = jnp.arange(key_time)
    if tiles.columns is not None:
        is_column = (tiles.columns[..., None] == index[None, None, None]).any(axis=2)
        mask |= is_column[:, :, None]
    seen = index[None] <= jnp.arange(time)[:, None]
    return mask & seen[None, None] if is_causal else mask
