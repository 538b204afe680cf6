r"""One token of decoding: the state is read once and written once.

    S~ = diag(e^g) S,    u = beta (v - S~^T k)  (u = v without a delta rule)
    S' = S~ + k u^T,     o = S'^T q

Decoding is bound by memory: 8 K V bytes of a float32 state for about 8 K V FLOPs. As separate
XLA fusions the state is read once for S~^T k and again for the update; here a thread block brings
a tile of its columns on chip, and both reductions and the update happen there. The state is
float32 throughout, so this kernel takes queries, keys and values of any floating type.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from toolkit.attention.kernels.gpu.support import (
    F32,
    PROCESSORS,
    check_chip,
    check_heads,
    launch,
    padded,
    program,
    tile_columns,
)

DECAY, ERASE, WRITE, READ = range(4)  # vectors over the key: e^g, beta k, k, q


def step(
    q_t: Float[Array, "rows key"], k_t: Float[Array, "rows key"], v_t: Float[Array, "rows value"],
    g_t: Float[Array, "rows channels"], beta_t: Float[Array, " rows"] | None,
    state: Float[Array, "rows key value"], *,
    interpret: Any = False,
) -> tuple[Float[Array, "rows value"], Float[Array, "rows key value"]]:  # fmt: skip
    """Decode one token of every row; a row is one head of one sequence, its query already scaled.

    7 K V FLOPs per row (4 K V without a delta rule) and 8 K V bytes. At 4.8 TB/s the floor of 512
    rows (16 sequences of 32 heads) of 128 x 128 is 14 microseconds. Keys are padded to a multiple
    of 64 and values to one of 32, with a copy of the state if that changes it.
    """
    wide, value = state.shape[-2:]
    check_heads(wide, value)
    check_chip(interpret)
    q, k = (padded(x.astype(F32), 64) for x in (q_t, k_t))
    decay = jnp.broadcast_to(jnp.exp(g_t.astype(F32)), (state.shape[0], wide))
    is_delta = beta_t is not None
    strength = beta_t.astype(F32)[:, None] if is_delta else 1.0
    vectors = jnp.stack([padded(decay, 64), strength * k, k, q], axis=1)
    values = padded(strength * v_t.astype(F32), 32)
    state = jnp.pad(state, [(0, 0), (0, -wide % 64), (0, -value % 32)])
    out, new_state = _update(vectors, values, state, is_delta, interpret)
    return out[:, :value].astype(v_t.dtype), new_state[:, :wide, :value]


def _update(vectors: Array, values: Array, state: Array, is_delta: bool, interpret: Any):
    rows, key, value = state.shape
    # 64 registers a thread of state at most, and two thread blocks a processor where possible.
    tile = tile_columns(value, 64 if key <= 128 and rows * value >= 128 * PROCESSORS else 32)

    def along_key(x):
        return lax.broadcast_in_dim(x, (key, tile), (0,))

    grid = (rows, value // tile)

    def body(vectors, values, state, out, new_state, vector_smem, *rest):
        value_smem, state_smem, out_smem, loaded = rest
        row, number = program(grid)
        columns = pl.ds(number * tile, tile)
        plgpu.copy_gmem_to_smem(state.at[row, :, columns], state_smem, loaded)
        plgpu.copy_gmem_to_smem(vectors.at[row], vector_smem, loaded)
        plgpu.copy_gmem_to_smem(values.at[row, columns], value_smem, loaded)
        plgpu.barrier_wait(loaded)
        current = state_smem[...]
        if not interpret:  # the interpreter does not know where in registers numbers lie
            current = plgpu.layout_cast(current, plgpu.Layout.WGMMA)
        current = along_key(vector_smem[DECAY]) * current
        written = value_smem[...]
        if is_delta:
            written = written - jnp.sum(along_key(vector_smem[ERASE]) * current, axis=0)
        current += along_key(vector_smem[WRITE]) * lax.broadcast_in_dim(written, (key, tile), (1,))
        out_smem[...] = jnp.sum(along_key(vector_smem[READ]) * current, axis=0)
        state_smem[...] = current
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out.at[row, columns])
        plgpu.copy_smem_to_gmem(state_smem, new_state.at[row, :, columns])
        plgpu.wait_smem_to_gmem(0)

    kernel = launch(
        body,
        out_type=[
            jax.ShapeDtypeStruct((rows, value), F32),
            jax.ShapeDtypeStruct((rows, key, value), F32),
        ],
        scratch_types=[
            plgpu.SMEM((4, key), F32),
            plgpu.SMEM((tile,), F32),
            plgpu.SMEM((key, tile), F32),
            plgpu.SMEM((tile,), F32),
            plgpu.Barrier(num_arrivals=3),
        ],
        grid=grid,
        interpret=interpret,
    )
    return kernel(vectors, values, state)
