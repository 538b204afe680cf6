r"""The part of a chunk that does not depend on the state: what it is, and in XLA.

With G the running sum of log-decay in a chunk, the three families (simple decay, Gated DeltaNet,
Kimi Delta Attention) differ in their factors only. A chunk that enters with state S computes

    N  = U + E S                    the values written (N = V without a delta rule)
    O  = R S + P N                  R = e^G * Q            (entry)
    S' = diag(through) S + L^T N    L = e^(G_C - G) * K    (leaving)

    P_ij = sum_c q_ic k_jc exp(G_ic - G_jc)         for j <= i
    A_ij = beta_i sum_c k_ic k_jc exp(G_ic - G_jc)  for j < i,    T = (I + A)^-1
    U = T diag(beta) V,   E = -T diag(beta) (e^G * K)

No exponent is positive. `prepare` computes them on chip where one decay serves all channels,
`channels` where every channel decays on its own. XLA, here, does where gradients of heads beyond
128 channels are found, of one decay for all.

Heads of values that share a query and key are rows beside each other: scores without their decay
are found once for all, and elsewhere XLA reads the shared row in what it computes of it.

Where documents meet, the same factors are masked. Products of bf16 queries and keys are exact
before they are summed in float32; `solve` finds T.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from toolkit.attention.kernels.gpu.support import BF16, CHUNK, F32


class Delta(NamedTuple):
    """What a delta rule adds: the system of equations of what a chunk writes."""

    system: Float[Array, "rows chunks C C"]  # A, float32
    # K, or e^G * K if channels decay apart, bf16; K may have a row for several
    keys: Float[Array, "key_rows chunks C key"]
    strengths: Float[Array, "rows chunks 2 C"]  # of V: beta; of `keys`: what they lack; float32


class Factors(NamedTuple):
    """Matrices of all chunks; see the equations of this module. Rounded once, from float32."""

    read: Float[Array, "rows chunks C key"]  # R, bf16
    leave: Float[Array, "rows chunks C key"]  # L, bf16
    scores: Float[Array, "rows chunks C C"]  # P, bf16
    through: Float[Array, "rows chunks key"]  # float32
    values: Float[Array, "rows chunks C value"]  # V, bf16; for the walk as the tokens lie
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


def exact_sums(g: Float[Array, "*chunks C channels"]) -> tuple[Array, Array]:
    """Running sums of g in two parts, whose differences are exact.

    Multiples of 1/64 add up exactly in any order, and what is left of each g is small.
    """
    coarse = lax.stop_gradient(jnp.round(64 * g) / 64)  # whose derivative is 0
    return jnp.cumsum(coarse, axis=-2), jnp.cumsum(g - coarse, axis=-2)


def cut(x: Array) -> Array:
    """[rows, time, ...] -> [rows, chunks, C, ...]."""
    return x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:])


def shared(x: Float[Array, "key_rows *rest"], rows: int) -> Float[Array, "rows *rest"]:
    """Repeat a row that several share, once for each."""
    group = rows // x.shape[0]
    return x if group == 1 else jnp.repeat(x, group, axis=0)


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


def _scores(x: Array, k: Array, decay: tuple[Array, Array]) -> Array:
    """sum_c x_ic k_jc exp(G_i - G_j) for j <= i, else 0."""
    between = sum(part - jnp.swapaxes(part, -1, -2) for part in decay)
    causal = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    survives = jnp.exp(jnp.where(causal, between, -jnp.inf))
    return shared(dot("rnik,rnjk->rnij", x, k), len(survives)) * survives


def factors(
    q: Float[Array, "key_rows time key"], k: Float[Array, "key_rows time key"],
    v: Float[Array, "rows time value"], g: Float[Array, "rows time 1"],
    beta: Float[Array, "rows time"] | None, documents: Int[Array, "rows time"] | None,
) -> Factors:  # fmt: skip
    """Everything about the chunks that can be computed before the walk over them.

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
    through = jnp.broadcast_to(through, (*v.shape[:2], k.shape[-1]))
    wide_q, wide_k = (shared(x.astype(F32), len(v)) for x in (q, k))
    read, leave = (entry * wide_q).astype(BF16), (leave * wide_k).astype(BF16)
    scores = scores.astype(BF16)
    if beta is None:
        return Factors(read, leave, scores, through, v, None)
    strength = cut(beta)[..., None]
    system = jnp.tril(strength * _scores(k, k, decay), -1)
    if masks is not None:
        system = jnp.where(masks.pair, system, 0)
    strengths = jnp.stack([strength[..., 0], (strength * entry)[..., 0]], axis=2)
    return Factors(read, leave, scores, through, v, Delta(system, k, strengths))
