"""Arithmetic on the two-dimensional blocks of a TPU kernel: products, sums along time, an inverse.

A TPU core holds a block as tiles of 8 sublanes x 128 lanes. What is free or cheap there decides
how these are written: slices and joins at multiples of 8 rows cost nothing, a mask is two
comparisons of counters, a sum over lanes is one instruction a tile, and only matrix products
reach the matrix unit, which multiplies bfloat16 and adds float32.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

# Columns eliminated one after another in an inverse; the blocks between merge by products.
SUBSTITUTED = 16


def split_bfloat16(x: Float[Array, "m n"]) -> list[Float[Array, "m n"]]:
    """Three bfloat16 blocks whose sum is the float32 block `x`, exactly.

    Each keeps the next 8 of the 24 bits of x. They are cut by masking bits: a round trip through
    bfloat16 would be simplified away by XLA where the kernel is interpreted.
    """
    parts = []
    for _ in range(2):
        bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << 16))
        part = lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return [*parts, x.astype(jnp.bfloat16)]


def dot(
    a: Float[Array, "..."], b: Float[Array, "..."], axes: tuple[int, int] = (1, 0)
) -> Float[Array, "..."]:
    """The product of two blocks over one axis of each, to float32 accuracy whatever their dtypes.

    bfloat16 with bfloat16 is one pass of the matrix unit and exact. float32 with float32 takes
    six. bfloat16 with float32 takes three: only one side has parts beyond the first.
    """
    dimensions = (((axes[0],), (axes[1],)), ((), ()))

    def product(x, y, precision=None):
        return lax.dot_general(
            x, y, dimensions, precision=precision, preferred_element_type=jnp.float32
        )

    if a.dtype == b.dtype:
        return product(a, b, lax.Precision.HIGHEST if a.dtype == jnp.float32 else None)
    if a.dtype == jnp.float32:
        high, middle, low = (product(part, b) for part in split_bfloat16(a))
    else:
        high, middle, low = (product(a, part) for part in split_bfloat16(b))
    return high + (middle + low)


def rows_and_columns(shape: tuple[int, int]) -> tuple[Int[Array, "m n"], Int[Array, "m n"]]:
    """The row number and the column number of every place of a block."""
    return lax.broadcasted_iota(jnp.int32, shape, 0), lax.broadcasted_iota(jnp.int32, shape, 1)


def causal(size: int) -> Bool[Array, "C C"]:
    """Where token i (row) may read token j (column): j <= i."""
    i, j = rows_and_columns((size, size))
    return j <= i


def as_column(row: Float[Array, "1 n"]) -> Float[Array, "n 1"]:
    """From lanes to sublanes, by way of a diagonal."""
    i, j = rows_and_columns((row.shape[1], row.shape[1]))
    return jnp.sum(jnp.where(i == j, row, 0.0), axis=1, keepdims=True)


def as_row(column: Float[Array, "n 1"]) -> Float[Array, "1 n"]:
    """From sublanes to lanes, by way of a diagonal."""
    i, j = rows_and_columns((column.shape[0], column.shape[0]))
    return jnp.sum(jnp.where(i == j, column, 0.0), axis=0, keepdims=True)


def spread_row(x: Float[Array, "C n"], block: int, row: int) -> Float[Array, "C n"]:
    """In every block of `block` rows, that block's row number `row` in all its places."""
    blocks = x.reshape(-1, block, x.shape[1])
    return jnp.broadcast_to(blocks[:, row : row + 1], blocks.shape).reshape(x.shape)


def unit_lower_inverse(a: Float[Array, "C C"]) -> Float[Array, "C C"]:
    """(I + A)^-1 of a strictly lower triangular A, without powers of A.

    Diagonal blocks of 16 by forward substitution, all of them at once: when row j of X is final,
    a_ij times it leaves the rows below, X <- X - a_j x_j. Then pairs of finished blocks merge,
    X <- X - X A_corner X, where A_corner is the part of A that links the two. Powers of A, which
    a shorter product would form, grow beyond float32 when keys repeat.

    Cost:
        15 column steps on C x C numbers, and 2 log2(C / 16) products of C x C blocks.
    """
    size = a.shape[0]
    i, j = rows_and_columns(a.shape)
    x = jnp.where(i == j, 1.0, 0.0)
    own_column = j - i // SUBSTITUTED * SUBSTITUTED
    for step in range(SUBSTITUTED - 1):
        factor = jnp.sum(jnp.where(own_column == step, a, 0.0), axis=1, keepdims=True)
        x = x - factor * spread_row(x, SUBSTITUTED, step)
    width = SUBSTITUTED
    while width < size:
        corner = (i // width % 2 == 1) & (j // width == i // width - 1)
        x = x - dot(dot(x, jnp.where(corner, a, 0.0)), x)
        width *= 2
    return x
