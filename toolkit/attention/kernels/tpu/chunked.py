r"""Chunked linear-time mixers as Pallas kernels for TPUs (Mosaic), forward and backward.

Made for TPU v5e and v6e; compiled ahead of time for both, not yet run on either. One file serves
three families: additive rules (linear attention, retention, Mamba-2, gated linear attention),
Gated DeltaNet and Kimi Delta Attention. `rule.py` has the equations of a chunk; here is what
surrounds them: a grid of (groups of rows, chunks) whose second axis runs in order, forward in one
pass and backward in the other, with the state, or its gradient, in VMEM from chunk to chunk.

The products of a chunk depend on one another, and a lone chain of them leaves the matrix units
waiting. So a program takes `ROWS` rows, and `jax.vmap` runs each product for all of them before
the next: with products of float32, 900 bundles of instructions per chunk and row of Gated DeltaNet,
against 1400 for one row at a time and 1450 where a loop over the rows is unrolled.

Tokens come as [rows, time, size], heads before time (`dispatch.over_rows`): one head of
[batch, time, heads, size] makes a block that ends in (1, size), and Mosaic takes multiples of
(8, 128) or all of an axis. Eight heads in place compile, but then XLA copies elsewhere: between two
projections such a call moves 1.39 GB against 1.25 (compiled for a v5e, 2 x 8,192 tokens, 16 heads
of 128, one array), for XLA turns tokens while it computes something of them. Rows that share a
query and key read one.

Kept for the backward pass: the inputs and the float32 state [key, value] that enters each chunk.
Scores, inverse and written values are computed again.

Products of bfloat16 inputs are one pass of the matrix unit each, but for those with the inverse of
a chunk, which take three; of float32 inputs three or six (`blocks.dot`). Passes in GFLOP at 16
rows x 4096 tokens, key = value = 128, C = 64 (counted), forward and backward:

             additive rule     Gated DeltaNet    Kimi Delta Attention
    bfloat16 6.4 and 16.1      19.1 and 39.5     36.3 and 62.1
    float32  38.7 and 96.6     75.5 and 185      98.0 and 224

Floor of Gated DeltaNet forward there, in bfloat16 (modelled: 12.3 GFLOP, 19.1 GFLOP in passes; 68
MB, and 67 MB more where states are kept):

             FLOPs / peak      passes / peak     bytes / bandwidth
    v5e      0.06 ms           0.10 ms           0.08 ms (0.16)
    v6e      0.01 ms           0.02 ms           0.04 ms (0.08)

with peaks of 197 and 918 bfloat16 TFLOP/s, 819 and 1640 GB/s. What the compiler packed for a v5e,
one bundle per cycle at 1.5 GHz, stands above the floors for the vector unit's work around small
products: 665 bundles per chunk and row forward and 931 backward, 0.45 ms of the forward pass here.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from toolkit._checks import check_shape
from toolkit._compat import vary_alike
from toolkit._kinds import check_rank
from toolkit.attention._checks import check_multiple, check_same_dtype
from toolkit.attention.execution.derivatives import no_derivative
from toolkit.attention.execution.precision import BFLOAT16_PRODUCTS, product_precision
from toolkit.attention.kernels.tpu.blocks import EXACT, ROUNDED
from toolkit.attention.kernels.tpu.call import VMEM_BYTES, cost, shapes_of
from toolkit.attention.kernels.tpu.grid import Grid, block_sizes, multiply_adds
from toolkit.attention.kernels.tpu.rule import Chunk, backward_chunk, forward_chunk


def _load(refs: Chunk) -> Chunk:
    """Every row with its own query and key."""
    chunk = jax.tree.map(lambda ref: ref[...], refs)
    q, k = (jnp.repeat(x, len(chunk.v) // len(x), axis=0) for x in (chunk.q, chunk.k))
    return chunk._replace(q=q, k=k)


def _forward_kernel(products, refs: Chunk, initial_ref, out_ref, states_ref, final_ref, state_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        state_ref[...] = initial_ref[...]

    if states_ref is not None:
        states_ref[...] = state_ref[...]
    forward = partial(forward_chunk, products=products)
    out, new_state = jax.vmap(forward)(_load(refs), state_ref[...])
    out_ref[...] = out.astype(out_ref.dtype)
    state_ref[...] = new_state

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        final_ref[...] = state_ref[...]


def _backward_kernel(
    products, refs: Chunk, states_ref, d_out_ref, d_final_ref, d_refs: Chunk, d_initial_ref,
    d_state_ref,
):  # fmt: skip
    @pl.when(pl.program_id(1) == 0)
    def _():
        d_state_ref[...] = d_final_ref[...]

    d_chunk, d_state = jax.vmap(partial(backward_chunk, products=products))(
        _load(refs), states_ref[...], d_out_ref[...], d_state_ref[...]
    )
    for d_ref, d in zip(jax.tree.leaves(d_refs), jax.tree.leaves(d_chunk), strict=True):
        if d.shape != d_ref.shape:  # of a query or key that rows share
            d = jnp.sum(d.reshape(len(d_ref), -1, *d.shape[1:]), axis=1)
        d_ref[...] = d.astype(d_ref.dtype)
    d_state_ref[...] = d_state

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        d_initial_ref[...] = d_state_ref[...]


def _call(name, kernel, grid: Grid, state, in_specs, out_specs, inputs, outputs, products):
    """The call of a kernel that carries a `state` from chunk to chunk."""
    chunk = inputs[0]
    exponentials = chunk.g.size * (16 if chunk.g.ndim == 3 else 2 * grid.size)
    return pl.pallas_call(
        partial(kernel, grid.products),
        grid=(grid.programs, grid.chunks),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=shapes_of(outputs, like=state),
        scratch_shapes=[pltpu.VMEM((grid.row_block, *state.shape[1:]), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=cost(products, exponentials, inputs, outputs),
        interpret=grid.interpret,
        name=name,
    )(*inputs)


def _cut(q, k, v, g, beta, documents, size: int) -> Chunk:
    """The kernels' form of the inputs: numbers that are one per token lie along lanes."""
    rows, time = v.shape[:2]
    by_chunk = (rows, time // size, 1, size)
    if documents is not None:
        documents = documents.reshape(by_chunk)
        incoming = jnp.concatenate([documents[:, :1, :, :1], documents[:, :-1, :, -1:]], axis=1)
        documents = (documents - incoming).astype(jnp.float32)
    g = g.reshape(by_chunk) if g.shape[2] == 1 else g
    return Chunk(q, k, v, g, None if beta is None else beta.reshape(by_chunk), documents)


def _forward(chunk: Chunk, initial_state: Array, grid: Grid, keeps_states: bool):
    states = spec = None
    if keeps_states:
        shape = (grid.rows, grid.chunks, *initial_state.shape[1:])
        states = jax.ShapeDtypeStruct(shape, jnp.float32)
        spec = grid.tokens(states)
    return _call(
        "chunked_forward",
        _forward_kernel,
        grid,
        initial_state,
        [grid.chunk(chunk), grid.state(initial_state)],
        [grid.tokens(chunk.v), spec, grid.state(initial_state)],
        (chunk, initial_state),
        [chunk.v, states, initial_state],
        multiply_adds(chunk, initial_state, grid.size),
    )


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _chunked(chunk: Chunk, initial_state: Array, grid: Grid):
    out, _, final_state = _forward(chunk, initial_state, grid, keeps_states=False)
    return out, final_state


def _chunked_forward(chunk, initial_state, grid):
    chunk, initial_state = no_derivative("the gradient", (chunk, initial_state))
    out, states, final_state = _forward(chunk, initial_state, grid, keeps_states=True)
    return (out, final_state), (chunk, states)


def _chunked_backward(grid, saved, cotangents):
    chunk, states = saved
    d_out, d_final_state = no_derivative("the gradient", cotangents)
    d_out, d_final_state, states = vary_alike((d_out, d_final_state, states))
    grid = grid._replace(is_reversed=True)
    # A part of a group sums what it adds to the gradient of its query and key.
    partial_sums = grid.programs * grid.key_block // chunk.q.shape[0]
    shape = (chunk.q.shape[0] * partial_sums, *chunk.q.shape[1:])
    shared = jax.ShapeDtypeStruct(shape, jnp.float32 if partial_sums > 1 else chunk.q.dtype)
    differentiable = chunk._replace(q=shared, k=shared, documents=None)
    d_chunk, d_initial_state = _call(
        "chunked_backward",
        _backward_kernel,
        grid,
        d_final_state,
        [grid.chunk(chunk), grid.tokens(states), grid.tokens(d_out), grid.state(d_final_state)],
        [grid.chunk(differentiable), grid.state(d_final_state)],
        (chunk, states, d_out, d_final_state),
        [differentiable, d_final_state],
        3 * multiply_adds(chunk, d_final_state, grid.size),
    )
    if partial_sums > 1:
        d_q, d_k = (
            jnp.sum(x.reshape(-1, partial_sums, *x.shape[1:]), axis=1).astype(chunk.q.dtype)
            for x in (d_chunk.q, d_chunk.k)
        )
        d_chunk = d_chunk._replace(q=d_q, k=d_k)
    if chunk.documents is not None:
        d_chunk = d_chunk._replace(documents=jnp.zeros_like(chunk.documents))
    return d_chunk, d_initial_state


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _check(q, k, v, g, beta, initial_state, documents, chunk: int) -> None:
    check_rank("q", q, "key_rows time key")
    check_rank("v", v, "rows time value")
    _, time, key = q.shape
    rows = v.shape[0]
    check_multiple("rows of v", rows, "rows of q", q.shape[0])
    check_shape("k", k, q.shape, "key_rows time key")
    check_shape("v", v, (rows, time, v.shape[2]), "rows time value")
    check_shape("g", g, (rows, time, 1 if g.shape[2:] == (1,) else key), "rows time channels")
    wanted = (rows, key, v.shape[2])
    check_shape("initial_state", initial_state, wanted, "rows key value")
    for name, x in (("beta", beta), ("documents", documents)):
        if x is not None:
            check_shape(name, x, (rows, time), "rows time")
    check_same_dtype(q=q, k=k, v=v)
    if v.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"q, k and v must be float32 or bfloat16 on a TPU; got {v.dtype}.")
    for name, x in (("g", g), ("beta", beta), ("initial_state", initial_state)):
        if x is not None and x.dtype != jnp.float32:
            raise TypeError(f"{name} must be float32; got {x.dtype}.")
    if chunk < 16 or chunk & (chunk - 1):
        raise ValueError(f"chunk must be a power of two from 16 on; got {chunk}.")
    if time == 0 or time % chunk:
        raise ValueError(f"time must be a multiple of chunk = {chunk}; got {time}.")


