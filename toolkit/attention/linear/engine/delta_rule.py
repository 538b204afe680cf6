r"""What the delta rules have in common: checks, the equations, and their ways to run.

DeltaNet, Gated DeltaNet, Kimi Delta Attention and Gated DeltaProduct share one recurrence,

    S  <- Diag(e^g) S
    S  <- S + beta k (v - S^T k)^T
    o   = scale S^T q

and differ in whether g is nothing, one number a head or one a key channel, and in how many
corrections a token makes. The functions here take g as [batch, time, heads, channels] with
channels 1 or key.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from toolkit.attention.linear.engine.chunked import Action, Correction, Rule
from toolkit.attention.linear.engine.recurrence import (
    Inputs,
    for_value_heads,
    log_decay_channels,
    run,
    run_equation,
    scaled_queries,
    step,
)

DELTA = Rule(
    lambda q, k, v, beta: Action(q, correction=Correction(k, k, v, beta), addition=None),
    has_kernels=True,
)


def delta_rule(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time value_heads value"],
    g: Float[Array, "batch time value_heads *channels"],
    beta: Float[Array, "batch time value_heads"],
    *,
    scale: float | None,
    initial_state: Float[Array, "batch value_heads key value"] | None,
    segment_ids: Int[Array, "batch time"] | None,
    implementation: str | None,
    chunk: int | None,
) -> tuple[Array, Array]:
    """Run checked inputs in chunks ("xla") or token by token ("scan")."""
    key, value = k.shape[-1], v.shape[-1]
    inputs = _inputs(q, k, v, g, beta, scale)
    usual = chunk_size(q.shape[1], key, value, inputs.g.shape[-1])
    out, state = run(
        DELTA,
        inputs,
        initial_state,
        sizes=(key, value),
        segment_ids=segment_ids,
        implementation=implementation,
        chunk=chunk,
        usual_chunk=usual,
    )
    return out.astype(v.dtype), state


def delta_rule_reference(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time value_heads value"],
    g: Float[Array, "batch time value_heads *channels"],
    beta: Float[Array, "batch time value_heads"],
    *,
    scale: float | None,
    initial_state: Float[Array, "batch value_heads key value"] | None,
    segment_ids: Int[Array, "batch time"] | None,
) -> tuple[Array, Array]:
    """The recurrence of checked inputs, token by token: slow, and the oracle of the others."""

    def one_token(state, g_t, q_t, k_t, v_t, beta_t):
        state = jnp.exp(g_t)[..., None] * state
        error = v_t - jnp.einsum("bhk,bhkv->bhv", k_t, state)
        state = state + jnp.einsum("bh,bhk,bhv->bhkv", beta_t, k_t, error)
        return state, jnp.einsum("bhk,bhkv->bhv", q_t, state)

    out, state = run_equation(
        one_token,
        _inputs(q, k, v, g, beta, scale),
        initial_state,
        sizes=(k.shape[-1], v.shape[-1]),
        segment_ids=segment_ids,
    )
    return out.astype(v.dtype), state


def delta_rule_step(
    q: Float[Array, "batch 1 heads key"],
    k: Float[Array, "batch 1 heads key"],
    v: Float[Array, "batch 1 value_heads value"],
    g: Float[Array, "batch 1 value_heads *channels"],
    beta: Float[Array, "batch 1 value_heads"],
    state: Float[Array, "batch value_heads key value"],
    *,
    scale: float | None,
    implementation: str | None,
) -> tuple[Array, Array]:
    """One token of checked inputs [batch, 1, ...]: one read and one write of the state."""
    out, state = step(DELTA, _inputs(q, k, v, g, beta, scale), state, implementation=implementation)
    return out.astype(v.dtype), state


def chunk_size(time: int, key: int, value: int, channels: int = 1) -> int:
    """Tokens a chunk, a power of two from 16 on, chosen by length, head size and decays.

    Large chunks spend C^2 work a token, small ones keep a state more often. Measured on CPUs at
    2048 tokens, 32 ties 16 forward and backward together and takes a tenth to a quarter longer
    forward alone; with a decay a channel it is slower in both. At 8192 tokens, memory makes 16
    a tenth slower than 32.
    """
    has_small_heads = channels > 1 or max(key, value) <= 64
    return 16 if time <= 16 or (has_small_heads and time <= 4096) else 32


def _inputs(q: Array, k: Array, v: Array, g: Array, beta: Array, scale: float | None) -> Inputs:
    q, k = (for_value_heads(x, v.shape[2]) for x in (scaled_queries(q, scale), k))
    return Inputs((q, k, v, beta), log_decay_channels(g, v))
