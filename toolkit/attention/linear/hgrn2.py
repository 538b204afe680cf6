r"""HGRN2: a gated linear recurrence whose keys are what its gates let go.

    S_t = Diag(e^(g_t)) S_(t-1) + k_t v_t^T,   k_t = 1 - e^(g_t),   o_t = scale S_t^T q_t

Gated linear attention with the key tied to the forget gate: every channel keeps a running
average of the values, with weights that add up to at most one, so the state stays bounded.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from toolkit.attention._checks import check_rank, check_recurrence, check_same_dtype, check_shape
from toolkit.attention.linear.engine.fading_memory import (
    fading_memory,
    fading_memory_reference,
    fading_memory_step,
)
from toolkit.attention.linear.engine.recurrence import add_time, state_dtype


def hgrn2(
    q: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time heads value"],
    g: Float[Array, "batch time heads key"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "batch heads key value"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
    implementation: str | None = None,
    chunk: int | None = None,
) -> tuple[Float[Array, "batch time heads value"], Float[Array, "batch heads key value"]]:
    r"""Mix tokens through a state whose channels take in as much as they forget.

        S_t = Diag(e^(g_t)) S_(t-1) + (1 - e^(g_t)) v_t^T,   o_t = scale S_t^T q_t

    Args:
        q: [batch, time, heads, key] queries.
        v: [batch, time, heads, value].
        g: [batch, time, heads, key] logarithm of the forget gate, <= 0; -inf replaces
            what the channel holds.
        scale: multiplies the outputs; key**-0.5 if None.
        initial_state: [batch, heads, key, value] before the first token; zero if None.
        segment_ids: [batch, time] document of each token; the state is cleared wherever the
            number changes. `initial_state` belongs to the first, the final state to the last.
        implementation: "xla" (chunks; None picks it), "scan" (token by token) or "pallas"
            (kernels for TPUs and Hopper GPUs).
        chunk: tokens a chunk of "xla", a power of two from 16 on; None chooses.

    Returns:
        Outputs [batch, time, heads, value] in the dtype of v, and the final state
        [batch, heads, key, value], float32 (float64 for float64 inputs).

    Raises:
        ValueError: wrong rank, sizes that do not fit, no tokens, a positive log-decay, an
            unknown implementation, or a chunk that is no power of two from 16 on.
        TypeError: not floating point, or q and v of different dtypes.

    Cost:
        With chunks of C = 32 tokens (64 if a head exceeds 64), 2 (2 K V + C K + C V) FLOPs and
        2 exponentials a key channel, a token and value head forward; about 2.5 times as much
        more backward. In a chunk where a channel fades below 1e-28, scores are log2(C) products
        instead of one. Reads q, v and g once.

    Source:
        Qin, Yang, Sun, Shen, Li, Sun, Zhong, "HGRN2: Gated Linear RNNs with State Expansion"
        (arXiv:2404.07904), section 3.2.
    """
    _check(q, v, g, initial_state=initial_state, segment_ids=segment_ids)
    return fading_memory(
        q,
        _keys(v, g),
        v,
        g,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        implementation=implementation,
        chunk=chunk,
    )


def hgrn2_reference(
    q: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time heads value"],
    g: Float[Array, "batch time heads key"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "batch heads key value"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
) -> tuple[Float[Array, "batch time heads value"], Float[Array, "batch heads key value"]]:
    r"""The equations of `hgrn2`, token by token: the oracle.

        S <- Diag(e^g) S + (1 - e^g) v^T,   o = scale S^T q

    Args:
        q: [batch, time, heads, key].
        v: [batch, time, heads, value].
        g: [batch, time, heads, key] logarithm of the forget gate, <= 0.
        scale: multiplies the outputs; key**-0.5 if None.
        initial_state: [batch, heads, key, value]; zero if None.
        segment_ids: [batch, time]; the state is cleared wherever the number changes.

    Returns:
        Outputs [batch, time, heads, value] and the final state.

    Raises:
        ValueError: wrong rank, sizes that do not fit, or a positive log-decay.
        TypeError: not floating point, or q and v of different dtypes.

    Source:
        Qin et al., "HGRN2: Gated Linear RNNs with State Expansion" (arXiv:2404.07904).
    """
    _check(q, v, g, initial_state=initial_state, segment_ids=segment_ids)
    return fading_memory_reference(
        q,
        _keys(v, g),
        v,
        g,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
    )


def hgrn2_step(
    q_t: Float[Array, "batch heads key"],
    v_t: Float[Array, "batch heads value"],
    g_t: Float[Array, "batch heads key"],
    state: Float[Array, "batch heads key value"],
    *,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "batch heads value"], Float[Array, "batch heads key value"]]:
    r"""Decode one token: one read and one write of the state.

        k = 1 - e^g,   o = scale (S^T (e^g * q) + (q . k) v),   S <- Diag(e^g) S + k v^T

    Args:
        q_t: [batch, heads, key] query of this token.
        v_t: [batch, heads, value].
        g_t: [batch, heads, key] logarithm of the forget gate, <= 0.
        state: [batch, heads, key, value], as `hgrn2` returns it.
        scale: multiplies the output; key**-0.5 if None.
        implementation: "xla" (None picks it) or "pallas", the decode kernel of TPUs and Hopper
            GPUs.

    Returns:
        The output [batch, heads, value] in the dtype of v_t, and the new state.

    Raises:
        ValueError: wrong rank, sizes that do not fit, or a positive log-decay.
        TypeError: not floating point, or q_t and v_t of different dtypes.

    Cost:
        About 5 K V FLOPs and 8 K V bytes of a float32 state a value head: bound by memory.
        Donate the state under `jax.jit` so that it is updated in place.
    """
    q, v, g = add_time(
        q_t=(q_t, "batch heads key"),
        v_t=(v_t, "batch heads value"),
        g_t=(g_t, "batch heads key"),
    )
    _check(q, v, g, initial_state=state, segment_ids=None)
    return fading_memory_step(
        q, _keys(v, g), v, g, state, scale=scale, implementation=implementation
    )


def _check(
    q: Array, v: Array, g: Array, *, initial_state: Array | None, segment_ids: Array | None
) -> None:
    check_rank("q", q, "batch time heads key")
    check_shape("g", g, q.shape, "batch time heads key")
    check_rank("v", v, "batch time heads value")
    check_same_dtype(q=q, v=v)
    check_shape("v", v, (*q.shape[:3], v.shape[3]), "batch time heads value")
    # Keys come from g: they have the shape of q.
    check_recurrence(q, q, v, g=g, initial_state=initial_state, segment_ids=segment_ids)


def _keys(v: Array, g: Array) -> Array:
    """1 - e^g, exact also where the gate is nearly open."""
    return -jnp.expm1(g.astype(state_dtype(v)))
