r"""The delta rule of a chunk solved for what it writes: T = (I + A)^-1, then U and E.

T by doubling: with X the inverse of the diagonal blocks of b tokens, and A_b the entries of A
that lie below them inside blocks of 2 b, the inverse of the larger blocks is

    X <- X - (X A_b) X,      b = 1, 2, 4, ..., 32

No powers of A appear (repeated keys would make them overflow), and each step is two products of
64 x 64, which stay on chip. Entries of T for correlated keys come from cancellation, so products
keep 16 bits: an operand is the sum of two bf16 numbers, and the three larger of the four partial
products are summed in float32. So it is for U and E, where strengths scale the columns of T, and
values and keys stay the bf16 numbers that came in. What is stored of T is rounded to bf16.

In XLA the same inverse is some twenty kernels, which move six times the 24 KB of A and T per chunk.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from toolkit.attention.kernels.gpu_factors import Delta, Solution
from toolkit.attention.kernels.gpu_support import BF16, CHUNK, F32, launch
from toolkit.attention.kernels.gpu_walk import sum_of_products

SQUARE = (CHUNK, CHUNK)


def _halves(x: Array) -> tuple[Array, Array]:
    """Two bf16 numbers that sum to x but for its last 8 bits."""
    high = x.astype(BF16)
    return high, (x - high.astype(F32)).astype(BF16)


def solve(
    delta: Delta, values: Float[Array, "rows chunks C value"], *, interpret: Any = False
) -> Solution:
    """T, U and E of all chunks in bf16, one thread block per chunk.

    10 C^3 multiply-adds per chunk, of three bf16 products each, and 2 C^2 (K + V); 6 C^2 +
    4 C (K + V) bytes.
    """
    rows, count, _, key = delta.keys.shape
    value = values.shape[-1]

    def body(system, values, keys, strengths, inverse, new_values, erase, *scratch):
        system_smem, values_smem, keys_smem, strengths_smem, *scratch = scratch
        pair_smem, other_smem, loaded = scratch
        place = lax.axis_index("row"), lax.axis_index("chunk")
        plgpu.copy_gmem_to_smem(system.at[place], system_smem, loaded)
        plgpu.copy_gmem_to_smem(values.at[place], values_smem, loaded)
        plgpu.copy_gmem_to_smem(keys.at[place], keys_smem, loaded)
        plgpu.copy_gmem_to_smem(strengths.at[place], strengths_smem, loaded)
        plgpu.barrier_wait(loaded)
        distance = lax.broadcasted_iota(jnp.int32, SQUARE, 0)
        distance = distance ^ lax.broadcasted_iota(jnp.int32, SQUARE, 1)

        def store(buffers, x):
            for buffer, half in zip(buffers, _halves(x), strict=True):
                buffer[...] = half
            plgpu.commit_smem()

        def product(left, right):
            pairs = [(left[0], right[0]), (left[0], right[1]), (left[1], right[0])]
            return sum_of_products(SQUARE, pairs)

        x = jnp.where(distance == 0, 1.0, 0.0) - jnp.where(distance == 1, system_smem[...], 0.0)
        for width in (2, 4, 8, 16, 32):
            inside = (distance >= width) & (distance < 2 * width)
            store(pair_smem, x)
            store(other_smem, jnp.where(inside, system_smem[...], 0.0))
            read = product(pair_smem, other_smem)
            store(other_smem, read)
            x = x - product(other_smem, pair_smem)
        store(other_smem, x)
        plgpu.copy_smem_to_gmem(other_smem[0], inverse.at[place])

        def apply(sign, strength, buffer, result):
            """T diag(strength) times the buffer, into the buffer."""
            columns = lax.broadcast_in_dim(sign * strengths_smem[strength], SQUARE, (1,))
            store(pair_smem, x * columns)
            buffer[...] = sum_of_products(buffer.shape, [(y, buffer) for y in pair_smem]).astype(
                BF16
            )
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, result.at[place])

        apply(1.0, 0, values_smem, new_values)
        apply(-1.0, 1, keys_smem, erase)
        plgpu.wait_smem_to_gmem(0)

    square = plgpu.SMEM(SQUARE, BF16)
    outputs = [SQUARE, (CHUNK, value), (CHUNK, key)]
    kernel = launch(
        body,
        out_type=[jax.ShapeDtypeStruct((rows, count, *shape), BF16) for shape in outputs],
        scratch_types=[
            plgpu.SMEM(SQUARE, F32),
            plgpu.SMEM((CHUNK, value), BF16),
            plgpu.SMEM((CHUNK, key), BF16),
            plgpu.SMEM((2, CHUNK), F32),
            [square, square],
            [square, square],
            plgpu.Barrier(num_arrivals=4),
        ],
        grid=(rows, count),
        grid_names=("row", "chunk"),
        interpret=interpret,
    )
    return Solution(*kernel(delta.system, values, delta.keys, delta.strengths))
