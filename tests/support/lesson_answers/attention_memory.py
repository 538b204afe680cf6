"""Answers to the exercises on attention as a memory."""

import math

import jax
import jax.numpy as jnp
import numpy as np


def delta_step(state, k, v, beta):
    return state + beta * np.outer(k, v - k @ state)


def chunked(q, k, v, g, chunk, power=lambda g, n: jnp.exp(g * n)):
    steps = jnp.arange(chunk, dtype=q.dtype)
    back = steps[:, None] - steps
    within = jnp.where(back >= 0, power(g, jnp.maximum(back, 0)), 0)

    def one(state, part):
        q, k, v = part
        inside = (q @ k.T * within) @ v
        before = power(g, steps + 1)[:, None] * (q @ state)
        left = power(g, chunk - 1 - steps)[:, None]
        return power(g, jnp.float32(chunk)) * state + (k * left).T @ v, inside + before

    parts = [x.reshape(-1, chunk, x.shape[-1]) for x in (q, k, v)]
    _, out = jax.lax.scan(one, jnp.zeros((k.shape[-1], v.shape[-1])), tuple(parts))
    return out.reshape(v.shape)


def dense(q, k, v, g, chunk):
    steps = jnp.arange(len(q), dtype=q.dtype)
    back = steps[:, None] - steps
    return (q @ k.T * jnp.where(back >= 0, jnp.exp(g * jnp.maximum(back, 0)), 0)) @ v


def divided(q, k, v, g, chunk):
    """exp(a) / exp(b), which overflows."""
    steps = jnp.arange(len(q), dtype=q.dtype)[:, None]
    return jnp.tril((q * jnp.exp(g * steps)) @ (k * jnp.exp(-g * steps)).T) @ v


def masked_too_late(q, k, v, g, chunk):
    """Right values: the masked entries overflow to infinity, and only their gradient shows it."""
    steps = jnp.arange(chunk, dtype=q.dtype)
    back = steps[:, None] - steps

    def one(state, part):
        q, k, v = part
        inside = jnp.tril(q @ k.T * jnp.exp(g * back)) @ v
        before = jnp.exp(g * (steps + 1))[:, None] * (q @ state)
        left = jnp.exp(g * (chunk - 1 - steps))[:, None]
        return jnp.exp(g * chunk) * state + (k * left).T @ v, inside + before

    parts = [x.reshape(-1, chunk, x.shape[-1]) for x in (q, k, v)]
    _, out = jax.lax.scan(one, jnp.zeros((k.shape[-1], v.shape[-1])), tuple(parts))
    return out.reshape(v.shape)


def without_decay_gradient(q, k, v, g, chunk):
    return chunked(q, k, v, jax.lax.stop_gradient(g), chunk)


def without_gradient(q, k, v, g, chunk):
    return chunked(q, jax.lax.stop_gradient(k), v, g, chunk)


def forgets_the_state(q, k, v, g, chunk):
    parts = [slice(at, at + chunk) for at in range(0, len(q), chunk)]
    return jnp.concatenate([dense(q[at], k[at], v[at], g, chunk) for at in parts])


ANSWERS = {
    "delta_step": (
        delta_step,
        [
            (lambda s, k, v, beta: s + beta * np.outer(k, v), "adds the value"),
            (lambda s, k, v, beta: np.outer(k, v), "under others"),
            (lambda s, k, v, beta: delta_step(s, k, v, 1.0), "half old, half new"),
            (lambda s, k, v, beta: delta_step(s, k, v, 0.3), "With beta 1"),
            (lambda s, k, v, beta: s[:2], "returned shape [2, 3]; wanted [4, 3]"),
        ],
    ),
    "log_decay": (
        lambda half_life: -math.log(2) / half_life,
        [
            (lambda half_life: 0.5 ** (1 / half_life), "below 0"),
            (lambda half_life: -1 / half_life, "1/e"),
            (lambda half_life: -half_life, "is kept after 8 tokens"),
        ],
    ),
    "chunked": (
        chunked,
        [
            (lambda q, k, v, g, chunk: (q @ k.T) @ v, "inside the first chunk"),
            (forgets_the_state, "at token 16, in a later chunk"),
            (divided, "never exp(a) / exp(b)"),
            (dense, "all tokens by all tokens"),
            (lambda q, k, v, g, chunk: chunked(q, k, v, g, 1), "token by token"),
            (without_gradient, "the gradient with respect to k is not"),
            (without_decay_gradient, "the gradient with respect to g is not"),
            (masked_too_late, "mask the exponent before exp"),
        ],
    ),
}
