r"""The part of a chunk that does not depend on the state, for all chunks at once, in XLA.

With G the running sum of log-decay in a chunk, the three families (simple decay, Gated DeltaNet,
Kimi Delta Attention) differ in their factors only. A chunk that enters with state S computes

    N  = U + E S                    the values written (N = V without a delta rule)
    O  = R S + P N                  R = e^G * Q            (entry)
    S' = diag(through) S + L^T N    L = e^(G_C - G) * K    (leaving)

    P_ij = sum_c q_ic k_jc exp(G_ic - G_jc)         for j <= i
    A_ij = beta_i sum_c k_ic k_jc exp(G_ic - G_jc)  for j < i,    T = (I + A)^-1
    U = T (beta * V),   E = -T (beta * e^G * K)

No exponent is positive: a decay of every channel goes through `decayed_scores`, which factors it
between halves of a block. Where documents meet, the same factors are masked. Products of bf16
queries and keys are exact in float32; T stays float32, and its products run at the platform's
default precision (TF32 on Hopper, 10 bits against the 7 of the bf16 they are rounded to next).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from toolkit.attention.chunked_decay import decayed_scores
from toolkit.attention.inverse import unit_lower_inverse
from toolkit.attention.kernels.gpu_support import CHUNK


class Factors(NamedTuple):
    """Matrices of all chunks, float32; see the equations of this module."""

    read: Float[Array, "rows chunks C key"]  # R
    leave: Float[Array, "rows chunks C key"]  # L
    scores: Float[Array, "rows chunks C C"]  # P
    through: Float[Array, "rows chunks key"]
    values: Float[Array, "rows chunks C value"]  # U, or V without a delta rule
    erase: Float[Array, "rows chunks C key"] | None  # E


class Masks(NamedTuple):
    """Which pairs of places of a chunk belong to the same document."""

    pair: Array  # [rows, chunks, C, C]
    entry: Array  # [rows, chunks, C, 1]: the incoming state and token i
    leave: Array  # [rows, chunks, C, 1]: token j and the outgoing state
    through: Array  # [rows, chunks, 1]: the incoming and the outgoing state


def cut(x: Array) -> Array:
    """[rows, time, ...] -> [rows, chunks, C, ...]."""
    return x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:])


def dot(equation: str, x: Array, y: Array) -> Array:
    """A product of bf16 or float32 operands, summed in float32."""
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _masks(documents: Int[Array, "rows time"]) -> Masks:
    token = cut(documents)
    outgoing = token[:, :, -1:]
    incoming = jnp.concatenate([token[:, :1, :1], outgoing[:, :-1]], axis=1)
    return Masks(
        token[..., :, None] == token[..., None, :],
        (token == incoming)[..., None],
        (token == outgoing)[..., None],
        incoming == outgoing,
    )


def _scores(q: Array, k: Array, decay: Array) -> Array:
    """sum_c q_ic k_jc exp(G_ic - G_jc) for j <= i, else 0."""
    shape = q.shape[:2]
    if decay.shape[-1] == 1:
        between = decay - jnp.swapaxes(decay, -1, -2)
        causal = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
        survives = jnp.exp(jnp.where(causal, between, -jnp.inf))
        return dot("rnik,rnjk->rnij", q, k) * survives
    together = (-1, CHUNK, q.shape[-1])
    q, k, decay = (x.astype(jnp.float32).reshape(together) for x in (q, k, decay))
    return decayed_scores(q, k, decay, None).reshape(*shape, CHUNK, CHUNK)


def factors(
    q: Float[Array, "rows time key"],
    k: Float[Array, "rows time key"],
    v: Float[Array, "rows time value"],
    g: Float[Array, "rows time channels"],
    beta: Float[Array, "rows time"] | None,
    documents: Int[Array, "rows time"] | None,
) -> Factors:
    """Everything about the chunks that can be known before walking over them.

    Cost:
        A chunk: C^2 K multiply-adds of scores, and with a delta rule C^2 (2 K + V) + C^3 / 3
        more. Differentiated by JAX; the gradient of T is `unit_lower_inverse`'s own.
    """
    q, k, v, g = (cut(x) for x in (q, k, v, g))
    decay = jnp.cumsum(g, axis=2)
    last = decay[:, :, -1:]
    entry, leave, through = jnp.exp(decay), jnp.exp(last - decay), jnp.exp(last[:, :, 0])
    scores = _scores(q, k, decay)
    masks = None if documents is None else _masks(documents)
    if masks is not None:
        entry = jnp.where(masks.entry, entry, 0)
        leave = jnp.where(masks.leave, leave, 0)
        through = jnp.where(masks.through, through, 0)
        scores = jnp.where(masks.pair, scores, 0)
    through = jnp.broadcast_to(through, (*k.shape[:2], k.shape[-1]))
    wide_k = k.astype(jnp.float32)
    read, leaving = entry * q.astype(jnp.float32), leave * wide_k
    if beta is None:
        return Factors(read, leaving, scores, through, v.astype(jnp.float32), None)
    strength = cut(beta)[..., None]
    a = jnp.tril(strength * _scores(k, k, decay), -1)
    if masks is not None:
        a = jnp.where(masks.pair, a, 0)
    inverse = unit_lower_inverse(a)
    values = dot("rnij,rnjv->rniv", inverse, strength * v.astype(jnp.float32))
    erase = -dot("rnij,rnjk->rnik", inverse, strength * entry * wide_k)
    return Factors(read, leaving, scores, through, values, erase)
