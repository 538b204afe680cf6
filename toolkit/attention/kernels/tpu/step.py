r"""The decode step of the linear-time mixers as a Pallas kernel for TPUs (Mosaic).

Made for TPU v5e and v6e; compiled ahead of time for both, not yet run on either. One token reads
and writes a state [key, value] of float32 for every row, which is nearly all there is to do: at
key = value = 128 that is 128 KiB a row, 0.16 us on a v5e (819 GB/s) and 0.08 us on a v6e
(1640 GB/s). The compiled schedule for v5e is 107 bundles per row for Gated DeltaNet and 138 for
Kimi Delta Attention, at 1.5 GHz 0.07 and 0.09 us: memory is the bound (modelled).

So the products stay off the matrix unit, in exact float32 on the vector unit, and the new state
takes the place of the old one in memory.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from toolkit._checks import check_shape
from toolkit._compat import vary_alike
from toolkit._kinds import check_rank
from toolkit.attention.kernels.tpu.blocks import as_column
from toolkit.attention.kernels.tpu.call import VMEM_BYTES, cost, rows_per_program, shapes_of

# Rows of one program: enough to fetch in one go what hides the cost of starting it.
ROWS = 8


class Token(NamedTuple):
    """One token of every row; blocks and references in the kernel, one row under `jax.vmap`."""

    q: Float[Array, "rows 1 key"]
    k: Float[Array, "rows 1 key"]
    v: Float[Array, "rows 1 value"]
    g: Float[Array, "rows 1 channels"]
    beta: Float[Array, "rows 1 1"] | None


def _update(token: Token, state: Float[Array, "key value"]) -> tuple[Array, Array]:
    """The output [1, value] and the new state of one row."""
    q, k, v = (x.astype(jnp.float32) for x in token[:3])
    survives = jnp.exp(token.g)
    state = (survives if survives.shape[1] == 1 else as_column(survives)) * state
    key, written = as_column(k), v
    if token.beta is not None:
        written = token.beta * (v - jnp.sum(key * state, axis=0, keepdims=True))
    state = state + key * written
    return jnp.sum(as_column(q) * state, axis=0, keepdims=True), state


def _step_kernel(state_ref, refs: Token, new_state_ref, out_ref):
    token = jax.tree.map(lambda ref: ref[...], refs)
    out, new_state = jax.vmap(_update)(token, state_ref[...])
    new_state_ref[...] = new_state
    out_ref[...] = out.astype(out_ref.dtype)


def step(
    q_t: Float[Array, "rows key"], k_t: Float[Array, "rows key"], v_t: Float[Array, "rows value"],
    g_t: Float[Array, "rows channels"], beta_t: Float[Array, "rows"] | None,
    state: Float[Array, "rows key value"], *,
    interpret: "bool | pltpu.InterpretParams" = False,
) -> tuple[Float[Array, "rows value"], Float[Array, "rows key value"]]:  # fmt: skip
    r"""Decode one token of every row on a TPU, reading and writing each state once.

        S <- Diag(e^g) S,   S <- S + k w^T  with  w = v  or  beta (v - S^T k),   o = S^T q

    The query is already scaled. Donate the float32 state under `jax.jit`, or it is copied first.
    5 K V FLOPs per row and 2 K V more with the delta rule; 8 K V bytes.
    """
    check_rank("state", state, "rows key value")
    rows, key, value = state.shape
    if state.dtype != jnp.float32:
        raise TypeError(f"state must be float32; got {state.dtype}.")
    check_shape("q_t", q_t, (rows, key), "rows key")
    check_shape("k_t", k_t, (rows, key), "rows key")
    check_shape("v_t", v_t, (rows, value), "rows value")
    check_shape("g_t", g_t, (rows, 1 if g_t.shape[1:] == (1,) else key), "rows channels")
    if beta_t is not None:
        check_shape("beta_t", beta_t, (rows,), "rows")
        beta_t = beta_t[:, None]
    token = jax.tree.map(lambda x: x[:, None], Token(q_t, k_t, v_t, g_t, beta_t))
    token, state = vary_alike((token, state))
    block = rows_per_program(state, ROWS)
    inputs, outputs = (state, token), (state, token.v)
    specs = jax.tree.map(
        lambda x: pl.BlockSpec((block, *x.shape[1:]), lambda r: (r, 0, 0)), (inputs, outputs)
    )
    new_state, out = pl.pallas_call(
        _step_kernel,
        grid=(rows // block,),
        in_specs=specs[0],
        out_specs=specs[1],
        out_shape=shapes_of(outputs, like=state),
        input_output_aliases={0: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=cost(rows * key * value * 3, g_t.size, inputs, outputs),
        interpret=interpret,
        name="mixer_step",
    )(*inputs)
    return out[:, 0], new_state
