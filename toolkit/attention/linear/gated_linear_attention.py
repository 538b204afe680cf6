r"""Gated linear attention: every channel of the key fades at a rate of its own.

    S_t = Diag(e^(g_t)) S_(t-1) + k_t v_t^T,   o_t = scale S_t^T q_t

Row c of the state [key, value] is what was written under channel c; a layer computes its
log-decay g from the token, so that the network chooses what to keep.
"""

from jaxtyping import Array, Float, Int

from toolkit.attention._checks import check_recurrence
from toolkit.attention.linear.engine.fading_memory import (
    fading_memory,
    fading_memory_reference,
    fading_memory_step,
)
from toolkit.attention.linear.engine.recurrence import add_time


def gated_linear_attention(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time value_heads value"],
    g: Float[Array, "batch time value_heads key"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "batch value_heads key value"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
    implementation: str | None = None,
    chunk: int | None = None,
) -> tuple[
    Float[Array, "batch time value_heads value"], Float[Array, "batch value_heads key value"]
]:
    r"""Mix tokens through a state whose key channels fade one by one.

        S_t = Diag(e^(g_t)) S_(t-1) + k_t v_t^T,   o_t = scale S_t^T q_t

    Args:
        q: [batch, time, heads, key] queries.
        k: [batch, time, heads, key] keys.
        v: [batch, time, value_heads, value]; value_heads is a multiple of heads, and every
            head of q and k serves a group of consecutive value heads.
        g: [batch, time, value_heads, key] log-decay (natural), <= 0; -inf clears a channel.
        scale: multiplies the outputs; key**-0.5 if None.
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
        With chunks of C = 32 tokens (64 if a head exceeds 64), 2 (2 K V + C K + C V) FLOPs and
        2 exponentials a key channel, a token and value head forward; about 2.5 times as much
        more backward. In a chunk where a channel fades below 1e-28, scores are log2(C) products
        instead of one. Reads q, k, v and g once.

    Source:
        Yang, Wang, Shen, Panda, Kim, "Gated Linear Attention Transformers with
        Hardware-Efficient Training" (arXiv:2312.06635), equation 3 and section 4.
    """
    check_recurrence(q, k, v, g=g, initial_state=initial_state, segment_ids=segment_ids)
    return fading_memory(
        q,
        k,
        v,
        g,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        implementation=implementation,
        chunk=chunk,
    )


def gated_linear_attention_reference(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time value_heads value"],
    g: Float[Array, "batch time value_heads key"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "batch value_heads key value"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
) -> tuple[
    Float[Array, "batch time value_heads value"], Float[Array, "batch value_heads key value"]
]:
    r"""The equations of `gated_linear_attention`, token by token: the oracle.

        S <- Diag(e^g) S + k v^T,   o = scale S^T q

    Args:
        q: [batch, time, heads, key].
        k: [batch, time, heads, key].
        v: [batch, time, value_heads, value].
        g: [batch, time, value_heads, key] log-decay, <= 0.
        scale: multiplies the outputs; key**-0.5 if None.
        initial_state: [batch, value_heads, key, value]; zero if None.
        segment_ids: [batch, time]; the state is cleared wherever the number changes.

    Returns:
        Outputs [batch, time, value_heads, value] and the final state.

    Raises:
        ValueError: wrong rank, sizes that do not fit, or a positive log-decay.
        TypeError: not floating point, or q, k and v of different dtypes.

    Source:
        Yang et al., "Gated Linear Attention Transformers" (arXiv:2312.06635), equation 3.
    """
    check_recurrence(q, k, v, g=g, initial_state=initial_state, segment_ids=segment_ids)
    return fading_memory_reference(
        q,
        k,
        v,
        g,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
    )


def gated_linear_attention_step(
    q_t: Float[Array, "batch heads key"],
    k_t: Float[Array, "batch heads key"],
    v_t: Float[Array, "batch value_heads value"],
    g_t: Float[Array, "batch value_heads key"],
    state: Float[Array, "batch value_heads key value"],
    *,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "batch value_heads value"], Float[Array, "batch value_heads key value"]]:
    r"""Decode one token: one read and one write of the state.

        o = scale (S^T (e^g * q) + (q . k) v),   S <- Diag(e^g) S + k v^T

    Args:
        q_t: [batch, heads, key] query of this token.
        k_t: [batch, heads, key] key of this token.
        v_t: [batch, value_heads, value]; value_heads is a multiple of heads.
        g_t: [batch, value_heads, key] log-decay, <= 0.
        state: [batch, value_heads, key, value], as `gated_linear_attention` returns it.
        scale: multiplies the output; key**-0.5 if None.
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
    q, k, v, g = add_time(
        q_t=(q_t, "batch heads key"),
        k_t=(k_t, "batch heads key"),
        v_t=(v_t, "batch value_heads value"),
        g_t=(g_t, "batch value_heads key"),
    )
    check_recurrence(q, k, v, g=g, initial_state=state, segment_ids=None)
    return fading_memory_step(q, k, v, g, state, scale=scale, implementation=implementation)
