r"""XAttention: sums along antidiagonals tell how much of the softmax a tile holds (prefill).

    x_ab = scale / stride sum_i q_(stride a + stride - 1 - i) . k_(stride b + i)

Every query and every key of two strides meets once in such a sum, which is one product of longer
vectors. The tiles of a row are taken in falling order of their share of softmax_b(x_ab) until these
hold a share of the row; the first and the diagonal tile are always read and counted first. The
release does so from its second chunk of queries on; in its first one it counts the first tile among
the others and reads one more.

Source: Xu et al. (2025), arXiv:2503.16428, and its release.
"""

from functools import partial

import jax
import jax.numpy as jnp

from toolkit._checks import checked
from toolkit.attention._attend import fixed_scale, masked_softmax
from toolkit.attention._shapes import OtherKeys, Queries, TokenCount
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.sparse.prefill.tiles import Tiles, by_head, check_lengths, in_blocks


@checked
def antidiagonal_tiles(
    q: Queries, k: OtherKeys, share: float = 0.9, *,
    block: TokenCount = 128, stride: TokenCount = 16, scale: float | None = None,
) -> Tiles:  # fmt: skip
    """The tiles that hold a share of the softmax, estimated along antidiagonals.

    Args:
        q: queries [batch, time, heads, key].
        k: keys [batch, time, key_value_heads, key]; heads is a multiple of key_value_heads.
        share: of the estimated softmax of a row of tiles, above 0 and at most 1.
        block: queries and keys of a tile, a multiple of stride.
        stride: tokens of which one sum is taken; more of them cost less and see less.
        scale: factor of the scores; None for key ** -0.5.

    Returns:
        The tiles, for causal attention.

    Cost:
        2 key / stride FLOPs per pair of a query and a key.

    Source: Xu et al. (2025), arXiv:2503.16428, algorithm 1.

    Example:
        >>> q = k = jnp.ones((1, 8, 2, 4))
        >>> antidiagonal_tiles(q, k, block=4, stride=2).kept[0, 0].tolist()
        [[True, False], [True, True]]
    """
    check_lengths(q, k)
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1; got {share}.")
    if block % stride:
        raise ValueError(f"block must be a multiple of stride {stride}; got {block}.")
    q, scale = fixed_scale(q, scale)
    return Tiles(_kept(q, k, share, block, stride, scale), None, block, block)


@partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _kept(q, k, share, block, stride, scale):
    batch, time, heads, key = q.shape
    precise = accumulator(q.dtype)

    def head(q, k):
        q, k = (in_blocks(x, block).reshape(-1, stride, key) for x in (q, k))
        rows = jnp.arange(q.shape[0])
        visible = (rows[None] <= rows[:, None]) & (rows * stride < time)[None]
        q, k = (x.reshape(x.shape[0], -1) for x in (q[:, ::-1], k))
        x = scale / stride * jnp.matmul(q, k.T, preferred_element_type=precise)
        exponentials, total, _ = masked_softmax(x, visible)
        weights = jnp.where((rows * stride < time)[:, None], exponentials / total, 0)
        width = block // stride
        mass = weights.reshape(-1, width, rows.size // width, width).sum(axis=(1, 3))
        place = jnp.arange(mass.shape[0])
        causal = place[None] <= place[:, None]
        is_forced = (place[None] == 0) | (place[None] == place[:, None])
        others = jnp.where(is_forced, -1, mass)
        order = jnp.argsort(-others, axis=1, stable=True)
        ranked = jnp.take_along_axis(jnp.maximum(others, 0), order, axis=1)
        before = jnp.where(is_forced, mass, 0).sum(axis=1, keepdims=True)
        before = before + jnp.cumsum(ranked, axis=1) - ranked
        is_needed = before < share * mass.sum(axis=1, keepdims=True)
        rank = jnp.argsort(order, axis=1)
        return causal & (is_forced | jnp.take_along_axis(is_needed, rank, axis=1))

    kept = jax.vmap(head)(by_head(q, heads), by_head(k, heads))
    return kept.reshape(batch, heads, *kept.shape[1:])
