r"""Mamba-2 (state-space duality): a state space whose decay and input share one time step.

The paper's names on the left, those of this room on the right:

    C [batch, time, groups, state]    q      how the output reads the state
    B [batch, time, groups, state]    k      how the input enters the state
    x [batch, time, heads, size]      v      the input
    dt A                              g      log-decay: A = -e^(A_log) < 0 a head
    dt                                dt     time step, after softplus

    S_t = e^(g_t) S_(t-1) + dt_t k_t v_t^T,   o_t = scale S_t^T q_t

A group of B and C serves several consecutive heads of x. The skip D x, the convolution and the
gate belong to the layer around it.
"""

from jaxtyping import Array, Float, Int

from toolkit.attention._checks import check_recurrence
from toolkit.attention.linear.engine.fading_memory import (
    fading_memory,
    fading_memory_reference,
    fading_memory_step,
)
from toolkit.attention.linear.engine.recurrence import add_time, state_dtype


def mamba2(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time value_heads value"],
    g: Float[Array, "batch time value_heads"],
    dt: Float[Array, "batch time value_heads"],
    *,
    scale: float = 1.0,
    initial_state: Float[Array, "batch value_heads key value"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
    implementation: str | None = None,
    chunk: int | None = None,
) -> tuple[
    Float[Array, "batch time value_heads value"], Float[Array, "batch value_heads key value"]
]:
    r"""Mix tokens through a state-space model with one decay a head.

        S_t = e^(g_t) S_(t-1) + dt_t k_t v_t^T,   o_t = scale S_t^T q_t

    Args:
        q: [batch, time, heads, key] C.
        k: [batch, time, heads, key] B.
        v: [batch, time, value_heads, value] x; value_heads is a multiple of heads, and every
            head of q and k serves a group of consecutive value heads.
        g: [batch, time, value_heads] log-decay dt A, <= 0; -inf clears the state.
        dt: [batch, time, value_heads] time step, by which v is multiplied.
        scale: multiplies the outputs; 1 as in the paper.
        initial_state: [batch, value_heads, key, value] before the first token; zero if None.
        segment_ids: [batch, time] document of each token; the state is cleared wherever the
            number changes. `initial_state` belongs to the first, the final state to the last.
        implementation: "xla" (chunks; None picks it), "scan" (token by token) or "pallas"
            (kernels for TPUs and Hopper GPUs).
        chunk: tokens a chunk of "xla", a power of two from 16 on; None chooses.

    Returns:
        Outputs [batch, time, value_heads, value] in the dtype of v, and the final state
        [batch, value_heads, key, value], float32 (float64 for float64 inputs).

    Raises:
        ValueError: wrong rank, sizes that do not fit, no tokens, a positive log-decay, an
            unknown implementation, or a chunk that is no power of two from 16 on.
        TypeError: not floating point, or q, k and v of different dtypes.

    Cost:
        With chunks of C = 32 tokens (64 if a head exceeds 64), 2 (2 K V + C K + C V) FLOPs a
        token and value head forward, about 2.5 times as much more backward. Reads the inputs once.

    Source:
        Dao, Gu, "Transformers are SSMs" (arXiv:2405.21060), equations 1 and 2 discretised as in
        section 7.1, and the chunks of section 6.
    """
    check_recurrence(q, k, v, g=g, dt=dt, initial_state=initial_state, segment_ids=segment_ids)
    out, state = fading_memory(
        q,
        k,
        _written(v, dt),
        g,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        implementation=implementation,
        chunk=chunk,
    )
    return out.astype(v.dtype), state


def mamba2_reference(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time value_heads value"],
    g: Float[Array, "batch time value_heads"],
    dt: Float[Array, "batch time value_heads"],
    *,
    scale: float = 1.0,
    initial_state: Float[Array, "batch value_heads key value"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
) -> tuple[
    Float[Array, "batch time value_heads value"], Float[Array, "batch value_heads key value"]
]:
    r"""The equations of `mamba2`, token by token: slow, and the oracle of the others.

        S <- e^g S + dt k v^T,   o = scale S^T q

    Args:
        q: [batch, time, heads, key].
        k: [batch, time, heads, key].
        v: [batch, time, value_heads, value].
        g: [batch, time, value_heads] log-decay dt A, <= 0.
        dt: [batch, time, value_heads] time step.
        scale: multiplies the outputs; 1 as in the paper.
        initial_state: [batch, value_heads, key, value]; zero if None.
        segment_ids: [batch, time]; the state is cleared wherever the number changes.

    Returns:
        Outputs [batch, time, value_heads, value] and the final state.

    Raises:
        ValueError: wrong rank, sizes that do not fit, or a positive log-decay.
        TypeError: not floating point, or q, k and v of different dtypes.

    Source:
        Dao, Gu, "Transformers are SSMs" (arXiv:2405.21060), section 6, listing 1.
    """
    check_recurrence(q, k, v, g=g, dt=dt, initial_state=initial_state, segment_ids=segment_ids)
    out, state = fading_memory_reference(
        q,
        k,
        _written(v, dt),
        g,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
    )
    return out.astype(v.dtype), state


def mamba2_step(
    q_t: Float[Array, "batch heads key"],
    k_t: Float[Array, "batch heads key"],
    v_t: Float[Array, "batch value_heads value"],
    g_t: Float[Array, "batch value_heads"],
    dt_t: Float[Array, "batch value_heads"],
    state: Float[Array, "batch value_heads key value"],
    *,
    scale: float = 1.0,
    implementation: str | None = None,
) -> tuple[Float[Array, "batch value_heads value"], Float[Array, "batch value_heads key value"]]:
    r"""Decode one token: one read and one write of the state.

        o = scale (e^g S^T q + dt (q . k) v),   S <- e^g S + dt k v^T

    Args:
        q_t: [batch, heads, key] query of this token.
        k_t: [batch, heads, key] key of this token.
        v_t: [batch, value_heads, value]; value_heads is a multiple of heads.
        g_t: [batch, value_heads] log-decay dt A, <= 0.
        dt_t: [batch, value_heads] time step.
        state: [batch, value_heads, key, value], as `mamba2` returns it.
        scale: multiplies the output; 1 as in the paper.
        implementation: "xla" (None picks it) or "pallas", the decode kernel of TPUs and Hopper
            GPUs.

    Returns:
        The output [batch, value_heads, value] in the dtype of v_t, and the new state.

    Raises:
        ValueError: wrong rank, sizes that do not fit, or a positive log-decay.
        TypeError: not floating point, or q_t, k_t and v_t of different dtypes.

    Cost:
        About 5 K V FLOPs and 8 K V bytes of a float32 state a value head: bound by memory.
        Donate the state under `jax.jit` so that it is updated in place.
    """
    q, k, v, g, dt = add_time(
        q_t=(q_t, "batch heads key"),
        k_t=(k_t, "batch heads key"),
        v_t=(v_t, "batch value_heads value"),
        g_t=(g_t, "batch value_heads"),
        dt_t=(dt_t, "batch value_heads"),
    )
    check_recurrence(q, k, v, g=g, dt=dt, initial_state=state, segment_ids=None)
    out, state = fading_memory_step(
        q, k, _written(v, dt), g, state, scale=scale, implementation=implementation
    )
    return out.astype(v_t.dtype), state


def _written(v: Array, dt: Array) -> Array:
    """What a token writes under its key: its input over one time step."""
    dtype = state_dtype(v)
    return dt.astype(dtype)[..., None] * v.astype(dtype)
