r"""MInference: a pattern per head, found offline, and its places, found for every prompt (prefill).

A-shape: the first keys and the latest. Vertical-slash: the columns (keys) and the slashes
(distances t - s) with the most weight in the attention of the last queries to all keys. Pooled
blocks: the tiles in which the mean query and the mean key agree best.

`search_patterns` runs every candidate on a prompt, head by head, and names the one whose output
comes closest to that of all keys; `pattern_tiles` finds the places of the patterns so named.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from toolkit._checks import checked
from toolkit.attention._attend import fixed_scale, masked_softmax
from toolkit.attention._checks import check_choice, check_count
from toolkit.attention._shapes import OtherKeys, OtherValues, Queries, TokenCount
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.sparse.prefill.tiles import (
    Tiles,
    attend_tiles,
    by_head,
    check_lengths,
    in_blocks,
)
from toolkit.attention.sparse.selection import selected_indices, top_mask

_FORCED_COLUMNS, _FORCED_SLASHES = 30, 100


class Pattern(NamedTuple):
    """One kind of tiles and how many of them.

    Attributes:
        kind: "vertical-slash", "a-shape" or "pooled".
        vertical: columns that are kept, the first ones of an a-shape; key blocks per block of
            queries of "pooled".
        slash: slashes that are kept, the nearest ones of an a-shape; unused by "pooled".

    Example:
        >>> Pattern("a-shape", 100, 800).slash
        800
    """

    kind: str
    vertical: int
    slash: int = 0


PATTERNS = (
    Pattern("vertical-slash", 30, 800),
    Pattern("vertical-slash", 100, 750),
    Pattern("vertical-slash", 500, 700),
    Pattern("vertical-slash", 3500, 100),
    Pattern("vertical-slash", 1000, 4096),
    Pattern("a-shape", 100, 800),
    Pattern("pooled", 100),
)
"""What the released search tries, without the one that another contains."""


@checked
def pattern_tiles(
    q: Queries, k: OtherKeys, pattern: Pattern, *,
    block: TokenCount = 64, last_queries: TokenCount = 64, scale: float | None = None,
) -> Tiles:  # fmt: skip
    """Where a pattern lies in this prompt, for every head.

        vertical_s = sum_t p_ts        slash_d = sum_t p_(t, t - d)        t: the last queries

    Args:
        q: queries [batch, time, heads, key].
        k: keys [batch, time, key_value_heads, key]; heads is a multiple of key_value_heads.
        pattern: which kind, and how many columns and slashes. The first 30 columns and the 100
            nearest slashes are among those kept.
        block: queries and keys of a tile; slashes become the tiles they cross.
        last_queries: number of last queries by whose attention columns and slashes are found.
        scale: factor of the scores; None for key ** -0.5.

    Returns:
        The tiles, for causal attention, and the columns.

    Cost:
        2 key FLOPs per pair of one of the last queries and a key; of pooled blocks, of two blocks.

    Source: Jiang et al. (2024), arXiv:2407.02490, and its release.

    Example:
        >>> q = k = jnp.ones((1, 8, 2, 4))
        >>> tiles = pattern_tiles(q, k, Pattern("vertical-slash", 2, 2), block=2)
        >>> tiles.kept.shape, tiles.columns.shape
        ((1, 2, 4, 4), (1, 2, 2))
    """
    check_lengths(q, k)
    check_pattern(pattern)
    block = min(block, q.shape[1])
    q, scale = fixed_scale(q, scale)
    time = q.shape[1]
    pattern = Pattern(pattern.kind, min(pattern.vertical, time), min(pattern.slash, time))
    kept, columns = _places(q, k, pattern, block, min(last_queries, time), scale)
    return Tiles(kept, columns, block, block)


def check_pattern(pattern: Pattern) -> None:
    """Refuse an unknown kind, or a pattern of nothing."""
    check_choice("pattern.kind", pattern.kind, ("vertical-slash", "a-shape", "pooled"))
    check_count("pattern.vertical", pattern.vertical, 1)
    check_count("pattern.slash", pattern.slash, 0 if pattern.kind == "pooled" else 1)


@partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _places(q, k, pattern, block, last, scale):
    batch, time, heads, _ = q.shape
    count = -(-time // block)
    row = jnp.arange(count)
    causal = row[None] <= row[:, None]
    index = jnp.arange(time)

    def slashed(slashes):
        """The tiles that the chosen distances t - s [time] cross."""
        # Tile (i, j) holds distances block (i - j) - block + 1 to block (i - j) + block - 1.
        before = jnp.cumsum(jnp.pad(slashes, (block, 2 * block)), dtype=jnp.int32)
        middle = block * (row + 1)  # of each distance of blocks, in `before`
        crossed = before[middle + block - 1] > before[middle - block]
        return causal & crossed[jnp.maximum(row[:, None] - row[None], 0)]

    def vertical_slash(q, k):
        query = time - last + jnp.arange(last)
        seen = index[None] <= query[:, None]
        x = scale * jnp.einsum(
            "qd,sd->qs", q[-last:], k, preferred_element_type=accumulator(q.dtype)
        )
        p, total, _ = masked_softmax(x, seen)
        p = p / total
        distance = jnp.where(seen, query[:, None] - index[None], time)
        slashes = jnp.zeros(time, p.dtype).at[distance].add(p, mode="drop")
        columns = jnp.where(index < _FORCED_COLUMNS, jnp.inf, p.sum(axis=0))
        slashes = jnp.where(index < _FORCED_SLASHES, jnp.inf, slashes)
        everywhere = jnp.ones(time, bool)
        columns, is_column = selected_indices(
            top_mask(columns, everywhere, pattern.vertical), pattern.vertical
        )
        kept = slashed(top_mask(slashes, everywhere, pattern.slash))
        return kept, jnp.where(is_column, columns, -1)

    def a_shape(q, k):
        return slashed(index < pattern.slash), jnp.arange(pattern.vertical, dtype=jnp.int32)

    def pooled(q, k):
        filled = in_blocks(jnp.ones(time, q.dtype), block).sum(axis=1, keepdims=True)
        q, k = (in_blocks(x, block).sum(axis=1) / filled for x in (q, k))
        x = jnp.einsum("id,jd->ij", q, k, preferred_element_type=accumulator(q.dtype))
        is_forced = (row[None] == 0) | (row[None] == row[:, None])
        return top_mask(jnp.where(is_forced, jnp.inf, x), causal, pattern.vertical), None

    kinds = {"vertical-slash": vertical_slash, "a-shape": a_shape, "pooled": pooled}
    places = jax.vmap(kinds[pattern.kind])(by_head(q, heads), by_head(k, heads))
    return jax.tree.map(lambda x: x.reshape(batch, heads, *x.shape[1:]), places)


@checked
def search_patterns(
    q: Queries, k: OtherKeys, v: OtherValues, patterns: tuple[Pattern, ...] = PATTERNS, *,
    block: TokenCount = 64, difference: float = 5e-3, scale: float | None = None,
) -> tuple[Int[Array, "heads"], Float[Array, "patterns heads"]]:  # fmt: skip
    """Which pattern suits each head: the one whose output differs from the full one least often.

        argmin over patterns of the share of numbers with |o - o of all keys| > difference

    Arguments as `pattern_tiles`, of the prompts to search on, and:

    Args:
        v: values [batch, time, key_value_heads, value].
        patterns: the candidates; of equally good ones the first.
        difference: how far apart two numbers count as different.

    Returns:
        The index of a pattern per head [heads], and the shares of numbers that differ
        [patterns, heads].

    Cost:
        Attention once densely and once per pattern.

    Source: Jiang et al. (2024), arXiv:2407.02490, and its release.

    Example:
        >>> q = k = v = jnp.ones((1, 8, 2, 4))
        >>> best, shares = search_patterns(q, k, v, (Pattern("a-shape", 2, 2),), block=2)
        >>> best.tolist(), shares.shape
        ([0, 0], (1, 2))
    """
    check_lengths(q, k)
    if not patterns:
        raise ValueError("search_patterns needs at least one pattern; got none.")
    if difference < 0:
        raise ValueError(f"difference must be at least 0; got {difference}.")
    for pattern in patterns:
        check_pattern(pattern)
    first = pattern_tiles(q, k, patterns[0], block=block, scale=scale)
    everything = Tiles(jnp.ones_like(first.kept), None, first.query_block, first.key_block)
    wanted, _ = attend_tiles(q, k, v, everything, scale=scale)
    shares = []
    for pattern in patterns:
        tiles = pattern_tiles(q, k, pattern, block=block, scale=scale)
        out, _ = attend_tiles(q, k, v, tiles, scale=scale)
        shares.append((jnp.abs(out - wanted) > difference).mean(axis=(0, 1, 3)))
    return jnp.argmin(jnp.stack(shares), axis=0).astype(jnp.int32), jnp.stack(shares)


@checked
def patterns_by_head(
    q: Queries, k: OtherKeys, patterns: tuple[Pattern, ...], best: Int[Array, "heads"], *,
    block: TokenCount = 64, scale: float | None = None,
) -> Tiles:  # fmt: skip
    """Where the pattern of each head lies in this prompt.

    Arguments and results as `pattern_tiles`, and:

    Args:
        patterns: the candidates of the search.
        best: which of them each head has [heads], from `search_patterns`.

    Cost:
        As `pattern_tiles`, once per pattern.

    Example:
        >>> q = k = jnp.ones((1, 8, 2, 4))
        >>> both = Pattern("a-shape", 2, 2), Pattern("pooled", 2)
        >>> patterns_by_head(q, k, both, jnp.array([0, 1]), block=2).kept.shape
        (1, 2, 4, 4)
    """
    if not patterns:
        raise ValueError("patterns_by_head needs at least one pattern; got none.")
    check_lengths(q, k)
    found = [pattern_tiles(q, k, pattern, block=block, scale=scale) for pattern in patterns]
    most = max(0 if tiles.columns is None else tiles.columns.shape[2] for tiles in found)
    none = jnp.full((*found[0].kept.shape[:2], most), -1, jnp.int32)
    columns = [none if x is None else none.at[:, :, : x.shape[2]].set(x)
               for x in (tiles.columns for tiles in found)]  # fmt: skip
    head = jnp.arange(q.shape[2])
    pick = lambda maps: jnp.stack(maps)[best, :, head].swapaxes(0, 1)  # noqa: E731
    kept = pick([tiles.kept for tiles in found])
    return Tiles(kept, pick(columns) if most else None, found[0].query_block, found[0].key_block)
