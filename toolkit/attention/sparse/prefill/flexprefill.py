r"""FlexPrefill: every head finds its own pattern and its own number of tiles, prompt by prompt.

The last block of queries shows which columns (blocks of keys) and slashes (distances in blocks) its
softmax falls on. A head whose column masses are close to what pooled keys predict,

    sqrt(JS(softmax(mean q . mean k_j), vertical_j)) < threshold

reads by pooled queries and keys, the tiles with the largest softmax until they hold a share of all
rows. Other heads read the columns and slashes with the largest masses, so many blocks of each as
single columns and slashes need to hold the share.

Source: Lai et al. (2025), arXiv:2502.20766, and its release.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

from toolkit._checks import checked
from toolkit.attention._attend import fixed_scale, masked_softmax
from toolkit.attention._shapes import OtherKeys, Queries, TokenCount
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.sparse.prefill.tiles import Tiles, by_head, check_lengths, in_blocks


@checked
def flexible_tiles(
    q: Queries, k: OtherKeys, share: float = 0.9, *,
    threshold: float = 0.1, block: TokenCount = 128, scale: float | None = None,
) -> Tiles:  # fmt: skip
    """The tiles of each head by the pattern that suits it, as many as hold a share of its softmax.

    Args:
        q: queries [batch, time, heads, key].
        k: keys [batch, time, key_value_heads, key]; heads is a multiple of key_value_heads.
        share: of the softmax that the tiles are to hold, above 0 and at most 1.
        threshold: distance below which a head reads by pooled blocks; 0 for columns and slashes
            everywhere.
        block: queries and keys of a tile.
        scale: factor of the scores; None for key ** -0.5.

    Returns:
        The tiles, for causal attention.

    Cost:
        2 key FLOPs per pair of one of the last `block` queries and a key, and per pair of blocks.

    Source: Lai et al. (2025), arXiv:2502.20766, algorithms 1 to 3.

    Example:
        >>> q = k = jnp.ones((1, 8, 2, 4))
        >>> flexible_tiles(q, k, block=4).kept[0, 0].tolist()
        [[True, False], [True, True]]
    """
    check_lengths(q, k)
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1; got {share}.")
    if threshold < 0:
        raise ValueError(f"threshold must be at least 0; got {threshold}.")
    block = min(block, q.shape[1])
    q, scale = fixed_scale(q, scale)
    return Tiles(_kept(q, k, share, threshold, block, scale), None, block, block)


@partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _kept(q, k, share, threshold, block, scale):
    batch, time, heads, _ = q.shape
    precise = accumulator(q.dtype)
    token, row = jnp.arange(time), jnp.arange(-(-time // block))
    causal = row[None] <= row[:, None]
    filled = in_blocks(jnp.ones(time, precise), block).sum(axis=1, keepdims=True)

    def head(q, k):
        query = time - block + jnp.arange(block)
        x = scale * jnp.matmul(q[-block:], k.T, preferred_element_type=precise)
        exponentials, total, _ = masked_softmax(x, token[None] <= query[:, None])
        p = exponentials / total
        vertical = p.mean(axis=0)
        # Place j is the distance time - 1 - j, as in the release, so that blocks of places agree.
        place = jnp.clip(time - 1 - query[:, None] + token[None], 0, time - 1)
        slash = jnp.zeros(time, precise).at[place].add(p) / block
        columns, slashes = (in_blocks(x, block).sum(axis=1) for x in (vertical, slash))
        pooled_q, pooled_k = (in_blocks(x, block).sum(axis=1) / filled for x in (q, k))
        own = q[-block:].mean(axis=0, keepdims=True)
        predicted = jax.nn.softmax(scale * jnp.matmul(own, pooled_k.T)[0].astype(precise))
        is_pooled = _distance(predicted, columns) < threshold
        kept = [
            best | (row == 0)
            for best in (
                _largest(x, jnp.where(is_pooled, 1, _needed(single, share) // block + 1))
                for x, single in ((columns, vertical), (slashes[::-1], slash))
            )
        ]
        structured = kept[0][None] | kept[1][jnp.abs(row[:, None] - row[None])]
        x = scale * jnp.matmul(pooled_q, pooled_k.T, preferred_element_type=precise)
        exponentials, total, _ = masked_softmax(x, causal)
        weights = (exponentials / total).reshape(-1)
        order = jnp.argsort(-weights, stable=True)
        fits = jnp.cumsum(weights[order]) <= share * row.size
        by_blocks = jnp.zeros(weights.size, bool).at[order].set(fits).reshape(causal.shape)
        return causal & (structured | (by_blocks & is_pooled))

    kept = jax.vmap(head)(by_head(q, heads), by_head(k, heads))
    return kept.reshape(batch, heads, *kept.shape[1:])


def _needed(masses: Array, share: float) -> Array:
    """How many of the largest masses exceed a share of 1 together."""
    return (jnp.cumsum(jnp.sort(masses)[::-1]) <= share).sum(dtype=jnp.int32) + 1


def _largest(masses: Array, count: Array) -> Array:
    """Which are the `count` largest, the first one counted among them."""
    order = jnp.argsort(-masses.at[0].set(jnp.inf), stable=True)
    return jnp.zeros(masses.shape, bool).at[order].set(jnp.arange(masses.size) < count)


def _distance(p: Array, q: Array) -> Array:
    """Square root of the Jensen-Shannon divergence of two distributions, in nats."""
    middle = (p + q) / 2
    part = lambda x: jnp.where(x > 0, x * jnp.log(jnp.where(x > 0, x / middle, 1)), 0).sum()  # noqa: E731
    return jnp.sqrt(jnp.maximum((part(p) + part(q)) / 2, 0))
