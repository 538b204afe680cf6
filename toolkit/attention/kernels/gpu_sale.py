r"""SALE's choice of tiles: 4-bit scores against a bound per query, without an exponential.

    keep tile (i, j)  if  x^_ts >= bound_t  for some query t of i and key s <= t of j

Products are those of 8-bit integers that hold 15 levels, since Pallas has no 4-bit ones. One pass
over the keys per block of queries; all that is written is one number per tile. Written for Triton.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int8

from toolkit.attention._checks import check_choice
from toolkit.attention.kernels.gpu_support import F32
from toolkit.attention.kernels.gpu_tiles import SIZES, check_blocks


def tiles_above(
    q: Int8[Array, "rows time key"],
    k: Int8[Array, "rows time key"],
    q_step: Float[Array, "rows time"],
    k_step: Float[Array, "rows time"],
    of_mean: Float[Array, "rows time"],
    bound: Float[Array, "rows time"],
    *,
    query_block: int,
    key_block: int,
    interpret: Any = False,
) -> Bool[Array, "rows query_blocks key_blocks"]:
    """Tiles in which some score, levels times steps and the mean query's part, reaches its bound.

    2 key 8-bit operations per pair of a query and an earlier key.
    """
    check_blocks("SALE", {}, query_block, key_block)
    rows, time, size = q.shape
    check_choice("channels of the Pallas SALE kernel", size, SIZES)
    q, q_step, bound = _padded(query_block, q, q_step, bound)
    k, k_step, of_mean = _padded(key_block, k, k_step, of_mean)
    blocks, key_blocks = q.shape[1] // query_block, k.shape[1] // key_block

    def body(q_ref, k_ref, q_step, k_step, of_mean, bound, kept):
        first = pl.program_id(1) * query_block
        square = query_block, key_block
        query = first + lax.broadcasted_iota(jnp.int32, square, 0)
        down = lambda x: lax.broadcast_in_dim(x, square, (0,))  # noqa: E731
        across = lambda x: lax.broadcast_in_dim(x, square, (1,))  # noqa: E731
        q, steps, bounds = q_ref[...], down(q_step[...]), down(bound[...])

        def step(tile, nothing):
            those = pl.ds(tile * key_block, key_block)
            levels = jnp.dot(q, k_ref[those, :].T, preferred_element_type=jnp.int32)
            s = levels.astype(F32) * steps * across(k_step[those]) + across(of_mean[those])
            key = tile * key_block + lax.broadcasted_iota(jnp.int32, square, 1)
            is_above = (s >= bounds) & (key <= query) & (query < time)
            kept[tile] = jnp.max(is_above.astype(jnp.int32))
            return nothing

        last = jnp.minimum(first + query_block, time) - 1
        kept[...] = jnp.zeros(kept.shape, jnp.int32)
        lax.fori_loop(0, last // key_block + 1, step, None)

    of_block = pl.BlockSpec((None, query_block), lambda i, j: (i, j))
    of_head = pl.BlockSpec((None, k.shape[1]), lambda i, j: (i, 0))
    kept = pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((rows, blocks, key_blocks), jnp.int32),
        grid=(rows, blocks),
        in_specs=[
            pl.BlockSpec((None, query_block, size), lambda i, j: (i, j, 0)),
            pl.BlockSpec((None, *k.shape[1:]), lambda i, j: (i, 0, 0)),
            of_block,
            of_head,
            of_head,
            of_block,
        ],
        out_specs=pl.BlockSpec((None, None, key_blocks), lambda i, j: (i, j, 0)),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=bool(interpret),
    )(q, k, q_step, k_step, of_mean, bound)
    return kept > 0


def _padded(block: int, *arrays: Array) -> list[Array]:
    """Time filled up to whole blocks."""
    return [
        jnp.pad(x, [(0, 0), (0, -x.shape[1] % block)] + [(0, 0)] * (x.ndim - 2)) for x in arrays
    ]
