r"""The walk over chunks, and back: the sequential part, with the state on chip.

A thread block owns a tile of value columns of one row (one head of one sequence) and keeps its
piece of the state [key, tile] in registers, in float32, for the whole sequence. Each chunk is

    forward    N  = U + E S                 S  <- diag(through) S + L^T N
    backward   dN = L dS + P^T dO           dS <- diag(through) dS + R^T dO + E^T dN

with the symbols of `factors`: the same kernel with other operands. Every product is a WGMMA
of 64 (or key) by tile; the state is rounded to bf16 as an operand, never as the value carried.
Stored in bf16 for the phases that run over all chunks at once: the state (or its gradient) each
chunk starts from, and N (or its gradient). While a chunk is computed, bulk copies load the next.

Columns of the state never meet, so tiles are independent, and their width trades parallelism
against traffic: the [64, key] factors are read once per tile, mostly from the L2 cache. Tiles of 32
make 128 blocks of 32 rows by 128 columns, for 132 processors; 64 halves the reads where there
are many rows. Operands contracted over tokens are read by columns from shared memory.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from toolkit.attention.kernels.gpu.factors import Factors, Solution
from toolkit.attention.kernels.gpu.support import (
    BF16,
    CHUNK,
    F32,
    PROCESSORS,
    SHARED_MEMORY,
    launch,
    program,
    token_place,
)

# Names of the two operands that live on chip: the state a chunk starts from, and what it writes.
STATE, WRITTEN = "state", "written"
# Pairs (left matrix, right tile) whose products are summed; "L^T" is the transpose of matrix "L".
Products = Sequence[tuple[str, str]]


def tile_of_state(rows: int, key: int, value: int) -> int:
    """Value columns a thread block carries: 64 where that leaves two blocks a processor."""
    fits = key <= 128 and value % 64 == 0  # 64 registers a thread of state, and as many of sums
    return 64 if fits and rows * value // 64 >= 2 * PROCESSORS else 32


class Transposed(NamedTuple):
    """A matrix in shared memory that a product reads by columns."""

    matrix: Any

    def __getitem__(self, index: Any) -> Array:
        return jnp.swapaxes(self.matrix[index], 0, 1)


def sum_of_products(
    shape: tuple[int, int], pairs: Sequence[tuple[Any, Any]], interpret: Any = False
) -> Array:
    """Matrix products summed in float32 registers, of operands in shared memory.

    A left operand may lie in registers, and either may be `transposed`; the interpreter of jax 0.10
    supports neither.
    """
    if interpret:
        dots = (jnp.dot(x[...], y[...], preferred_element_type=F32) for x, y in pairs)
        return sum(dots, jnp.zeros(shape, F32))

    def multiply(sums):
        for operands in pairs:
            left, right = (
                x.matrix.transpose((1, 0)) if isinstance(x, Transposed) else x for x in operands
            )
            plgpu.wgmma(sums, left, right)
        return sums[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, F32))


def _walk(
    through: Float[Array, "rows chunks key"],
    matrices: dict[str, Array],  # [rows, chunks, m, n], whole in every thread block
    tiles: dict[str, Array],  # [rows, chunks, C, value] or tokens, a tile in every thread block
    initial: Float[Array, "rows key value"],
    *,
    writes: Products,
    updates: Products,
    plus: str | None = None,  # a tile added to what is written
    heads: int | None = None,  # if the tiles are tokens, which lie as [batch, time, heads, value]
    is_in_place: bool = False,  # what is written lies as these do
    is_reversed: bool = False,
    interpret: Any = False,
) -> list[Array]:
    """States chunks start from, what they write (unless `writes` is empty), and the last state."""
    (rows, count, key), value = through.shape, initial.shape[-1]
    tile = tile_of_state(rows, key, value)
    state_shape, written_shape = (key, tile), (CHUNK, tile)
    shapes = [x.shape[2:] for x in matrices.values()] + [written_shape] * len(tiles)
    names = [*matrices, *tiles]

    # Two stages, so that one loads while the other is computed, if they fit beside the rest. The
    # kilobyte is for barriers and alignment.
    stage_bytes = 4 * key + sum(2 * m * n for m, n in shapes)
    other_bytes = (4 + 2) * key * tile + 2 * CHUNK * tile + 1024
    stages = min(count, 2 if 2 * stage_bytes + other_bytes <= SHARED_MEMORY else 1)

    grid = (rows, value // tile)

    def body(*refs):
        through_hbm, *sources = refs[: 1 + len(names)]
        initial_hbm, states_hbm, *written_hbm, final_hbm = refs[1 + len(names) :][:-7]
        through_smem, buffers, loaded, edge, edge_loaded, state_smem, written_smem = refs[-7:]
        row, number = program(grid)
        columns = pl.ds(number * tile, tile)

        def place(i):
            return count - 1 - i if is_reversed else i

        def part_of(chunk, are_tokens):
            if are_tokens and heads is not None:
                return token_place(row, chunk, heads, columns)
            return row, chunk, slice(None), columns

        def load(i, stage):
            chunk, barrier = place(i), loaded.at[stage]
            plgpu.copy_gmem_to_smem(through_hbm.at[row, chunk], through_smem.at[stage], barrier)
            for name, source, buffer in zip(names, sources, buffers, strict=True):
                part = (row, chunk) if name in matrices else part_of(chunk, True)
                plgpu.copy_gmem_to_smem(source.at[part], buffer.at[stage], barrier)

        def step(i, state):
            stage, chunk = lax.rem(i, stages), place(i)
            operand = {name: buffer.at[stage] for name, buffer in zip(names, buffers, strict=True)}
            operand |= {STATE: state_smem, WRITTEN: written_smem}

            def left(name):
                matrix = operand[name.removesuffix("^T")]
                return Transposed(matrix) if name.endswith("^T") else matrix

            def products(shape, pairs):
                return sum_of_products(shape, [(left(x), operand[y]) for x, y in pairs], interpret)

            plgpu.barrier_wait(loaded.at[stage])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last chunk's results have left
            state_smem[...] = state.astype(BF16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(state_smem, states_hbm.at[row, chunk, :, columns])
            if writes:
                written = products(written_shape, writes)
                if plus is not None:
                    written = written + operand[plus][...].astype(F32)
                written_smem[...] = written.astype(BF16)
                plgpu.commit_smem()
                target = written_hbm[0].at[part_of(chunk, is_in_place)]
                plgpu.copy_smem_to_gmem(written_smem, target)
            kept = lax.broadcast_in_dim(through_smem[stage], state_shape, (0,)) * state
            state = kept + products(state_shape, updates)
            plgpu.commit_smem()  # whatever was read of this stage has been read
            pl.when(i + stages < count)(lambda: load(i + stages, stage))
            return state

        for stage in range(stages):
            load(stage, stage)
        plgpu.copy_gmem_to_smem(initial_hbm.at[row, :, columns], edge, edge_loaded)
        plgpu.barrier_wait(edge_loaded)
        edge[...] = lax.fori_loop(0, count, step, edge[...])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(edge, final_hbm.at[row, :, columns])
        plgpu.wait_smem_to_gmem(0)

    outputs = [jax.ShapeDtypeStruct((rows, count, key, value), BF16)]
    written = next(iter(tiles.values())).shape if is_in_place else (rows, count, CHUNK, value)
    outputs += [jax.ShapeDtypeStruct(written, BF16)] if writes else []
    kernel = launch(
        body,
        out_type=[*outputs, jax.ShapeDtypeStruct((rows, key, value), F32)],
        scratch_types=[
            plgpu.SMEM((stages, key), F32),
            [plgpu.SMEM((stages, *shape), BF16) for shape in shapes],
            plgpu.Barrier(num_arrivals=1 + len(names), num_barriers=stages),
            plgpu.SMEM(state_shape, F32),
            plgpu.Barrier(),
            plgpu.SMEM(state_shape, BF16),
            plgpu.SMEM(written_shape, BF16),
        ],
        grid=grid,
        interpret=interpret,
    )
    return kernel(through, *matrices.values(), *tiles.values(), initial)


def walk(
    factors: Factors, solution: Solution | None,
    initial_state: Float[Array, "rows key value"], *,
    interpret: Any = False,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Every chunk's incoming state and written values (bf16), and the final state (float32).

    Without a delta rule what is written are the values, [batch, time, heads, value].

    The key size is a multiple of 64, the value size of 32. 2 C K V multiply-adds per chunk (C K V
    without a delta rule). Its longest chain is two dependent WGMMA and two trips of [64, tile] and
    [key, tile] through shared memory.
    """
    matrices = {"L": factors.leave}
    if solution is None:
        states, final = _walk(
            factors.through, matrices, {"N": factors.values}, initial_state,
            writes=[], updates=[("L^T", "N")], heads=factors.values.shape[2], interpret=interpret,
        )  # fmt: skip
        return states, factors.values, final
    matrices["E"] = solution.erase
    states, written, final = _walk(
        factors.through, matrices, {"U": solution.values}, initial_state,
        writes=[("E", STATE)], plus="U", updates=[("L^T", WRITTEN)], interpret=interpret,
    )  # fmt: skip
    return states, written, final


def walk_backward(
    factors: Factors, erase: Float[Array, "rows chunks C key"] | None,
    d_out: Float[Array, "batch time heads value"], d_final_state: Float[Array, "rows key value"],
    *,
    interpret: Any = False,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Gradients of every chunk's outgoing state and written values (bf16), and of the first state.

    Without a delta rule, that is without E, the written values' is the gradient of the values and
    lies as they do, [batch, time, heads, value].

    3 C K V + C^2 V multiply-adds per chunk (2 C K V + C^2 V without a delta rule).
    """
    matrices = {"L": factors.leave, "P": factors.scores, "R": factors.read}
    updates = [("R^T", "dO")]
    if erase is not None:
        matrices["E"] = erase
        updates.append(("E^T", WRITTEN))
    d_states, d_written, d_initial = _walk(
        factors.through, matrices, {"dO": d_out}, d_final_state,
        writes=[("L", STATE), ("P^T", "dO")], updates=updates, heads=d_out.shape[2],
        is_in_place=erase is None, is_reversed=True, interpret=interpret,
    )  # fmt: skip
    return d_states, d_written, d_initial
