r"""Gated linear attention: every channel of the key decays at a rate of its own.

Row c of the state [key, value] is what was written under channel c; a layer computes its
log-decay g from the token, so that the network chooses what to keep.
"""

import jax.numpy as jnp

import toolkit.attention._shapes as shapes
from toolkit._checks import checked
from toolkit.attention.execution.compiled import compiled
from toolkit.attention.inputs import CHANNEL_G, K, Q, V, recurrent
from toolkit.attention.linear.engine.recurrence import run, scan_tokens, step
from toolkit.attention.linear.engine.rule import ADDITIVE_RULE
from toolkit.attention.linear.engine.tokens import gather_tokens


@checked
@compiled
def gated_linear_attention(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, g: shapes.KeyLogDecays, *,
    scale: float | None = None,
    initial_state: shapes.State | None = None, segment_ids: shapes.SegmentIds | None = None,
    implementation: shapes.Form | None = None, chunk: shapes.Chunk | None = None,
) -> shapes.Outputs:  # fmt: skip
    r"""Mix tokens through a state whose key channels decay one by one.

        S_t = Diag(e^(g_t)) S_(t-1) + k_t v_t^T,   o_t = scale S_t^T q_t

    Arguments and results as `linear_attention`, and:

    Args:
        g: [batch, time, value_heads, key] log-decay (natural), <= 0, else NaN; -inf clears
            a channel.

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
        >>> out, state = gated_linear_attention(q, k, v, g=-k)
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    tokens = gather_tokens(q, k, v, g=g, scale=scale)
    return run(ADDITIVE_RULE, tokens, initial_state, segment_ids, implementation, chunk)


@checked
def gated_linear_attention_reference(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, g: shapes.KeyLogDecays, *,
    scale: float | None = None,
    initial_state: shapes.State | None = None, segment_ids: shapes.SegmentIds | None = None,
) -> shapes.Outputs:  # fmt: skip
    """The equation token by token: a slow oracle. Arguments as `gated_linear_attention`."""

    def token(S, q, k, v, g):
        S = jnp.exp(g)[:, None] * S + jnp.outer(k, v)
        return S, S.T @ q

    arrays = {"q": q, "k": k, "v": v, "g": g}
    return scan_tokens(token, initial_state, segment_ids, scale, **arrays)


@checked
@compiled
def gated_linear_attention_step(
    q_t: shapes.Query, k_t: shapes.Key, v_t: shapes.Value, g_t: shapes.KeyLogDecay,
    state: shapes.State, *,
    scale: float | None = None, implementation: shapes.StepForm | None = None,
) -> shapes.Output:  # fmt: skip
    r"""Decode one token: one read and one write of the state.

        o = scale (S^T (e^g * q) + (q . k) v),   S <- Diag(e^g) S + k v^T

    Arguments as `gated_linear_attention`, without the time axis; state and implementation as
    `linear_attention_step`.

    Cost:
        About 5 K V FLOPs and 8 K V bytes of a float32 state per value head.

    Example:
        >>> q = k = v = jnp.ones((1, 2, 4))
        >>> gated_linear_attention_step(q, k, v, -k, jnp.zeros((1, 2, 4, 4)))[0].shape
        (1, 2, 4)
    """
    tokens = gather_tokens(q_t, k_t, v_t, g=g_t, scale=scale)
    return step(ADDITIVE_RULE, tokens, state, implementation)


ROW = recurrent(
    name="gla", title="Gated linear attention",
    paper="Yang, Wang, Shen, Panda, Kim, Gated Linear Attention (arXiv:2312.06635)",
    transition="diagonal",
    inputs=(Q, K, V, CHANNEL_G),
    function=gated_linear_attention, step=gated_linear_attention_step,
    reference=gated_linear_attention_reference,
)  # fmt: skip
