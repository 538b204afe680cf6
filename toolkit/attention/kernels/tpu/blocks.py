"""Arithmetic on the two-dimensional blocks of a TPU kernel: products, sums along time, an inverse.

A TPU core holds a block as tiles of 8 sublanes x 128 lanes. What is free or cheap there decides
how these are written: slices and joins at multiples of 8 rows cost nothing, a mask is two
comparisons of counters, a sum over lanes is one instruction a tile, and only matrix products
reach the matrix unit, which multiplies bfloat16 and adds float32.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

# Rows of a tile, and of the blocks inverted by substitution before products merge them.
TILE = 8


def _split(x: Float[Array, "m n"], parts: int) -> list[Array]:
    """Bfloat16 blocks, of 8 of the 24 bits each, whose sum is the float32 block `x` if three.

    They are cut by masking bits: a round trip through bfloat16 would be simplified away by XLA
    where the kernel is interpreted.
    """
    blocks = []
    for _ in range(parts - 1):
        bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << 16))
        part = lax.bitcast_convert_type(bits, jnp.float32)
        blocks.append(part.astype(jnp.bfloat16))
        x = x - part
    return [*blocks, x.astype(jnp.bfloat16)]


def dot(
    a: Float[Array, "..."], b: Float[Array, "..."], axes: tuple[int, int] = (1, 0), *,
    parts: int = 3,
) -> Float[Array, "..."]:  # fmt: skip
    """The product of two blocks over one axis of each, to 8 bits for each of `parts`.

    The matrix unit multiplies bfloat16 exactly. With three parts of a float32 factor the product is
    as accurate as float32: three products of float32 and bfloat16, of float32 and float32 the six
    that matter of nine. Two parts take two, and three of four; one rounds to bfloat16. All are one
    product over a longer axis, which fills the unit where the axis is short: 64 tokens are half of
    what a v5e sums at once, and a quarter on a v6e.
    """
    left, right = (
        _split(x, parts) if x.dtype == jnp.float32 else [x.astype(jnp.bfloat16)] for x in (a, b)
    )
    pairs = [(x, y) for i, x in enumerate(left) for j, y in enumerate(right) if i + j < parts]
    return lax.dot_general(
        jnp.concatenate([x for x, _ in pairs], axis=axes[0]),
        jnp.concatenate([y for _, y in pairs], axis=axes[1]),
        (((axes[0],), (axes[1],)), ((), ())),
        preferred_element_type=jnp.float32,
    )


class Products(NamedTuple):
    """How exactly the products of a chunk are made."""

    dot: Callable[..., Array]
    of_inverse: Callable[..., Array]  # where correlated keys cancel


EXACT = Products(dot, dot)
ROUNDED = Products(partial(dot, parts=1), partial(dot, parts=2))


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


def unit_lower_inverse(
    a: Float[Array, "C C"], dot: Callable[..., Array] = dot
) -> Float[Array, "C C"]:
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
