r"""SALE: tiles chosen by 4-bit scores against an exact denominator (prefill, training-free).

    keep tile (i, j)  if  exp(x^_ts - m_t) / l_t >= tau  for some query t of i and key s of j

x^ is the product of queries and keys in 4 bits; m and l are the largest score and the sum of
exponentials over the first `sink` and the last `local` keys, computed exactly, since they hold most
of the mass of a language model's attention. Those tiles are always kept. Taking logarithms leaves
one comparison per score, with a bound per query: x^_ts >= m_t + log(tau l_t). The threshold tau is
calibrated per head (`calibrate_sale`): a head that tolerates no loss gets 0 and stays dense.

Queries and keys are rounded after their mean over time is taken off: outlier channels, which all
tokens share, would otherwise use up the 15 levels. Subtracting the mean key shifts a query's scores
by one number, which a softmax ignores; the mean query's part is computed exactly.

One scale per token where the released kernel has one per few rows of a matrix fragment.
"""

from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from toolkit._annotations import AtLeast
from toolkit._checks import checked
from toolkit.attention._attend import fixed_scale
from toolkit.attention._shapes import OtherKeys, OtherValues, Queries, TokenCount
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.sparse.prefill.tiles import (
    Tiles,
    attend_tiles,
    by_head,
    check_lengths,
    in_blocks,
)
from toolkit.attention.sparse.train.spread import each

_LEVELS = 7  # of each sign


@checked
def sale_tiles(
    q: Queries, k: OtherKeys, *,
    threshold: float | Float[Array, "heads"] = 0.008, query_block: TokenCount = 64,
    key_block: TokenCount = 32, sink: Annotated[int, AtLeast(0)] = 32,
    local: Annotated[int, AtLeast(0)] = 128, scale: float | None = None, is_rounded: bool = True,
) -> Tiles:  # fmt: skip
    """The tiles in which some weight reaches a share of the sink's and the local keys' sum.

        keep (i, j)  if  max_{t in i, s in j} x^_ts - m_t - log l_t >= log tau

    Args:
        q: queries [batch, time, heads, key].
        k: keys [batch, time, key_value_heads, key]; heads is a multiple of key_value_heads.
        threshold: tau, one for all heads or one per head; 0 keeps everything.
        query_block: queries of a tile.
        key_block: keys of a tile.
        sink: keys at the start that are always kept.
        local: keys before a block of queries that are always kept, with the block itself.
        scale: factor of the scores; None for key ** -0.5.
        is_rounded: whether scores are estimated in 4 bits; exact otherwise.

    Returns:
        The tiles, for causal attention.

    Cost:
        2 key 4-bit operations per pair of a query and a key: an eighth of attention where these
        are four times as fast as 16 bits.

    Source: Ji et al. (2025), arXiv:2505.24179.

    Example:
        >>> q = k = jnp.ones((1, 8, 2, 4))
        >>> tiles = sale_tiles(q, k, query_block=2, key_block=2, sink=2, local=2)
        >>> tiles.kept.shape
        (1, 2, 4, 4)
    """
    check_lengths(q, k)
    query_block, key_block = min(query_block, q.shape[1]), min(key_block, k.shape[1])
    heads = q.shape[2]
    tau = jnp.asarray(threshold, accumulator(q.dtype))
    if isinstance(threshold, int | float) and threshold < 0:
        raise ValueError(f"threshold must be at least 0; got {threshold:g}.")
    q, scale = fixed_scale(q, scale)
    how = query_block, key_block, sink, local, scale, is_rounded
    kept = _kept(q, k, jnp.broadcast_to(tau, (heads,)), *how)
    return Tiles(kept, None, query_block, key_block)


