r"""Scores of a chunk whose every key channel decays on its own, without a positive exponent.

    P_ij = sum_c x_ic k_jc exp(G_ic - G_jc)   for j <= i, else 0

As in `decays.py` by halves, what the second half of a block reads in its first half passes
through G at the middle m, as (x_i e^(G_i - G_m)) . (k_j e^(G_m - G_j)); only blocks of `BLOCK`
tokens on the diagonal take their exponentials pair by pair. The products run at the platform's
default precision (TF32 on Hopper) instead of emulated float32.

P is linear in x and in k, and every exponential stands between an x and a k. So the gradient
keeps nothing but the inputs and needs no derivative of an exponential: dG = x dx - k dk.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Sums = tuple[Array, Array]  # running sums in parts whose differences are exact: `exact_sums`

BLOCK = 8  # tokens of a diagonal block: 8 exponentials per channel and token, 3 levels of halves


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
    x: Float[Array, "chunks C key"],
    k: Float[Array, "chunks C key"],
    decay: Sums,
) -> Float[Array, "chunks C C"]:
    """What every token of a chunk reads of each earlier one: lower triangular [chunks, C, C].

    `x` are queries, or the keys where a delta rule reads with them; `decay` is G, the running sum
    of log-decay, in two parts [chunks, C, key]. C^2 K / 2 multiply-adds and
    C (BLOCK + 2 log2(C / BLOCK)) K exponentials per chunk.
    """
    return _linear_scores(x, k, lax.optimization_barrier(decay))


def _forward(x, k, decay):
    return channel_scores(x, k, decay), (x, k, decay)


def _backward(saved, d_scores):
    x, k, decay = saved
    # Behind its own barrier every product takes its exponentials anew and folds them into its
    # sums. Where two share them, XLA writes all of them to memory: BLOCK times the inputs.
    decay, d_scores = lax.optimization_barrier((decay, d_scores))
    (d_x,) = jax.vjp(lambda x: _linear_scores(x, k, decay), x)[1](d_scores)
    decay, d_x = lax.optimization_barrier((decay, d_x))
    (d_k,) = jax.vjp(lambda k: _linear_scores(x, k, decay), k)[1](d_scores)
    d_decay = x * d_x - k * d_k
    return d_x, d_k, (d_decay, d_decay)


channel_scores.defvjp(_forward, _backward)
