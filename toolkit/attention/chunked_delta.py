r"""The chunked engine of the gated delta rule: a scan over chunks, with its gradient by hand.

Token by token the rule is S <- e^g S, then S <- S + beta k (v - S^T k)^T. Over a chunk of C
tokens that enters with state S, with G the running sum of g inside the chunk, it becomes

    D_ij  = exp(G_i - G_j)                     for j <= i, else 0
    A_ij  = beta_i (k_i . k_j) D_ij            for j < i, else 0
    T     = (I + A)^-1
    N     = T (beta * (V - e^G * K S))         the values really written to the state
    O     = e^G * Q S + (Q K^T * D) N
    S'    = e^(G_C) S + (e^(G_C - G) * K)^T N

so a sequential rule becomes a few matrix products. `T` does not depend on the state: all chunks
get theirs at once, before the scan. The forward pass keeps T, D, N and the state at every chunk
boundary; the backward pass recomputes the scores from there. Since N = T R, the gradient of the
inverse is one product: dA = -strict_tril((T^T dN) N^T).

Arrays here are [chunks, rows, C, ...], where a row is one head of one sequence.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from toolkit.attention.inverse import unit_lower_inverse


class Chunks(NamedTuple):
    """Inputs of the delta rule cut into chunks: leading axes [chunks, rows, C]."""

    q: Float[Array, "chunks rows C key"]
    k: Float[Array, "chunks rows C key"]
    v: Float[Array, "chunks rows C value"]
    decay: Float[Array, "chunks rows C"]  # G, the running sum of log-decay inside a chunk
    beta: Float[Array, "chunks rows C"]


class Documents(NamedTuple):
    """Which document each token belongs to, and which one the incoming state belongs to."""

    token: Int[Array, "chunks rows C"]
    incoming: Int[Array, "chunks rows"]


class Decays(NamedTuple):
    """How much survives between two places of a chunk; 0 where nothing may pass."""

    between: Float[Array, "rows C C"]  # D: from token j to token i
    entry: Float[Array, "rows C 1"]  # from the incoming state to token i
    exit: Float[Array, "rows C 1"]  # from token j to the outgoing state
    through: Float[Array, "rows 1 1"]  # from the incoming to the outgoing state


def _matmul(equation: str, *operands: Array) -> Array:
    # Tensor cores and TPUs would round float32 operands; the inverse amplifies that.
    return jnp.einsum(equation, *operands, precision=lax.Precision.HIGHEST)


def _masked_exp(log: Array, mask: Array) -> Array:
    """exp where the mask holds, else 0. Masked before exp: the other half would overflow."""
    return jnp.exp(jnp.where(mask, log, -jnp.inf))


def chunk_decays(decay: Float[Array, "*rows C"], documents: Documents | None) -> Decays:
    """The decay factors of one chunk (or of many, with leading axes)."""
    last = decay[..., -1:]
    between = decay[..., :, None] - decay[..., None, :]
    causal = jnp.tril(jnp.ones_like(between, dtype=bool))
    if documents is None:
        return Decays(
            _masked_exp(between, causal),
            jnp.exp(decay)[..., None],
            jnp.exp(last - decay)[..., None],
            jnp.exp(last)[..., None],
        )
    token, incoming = documents.token, documents.incoming[..., None]
    outgoing = token[..., -1:]
    same = causal & (token[..., :, None] == token[..., None, :])
    return Decays(
        _masked_exp(between, same),
        _masked_exp(decay, token == incoming)[..., None],
        _masked_exp(last - decay, token == outgoing)[..., None],
        _masked_exp(last, incoming == outgoing)[..., None],
    )


def _inverses(chunks: Chunks, between: Float[Array, "chunks rows C C"]) -> Array:
    """T = (I + A)^-1 for every chunk at once: it does not depend on the state."""
    k = chunks.k.astype(between.dtype)
    a = chunks.beta[..., None] * _matmul("nrik,nrjk->nrij", k, k) * between
    return unit_lower_inverse(jnp.tril(a, -1))


def _forward_chunk(state, inputs):
    chunk, decays, inverse = inputs
    q, k, v = (x.astype(state.dtype) for x in (chunk.q, chunk.k, chunk.v))
    residual = chunk.beta[..., None] * (v - decays.entry * _matmul("rik,rkv->riv", k, state))
    written = _matmul("rij,rjv->riv", inverse, residual)
    scores = _matmul("rik,rjk->rij", q, k) * decays.between
    out = decays.entry * _matmul("rik,rkv->riv", q, state)
    out += _matmul("rij,rjv->riv", scores, written)
    new_state = decays.through * state + _matmul("rik,riv->rkv", decays.exit * k, written)
    return new_state, (out.astype(chunk.v.dtype), written, state)


def _backward_chunk(d_new_state, inputs):
    chunk, decays, inverse, written, state, d_out = inputs
    q, k, v, d_out = (x.astype(state.dtype) for x in (chunk.q, chunk.k, chunk.v, d_out))
    beta = chunk.beta[..., None]
    scores = _matmul("rik,rjk->rij", q, k) * decays.between
    k_scores = jnp.tril(_matmul("rik,rjk->rij", k, k) * decays.between, -1)

    # Outputs and outgoing state -> written values N -> residuals R, where N = T R.
    d_written = decays.exit * _matmul("rjk,rkv->rjv", k, d_new_state)
    d_written += _matmul("rij,riv->rjv", scores, d_out)
    d_residual = _matmul("rij,riv->rjv", inverse, d_written)
    d_scores = _matmul("riv,rjv->rij", d_out, written)
    d_a = -_matmul("riv,rjv->rij", d_residual, written)

    # Scores and reads of the state -> inputs. The zeros of `between` mask the gradient too.
    d_qk = d_scores * decays.between
    d_kk = jnp.tril(beta * d_a * decays.between, -1)
    d_q_read = decays.entry * d_out
    d_k_read = decays.entry * d_residual
    q_state = _matmul("riv,rkv->rik", d_q_read, state)
    k_state = _matmul("riv,rkv->rik", d_k_read, state)
    d_exit_k = decays.exit * _matmul("riv,rkv->rik", written, d_new_state)
    d_q = q_state + _matmul("rij,rjk->rik", d_qk, k)
    d_k = d_exit_k - beta * k_state + _matmul("rij,rik->rjk", d_qk, q)
    d_k += _matmul("rij,rjk->rik", d_kk + jnp.swapaxes(d_kk, -1, -2), k)
    d_state = decays.through * d_new_state + _matmul("rik,riv->rkv", q, d_q_read)
    d_state -= _matmul("rik,riv->rkv", k, beta * d_k_read)

    a_gradient = jnp.sum(d_a * k_scores, axis=-1)
    k_read = jnp.sum(k * k_state, axis=-1)
    d_beta = jnp.sum(d_residual * v, axis=-1) - k_read + a_gradient

    # A factor exp(G_i - G_j) passes (its gradient x itself) to G_i, and minus that to G_j.
    between = d_scores * scores + beta * d_a * k_scores
    leaving = jnp.sum(k * d_exit_k, axis=-1)
    through = jnp.sum(decays.through * state * d_new_state, axis=(-2, -1))
    d_decay = jnp.sum(between, axis=-1) - jnp.sum(between, axis=-2) - leaving
    d_decay += jnp.sum(q * q_state, axis=-1) - chunk.beta * k_read
    d_decay = d_decay.at[..., -1].add(through + jnp.sum(leaving, axis=-1))

    d_v = beta * d_residual
    d_chunk = Chunks(d_q, d_k, d_v, d_decay, d_beta)
    return d_state, jax.tree.map(lambda d, x: d.astype(x.dtype), d_chunk, chunk)


@jax.custom_vjp
def chunked_delta(
    chunks: Chunks, documents: Documents | None, initial_state: Float[Array, "rows key value"]
) -> tuple[Float[Array, "chunks rows C value"], Float[Array, "rows key value"]]:
    """The gated delta rule over chunks, one after another.

    Args:
        chunks: inputs, padded to whole chunks with k = v = beta = 0 and an unchanged G.
        documents: where the state must not pass, or None for one document a row.
        initial_state: [rows, key, value], in the dtype of gates and states.

    Returns:
        Outputs [chunks, rows, C, value] in the dtype of `chunks.v`, and the final state.

    Cost:
        Forward 3 C K V + 2 C^2 K + 2 C^2 V + C^3 / 2 multiply-adds a chunk and row; backward
        6 C K V + 5 C^2 K + 4 C^2 V. Kept for the backward pass: the inputs, the values
        written, and a K x V state and two C x C matrices (T and D) a chunk and row.

    Source:
        Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv:2412.06464), section 3.3.
    """
    return _chunked_delta_forward(chunks, documents, initial_state)[0]


def _chunked_delta_forward(chunks, documents, initial_state):
    decays = chunk_decays(chunks.decay, documents)
    inverses = _inverses(chunks, decays.between)
    final_state, (out, written, states) = lax.scan(
        _forward_chunk, initial_state, (chunks, decays, inverses)
    )
    return (out, final_state), (chunks, decays, inverses, written, states)


def _chunked_delta_backward(saved, cotangents):
    d_out, d_final_state = cotangents
    d_initial_state, d_chunks = lax.scan(
        _backward_chunk, d_final_state, (*saved, d_out), reverse=True
    )
    return d_chunks, None, d_initial_state


chunked_delta.defvjp(_chunked_delta_forward, _chunked_delta_backward)