@partial(jax.jit, static_argnums=(3, 4, 5, 6, 7, 8))
def _kept(q, k, tau, query_block, key_block, sink, local, scale, is_rounded):
    batch, time, heads, _ = q.shape
    precise = accumulator(q.dtype)

    def head(q, k, tau):
        q, k = (scale * q).astype(precise), k.astype(precise)
        k = k - k.mean(axis=0, keepdims=True)
        mean = q.mean(axis=0)
        centred = q - mean[None]
        rounded_q, rounded_k = (rounded(x) if is_rounded else x for x in (centred, k))
        of_mean = jnp.pad(k @ mean, (0, -time % key_block))
        k, rounded_k = (in_blocks(x, key_block).reshape(-1, k.shape[1]) for x in (k, rounded_k))
        key = jnp.arange(k.shape[0], dtype=jnp.int32)
        block_of_key = key // key_block

        def rows(q, rounded_q, first):
            query = first + jnp.arange(query_block, dtype=jnp.int32)
            causal = (key[None] <= query[:, None]) & (key < time)[None]
            start = jnp.maximum(first - local, 0) // key_block
            exact = (block_of_key < -(-sink // key_block)) | (block_of_key >= start)
            x = jnp.where(causal & exact[None], q @ k.T, -jnp.inf)
            bound = jax.nn.logsumexp(x, axis=1) + jnp.log(tau)
            estimate = rounded_q @ rounded_k.T + of_mean[None]
            is_above = causal & (query < time)[:, None] & (estimate >= bound[:, None])
            in_block = (is_above | exact[None]).any(axis=0).reshape(-1, key_block).any(axis=1)
            last = jnp.minimum(first + query_block, time) - 1
            return in_block & (jnp.arange(in_block.size) <= last // key_block)

        first = query_block * jnp.arange(-(-time // query_block), dtype=jnp.int32)
        return each(rows, in_blocks(q, query_block), in_blocks(rounded_q, query_block), first)

    q, k = by_head(q, heads), by_head(k, heads)
    kept = each(head, q, k, jnp.tile(tau, batch))
    return kept.reshape(batch, heads, *kept.shape[1:])


def levels(x: Float[Array, "... size"]) -> tuple[Float[Array, "... size"], Float[Array, "... 1"]]:
    """Each row as 15 levels, -7 to 7, and the step between them: its largest number over 7."""
    step = jnp.abs(x).max(axis=-1, keepdims=True) / _LEVELS
    step = jnp.where(step == 0, 1, step)
    return jnp.round(x / step), step


def rounded(x: Float[Array, "tokens size"]) -> Float[Array, "tokens size"]:
    """Each row to the nearest of its 15 levels."""
    level, step = levels(x)
    return level * step


@checked
def calibrate_sale(
    q: Queries, k: OtherKeys, v: OtherValues, *,
    error: float = 0.4, start: float = 0.008, least: float = 1e-4, query_block: TokenCount = 64,
    key_block: TokenCount = 32, sink: Annotated[int, AtLeast(0)] = 32,
    local: Annotated[int, AtLeast(0)] = 128, scale: float | None = None,
) -> Float[Array, "heads"]:  # fmt: skip
    """Thresholds per head, halved until what is dropped changes the output by little enough.

        while sum_t |o_t - o_t of all keys|_1 > error time:  tau <- tau / 2, below `least` 0

    Arguments as `sale_tiles`, of the prompts to calibrate on, and:

    Args:
        v: values [batch, time, key_value_heads, value].
        error: largest sum of absolute differences per token, over the channels of a head.
        start: threshold to begin with.
        least: a threshold that falls to this becomes 0, a dense head.

    Returns:
        Thresholds [heads], for `sale_tiles`.

    Cost:
        Attention once densely and log2(start / least) times sparsely.

    Source: Ji et al. (2025), arXiv:2505.24179, and its released calibration.

    Example:
        >>> q = k = v = jnp.ones((1, 8, 2, 4))
        >>> calibrate_sale(q, k, v, query_block=2, key_block=2, sink=2, local=2).shape
        (2,)
    """
    if error <= 0:
        raise ValueError(f"error must be above 0; got {error}.")
    if not 1e-6 <= least <= start <= 1:
        raise ValueError(f"1e-6 <= least <= start <= 1 must hold; got {least} and {start}.")
    check_lengths(q, k)
    how: dict[str, Any] = {
        "query_block": query_block,
        "key_block": key_block,
        "sink": sink,
        "local": local,
    }
    batch, time, heads, _ = q.shape
    tau = jnp.full(heads, start, accumulator(q.dtype))
    everything = sale_tiles(q, k, threshold=0.0, scale=scale, **how)
    wanted = attend_tiles(q, k, v, everything, scale=scale)[0]
    while True:
        tiles = sale_tiles(q, k, threshold=tau, scale=scale, **how)
        out = attend_tiles(q, k, v, tiles, scale=scale)[0]
        is_off = jnp.abs(out - wanted).sum(axis=(0, 1, 3)) > error * batch * time
        if not bool((is_off & (tau > 0)).any()):
            return tau
        tau = jnp.where(is_off, jnp.where(tau <= 2 * least, 0, tau / 2), tau)
