r"""The delta rule of a chunk solved for what it writes: T = (I + A)^-1, then U and E.

T by blocks of 16 tokens. The four blocks on the diagonal are inverted beside each other, as one
strip [64, 16]: with X the inverse of their own diagonal blocks of b tokens, and A_b the entries of
A that lie below those inside blocks of 2 b,

    X <- X - (X A_b) X,      b = 1, 2, 4, 8

Then blocks merge, two by two, without the zeros above the diagonal and around it:

    T_10 = -X_1 A_10 X_0,    T_32 = -X_3 A_32 X_2,    lower left half = -(T_22 A_21) T_11

No powers of A appear (repeated keys would make them overflow). Entries of T for correlated keys
come from cancellation, so products keep 16 bits: an operand is the sum of two bf16 numbers, and the
three larger of the four partial products are summed in float32. So it is for U and E, where
strengths scale the columns of T, and values and keys stay the bf16 numbers that came in. What is
stored of T is rounded to bf16.

An instruction of the matrix unit multiplies 64 rows, so a product of four blocks beside each other
is four instructions of 64 x 16 x 16, whose left operand is zero outside its block. They come from
registers, where a warp holds the 16 rows of a block; only right operands pass through shared
memory. That is 105 instructions, 6.6 C^3 multiply-adds, where doubling whole matrices took 30 C^3.

In XLA the same inverse is some twenty kernels, which move six times the 24 KB of A and T per chunk.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from toolkit.attention.kernels.gpu.factors import Delta, Solution
from toolkit.attention.kernels.gpu.support import BF16, CHUNK, F32, launch, program, token_place
from toolkit.attention.kernels.gpu.walk import sum_of_products

BLOCK = 16  # tokens of a block on the diagonal: the rows of a warp, and the K of a WGMMA
BLOCKS = range(CHUNK // BLOCK)
STRIP = (CHUNK, BLOCK)
INSTRUCTIONS = 3 * (3 * 8 + 4 + 7)  # of 64 x 16 x 16: of three doublings, and of the two merges


def halves(x: Array) -> tuple[Array, Array]:
    """Two bf16 numbers whose sum is x without its last 8 bits."""
    high = x.astype(BF16)
    return high, (x - high.astype(F32)).astype(BF16)


def _tokens(block: int) -> Any:
    return pl.ds(BLOCK * block, BLOCK)


class Scratch(NamedTuple):
    """Shared memory of an inverse: bf16 strips, two for an operand of 16 bits."""

    below: Any  # right operands that come from A
    by_turns: Any  # X
    inverse: Any


def scratch() -> Scratch:
    """What `write_solution` needs."""
    strip = plgpu.SMEM(STRIP, BF16)
    pair = [strip, strip]
    return Scratch([pair] * 6, [pair] * 2, [strip for _ in BLOCKS])


def operand(size: int) -> Any:
    """Keys or values of a chunk in shared memory, as narrow as a block: a WGMMA takes whole periods
    of the swizzle.
    """
    narrow = (plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(2 * BLOCK))
    return plgpu.SMEM((CHUNK, size), BF16, transforms=narrow)


def write_solution(system, values, keys, strengths, scratch: Scratch, results, interpret) -> None:
    """T, U and E of one chunk to global memory; values and keys are overwritten on chip.

    `system` is A in shared memory, and `strengths(i, tokens)` gives those of values, of keys; the
    `results` are references to the chunk's T, U and E.
    """
    row, column = (lax.broadcasted_iota(jnp.int32, STRIP, axis) for axis in (0, 1))
    distance, own = (row & (BLOCK - 1)) ^ column, row // BLOCK
    inverse, *applied = results

    def in_block(x, block):
        return jnp.where(own == block, x, 0.0)

    def store(pair, x):
        for buffer, half in zip(pair, halves(x), strict=True):
            buffer[...] = half

    def product(*terms):
        """The sum of strips times a block of a strip in shared memory, to 16 bits."""
        pairs = []
        for x, (high, low), block in terms:
            x_high, x_low = halves(x)
            right = high.at[_tokens(block)]
            pairs += [(x_high, right), (x_high, low.at[_tokens(block)]), (x_low, right)]
        return sum_of_products(STRIP, pairs, interpret)

    def blocks_product(left, right, blocks: Sequence[int] = BLOCKS, below: int = 0):
        """Every block of the left, `below` blocks lower, times its block of the right."""
        return product(*((in_block(left, block + below), right, block) for block in blocks))

    # Columns of A. Right operands are stored where no warp can still be reading: at first all
    # that come from A, then X by turns in two places.
    columns = [system[:, _tokens(block)] for block in BLOCKS]
    diagonal = sum(in_block(columns[block], block) for block in BLOCKS)
    *inside_smem, pairs_smem, left_smem, right_smem = scratch.below
    for width, pair in zip((2, 4, 8), inside_smem, strict=True):
        inside = (distance >= width) & (distance < 2 * width)
        store(pair, jnp.where(inside, diagonal, 0.0))
    store(pairs_smem, in_block(columns[0], 1) + in_block(columns[2], 3))
    store(left_smem, columns[0])
    store(right_smem, columns[1])
    x = jnp.where(distance == 0, 1.0, 0.0) - jnp.where(distance == 1, diagonal, 0.0)
    x_smem, other_smem = scratch.by_turns
    for inside in inside_smem:
        store(x_smem, x)
        plgpu.commit_smem()
        x = x - blocks_product(blocks_product(x, inside), x_smem)
        x_smem, other_smem = other_smem, x_smem
    store(x_smem, x)
    plgpu.commit_smem()
    read = blocks_product(x, pairs_smem, (1, 3))
    merged = -blocks_product(read, x_smem, (0, 2), below=1)
    store(other_smem, merged)
    plgpu.commit_smem()
    third, last = in_block(x, 2) + in_block(merged, 3), in_block(x, 3)
    left, right = (
        product((third, corner, 2), (last, corner, 3)) for corner in (left_smem, right_smem)
    )
    first = in_block(x, 0) + in_block(merged, 1)
    first -= product((left, x_smem, 0), (right, other_smem, 1))
    second = in_block(x, 1) - product((right, x_smem, 1))
    strips = (first, second, third, last)

    def apply(sign, strength, buffer, result):
        """T diag(strength) times the buffer, into the buffer."""
        pairs = []
        for block, strip in enumerate(strips):
            by_token = sign * strengths(strength, _tokens(block))
            scaled = strip * lax.broadcast_in_dim(by_token, STRIP, (1,))
            pairs += [(half, buffer.at[_tokens(block)]) for half in halves(scaled)]
        applied = sum_of_products(buffer.shape, pairs, interpret)
        plgpu.commit_smem()  # whatever was read of the buffer has been read
        buffer[...] = applied.astype(BF16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, result)

    for block, (strip, buffer) in enumerate(zip(strips, scratch.inverse, strict=True)):
        buffer[...] = strip.astype(BF16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, inverse.at[:, _tokens(block)])
    apply(1.0, 0, values, applied[0])
    apply(-1.0, 1, keys, applied[1])
    plgpu.wait_smem_to_gmem(0)


def solve(
    delta: Delta, values: Float[Array, "batch time heads value"], *, interpret: Any = False
) -> Solution:
    """T, U and E of all chunks in bf16, one thread block per chunk; values are read in place.

    6.6 C^3 multiply-adds of bf16 per chunk for T (`INSTRUCTIONS`), and 2 C^2 (K + V); 6 C^2 +
    4 C (K + V) bytes.
    """
    rows, count, _, key = delta.keys.shape
    heads, value = values.shape[2:]

    grid = (rows, count)

    def body(*refs):
        *sources, inverse, new_values, erase = refs[:7]
        *buffers, strips, loaded = refs[7:]
        row, chunk = program(grid)
        place = row, chunk
        parts = place, token_place(*place, heads), place, place
        for source, part, buffer in zip(sources, parts, buffers, strict=True):
            plgpu.copy_gmem_to_smem(source.at[part], buffer, loaded)
        plgpu.barrier_wait(loaded)
        system, values, keys, strengths = buffers
        results = [x.at[place] for x in (inverse, new_values, erase)]
        by_token = lambda i, tokens: strengths[i, tokens]  # noqa: E731
        write_solution(system, values, keys, by_token, strips, results, interpret)

    outputs = [(CHUNK, CHUNK), (CHUNK, value), (CHUNK, key)]
    kernel = launch(
        body,
        out_type=[jax.ShapeDtypeStruct((rows, count, *shape), BF16) for shape in outputs],
        scratch_types=[
            plgpu.SMEM((CHUNK, CHUNK), F32),
            operand(value),
            operand(key),
            plgpu.SMEM((2, CHUNK), F32),
            scratch(),
            plgpu.Barrier(num_arrivals=4),
        ],
        grid=grid,
        interpret=interpret,
    )
    return Solution(*kernel(delta.system, values, delta.keys, delta.strengths))
