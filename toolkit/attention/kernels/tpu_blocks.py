"""Arithmetic on the two-dimensional blocks of a TPU kernel: products, sums along time, an inverse.

A TPU core holds a block as tiles of 8 sublanes x 128 lanes. What is free or cheap there decides
how these are written: slices and joins at multiples of 8 rows cost nothing, a mask is two
comparisons of counters, a sum over lanes is one instruction a tile, and only matrix products
reach the matrix unit, which multiplies bfloat16 and adds float32.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

# Rows of a tile, and of the blocks inverted by substitution before products merge them.
TILE = 8


def _split(x: Float[Array, "m n"]) -> tuple[Array, Array, Array]:
    """Three bfloat16 blocks, of 8 of the 24 bits each, whose sum is the float32 block `x`.

    They are cut by masking bits: a round trip through bfloat16 would be simplified away by XLA
    where the kernel is interpreted.
    """
    parts = []
    for _ in range(2):
        bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << 16))
        part = lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts[0], parts[1], x.astype(jnp.bfloat16)


def dot(
    a: Float[Array, "..."], b: Float[Array, "..."], axes: tuple[int, int] = (1, 0)
) -> Float[Array, "..."]:
    """The product of two blocks over one axis of each, to float32 accuracy whatever their dtypes.

    The matrix unit multiplies bfloat16 exactly. A float32 factor is three such parts, so float32
    times bfloat16 is three products and float32 times float32 the six that matter of nine. All
    are one product over a longer axis, which fills the unit where the axis is short: 64 tokens
    are half of what a v5e sums at once, and a quarter on a v6e.
    """
    if a.dtype == b.dtype == jnp.float32:
        (a0, a1, a2), (b0, b1, b2) = _split(a), _split(b)
        left, right = (a0, a0, a1, a1, a0, a2), (b0, b1, b0, b1, b2, b0)
    elif a.dtype == jnp.float32:
        left, right = _split(a), (b,) * 3
    elif b.dtype == jnp.float32:
        left, right = (a,) * 3, _split(b)
    else:
        left, right = (a,), (b,)
    return lax.dot_general(
        jnp.concatenate(left, axis=axes[0]),
        jnp.concatenate(right, axis=axes[1]),
        (((axes[0],), (axes[1],)), ((), ())),
        preferred_element_type=jnp.float32,
    )


def rows_and_columns(shape: tuple[int, ...]) -> tuple[Int[Array, "m n"], Int[Array, "m n"]]:
    """The row number and the column number of every place of a block."""
    return lax.broadcasted_iota(jnp.int32, shape, 0), lax.broadcasted_iota(jnp.int32, shape, 1)


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


def first_halves(x: Array, width: int) -> Array:
    """The first `width` rows of every 2 `width`, joined."""
    return jnp.concatenate([x[i : i + width] for i in range(0, x.shape[0], 2 * width)])


def second_halves(x: Array, width: int) -> Array:
    """The second `width` rows of every 2 `width`, joined."""
    return jnp.concatenate([x[i : i + width] for i in range(width, x.shape[0], 2 * width)])


def interleave(first: Array, second: Array, width: int) -> Array:
    """Undo `first_halves` and `second_halves`."""
    starts = range(0, first.shape[0], width)
    return jnp.concatenate([x[i : i + width] for i in starts for x in (first, second)])


def second_reads_first(size: int, width: int) -> Bool[Array, "C/2 C"]:
    """For the rows `second_halves` keeps: which columns are the first half of their own block."""
    i, j = rows_and_columns((size // 2, size))
    return (j & -width) == (i & -width) * 2


def _invert_tiles(a: Float[Array, "C C"]) -> Float[Array, "C C"]:
    """Inverses of the 8 x 8 diagonal blocks of I + A, side by side in 8 rows and then in place.

    Forward substitution: when row s of X is final, a_is times it leaves every row below.
    """
    size = a.shape[0]
    i, j = rows_and_columns(a.shape)
    own = (i & -TILE) == (j & -TILE)
    packed = jnp.sum(jnp.where(own, a, 0.0).reshape(-1, TILE, size), axis=0)
    row, lane = rows_and_columns(packed.shape)
    # Column s of every block, in all eight columns of that block.
    columns = [jnp.where((lane & (TILE - 1)) == s, packed, 0.0) for s in range(TILE - 1)]
    spread = dot(jnp.concatenate(columns), jnp.where(own, 1.0, 0.0).astype(jnp.bfloat16))
    x = jnp.where(row == (lane & (TILE - 1)), 1.0, 0.0)
    for s in range(TILE - 1):
        x = x - spread[s * TILE : (s + 1) * TILE] * x[s : s + 1]
    return jnp.where(own, jnp.concatenate([x] * (size // TILE)), 0.0)


def unit_lower_inverse(a: Float[Array, "C C"]) -> Float[Array, "C C"]:
    """(I + A)^-1 of a strictly lower triangular A, C a power of two, without powers of A.

    Blocks of 8 by forward substitution, all of them at once. Then pairs of finished blocks merge,
    X <- X - X A_corner X, where A_corner is the part of A that links the second to the first.
    Powers of A, which a shorter product would form, grow beyond float32 when keys repeat.

    Cost:
        7 steps on a tile, and 2 log2(C / 8) products of C / 2 rows with C x C.
    """
    x, width = _invert_tiles(a), TILE
    while width < a.shape[0]:
        first, second = first_halves(x, width), second_halves(x, width)
        corner = jnp.where(second_reads_first(a.shape[0], width), second_halves(a, width), 0.0)
        corner = interleave(jnp.zeros_like(corner), corner, width)
        x = interleave(first, second - dot(dot(second, corner), x), width)
        width *= 2
    return x
