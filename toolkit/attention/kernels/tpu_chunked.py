r"""Chunked linear-time mixers as Pallas kernels for TPUs, forward and backward.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from toolkit.attention.kernels.tpu_blocks import as_column, as_row, dot, unit_lower_inverse
from toolkit.attention.kernels.tpu_decay import ChannelDecay, ScalarDecay

# Rows of one program, unrolled: their chains of dependent products fill each other's gaps.
ROWS = 2


class Chunk(NamedTuple):
    """The inputs of a chunk; arrays of all rows outside a kernel, refs inside."""

    q: Float[Array, "rows time key"]
    k: Float[Array, "rows time key"]
    v: Float[Array, "rows time value"]
    g: Float[Array, "..."]  # [rows, time, key], or [rows, chunks, 1, C] with time along lanes
    beta: Float[Array, "rows chunks 1 C"] | None
    documents: Float[Array, "rows chunks 1 C"] | None  # 0 where the incoming state belongs


def _decay_of(chunk: Chunk) -> ScalarDecay | ChannelDecay:
    readers = 1 if chunk.beta is None else 2
    kind = ScalarDecay if chunk.g.shape[0] == 1 else ChannelDecay
    return kind.of(chunk.g, chunk.documents, readers)


def _readers(chunk: Chunk) -> Array:
    return chunk.q if chunk.beta is None else jnp.concatenate([chunk.q, chunk.k])


def _row(refs: Chunk, row: int) -> Chunk:
    return Chunk(*(None if ref is None else ref[row] for ref in refs))


def _forward_chunk(chunk: Chunk, state: Array) -> tuple[Array, Array]:
    """Outputs [C, value] and the outgoing state of one chunk of one row."""
    decay, readers, size = _decay_of(chunk), _readers(chunk), chunk.q.shape[0]
    reads, scores = decay.read(readers, state), decay.scores(readers, chunk.k)
    if chunk.beta is None:
        written = chunk.v
    else:
        beta = as_column(chunk.beta)
        inverse = unit_lower_inverse(beta * scores[size:])
        written = dot(inverse, beta * (chunk.v.astype(jnp.float32) - reads[size:]))
    out = reads[:size] + dot(scores[:size], written)
    return out, decay.carry(state) + decay.write(chunk.k, written)


def _backward_chunk(
    chunk: Chunk, state: Array, d_out: Array, d_new_state: Array
) -> tuple[Chunk, Array]:
    """Gradients of the inputs and of the incoming state of one chunk of one row."""
    decay, readers, size = _decay_of(chunk), _readers(chunk), chunk.q.shape[0]
    scores, k = decay.scores(readers, chunk.k), chunk.k.astype(jnp.float32)
    if chunk.beta is None:
        written = chunk.v
    else:
        beta, reads = as_column(chunk.beta), decay.read(readers, state)
        inverse = unit_lower_inverse(beta * scores[size:])
        error = chunk.v.astype(jnp.float32) - reads[size:]
        written = dot(inverse, beta * error)

    d_k_written, d_written = decay.write_gradient(d_new_state, chunk.k, written)
    d_written += dot(scores[:size], d_out, (0, 0))
    d_scores = dot(d_out, written, (1, 1))
    d_reads, d_beta = d_out.astype(jnp.float32), None
    if chunk.beta is None:
        d_v = d_written
    else:
        # written = T R with T = (I + A)^-1: dR = T^T dN, and dA = -dR N^T.
        d_residual = dot(inverse, d_written, (0, 0))
        d_a = -dot(d_residual, written, (1, 1))
        d_beta = jnp.sum(d_residual * error, axis=1, keepdims=True)
        d_beta = as_row(d_beta + jnp.sum(d_a * scores[size:], axis=1, keepdims=True))
        d_v = beta * d_residual
        d_scores = jnp.concatenate([d_scores, beta * d_a])
        d_reads = jnp.concatenate([d_reads, -d_v])

    d_readers, d_k_read = decay.scores_gradient(d_scores, readers, chunk.k)
    d_readers_state, d_state = decay.read_gradient(d_reads, readers, state)
    d_readers += d_readers_state
    d_k = d_k_read + d_k_written
    # Every exponential stands between a reader, which has e^G, and a key, which has e^-G or
    # e^(G_C - G): the gradient of G needs no products of its own.
    reader_terms = readers.astype(jnp.float32) * d_readers
    d_total = reader_terms[:size] - k * d_k
    if chunk.beta is not None:
        d_total += reader_terms[size:]
        d_k += d_readers[size:]
    d_last = jnp.sum(k * d_k_written, axis=0, keepdims=True)
    carried = decay.carry(d_new_state)
    d_g = decay.gradient(d_total, d_last, carried * state)
    return Chunk(d_readers[:size], d_k, d_v, d_g, d_beta, None), carried + d_state


def _forward_kernel(refs: Chunk, initial_ref, out_ref, states_ref, final_ref, state_ref):
    @pl.when(pl.program_id(1) == 0)
    def _():
        state_ref[...] = initial_ref[...]

    for row in range(state_ref.shape[0]):
        state = state_ref[row]
        if states_ref is not None:
            states_ref[row] = state
        out, new_state = _forward_chunk(_row(refs, row), state)
        out_ref[row] = out.astype(out_ref.dtype)
        state_ref[row] = new_state

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        final_ref[...] = state_ref[...]


def _backward_kernel(
    refs: Chunk, states_ref, d_out_ref, d_final_ref, d_refs: Chunk, d_initial_ref, d_state_ref
):
    @pl.when(pl.program_id(1) == 0)
    def _():
        d_state_ref[...] = d_final_ref[...]

    for row in range(d_state_ref.shape[0]):
        d_chunk, d_state = _backward_chunk(
            _row(refs, row), states_ref[row], d_out_ref[row], d_state_ref[row]
        )
        for d_ref, d in zip(d_refs, d_chunk, strict=True):
            if d_ref is not None:
                d_ref[row] = d.astype(d_ref.dtype)
        d_state_ref[row] = d_state

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        d_initial_ref[...] = d_state_ref[...]


class _Grid(NamedTuple):
    """Blocks of a grid (groups of rows, chunks), whose second axis runs one after another."""

    rows: int
    chunks: int
    size: int
    is_reversed: bool

    @property
    def row_block(self) -> int:
        return next(r for r in (ROWS, 2, 1) if self.rows % r == 0)

    def _chunk(self, c):
        return self.chunks - 1 - c if self.is_reversed else c

    def tokens(self, x: Array | None):
        """[rows, time, n] cut along time, or [rows, chunks, m, n] chunk by chunk."""
        if x is None:
            return None
        if x.ndim == 3:
            return pl.BlockSpec(
                (self.row_block, self.size, x.shape[2]), lambda r, c: (r, self._chunk(c), 0)
            )
        return pl.BlockSpec(
            (self.row_block, None, *x.shape[2:]), lambda r, c: (r, self._chunk(c), 0, 0)
        )

    def state(self, x: Array):
        """[rows, key, value], the same for all chunks."""
        return pl.BlockSpec((self.row_block, *x.shape[1:]), lambda r, c: (r, 0, 0))


def _call(kernel, grid: _Grid, state: Array, in_specs, out_specs, out_shape, interpret):
    return pl.pallas_call(
        kernel,
        grid=(grid.rows // grid.row_block, grid.chunks),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[pltpu.VMEM((grid.row_block, *state.shape[1:]), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
    )


def _cut(q, k, v, g, beta, documents, size: int) -> Chunk:
    """The kernels' form of the inputs: numbers that are one a token lie along lanes."""
    rows, time = q.shape[:2]
    by_chunk = (rows, time // size, 1, size)
    if documents is not None:
        documents = documents.reshape(by_chunk)
        incoming = jnp.concatenate([documents[:, :1, :, :1], documents[:, :-1, :, -1:]], axis=1)
        documents = (documents - incoming).astype(jnp.float32)
    g = g.reshape(by_chunk) if g.shape[2] == 1 else g
    return Chunk(q, k, v, g, None if beta is None else beta.reshape(by_chunk), documents)


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _forward(q, k, v, g, beta, documents, initial_state, size, interpret, keeps_states):
    chunk = _cut(q, k, v, g, beta, documents, size)
    grid = _Grid(q.shape[0], q.shape[1] // size, size, is_reversed=False)
    states = spec = None
    if keeps_states:
        shape = (grid.rows, grid.chunks, *initial_state.shape[1:])
        states = jax.ShapeDtypeStruct(shape, jnp.float32)
        spec = grid.tokens(states)
    out, states, final_state = _call(
        _forward_kernel,
        grid,
        initial_state,
        [Chunk(*map(grid.tokens, chunk)), grid.state(initial_state)],
        [grid.tokens(v), spec, grid.state(initial_state)],
        [_like(v), states, _like(initial_state)],
        interpret,
    )(chunk, initial_state)
    return out, final_state, states


@partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _chunked(q, k, v, g, beta, documents, initial_state, size, interpret):
    return _forward(
        q, k, v, g, beta, documents, initial_state, size, interpret, keeps_states=False
    )[:2]


def _chunked_forward(q, k, v, g, beta, documents, initial_state, size, interpret):
    inputs = (q, k, v, g, beta, documents)
    out, final_state, states = _forward(
        *inputs, initial_state, size, interpret, keeps_states=True
    )
    return (out, final_state), (inputs, states)


def _chunked_backward(size, interpret, saved, cotangents):
    inputs, states = saved
    d_out, d_final_state = cotangents
    chunk = _cut(*inputs, size)
    grid = _Grid(d_out.shape[0], d_out.shape[1] // size, size, is_reversed=True)
    differentiable = chunk._replace(documents=None)
    d_chunk, d_initial_state = _call(
        _backward_kernel,
        grid,
        d_final_state,
        [
            Chunk(*map(grid.tokens, chunk)),
            grid.tokens(states),
            grid.tokens(d_out),
            grid.state(d_final_state),
        ],
        [Chunk(*map(grid.tokens, differentiable)), grid.state(d_final_state)],
        [Chunk(*(None if x is None else _like(x) for x in differentiable)), _like(d_final_state)],
        interpret,
    )(chunk, states, d_out, d_final_state)
    d_inputs = [
        None if d is None else d.reshape(x.shape)
        for d, x in zip(d_chunk, inputs, strict=True)
    ]
    return *d_inputs, d_initial_state


_chunked.defvjp(_chunked_forward, _chunked_backward)


def chunked(
    q: Float[Array, "rows time key"],
    k: Float[Array, "rows time key"],
    v: Float[Array, "rows time value"],
    g: Float[Array, "rows time channels"],
    beta: Float[Array, "rows time"] | None,
    initial_state: Float[Array, "rows key value"],
    *,
    chunk: int,
    documents: Int[Array, "rows time"] | None = None,
    interpret=False,
) -> tuple[Float[Array, "rows time value"], Float[Array, "rows key value"]]:
    return _chunked(q, k, v, g, beta, documents, initial_state, chunk, interpret)