def chunked(
    q: Float[Array, "key_rows time key"], k: Float[Array, "key_rows time key"],
    v: Float[Array, "rows time value"], g: Float[Array, "rows time channels"],
    beta: Float[Array, "rows time"] | None,
    initial_state: Float[Array, "rows key value"], *,
    chunk: int, documents: Int[Array, "rows time"] | None = None,
    interpret: "bool | pltpu.InterpretParams" = False,
) -> tuple[Float[Array, "rows time value"], Float[Array, "rows key value"]]:  # fmt: skip
    r"""Mix rows of tokens through decaying states, chunk after chunk, on a TPU.

        S <- Diag(e^g) S,   S <- S + k w^T  with  w = v  or  beta (v - S^T k),   o = S^T q

    Products of float32 inputs are as accurate as float32. Those of bfloat16 inputs take bfloat16
    factors and are summed in float32, but for the inverse of a chunk, whose factors have 16 bits;
    `jax.default_matmul_precision` makes them as accurate as float32. Gates, sums and states are
    float32. The queries are already scaled, g is
    finite, and `chunk`, a power of two from 16 on (64 or 128 suit the matrix units), divides the
    time: pad with k = v = beta = g = 0. No state crosses `documents`; `initial_state` belongs to
    the first. `interpret` runs on any device, `True` plainly or as `pltpu.InterpretParams` says;
    under `jax.shard_map` that takes `check_vma=False`, which compiled kernels do not need.

    Forward 2 C K V + C^2 (K + V) multiply-adds per chunk and row, with a delta rule
    3 C K V + 2 C^2 (K + V) + C^3 log2(C / 8), backward about three times as many. A decay of
    every channel takes log2(C / 8) / 2 products for one of scores, and 8 + log2(C / 8)
    exponentials per token and channel. Reads the inputs and writes the outputs once.

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv:2412.06464), section 3.3; Kimi
    Team, "Kimi Linear" (arXiv:2510.26692), section 3.
    """
    _check(q, k, v, g, beta, initial_state, documents, chunk)
    inputs = _cut(q, k, v, g, beta, documents, chunk)
    rows, time, _ = v.shape
    row_block, key_block = block_sizes(initial_state, rows // q.shape[0])
    is_rounded = product_precision(v.dtype) is BFLOAT16_PRODUCTS
    products = ROUNDED if is_rounded else EXACT
    grid = Grid(rows, row_block, key_block, time // chunk, chunk, interpret, products)
    return _chunked(*vary_alike((inputs, initial_state)), grid)
