r"""Outputs of all chunks, once their states are known: one thread block per chunk.

    O = R S + P N

Both products go into one set of float32 sums, so the two terms meet before the only rounding and
nothing but the outputs is written. As two batched products, XLA would write the first term in
float32 and read it again: 2 C V floats per chunk, more than the operands R and P together.
"""

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from toolkit.attention.kernels.gpu.factors import Factors
from toolkit.attention.kernels.gpu.support import (
    BF16,
    CHUNK,
    launch,
    program,
    tile_columns,
    token_place,
)
from toolkit.attention.kernels.gpu.walk import sum_of_products


def outputs(
    factors: Factors, states: Float[Array, "rows chunks key value"],
    written: Float[Array, "rows chunks C value"] | Float[Array, "batch time heads value"],
    heads: int, *,
    is_in_place: bool, interpret: Any = False,
) -> Float[Array, "batch time heads value"]:  # fmt: skip
    """What every token reads, in bf16, of the incoming states and written values from `walk`.

    Bulk copies write it in place, between the other heads, and read the written values there where
    these are the inputs v.

    C K V + C^2 V multiply-adds per chunk; 2 (C K + C^2 + K V + 2 C V) bytes, which decide.
    """
    rows, count, key, value = states.shape
    tile = tile_columns(value, 256 if key <= 128 else 128)
    shape = (CHUNK, tile)

    grid = (rows, count, value // tile)

    def body(read, scores, states, written, out, read_smem, scores_smem, state_smem, *rest):
        written_smem, out_smem, loaded = rest
        row, chunk, number = program(grid)
        place, columns = (row, chunk), pl.ds(0, value)
        if tile != value:
            columns = pl.ds(number * tile, tile)
        part = (*place, slice(None), columns)
        tokens = token_place(*place, heads, columns)
        plgpu.copy_gmem_to_smem(read.at[place], read_smem, loaded)
        plgpu.copy_gmem_to_smem(states.at[part], state_smem, loaded)
        plgpu.copy_gmem_to_smem(scores.at[place], scores_smem, loaded)
        plgpu.copy_gmem_to_smem(written.at[tokens if is_in_place else part], written_smem, loaded)
        plgpu.barrier_wait(loaded)
        pairs = [(read_smem, state_smem), (scores_smem, written_smem)]
        out_smem[...] = sum_of_products(shape, pairs).astype(BF16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out.at[tokens])
        plgpu.wait_smem_to_gmem(0)

    kernel = launch(
        body,
        out_type=jax.ShapeDtypeStruct((rows // heads, count * CHUNK, heads, value), BF16),
        scratch_types=[
            plgpu.SMEM((CHUNK, key), BF16),
            plgpu.SMEM((CHUNK, CHUNK), BF16),
            plgpu.SMEM((key, tile), BF16),
            plgpu.SMEM(shape, BF16),
            plgpu.SMEM(shape, BF16),
            plgpu.Barrier(num_arrivals=4),
        ],
        grid=grid,
        interpret=interpret,
    )
    return kernel(factors.read, factors.scores, states, written)
