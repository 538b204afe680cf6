r"""The softmax of scores that arrive in tiles, with its maximum raised only when it has to be.

    m' = max(m, max_j s_j)    c = exp(m - m')    l' = c l + sum_j exp(s_j - m')    likewise a'

is exact for *any* m', not only the maximum, as long as nothing overflows: a / l does not change
when both are multiplied by exp(m - m'). So FlashAttention-4 keeps the old m until a tile exceeds it
by some slack, 8 in base 2, and skips the multiplications by c = 1 in between.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from toolkit._checks import checked
from toolkit.attention._checks import check_sizes


class OnlineSoftmax(NamedTuple):
    """What `online_softmax` returns."""

    out: Float[Array, "rows value"]  # weighted values [rows, value]
    lse: Float[Array, "rows"]  # logarithm of the sum of exponentials [rows]
    rescales: Int[Array, "rows"]  # how often what had been summed was rescaled [rows]


@checked
def online_softmax(
    scores: Float[Array, "rows keys"], values: Float[Array, "keys value"], *,
    tile: int = 64, slack: float = 0.0,
) -> OnlineSoftmax:  # fmt: skip
    """Values weighted by the softmax of every row, its keys taken in tiles.

        o_i = sum_j softmax_j(s_ij) v_j

    Args:
        scores: [rows, keys].
        values: [keys, value].
        tile: keys in a tile.
        slack: by how much a score may exceed the running maximum before that is raised; 0 for the
            usual online softmax. The result is the same, within rounding, up to some 80 in float32.

    Returns:
        An `OnlineSoftmax`: the output, its log-sum-exp, and the rescales.

    Cost:
        2 rows keys value FLOPs, and value multiplications per rescale.

    Source: Milakov and Gimelshein (2018), arXiv:1805.02867; Zadouri et al. (2026), FlashAttention-4
        (conditional rescaling).

    Example:
        >>> scores, values = jnp.arange(8.0).reshape(1, 8), jnp.ones((8, 2))
        >>> int(online_softmax(scores, values, tile=2).rescales[0])
        3
        >>> int(online_softmax(scores, values, tile=2, slack=5.5).rescales[0])
        1
    """
    rows, keys = scores.shape
    if values.shape[0] != keys:
        raise ValueError(f"values must be those of {keys} keys; got {values.shape[0]}.")
    check_sizes("online_softmax", scores=rows * keys, tile=tile)
    scores = jnp.pad(scores, ((0, 0), (0, -keys % tile)), constant_values=-jnp.inf)
    values = jnp.pad(values, ((0, -keys % tile), (0, 0)))

    def step(carry, arriving):
        largest, total, out, rescales = carry
        scores, values = arriving
        found = scores.max(axis=1, keepdims=True)
        is_raised = found > largest + slack
        raised = jnp.where(is_raised, found, largest)
        p = jnp.exp(scores - jnp.where(raised == -jnp.inf, 0, raised))
        rescale = jnp.where(is_raised, jnp.exp(largest - raised), 1)
        total = rescale * total + p.sum(axis=1, keepdims=True)
        out = rescale * out + p @ values
        is_rescaled = is_raised & (largest > -jnp.inf)
        return (raised, total, out, rescales + is_rescaled.astype(jnp.int32)), None

    start = (
        jnp.full_like(scores, -jnp.inf, shape=(rows, 1)),
        jnp.zeros_like(scores, shape=(rows, 1)),
        jnp.zeros_like(scores, shape=(rows, values.shape[1])),
        jnp.zeros((rows, 1), jnp.int32),
    )
    tiles = scores.reshape(rows, -1, tile).swapaxes(0, 1), values.reshape(-1, tile, values.shape[1])
    (largest, total, out, rescales), _ = lax.scan(step, start, tiles)
    lse = largest + jnp.log(total)
    return OnlineSoftmax(out / jnp.where(total == 0, 1, total), lse[:, 0], rescales[:, 0])
