r"""What the fading memories have in common: checks, gates, documents, and their ways to run.

Linear attention, retention, Mamba-2, gated linear attention and HGRN2 share one recurrence,

    S_t = Diag(e^(g_t)) S_(t-1) + k_t v_t^T,   o_t = scale S_t^T q_t

and differ in where g and k come from. A method's own file says that and calls the functions
here, which take g as [batch, time, heads, channels] with channels 1 (one decay a head) or key.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from toolkit.attention.linear.engine.chunked import Action, Addition, Rule
from toolkit.attention.linear.engine.recurrence import (
    Inputs,
    for_value_heads,
    log_decay_channels,
    run,
    run_equation,
    scaled_queries,
    step,
)

FADING = Rule(lambda q, k, v: Action(q, correction=None, addition=Addition(k, v)), has_kernels=True)


def fading_memory(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time value_heads value"],
    g: Float[Array, "batch time value_heads *channels"],
    *,
    scale: float | None,
    initial_state: Float[Array, "batch value_heads key value"] | None,
    segment_ids: Int[Array, "batch time"] | None,
    implementation: str | None,
    chunk: int | None,
) -> tuple[Array, Array]:
    """Run checked inputs in chunks ("xla") or token by token ("scan")."""
    key, value = k.shape[-1], v.shape[-1]
    usual = chunk_size(q.shape[1], key, value)
    out, state = run(
        FADING,
        _inputs(q, k, v, g, scale),
        initial_state,
        sizes=(key, value),
        segment_ids=segment_ids,
        implementation=implementation,
        chunk=chunk,
        usual_chunk=usual,
    )
    return out.astype(v.dtype), state


def fading_memory_reference(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time value_heads value"],
    g: Float[Array, "batch time value_heads *channels"],
    *,
    scale: float | None,
    initial_state: Float[Array, "batch value_heads key value"] | None,
    segment_ids: Int[Array, "batch time"] | None,
) -> tuple[Array, Array]:
    """The recurrence of checked inputs, token by token: slow, and the oracle of the others."""

    def one_token(state, g_t, q_t, k_t, v_t):
        state = jnp.exp(g_t)[..., None] * state + jnp.einsum("bhk,bhv->bhkv", k_t, v_t)
        return state, jnp.einsum("bhk,bhkv->bhv", q_t, state)

    out, state = run_equation(
        one_token,
        _inputs(q, k, v, g, scale),
        initial_state,
        sizes=(k.shape[-1], v.shape[-1]),
        segment_ids=segment_ids,
    )
    return out.astype(v.dtype), state


def fading_memory_step(
    q: Float[Array, "batch 1 heads key"],
    k: Float[Array, "batch 1 heads key"],
    v: Float[Array, "batch 1 value_heads value"],
    g: Float[Array, "batch 1 value_heads *channels"],
    state: Float[Array, "batch value_heads key value"],
    *,
    scale: float | None,
    implementation: str | None,
) -> tuple[Array, Array]:
    """One token of checked inputs [batch, 1, ...]: one read and one write of the state."""
    out, state = step(FADING, _inputs(q, k, v, g, scale), state, implementation=implementation)
    return out.astype(v.dtype), state


def chunk_size(time: int, key: int, value: int) -> int:
    """Tokens a chunk, a power of two: 32, or 64 for large heads, or what a short sequence needs."""
    return min(32 if max(key, value) <= 64 else 64, max(16, 1 << (time - 1).bit_length()))


def _inputs(q: Array, k: Array, v: Array, g: Array, scale: float | None) -> Inputs:
    q, k = (for_value_heads(x, v.shape[2]) for x in (scaled_queries(q, scale), k))
    return Inputs((q, k, v), log_decay_channels(g, v))
