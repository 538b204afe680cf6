r"""One chunk of one row: outputs and outgoing state, and the gradients of both.

A row is one head of one sequence. C tokens enter with state S [key, value]. In the words of
`decay.py`, where the decays are, and with P the scores of queries Q and keys K,

    without a delta rule     N = V
    with one                 N = (I + beta * P_k)^-1 beta * (V - read_k)
    then                     O = read_q + P_q N,    S' = carry + write(N)

The backward pass computes P, the inverse and N again from the S that the forward pass kept.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from toolkit.attention.kernels.tpu.blocks import Products, as_column, as_row, unit_lower_inverse
from toolkit.attention.kernels.tpu.decay import ChannelDecay, ScalarDecay


class Chunk(NamedTuple):
    """The inputs of one chunk of one row; None where a mixer has no such input.

    The kernels hold the same tuple of whole arrays, of blocks and of references to blocks.
    """

    q: Float[Array, "C key"]
    k: Float[Array, "C key"]
    v: Float[Array, "C value"]
    g: Float[Array, "C key"] | Float[Array, "1 C"]  # one log-decay per token lies along lanes
    beta: Float[Array, "1 C"] | None
    documents: Float[Array, "1 C"] | None  # 0 in the document of the incoming state


class _Delta(NamedTuple):
    """What the delta rule adds."""

    beta: Float[Array, "C 1"]
    inverse: Float[Array, "C C"]  # (I + beta * P_k)^-1
    error: Float[Array, "C value"]  # V - read_k


class _Parts(NamedTuple):
    """What both passes compute first."""

    decay: ScalarDecay | ChannelDecay
    readers: Float[Array, "readers*C key"]  # the queries, and under a delta rule the keys
    scores: Float[Array, "readers*C C"]  # P
    reads: Float[Array, "readers*C value"]
    written: Float[Array, "C value"]  # N
    delta: _Delta | None


def _parts(chunk: Chunk, state: Float[Array, "key value"], products: Products) -> _Parts:
    kind = ScalarDecay if chunk.g.shape[0] == 1 else ChannelDecay
    if chunk.beta is None:
        decay = kind.of(chunk.g, chunk.documents, 1, products.dot)
        scores, reads = decay.scores(chunk.q, chunk.k), decay.read(chunk.q, state)
        return _Parts(decay, chunk.q, scores, reads, chunk.v, None)
    decay = kind.of(chunk.g, chunk.documents, 2, products.dot)
    readers, beta = jnp.concatenate([chunk.q, chunk.k]), as_column(chunk.beta)
    scores, reads = decay.scores(readers, chunk.k), decay.read(readers, state)
    size = chunk.q.shape[0]
    inverse = unit_lower_inverse(beta * scores[size:], products.of_inverse)
    error = chunk.v.astype(jnp.float32) - reads[size:]
    written = products.of_inverse(inverse, beta * error)
    return _Parts(decay, readers, scores, reads, written, _Delta(beta, inverse, error))


def forward_chunk(
    chunk: Chunk, state: Float[Array, "key value"], products: Products
) -> tuple[Float[Array, "C value"], Float[Array, "key value"]]:
    """Outputs and the outgoing state."""
    parts, size = _parts(chunk, state, products), chunk.q.shape[0]
    out = parts.reads[:size] + products.dot(parts.scores[:size], parts.written)
    return out, parts.decay.carry(state) + parts.decay.write(chunk.k, parts.written)


def backward_chunk(
    chunk: Chunk, state: Float[Array, "key value"], d_out: Float[Array, "C value"],
    d_new_state: Float[Array, "key value"], products: Products,
) -> tuple[Chunk, Float[Array, "key value"]]:  # fmt: skip
    """Gradients of the inputs and of the incoming state."""
    decay, readers, scores, _, written, delta = _parts(chunk, state, products)
    dot = products.dot
    size, k = chunk.q.shape[0], chunk.k.astype(jnp.float32)

    # Outputs and outgoing state -> values written -> values and scores.
    d_k_written, d_written = decay.write_gradient(d_new_state, chunk.k, written)
    d_written += dot(scores[:size], d_out, (0, 0))
    d_scores = dot(d_out, written, (1, 1))
    d_reads, d_v, d_beta = d_out.astype(jnp.float32), d_written, None
    if delta is not None:
        # N = T R with T = (I + A)^-1, so dR = T^T dN and dA = -dR N^T.
        d_residual = products.of_inverse(delta.inverse, d_written, (0, 0))
        d_a = -dot(d_residual, written, (1, 1))
        d_beta = jnp.sum(d_residual * delta.error, axis=1, keepdims=True)
        d_beta = as_row(d_beta + jnp.sum(d_a * scores[size:], axis=1, keepdims=True))
        d_v = delta.beta * d_residual
        d_scores = jnp.concatenate([d_scores, delta.beta * d_a])
        d_reads = jnp.concatenate([d_reads, -d_v])

    # Scores and reads -> readers, keys and the incoming state.
    d_readers, d_k = decay.scores_gradient(d_scores, readers, chunk.k)
    d_from_state, d_state = decay.read_gradient(d_reads, readers, state)
    d_readers, d_k = d_readers + d_from_state, d_k + d_k_written
    carried = decay.carry(d_new_state)

    # Every exponential stands between a reader, with e^G, and a key, with e^-G or e^(G_C - G):
    # the gradient of G needs no products of its own.
    reader_terms = readers.astype(jnp.float32) * d_readers
    d_total = reader_terms[:size] - k * d_k
    if delta is not None:
        d_total, d_k = d_total + reader_terms[size:], d_k + d_readers[size:]
    d_last = jnp.sum(k * d_k_written, axis=0, keepdims=True)
    d_g = decay.gradient(d_total, d_last, carried * state)
    return Chunk(d_readers[:size], d_k, d_v, d_g, d_beta, None), carried + d_state
