r"""Block-sparse flash attention of a whole sequence, and SALE's choice of its tiles.

    o_t = sum_{s in kept tiles of t} exp(x_ts - lse_t) v_s
    keep tile (i, j)  if  x^_ts >= bound_t  for some query t of i and key s <= t of j

Written for Triton, like `tokens`. A program takes a block of queries of one head. Attention walks
the list of kept tiles and reads nothing of the others. The choice takes 4-bit scores x^ and no
exponential: it multiplies 8-bit integers with 15 levels, since Pallas has no 4-bit integers, and
writes one number per tile.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int8

from toolkit._compat import require_jax
from toolkit.attention._checks import check_choice
from toolkit.attention.kernels.gpu.latent import LOG2_E, dot, next_softmax
from toolkit.attention.kernels.gpu.support import BF16, F32

SIZES = (16, 32, 64, 128, 256)


def attend_tiles(
    q: Float[Array, "rows time key"],
    k: Float[Array, "key_rows key_time key"],
    v: Float[Array, "key_rows key_time value"],
    kept: Bool[Array, "rows query_blocks key_blocks"],
    *,
    query_block: int,
    key_block: int,
    is_causal: bool,
    scale: float,
    interpret: Any = False,
) -> tuple[Float[Array, "rows time value"], Float[Array, "rows time"]]:
    """Attention over the kept tiles; a row is a head, `rows / key_rows` of which share keys.

    2 (key + value) FLOPs per pair of a kept tile, and 2 (key + value) bytes per key of it for each
    block of queries. Returns outputs and the logarithms of the sums of exponentials, in float32; 0
    and -inf where nothing is kept.
    """
    _check_blocks("tile", {"q": q, "k": k, "v": v}, query_block, key_block)
    rows, time, _ = q.shape
    key_time, value, shared = k.shape[1], v.shape[2], rows // k.shape[0]
    q, k, v = (
        jnp.pad(x, [(0, 0), (0, -x.shape[1] % block), (0, 0)])
        for x, block in ((q, query_block), (k, key_block), (v, key_block))
    )
    order = jnp.argsort(~kept, axis=-1, stable=True).astype(jnp.int32)
    counts = kept.sum(axis=-1, dtype=jnp.int32)

    def body(q_ref, k_ref, v_ref, order, count, out, lse):
        q = q_ref[...]
        query = pl.program_id(1) * query_block + lax.broadcasted_iota(
            jnp.int32, (query_block, key_block), 0
        )

        def step(place, carry):
            sums, largest, total = carry
            first = order[place] * key_block
            those = pl.ds(first, key_block)
            s = dot(q, k_ref[those, :].T) * (scale * LOG2_E)
            key = first + lax.broadcasted_iota(jnp.int32, s.shape, 1)
            seen = (key < key_time) & (key <= query) if is_causal else key < key_time
            p, kept, largest, total = next_softmax(jnp.where(seen, s, -jnp.inf), largest, total)
            sums = sums * lax.broadcast_in_dim(kept, sums.shape, (0,))
            return sums + dot(p.astype(BF16), v_ref[those, :]), largest, total

        none = jnp.full(q.shape[:1], -jnp.inf, F32)
        carry = jnp.zeros(out.shape, F32), none, jnp.zeros_like(none)
        sums, largest, total = lax.fori_loop(0, count[0], step, carry)
        divisor = jnp.where(total == 0, 1.0, total)
        out[...] = sums / lax.broadcast_in_dim(divisor, sums.shape, (0,))
        lse[...] = (largest + jnp.log2(total)) / LOG2_E

    blocks = q.shape[1] // query_block
    of_head = lambda x: pl.BlockSpec((None, *x.shape[1:]), lambda i, j: (i // shared, 0, 0))  # noqa: E731
    of_block = lambda size: pl.BlockSpec((None, query_block, size), lambda i, j: (i, j, 0))  # noqa: E731
    out, lse = pl.pallas_call(
        body,
        out_shape=[
            jax.ShapeDtypeStruct((rows, q.shape[1], value), F32),
            jax.ShapeDtypeStruct((rows, q.shape[1]), F32),
        ],
        grid=(rows, blocks),
        in_specs=[
            of_block(q.shape[2]),
            of_head(k),
            of_head(v),
            pl.BlockSpec((None, None, kept.shape[2]), lambda i, j: (i, j, 0)),
            pl.BlockSpec((None, 1), lambda i, j: (i, j)),
        ],
        out_specs=[of_block(value), pl.BlockSpec((None, query_block), lambda i, j: (i, j))],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=bool(interpret),
    )(q, k, v, order, counts)
    return out[:, :time], lse[:, :time]


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
    _check_blocks("SALE", {}, query_block, key_block)
    rows, time, size = q.shape
    check_choice("channels of the Pallas SALE kernel", size, SIZES)
    q, q_step, bound = _padded(query_block, q, q_step, bound)
    k, k_step, of_mean = _padded(key_block, k, k_step, of_mean)
    blocks, key_blocks = q.shape[1] // query_block, k.shape[1] // key_block
    room = pl.next_power_of_2(key_blocks)  # as Triton wants of every array

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
        out_shape=jax.ShapeDtypeStruct((rows, blocks, room), jnp.int32),
        grid=(rows, blocks),
        in_specs=[
            pl.BlockSpec((None, query_block, size), lambda i, j: (i, j, 0)),
            pl.BlockSpec((None, *k.shape[1:]), lambda i, j: (i, 0, 0)),
            of_block,
            of_head,
            of_head,
            of_block,
        ],
        out_specs=pl.BlockSpec((None, None, room), lambda i, j: (i, j, 0)),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=bool(interpret),
    )(q, k, q_step, k_step, of_mean, bound)
    return kept[:, :, :key_blocks] > 0


def _padded(block: int, *arrays: Array) -> list[Array]:
    """Pad time to whole blocks."""
    return [
        jnp.pad(x, [(0, 0), (0, -x.shape[1] % block)] + [(0, 0)] * (x.ndim - 2)) for x in arrays
    ]


def _check_blocks(what: str, arrays: dict[str, Array], query_block: int, key_block: int) -> None:
    """Refuse sizes that Triton's products and loads do not take."""
    require_jax("0.10", "The Pallas kernels for GPUs")
    for name, array in arrays.items():
        if array.dtype != BF16:
            raise TypeError(f"The Pallas {what} kernel takes bfloat16; got {name} {array.dtype}.")
        if array.shape[2] not in SIZES:
            raise ValueError(
                f"The Pallas {what} kernel takes {SIZES} channels; got {name} with "
                f"{array.shape[2]}."
            )
    for name, block in (("query_block", query_block), ("key_block", key_block)):
        if block not in SIZES:
            raise ValueError(f"The Pallas {what} kernel takes a {name} of {SIZES}; got {block}.")
