r"""The part of a chunk that does not depend on the state, for all chunks at once, in XLA.

With G the running sum of log-decay in a chunk, the three families (simple decay, Gated DeltaNet,
Kimi Delta Attention) differ in their factors only. A chunk that enters with state S computes

    N  = U + E S                    the values written (N = V without a delta rule)
    O  = R S + P N                  R = e^G * Q            (entry)
    S' = diag(through) S + L^T N    L = e^(G_C - G) * K    (leaving)

    P_ij = sum_c q_ic k_jc exp(G_ic - G_jc)         for j <= i
    A_ij = beta_i sum_c k_ic k_jc exp(G_ic - G_jc)  for j < i,    T = (I + A)^-1
    U = T diag(beta) V,   E = -T diag(beta) (e^G * K)

No exponent is positive: `gpu_channels` factors a decay of every channel between halves of a block.
Where documents meet, the same factors are masked. Products of bf16 queries and keys are exact
before they are summed in float32; `gpu_solve` finds T.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from toolkit.attention.kernels.gpu_channels import Sums, channel_scores
from toolkit.attention.kernels.gpu_support import BF16, CHUNK, F32
from toolkit.attention.linear.engine.decays import exact_sums


class Delta(NamedTuple):
    """What a delta rule adds: the system of equations of what a chunk writes."""

    system: Float[Array, "rows chunks C C"]  # A, float32
    keys: Float[Array, "rows chunks C key"]  # K, or e^G * K if channels decay apart, bf16
    strengths: Float[Array, "rows chunks 2 C"]  # of V: beta; of `keys`: what they lack; float32


class Factors(NamedTuple):
    """Matrices of all chunks; see the equations of this module. Rounded once, from float32."""

    read: Float[Array, "rows chunks C key"]  # R, bf16
    leave: Float[Array, "rows chunks C key"]  # L, bf16
    scores: Float[Array, "rows chunks C C"]  # P, bf16
    through: Float[Array, "rows chunks key"]  # float32
    values: Float[Array, "rows chunks C value"]  # V, bf16
    delta: Delta | None


class Solution(NamedTuple):
    """The delta rule of all chunks solved for the values written: N = U + E S."""

    inverse: Float[Array, "rows chunks C C"]  # T, bf16
    values: Float[Array, "rows chunks C value"]  # U, bf16
    erase: Float[Array, "rows chunks C key"]  # E, bf16


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
    return jnp.einsum(equation, x, y, preferred_element_type=F32)


def document_masks(documents: Int[Array, "rows time"]) -> Masks:
    """From the numbers of documents, which never fall."""
    token = cut(documents)
    outgoing = token[:, :, -1:]
    incoming = jnp.concatenate([token[:, :1, :1], outgoing[:, :-1]], axis=1)
    return Masks(
        token[..., :, None] == token[..., None, :],
        (token == incoming)[..., None],
        (token == outgoing)[..., None],
        incoming == outgoing,
    )


def _scores(x: Array, k: Array, decay: Sums) -> Array:
    """sum_c x_ic k_jc exp(G_ic - G_jc) for j <= i, else 0."""
    if decay[0].shape[-1] == 1:
        between = sum(part - jnp.swapaxes(part, -1, -2) for part in decay)
        causal = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
        survives = jnp.exp(jnp.where(causal, between, -jnp.inf))
        return dot("rnik,rnjk->rnij", x, k) * survives
    shape = (-1, *k.shape[2:])
    x, k_wide, coarse, fine = (z.astype(F32).reshape(shape) for z in (x, k, *decay))
    return channel_scores(x, k_wide, (coarse, fine)).reshape(*k.shape[:2], CHUNK, CHUNK)


def factors(
    q: Float[Array, "rows time key"],
    k: Float[Array, "rows time key"],
    v: Float[Array, "rows time value"],
    g: Float[Array, "rows time channels"],
    beta: Float[Array, "rows time"] | None,
    documents: Int[Array, "rows time"] | None,
) -> Factors:
    """Everything about the chunks that can be known before walking over them.

    C^2 K multiply-adds of scores per chunk, twice with a delta rule. Differentiated by JAX.
    """
    q, k, v, g = (cut(x) for x in (q, k, v, g))
    decay = exact_sums(g)
    entry = jnp.exp(sum(decay))
    leave, through = jnp.exp(sum(x[:, :, -1:] - x for x in decay)), entry[:, :, -1]
    scores = _scores(q, k, decay)
    masks = None if documents is None else document_masks(documents)
    if masks is not None:
        entry = jnp.where(masks.entry, entry, 0)
        leave = jnp.where(masks.leave, leave, 0)
        through = jnp.where(masks.through, through, 0)
        scores = jnp.where(masks.pair, scores, 0)
    through = jnp.broadcast_to(through, (*k.shape[:2], k.shape[-1]))
    wide_q, wide_k = q.astype(F32), k.astype(F32)
    read, leave = (entry * wide_q).astype(BF16), (leave * wide_k).astype(BF16)
    scores = scores.astype(BF16)
    if beta is None:
        return Factors(read, leave, scores, through, v, None)
    strength = cut(beta)[..., None]
    system = jnp.tril(strength * _scores(k, k, decay), -1)
    if masks is not None:
        system = jnp.where(masks.pair, system, 0)
    if g.shape[-1] == 1:
        keys, key_strength = k, strength * entry
    else:
        keys, key_strength = (entry * wide_k).astype(BF16), strength
    strengths = jnp.stack([strength[..., 0], key_strength[..., 0]], axis=2)
    return Factors(read, leave, scores, through, v, Delta(system, keys, strengths))
