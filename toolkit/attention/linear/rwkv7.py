r"""RWKV-7: a memory that erases under one key, writes under another, and fades by channel.

    S_t = Diag(e^(g_t)) S_(t-1) - (rate_t * r_t) (r_t^T S_(t-1)) + k_t v_t^T
    o_t = scale S_t^T q_t

with r the removal key. The paper's names on the left, those of this room on the right:

    r (receptance)                    q
    k~ (replacement key), v           k, v
    log w = -e^-0.5 sigmoid(...)      g
    kappa^ (unit removal key)         removal_key
    a (in-context learning rate)      rate, in [0, 1], one a channel

What is erased is read before the state fades. A generalised delta rule: with equal keys, equal
rates and beta = rate it corrects as DeltaNet does.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from toolkit.attention._checks import check_rank, check_recurrence, check_shape
from toolkit.attention.linear.engine.chunked import Action, Addition, Correction, Rule
from toolkit.attention.linear.engine.recurrence import (
    Inputs,
    add_time,
    log_decay_channels,
    run,
    run_equation,
    scaled_queries,
    step,
)


def _action(q: Array, k: Array, v: Array, removal_key: Array, rate: Array) -> Action:
    erasure = Correction(removal_key, rate * removal_key, value=None, strength=None)
    return Action(q, correction=erasure, addition=Addition(k, v))


RWKV7 = Rule(_action, erases_before_fading=True)


def rwkv7(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time heads value"],
    g: Float[Array, "batch time heads key"],
    removal_key: Float[Array, "batch time heads key"],
    rate: Float[Array, "batch time heads key"],
    *,
    scale: float = 1.0,
    initial_state: Float[Array, "batch heads key value"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
    implementation: str | None = None,
    chunk: int | None = None,
) -> tuple[Float[Array, "batch time heads value"], Float[Array, "batch heads key value"]]:
    r"""Mix tokens through a fading state that erases and writes under keys of their own.

        S_t = Diag(e^(g_t)) S_(t-1) - (rate_t * r_t) (r_t^T S_(t-1)) + k_t v_t^T
        o_t = scale S_t^T q_t


    Args:
        q: [batch, time, heads, key] queries (receptance).
        k: [batch, time, heads, key] keys that values are added under.
        v: [batch, time, heads, value].
        g: [batch, time, heads, key] log-decay (natural), <= 0.
        removal_key: [batch, time, heads, key] of unit length, what is erased under.
        rate: [batch, time, heads, key] share of it that is erased, in [0, 1].
        scale: multiplies the outputs; 1 as in the paper.
        initial_state: [batch, heads, key, value] before the first token; zero if None.
        segment_ids: [batch, time] document of each token; the state is cleared wherever the
            number changes. `initial_state` belongs to the first, the final state to the last.
        implementation: "xla" (chunks; None picks it) or "scan" (token by token).
        chunk: tokens a chunk of "xla", a power of two from 16 on; None chooses.

    Returns:
        Outputs [batch, time, heads, value] in the dtype of v, and the final state
        [batch, heads, key, value], float32 (float64 for float64 inputs). Both have
        gradients.

    Raises:
        ValueError: wrong rank, sizes that do not fit, no tokens, a positive log-decay (of a
            concrete array), an unknown implementation, or a chunk that is no power of two from 16
            on.
        TypeError: not floating point, or q, k and v of different dtypes.

    Cost:
        With chunks of C = 16 tokens (32 beyond 4096), 2 (4 K V + 4 C K + 4 C V) FLOPs and
        3 K exponentials a token and head forward, about 2.3 times as much more backward. Reads
        the inputs once.

    Source:
        Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution" (arXiv:2503.14456),
        equation 17 and section 3.
    """
    _check(q, k, v, g, removal_key, rate, initial_state, segment_ids)
    out, state = run(
        RWKV7,
        _inputs(q, k, v, g, removal_key, rate, scale),
        initial_state,
        sizes=(k.shape[-1], v.shape[-1]),
        segment_ids=segment_ids,
        implementation=implementation,
        chunk=chunk,
        usual_chunk=chunk_size(q.shape[1]),
    )
    return out.astype(v.dtype), state


def rwkv7_reference(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time heads value"],
    g: Float[Array, "batch time heads key"],
    removal_key: Float[Array, "batch time heads key"],
    rate: Float[Array, "batch time heads key"],
    *,
    scale: float = 1.0,
    initial_state: Float[Array, "batch heads key value"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
) -> tuple[Float[Array, "batch time heads value"], Float[Array, "batch heads key value"]]:
    r"""The equations of `rwkv7`, token by token: slow, and the oracle of the others.

        S <- Diag(e^g) S - (rate * r) (r^T S) + k v^T,   o = scale S^T q


    Args:
        q: [batch, time, heads, key].
        k: [batch, time, heads, key].
        v: [batch, time, heads, value].
        g: [batch, time, heads, key] log-decay, <= 0.
        removal_key: [batch, time, heads, key].
        rate: [batch, time, heads, key].
        scale: multiplies the outputs; 1 as in the paper.
        initial_state: [batch, heads, key, value]; zero if None.
        segment_ids: [batch, time]; the state is cleared wherever the number changes.

    Returns:
        Outputs [batch, time, heads, value] and the final state.

    Raises:
        ValueError: wrong rank, sizes that do not fit, or a positive log-decay.
        TypeError: not floating point, or q, k and v of different dtypes.

    Source:
        Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution" (arXiv:2503.14456),
        equation 17 and section 3.
    """
    _check(q, k, v, g, removal_key, rate, initial_state, segment_ids)

    def one_token(state, g_t, q_t, k_t, v_t, removal_t, rate_t):
        erased = jnp.einsum("bhk,bhkv->bhv", removal_t, state)
        state = jnp.exp(g_t)[..., None] * state
        state -= jnp.einsum("bhk,bhv->bhkv", rate_t * removal_t, erased)
        state += jnp.einsum("bhk,bhv->bhkv", k_t, v_t)
        return state, jnp.einsum("bhk,bhkv->bhv", q_t, state)

    out, state = run_equation(
        one_token,
        _inputs(q, k, v, g, removal_key, rate, scale),
        initial_state,
        sizes=(k.shape[-1], v.shape[-1]),
        segment_ids=segment_ids,
    )
    return out.astype(v.dtype), state


def rwkv7_step(
    q_t: Float[Array, "batch heads key"],
    k_t: Float[Array, "batch heads key"],
    v_t: Float[Array, "batch heads value"],
    g_t: Float[Array, "batch heads key"],
    removal_key_t: Float[Array, "batch heads key"],
    rate_t: Float[Array, "batch heads key"],
    state: Float[Array, "batch heads key value"],
    *,
    scale: float = 1.0,
) -> tuple[Float[Array, "batch heads value"], Float[Array, "batch heads key value"]]:
    r"""Decode one token: one read and one write of the state.

        u = -S^T r,   o = scale (S^T (e^g q) + (q . (rate * r)) u + (q . k) v)
        S <- Diag(e^g) S + (rate * r) u^T + k v^T


    Args:
        q_t: [batch, heads, key] query of this token.
        k_t: [batch, heads, key] key of this token.
        v_t: [batch, heads, value].
        g_t: [batch, heads, key] log-decay, <= 0.
        removal_key_t: [batch, heads, key] of unit length.
        rate_t: [batch, heads, key] in [0, 1].
        state: [batch, heads, key, value], as `rwkv7` returns it.
        scale: multiplies the output; 1 as in the paper.

    Returns:
        The output [batch, heads, value] in the dtype of v_t, and the new state.

    Raises:
        ValueError: wrong rank, sizes that do not fit, or a positive log-decay.
        TypeError: not floating point, or q_t, k_t and v_t of different dtypes.

    Cost:
        About 9 K V FLOPs and 8 K V bytes of a float32 state a head: bound by memory.
        Donate the state under `jax.jit` so that it is updated in place.

    Source:
        Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution" (arXiv:2503.14456),
        equation 17 and section 3.
    """
    q, k, v, g, removal_key, rate = add_time(
        q_t=(q_t, "batch heads key"),
        k_t=(k_t, "batch heads key"),
        v_t=(v_t, "batch heads value"),
        g_t=(g_t, "batch heads key"),
        removal_key_t=(removal_key_t, "batch heads key"),
        rate_t=(rate_t, "batch heads key"),
    )
    _check(q, k, v, g, removal_key, rate, state, None)
    out, state = step(RWKV7, _inputs(q, k, v, g, removal_key, rate, scale), state)
    return out.astype(v_t.dtype), state


def chunk_size(time: int) -> int:
    """Tokens a chunk: 16 is fastest on CPUs, 32 keeps half the states of a long sequence."""
    return 16 if time <= 4096 else 32


def _inputs(q, k, v, g, removal_key, rate, scale) -> Inputs:
    tokens = (scaled_queries(q, scale), k, v, removal_key, rate)
    return Inputs(tokens, log_decay_channels(g, v))


def _check(q, k, v, g, removal_key, rate, initial_state, segment_ids) -> None:
    check_rank("v", v, "batch time heads value")
    check_shape("v", v, (*q.shape[:3], v.shape[3]), "batch time heads value")
    for name, gate in (("g", g), ("removal_key", removal_key), ("rate", rate)):
        check_rank(name, gate, "batch time heads key")
    check_recurrence(
        q,
        k,
        v,
        g=g,
        removal_key=removal_key,
        rate=rate,
        initial_state=initial_state,
        segment_ids=segment_ids,
    )
