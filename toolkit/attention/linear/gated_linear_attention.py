r"""Gated linear attention: every channel of the key decays at a rate of its own.

    S_t = Diag(e^(g_t)) S_(t-1) + k_t v_t^T,   o_t = scale S_t^T q_t

Row c of the state [key, value] is what was written under channel c; a layer computes its
log-decay g from the token, so that the network chooses what to keep.
"""

import jax.numpy as jnp

from toolkit._checks import checked
from toolkit.attention._compiled import compiled
from toolkit.attention._shapes import (
    Chunk,
    Form,
    Key,
    KeyLogDecay,
    KeyLogDecays,
    Keys,
    Output,
    Outputs,
    Queries,
    Query,
    SegmentIds,
    State,
    StepForm,
    Value,
    Values,
)
from toolkit.attention.inputs import CHANNEL_G, K, Q, V, recurrent
from toolkit.attention.linear.engine.recurrence import run, scan_tokens, step
from toolkit.attention.linear.engine.rule import ADDITIVE_RULE
from toolkit.attention.linear.engine.tokens import gather_tokens


@checked
@compiled
def gated_linear_attention(
    q: Queries,
    k: Keys,
    v: Values,
    g: KeyLogDecays,
    *,
    scale: float | None = None,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: Form | None = None,
    chunk: Chunk | None = None,
) -> Outputs:
    r"""Mix tokens through a state whose key channels decay one by one.

        S_t = Diag(e^(g_t)) S_(t-1) + k_t v_t^T,   o_t = scale S_t^T q_t

    Args:
        q: [batch, time, heads, key] queries.
        k: [batch, time, heads, key] keys.
        v: [batch, time, value_heads, value]; value_heads is a multiple of heads, and every
            head of q and k serves a group of consecutive value heads.
        g: [batch, time, value_heads, key] log-decay (natural), <= 0, else NaN; -inf clears
            a channel.
        scale: multiplies the outputs; key**-0.5 if None.
        initial_state: [batch, value_heads, key, value] before the first token; zero if None.
        segment_ids: [batch, time] document of each token; the state is cleared wherever the
            number changes. `initial_state` belongs to the first, the final state to the last.
        implementation: "xla" (chunks; None picks it), "scan" (token by token) or "pallas"
            (experimental kernels for TPUs and Hopper GPUs).
        chunk: tokens per chunk of "xla", a power of two from 16 on; None chooses.

    Returns:
        Outputs [batch, time, value_heads, value] in the dtype of v, and the final state
        [batch, value_heads, key, value], float32 (float64 for float64 inputs).

    Raises:
        ValueError: wrong rank, sizes that do not fit, no tokens, an unknown implementation, or a
            chunk that is no power of two from 16 on; inside `toolkit.checking()`, a gate out of
            range.
        TypeError: not floating point, or q, k and v of different dtypes.

    Cost:
        With chunks of C = 32 tokens (64 if a head exceeds 64), 2 (2 K V + C K + C V) FLOPs and
        one exponential per key channel, per token and value head forward; about 2.5 times as much
        more backward. In a chunk where a channel decays below 1e-28, scores are log2(C) products
        instead of one. Reads q, k, v and g once.

    Source:
        Yang, Wang, Shen, Panda, Kim, "Gated Linear Attention Transformers with
        Hardware-Efficient Training" (arXiv:2312.06635), equation 3 and section 4.

    Example:
        >>> q = k = v = jnp.ones((1, 3, 2, 4))
        >>> out, state = gated_linear_attention(q, k, v, g=-jnp.ones((1, 3, 2, 4)))
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    tokens = gather_tokens(q, k, v, g=g, scale=scale)
    return run(ADDITIVE_RULE, tokens, initial_state, segment_ids, implementation, chunk)


@checked
def gated_linear_attention_reference(
    q: Queries,
    k: Keys,
    v: Values,
    g: KeyLogDecays,
    *,
    scale: float | None = None,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
) -> Outputs:
    r"""The equation of `gated_linear_attention`, token by token: slow, and the oracle.

        S <- Diag(e^g) S + k v^T,   o = scale S^T q

    Arguments as `gated_linear_attention`.

    Example:
        >>> q = k = v = jnp.ones((1, 3, 2, 4))
        >>> out, state = gated_linear_attention_reference(q, k, v, g=-jnp.ones((1, 3, 2, 4)))
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    arrays = {"q": q, "k": k, "v": v, "g": g}
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def token(S, q, k, v, g):
        S = jnp.exp(g)[:, None] * S + jnp.outer(k, v)
        return S, scale * (S.T @ q)

    return scan_tokens(token, initial_state, segment_ids, **arrays)


@checked
@compiled
def gated_linear_attention_step(
    q_t: Query,
    k_t: Key,
    v_t: Value,
    g_t: KeyLogDecay,
    state: State,
    *,
    scale: float | None = None,
    implementation: StepForm | None = None,
) -> Output:
    r"""Decode one token: one read and one write of the state.

        o = scale (S^T (e^g * q) + (q . k) v),   S <- Diag(e^g) S + k v^T

    Arguments as `gated_linear_attention`, without the time axis; `state` as it returns it.
    `implementation` is "xla" (None picks it) or "pallas", the experimental decode
    kernel of TPUs and Hopper GPUs.

    Cost:
        About 5 K V FLOPs and 8 K V bytes of a float32 state per value head: bound by memory. Donate
        the state under `jax.jit` so that it is updated in place.

    Example:
        >>> q = k = v = jnp.ones((1, 2, 4))
        >>> out, state = gated_linear_attention_step(q, k, v, -k, jnp.zeros((1, 2, 4, 4)))
        >>> out.shape, state.shape
        ((1, 2, 4), (1, 2, 4, 4))
    """
    tokens = gather_tokens(q_t, k_t, v_t, g=g_t, scale=scale)
    return step(ADDITIVE_RULE, tokens, state, implementation)


ROW = recurrent(
    name="gla",
    title="Gated linear attention",
    paper="Yang, Wang, Shen, Panda, Kim, Gated Linear Attention (arXiv:2312.06635)",
    transition="diagonal",
    inputs=(Q, K, V, CHANNEL_G),
    function=gated_linear_attention,
    step=gated_linear_attention_step,
    reference=gated_linear_attention_reference,
)
"""The row of `MIXERS`."""
