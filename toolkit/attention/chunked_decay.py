r"""The chunked engine of fading memories: a scan over chunks, with its gradient by hand.

Token by token the state fades and gains one product: S <- Diag(e^g) S + k v^T, o = S^T q, where g
is one number a token (the same for all channels of the key) or one for every channel. Over a
chunk of C tokens that enters with state S, with G the running sum of g inside the chunk,

    P_ij  = sum_c q_ic k_jc exp(G_ic - G_jc)   for j <= i, else 0
    O     = (e^G * Q) S + P V
    S'    = e^(G_C) S + (e^(G_C - G) * K)^T V

With one decay for all channels, P is Q K^T times a C x C matrix. With one for every channel,
e^(G_i) and e^(-G_j) apart would overflow, and e^(G_i - G_j) together is C x C x K numbers. So P
is assembled by halves: what the second half of a block reads in its first half passes through
G at the middle m, as (q_i e^(G_i - G_m)) . (k_j e^(G_m - G_j)), and neither exponent is positive.
Only blocks of `BLOCK` tokens on the diagonal compute their exponentials pair by pair.

The backward pass recomputes each chunk from the state it entered with. Every exponential stands
between a q and a k, so the gradient of G needs no products of its own: it is q dq - k dk, and
the sum over v of S' dS' for G_C, which also carries the state across the chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from toolkit.attention.chunked_delta import Documents, _masked_exp, _matmul

BLOCK = 4  # tokens of a diagonal block, whose pairs are decayed one by one


class DecayChunks(NamedTuple):
    """Inputs cut into chunks: leading axes [chunks, rows, C]; `channels` is 1 or key."""

    q: Float[Array, "chunks rows C key"]
    k: Float[Array, "chunks rows C key"]
    v: Float[Array, "chunks rows C value"]
    decay: Float[Array, "chunks rows C channels"]  # G, the running sum of log-decay in a chunk


class StateDecays(NamedTuple):
    """How much survives between the states at a chunk's ends and its tokens."""

    entry: Float[Array, "rows C channels"]  # from the incoming state to token i
    exit: Float[Array, "rows C channels"]  # from token j to the outgoing state
    through: Float[Array, "rows channels 1"]  # from the incoming to the outgoing state


def _state_decays(decay: Array, documents: Documents | None) -> StateDecays:
    last = decay[:, -1:]
    entry, leaving, through = jnp.exp(decay), jnp.exp(last - decay), jnp.exp(last)
    if documents is not None:
        token, incoming = documents.token, documents.incoming[:, None]
        outgoing = token[:, -1:]
        entry = jnp.where((token == incoming)[..., None], entry, 0)
        leaving = jnp.where((token == outgoing)[..., None], leaving, 0)
        through = jnp.where((incoming == outgoing)[..., None], through, 0)
    return StateDecays(entry, leaving, jnp.swapaxes(through, 1, 2))


def decayed_scores(
    q: Float[Array, "rows C key"],
    k: Float[Array, "rows C key"],
    decay: Float[Array, "rows C channels"],
    documents: Documents | None,
) -> Float[Array, "rows C C"]:
    """P: how strongly each token reads each earlier one; zero between documents."""
    if decay.shape[-1] == 1:
        between = decay - jnp.swapaxes(decay, 1, 2)
        causal = jnp.tril(jnp.ones_like(between, dtype=bool))
        scores = _matmul("rik,rjk->rij", q, k) * _masked_exp(between, causal)
    else:
        scores = _scores_by_halves(q, k, decay)
    if documents is None:
        return scores
    token = documents.token
    return jnp.where(token[:, :, None] == token[:, None, :], scores, 0)


def _scores_by_halves(q: Array, k: Array, decay: Array) -> Array:
    """P for a decay of every channel; C is `BLOCK` times a power of two."""
    rows, size, key = q.shape

    def split(*sizes: int) -> tuple[Array, ...]:
        return tuple(x.reshape(rows, -1, *sizes, key) for x in (q, k, decay))

    scores = _block_scores(*split(BLOCK))
    width = BLOCK
    while width < size:
        q_half, k_half, decay_half = split(2, width)
        middle = decay_half[:, :, 1, :1]
        late = q_half[:, :, 1] * jnp.exp(decay_half[:, :, 1] - middle)
        early = k_half[:, :, 0] * jnp.exp(middle - decay_half[:, :, 0])
        lower = _matmul("rnik,rnjk->rnij", late, early)
        first, second = scores[:, 0::2], scores[:, 1::2]
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        scores = jnp.concatenate([top, jnp.concatenate([lower, second], axis=-1)], axis=-2)
        width *= 2
    return scores[:, 0]


