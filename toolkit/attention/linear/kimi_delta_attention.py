r"""Kimi Delta Attention: a self-correcting memory in which every key channel forgets on its own.

    S  <- Diag(e^g) S
    S  <- S + beta k (v - S^T k)^T
    o   = scale S^T q

Gated DeltaNet with the decay of a head refined to one a channel, so that a head keeps some
features long and others short. With equal channels it is Gated DeltaNet. Keys are not normalised
here: give unit keys.
"""

from jaxtyping import Array, Float, Int

from toolkit.attention._checks import check_rank, check_recurrence
from toolkit.attention.linear.engine.delta_rule import (
    delta_rule,
    delta_rule_reference,
    delta_rule_step,
)
from toolkit.attention.linear.engine.recurrence import add_time


def kimi_delta_attention(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time value_heads value"],
    g: Float[Array, "batch time value_heads key"],
    beta: Float[Array, "batch time value_heads"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "batch value_heads key value"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
    implementation: str | None = None,
    chunk: int | None = None,
) -> tuple[
    Float[Array, "batch time value_heads value"], Float[Array, "batch value_heads key value"]
]:
    r"""Mix tokens through a self-correcting state with a decay a channel, in linear time.

        S_t = Diag(e^(g_t)) S_(t-1) + beta_t k_t (v_t - S_(t-1)^T Diag(e^(g_t)) k_t)^T
        o_t = scale S_t^T q_t


    Args:
        q: [batch, time, heads, key] queries, of unit length or nearly so.
        k: [batch, time, heads, key] keys, of unit length or nearly so.
        v: [batch, time, value_heads, value]; value_heads is a multiple of heads, and every
            head of q and k serves a group of consecutive value heads.
        g: [batch, time, value_heads, key] log-decay (natural), <= 0; -inf clears a channel.
        beta: [batch, time, value_heads] writing strength in [0, 2].
        scale: multiplies the outputs; key**-0.5 if None.
        initial_state: [batch, value_heads, key, value] before the first token; zero if None.
        segment_ids: [batch, time] document of each token; the state is cleared wherever the
            number changes. `initial_state` belongs to the first, the final state to the last.
        implementation: "xla" (chunks; None picks it), "scan" (token by token) or "pallas"
            (kernels for TPUs and Hopper GPUs).
        chunk: tokens a chunk of "xla", a power of two from 16 on; None chooses.

    Returns:
        Outputs [batch, time, value_heads, value] in the dtype of v, and the final state
        [batch, value_heads, key, value], float32 (float64 for float64 inputs). Both have
        gradients.

    Raises:
        ValueError: wrong rank, sizes that do not fit, no tokens, a positive log-decay or a beta
            outside [0, 2] (of a concrete array), an unknown implementation, or a chunk that is no
            power of two from 16 on.
        TypeError: not floating point, or q, k and v of different dtypes.

    Cost:
        With chunks of C = 16 tokens (32 beyond 4096), 2 (3 K V + 2 C K + 2 C V) FLOPs and 3 K
        exponentials a token and value head forward, about 2.2 times as much more backward. In a
        chunk where a channel fades below 1e-28, scores are log2(C) products instead of one.
        Reads the inputs once.

    Source:
        Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture"
        (arXiv:2510.26692), equations 1 and 2 and section 3.
    """
    _check(q, k, v, g, beta, initial_state, segment_ids)
    return delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        implementation=implementation,
        chunk=chunk,
    )


def kimi_delta_attention_reference(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time value_heads value"],
    g: Float[Array, "batch time value_heads key"],
    beta: Float[Array, "batch time value_heads"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "batch value_heads key value"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
) -> tuple[
    Float[Array, "batch time value_heads value"], Float[Array, "batch value_heads key value"]
]:
    r"""The equations of `kimi_delta_attention`, token by token: slow, and the oracle of the others.

        S <- Diag(e^g) S,   S <- S + beta k (v - S^T k)^T,   o = scale S^T q


    Args:
        q: [batch, time, heads, key].
        k: [batch, time, heads, key].
        v: [batch, time, value_heads, value].
        g: [batch, time, value_heads, key] log-decay, <= 0.
        beta: [batch, time, value_heads] in [0, 2].
        scale: multiplies the outputs; key**-0.5 if None.
        initial_state: [batch, value_heads, key, value]; zero if None.
        segment_ids: [batch, time]; the state is cleared wherever the number changes.

    Returns:
        Outputs [batch, time, value_heads, value] and the final state.

    Raises:
        ValueError: wrong rank, sizes that do not fit, a positive log-decay or a beta outside [0,
            2].
        TypeError: not floating point, or q, k and v of different dtypes.

    Source:
        Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture"
        (arXiv:2510.26692), equations 1 and 2 and section 3.
    """
    _check(q, k, v, g, beta, initial_state, segment_ids)
    return delta_rule_reference(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
    )


def kimi_delta_attention_step(
    q_t: Float[Array, "batch heads key"],
    k_t: Float[Array, "batch heads key"],
    v_t: Float[Array, "batch value_heads value"],
    g_t: Float[Array, "batch value_heads key"],
    beta_t: Float[Array, "batch value_heads"],
    state: Float[Array, "batch value_heads key value"],
    *,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "batch value_heads value"], Float[Array, "batch value_heads key value"]]:
    r"""Decode one token: one read and one write of the state.

        u = beta (v - S^T (e^g k)),   o = scale (S^T (e^g q) + (q . k) u)
        S <- Diag(e^g) S + k u^T


    Args:
        q_t: [batch, heads, key] query of this token.
        k_t: [batch, heads, key] key of this token.
        v_t: [batch, value_heads, value]; value_heads is a multiple of heads.
        g_t: [batch, value_heads, key] log-decay, <= 0.
        beta_t: [batch, value_heads] writing strength in [0, 2].
        state: [batch, value_heads, key, value], as `kimi_delta_attention` returns it.
        scale: multiplies the output; key**-0.5 if None.
        implementation: "xla" (None picks it) or "pallas", the decode kernel of TPUs and Hopper
            GPUs.

    Returns:
        The output [batch, value_heads, value] in the dtype of v_t, and the new state.

    Raises:
        ValueError: wrong rank, sizes that do not fit, a positive log-decay or a beta outside [0,
            2].
        TypeError: not floating point, or q_t, k_t and v_t of different dtypes.

    Cost:
        About 7 K V FLOPs and 8 K V bytes of a float32 state a value head: bound by memory.
        Donate the state under `jax.jit` so that it is updated in place.

    Source:
        Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture"
        (arXiv:2510.26692), equations 1 and 2 and section 3.
    """
    q, k, v, g, beta = add_time(
        q_t=(q_t, "batch heads key"),
        k_t=(k_t, "batch heads key"),
        v_t=(v_t, "batch value_heads value"),
        g_t=(g_t, "batch value_heads key"),
        beta_t=(beta_t, "batch value_heads"),
    )
    _check(q, k, v, g, beta, state, None)
    return delta_rule_step(q, k, v, g, beta, state, scale=scale, implementation=implementation)


def _check(q, k, v, g, beta, initial_state, segment_ids) -> None:
    check_rank("g", g, "batch time value_heads key")
    check_rank("beta", beta, "batch time value_heads")
    check_recurrence(q, k, v, g=g, beta=beta, initial_state=initial_state, segment_ids=segment_ids)
