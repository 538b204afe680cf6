r"""The part of a chunk that does not depend on the state, for all chunks at once, in XLA.

With G the running sum of log-decay in a chunk, the three families (simple decay, Gated DeltaNet,
Kimi Delta Attention) differ in their factors only. A chunk that enters with state S computes

    N  = U + E S                    the values written (N = V without a delta rule)
    O  = R S + P N                  R = e^G * Q            (entry)
    S' = diag(through) S + L^T N    L = e^(G_C - G) * K    (leaving)

    P_ij = sum_c q_ic k_jc exp(G_ic - G_jc)         for j <= i
    A_ij = beta_i sum_c k_ic k_jc exp(G_ic - G_jc)  for j < i,    T = (I + A)^-1
    U = T diag(beta) V,   E = -T diag(beta) (e^G * K)

No exponent is positive. Where every channel decays apart, what the second half of a block reads in
its first half passes through G at the middle m, as (x_i e^(G_i - G_m)) . (k_j e^(G_m - G_j)), as in
`decays.py` by halves; only blocks of `BLOCK` tokens on the diagonal take their exponentials pair by
pair, and products run at the platform's default precision (TF32 on Hopper). Scores P are linear in
x and in k, and every exponential stands between an x and a k, so their gradient keeps nothing but
the inputs and needs no derivative of an exponential: dG = x dx - k dk.

Heads of values that share a query and key are rows beside each other: scores without their decay
are found once for all, and elsewhere XLA reads the shared row in what it computes of it.

Where documents meet, the same factors are masked. Products of bf16 queries and keys are exact
before they are summed in float32; `solve` finds T.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from toolkit.attention.kernels.gpu.support import BF16, CHUNK, F32

Sums = tuple[Array, Array]  # running sums in parts whose differences are exact: `exact_sums`

BLOCK = 8  # tokens of a diagonal block: 8 exponentials per channel and token, 3 levels of halves


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


def _split(x: Array, *sizes: int) -> Array:
    """[chunks, C, key] -> [chunks, blocks, *sizes, key]."""
    return x.reshape(x.shape[0], -1, *sizes, x.shape[-1])


def _block_scores(x: Array, k: Array, decay: Sums) -> Array:
    """P inside the diagonal blocks, pair by pair: [chunks, blocks, BLOCK, BLOCK]."""
    x, k, *parts = (_split(z, BLOCK) for z in (x, k, *decay))
    between = sum(part[..., :, None, :] - part[..., None, :, :] for part in parts)
    causal = jnp.tril(jnp.ones((BLOCK, BLOCK), bool))[:, :, None]
    survives = jnp.exp(jnp.where(causal, between, -jnp.inf))
    return jnp.sum(x[..., :, None, :] * k[..., None, :, :] * survives, axis=-1)


def _linear_scores(x: Array, k: Array, decay: Sums) -> Array:
    chunks, size, _ = k.shape
    scores, width = _block_scores(x, k, decay), BLOCK
    while width < size:
        x_half, k_half, *decay_half = (_split(z, 2, width) for z in (x, k, *decay))
        middles = [(part, part[:, :, 1, :1]) for part in decay_half]
        late = x_half[:, :, 1] * jnp.exp(sum(part[:, :, 1] - middle for part, middle in middles))
        early = k_half[:, :, 0] * jnp.exp(sum(middle - part[:, :, 0] for part, middle in middles))
        lower = jnp.einsum("bnik,bnjk->bnij", late, early)
        first, second = scores[:, 0::2], scores[:, 1::2]
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        scores = jnp.concatenate([top, jnp.concatenate([lower, second], axis=-1)], axis=-2)
        width *= 2
    return scores.reshape(chunks, size, size)


@jax.custom_vjp
def channel_scores(
    x: Float[Array, "chunks C key"], k: Float[Array, "chunks C key"], decay: Sums
) -> Float[Array, "chunks C C"]:
    """What every token of a chunk reads of each earlier one: lower triangular [chunks, C, C].

    `x` are queries, or the keys where a delta rule reads with them; `decay` is G, the running sum
    of log-decay, in two parts [chunks, C, key]. C^2 K / 2 multiply-adds and
    C (BLOCK + 2 log2(C / BLOCK)) K exponentials per chunk.
    """
    return _linear_scores(x, k, lax.optimization_barrier(decay))


def _kept(x, k, decay):
    return channel_scores(x, k, decay), (x, k, decay)


def _gradients(saved, d_scores):
    x, k, decay = saved
    # Behind its own barrier every product takes its exponentials anew and folds them into its
    # sums. Where two share them, XLA writes all of them to memory: BLOCK times the inputs.
    decay, d_scores = lax.optimization_barrier((decay, d_scores))
    (d_x,) = jax.vjp(lambda x: _linear_scores(x, k, decay), x)[1](d_scores)
    decay, d_x = lax.optimization_barrier((decay, d_x))
    (d_k,) = jax.vjp(lambda k: _linear_scores(x, k, decay), k)[1](d_scores)
    d_decay = x * d_x - k * d_k
    return d_x, d_k, (d_decay, d_decay)


channel_scores.defvjp(_kept, _gradients)


def _scores(x: Array, k: Array, decay: Sums) -> Array:
    """sum_c x_ic k_jc exp(G_ic - G_jc) for j <= i, else 0."""
    if decay[0].shape[-1] == 1:
        between = sum(part - jnp.swapaxes(part, -1, -2) for part in decay)
        causal = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
        survives = jnp.exp(jnp.where(causal, between, -jnp.inf))
        return shared(dot("rnik,rnjk->rnij", x, k), len(survives)) * survives
    rows, count, _, key = decay[0].shape
    x, k, coarse, fine = (
        shared(z.astype(F32), rows).reshape(-1, CHUNK, key) for z in (x, k, *decay)
    )
    return channel_scores(x, k, (coarse, fine)).reshape(rows, count, CHUNK, CHUNK)


def factors(
    q: Float[Array, "key_rows time key"], k: Float[Array, "key_rows time key"],
    v: Float[Array, "rows time value"], g: Float[Array, "rows time channels"],
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
    if g.shape[-1] == 1:
        keys, key_strength = k, strength * entry
    else:
        keys, key_strength = (entry * wide_k).astype(BF16), strength
    strengths = jnp.stack([strength[..., 0], key_strength[..., 0]], axis=2)
    return Factors(read, leave, scores, through, v, Delta(system, keys, strengths))