def _block_scores(q: Array, k: Array, decay: Array) -> Array:
    """P inside blocks [rows, blocks, BLOCK, key], pair by pair."""
    between = decay[..., :, None, :] - decay[..., None, :, :]
    causal = jnp.tril(jnp.ones((BLOCK, BLOCK), bool))[:, :, None]
    survives = _masked_exp(between, jnp.broadcast_to(causal, between.shape))
    return jnp.sum(q[..., :, None, :] * k[..., None, :, :] * survives, axis=-1)


def _forward_chunk(state, inputs):
    chunk, documents = inputs
    q, k, v = (x.astype(state.dtype) for x in chunk[:3])
    decays = _state_decays(chunk.decay, documents)
    out = _matmul("rik,rkv->riv", decays.entry * q, state)
    out += _matmul("rij,rjv->riv", decayed_scores(q, k, chunk.decay, documents), v)
    new_state = decays.through * state + _matmul("rik,riv->rkv", decays.exit * k, v)
    return new_state, (out.astype(chunk.v.dtype), state)


def _backward_chunk(carry, inputs):
    d_new_state, new_state = carry
    chunk, documents, state, d_out = inputs
    q, k, v, d_out = (x.astype(state.dtype) for x in (*chunk[:3], d_out))
    decays = _state_decays(chunk.decay, documents)
    # Linear in q and in k: the pullback of both is the same decays, applied once more.
    scores, pull = jax.vjp(lambda q, k: decayed_scores(q, k, chunk.decay, documents), q, k)
    d_q, d_k = pull(_matmul("riv,rjv->rij", d_out, v))
    d_q += decays.entry * _matmul("riv,rkv->rik", d_out, state)
    d_k += decays.exit * _matmul("riv,rkv->rik", v, d_new_state)
    d_v = _matmul("rij,riv->rjv", scores, d_out)
    d_v += _matmul("rik,rkv->riv", decays.exit * k, d_new_state)
    d_state = decays.through * d_new_state
    d_state += _matmul("rik,riv->rkv", decays.entry * q, d_out)

    d_decay = q * d_q - k * d_k
    d_decay = d_decay.at[:, -1].add(jnp.sum(new_state * d_new_state, axis=-1))
    if chunk.decay.shape[-1] == 1:
        d_decay = jnp.sum(d_decay, axis=-1, keepdims=True)
    d_chunk = DecayChunks(d_q, d_k, d_v, d_decay)
    d_chunk = jax.tree.map(lambda d, x: d.astype(x.dtype), d_chunk, chunk)
    return (d_state, state), d_chunk


@jax.custom_vjp
def chunked_decay(
    chunks: DecayChunks,
    documents: Documents | None,
    initial_state: Float[Array, "rows key value"],
) -> tuple[Float[Array, "chunks rows C value"], Float[Array, "rows key value"]]:
    """A fading memory over chunks, one after another.

    Args:
        chunks: inputs, padded to whole chunks with k = v = 0 and an unchanged G; with a decay
            for every channel, C is `BLOCK` times a power of two.
        documents: where the state must not pass, or None for one document a row.
        initial_state: [rows, key, value], in the dtype of decays and states.

    Returns:
        Outputs [chunks, rows, C, value] in the dtype of `chunks.v`, and the final state.

    Cost:
        Forward 2 C K V + C^2 (K + V) multiply-adds a chunk and row, backward about 2.5 times
        as many; C (BLOCK + log2(C)) exponentials of each channel where channels decay apart.
        Kept for the backward pass: the inputs and a K x V state a chunk and row.

    Source:
        Yang, Wang, Shen, Panda, Kim, "Gated Linear Attention Transformers with
        Hardware-Efficient Training" (arXiv:2312.06635), section 4.
    """
    return _chunked_decay_forward(chunks, documents, initial_state)[0]


def _chunked_decay_forward(chunks, documents, initial_state):
    final_state, (out, states) = lax.scan(_forward_chunk, initial_state, (chunks, documents))
    return (out, final_state), (chunks, documents, states, final_state)


def _chunked_decay_backward(saved, cotangents):
    chunks, documents, states, final_state = saved
    d_out, d_final_state = cotangents
    (d_initial_state, _), d_chunks = lax.scan(
        _backward_chunk,
        (d_final_state, final_state),
        (chunks, documents, states, d_out),
        reverse=True,
    )
    return d_chunks, None, d_initial_state


chunked_decay.defvjp(_chunked_decay_forward, _chunked_decay_backward)
