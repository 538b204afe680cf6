r"""Gated DeltaNet: a linear-time mixer whose state forgets (g) and corrects itself (beta).

The state S [key, value] is an associative memory. Each token first lets it fade, then replaces
what the memory holds under its key by its own value, to the fraction beta:

    S  <- e^g S
    S  <- S + beta k (v - S^T k)^T
    o   = scale S^T q

beta = 1 with a unit key overwrites; beta = 2 reflects (a negative eigenvalue), with which a state
can follow permutations. One mathematics in four forms: `gated_delta_net_reference` is the
equations above; `gated_delta_net` runs chunks ("xla", `chunked.py`) or tokens ("scan");
`gated_delta_net_step` is one token of decoding. Keys are not normalised here: give unit keys.
"""

from jaxtyping import Array, Float, Int

from toolkit.attention._checks import check_rank, check_recurrence
from toolkit.attention.linear.engine.delta_rule import (
    delta_rule,
    delta_rule_reference,
    delta_rule_step,
)
from toolkit.attention.linear.engine.recurrence import add_time


def gated_delta_net(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time value_heads value"],
    g: Float[Array, "batch time value_heads"],
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
    r"""Mix tokens through a decaying, self-correcting state, in time linear in the sequence.

        S_t = e^(g_t) S_(t-1) + beta_t k_t (v_t - e^(g_t) S_(t-1)^T k_t)^T,   o_t = scale S_t^T q_t

    Gates, states and the chunk inverse are float32 (float64 for float64 inputs).

    Args:
        q: [batch, time, heads, key] queries, of unit length or nearly so.
        k: [batch, time, heads, key] keys, of unit length or nearly so.
        v: [batch, time, value_heads, value]; value_heads is a multiple of heads, and every
            head of q and k serves a group of consecutive value heads.
        g: [batch, time, value_heads] log-decay (natural), <= 0; -inf clears the state.
        beta: [batch, time, value_heads] writing strength in [0, 2].
        scale: multiplies the outputs; key**-0.5 if None.
        initial_state: [batch, value_heads, key, value] before the first token; zero if None.
        segment_ids: [batch, time] document of each token. The state is cleared wherever the
            number changes, and values that are not finite stay within their document.
            `initial_state` belongs to the first document, the final state to the last.
        implementation: "xla" (chunks; None picks it), "scan" (token by token: as fast forward
            for small heads on a CPU, but its gradient keeps one state a token) or "pallas"
            (kernels for TPUs and Hopper GPUs).
        chunk: tokens a chunk, a power of two from 16 on; None chooses.

    Returns:
        Outputs [batch, time, value_heads, value] in the dtype of v, and the final state
        [batch, value_heads, key, value]. Both have gradients.

    Raises:
        ValueError: wrong rank, sizes that do not fit, no tokens, a positive log-decay (of a
            concrete array), an unknown implementation, or a chunk that is no power of two from
            16 on.
        TypeError: not floating point, or q, k and v of different dtypes.

    Cost:
        With chunks of C = 16 tokens (32 if a head exceeds 64, or beyond 4096 tokens),
        2 (3 K V + 2 C K + 2 C V) FLOPs and a little a token and value head forward, about 2.2
        times as much more backward. Reads q, k, v once.

    Source:
        Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule"
        (arXiv:2412.06464), equation 10 and section 3.3.
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


def gated_delta_net_reference(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time value_heads value"],
    g: Float[Array, "batch time value_heads"],
    beta: Float[Array, "batch time value_heads"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "batch value_heads key value"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
) -> tuple[
    Float[Array, "batch time value_heads value"], Float[Array, "batch value_heads key value"]
]:
    r"""The equations of `gated_delta_net`, token by token: slow, and the oracle of the others.

        S <- e^g S,   S <- S + beta k (v - S^T k)^T,   o = scale S^T q

    Args:
        q: [batch, time, heads, key].
        k: [batch, time, heads, key].
        v: [batch, time, value_heads, value].
        g: [batch, time, value_heads] log-decay, <= 0.
        beta: [batch, time, value_heads] in [0, 2].
        scale: multiplies the outputs; key**-0.5 if None.
        initial_state: [batch, value_heads, key, value]; zero if None.
        segment_ids: [batch, time]; the state is cleared wherever the number changes.

    Returns:
        Outputs [batch, time, value_heads, value] and the final state.

    Raises:
        ValueError: wrong rank, sizes that do not fit, or a positive log-decay.
        TypeError: not floating point, or q, k and v of different dtypes.

    Source:
        Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv:2412.06464), equation 10.
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


def gated_delta_net_step(
    q_t: Float[Array, "batch heads key"],
    k_t: Float[Array, "batch heads key"],
    v_t: Float[Array, "batch value_heads value"],
    g_t: Float[Array, "batch value_heads"],
    beta_t: Float[Array, "batch value_heads"],
    state: Float[Array, "batch value_heads key value"],
    *,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "batch value_heads value"], Float[Array, "batch value_heads key value"]]:
    r"""Decode one token: one read and one write of the state.

        p = S^T k,  r = S^T q,  u = beta (v - e^g p),
        o = scale (e^g r + (q . k) u),  S <- e^g S + k u^T

    Args:
        q_t: [batch, heads, key] query of this token.
        k_t: [batch, heads, key] key of this token.
        v_t: [batch, value_heads, value]; value_heads is a multiple of heads.
        g_t: [batch, value_heads] log-decay, <= 0.
        beta_t: [batch, value_heads] writing strength in [0, 2].
        state: [batch, value_heads, key, value], as `gated_delta_net` returns it.
        scale: multiplies the output; key**-0.5 if None.
        implementation: "xla" (None picks it) or "pallas", the decode kernel of TPUs and Hopper
            GPUs.

    Returns:
        The output [batch, value_heads, value] in the dtype of v_t, and the new state.

    Raises:
        ValueError: wrong rank, sizes that do not fit, or a positive log-decay.
        TypeError: not floating point, or q_t, k_t and v_t of different dtypes.

    Cost:
        About 7 K V FLOPs and 8 K V bytes of a float32 state a value head: bound by memory. Donate
        the state under `jax.jit` so that it is updated in place.

    Source:
        Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv:2412.06464), equation 10.
    """
    q, k, v, g, beta = add_time(
        q_t=(q_t, "batch heads key"),
        k_t=(k_t, "batch heads key"),
        v_t=(v_t, "batch value_heads value"),
        g_t=(g_t, "batch value_heads"),
        beta_t=(beta_t, "batch value_heads"),
    )
    _check(q, k, v, g, beta, state, None)
    out, state = delta_rule_step(
        q, k, v, g, beta, state, scale=scale, implementation=implementation
    )
    return out, state


def _check(q, k, v, g, beta, initial_state, segment_ids) -> None:
    check_rank("g", g, "batch time value_heads")
    check_rank("beta", beta, "batch time value_heads")
    check_recurrence(q, k, v, g=g, beta=beta, initial_state=initial_state, segment_ids=segment_ids)
