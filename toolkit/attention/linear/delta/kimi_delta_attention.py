r"""Kimi Delta Attention: a self-correcting memory in which every key channel forgets on its own.

    S  <- Diag(e^g) S
    S  <- S + beta k (v - S^T k)^T
    o   = scale S^T q

This is Gated DeltaNet with one decay per key channel instead of one per head, so that a head keeps
some features long and others short. With equal channels it is Gated DeltaNet. Keys must be of unit
length: `normalize_qk` makes them so.
"""

from functools import partial

import jax.numpy as jnp

import toolkit.attention._shapes as shapes
from toolkit._checks import checked
from toolkit.attention.costs import delta_forward_flops
from toolkit.attention.execution.compiled import compiled
from toolkit.attention.inputs import BETA, CHANNEL_G, K, Q, V, recurrent
from toolkit.attention.linear.engine.recurrence import run, scan_tokens, step
from toolkit.attention.linear.engine.rule import DELTA_RULE
from toolkit.attention.linear.engine.tokens import gather_tokens


@checked
@compiled
def kimi_delta_attention(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, g: shapes.KeyLogDecays,
    beta: shapes.Strengths, *,
    scale: float | None = None, normalize_qk: bool = False,
    initial_state: shapes.State | None = None, segment_ids: shapes.SegmentIds | None = None,
    implementation: shapes.Form | None = None, chunk: shapes.Chunk | None = None,
) -> shapes.Outputs:  # fmt: skip
    r"""Mix tokens through a self-correcting state with a decay per channel, in linear time.

        S_t = Diag(e^(g_t)) S_(t-1) + beta_t k_t (v_t - S_(t-1)^T Diag(e^(g_t)) k_t)^T
        o_t = scale S_t^T q_t

    Arguments and results as `gated_delta_net`, except:

    Args:
        g: [batch, time, value_heads, key] log-decay (natural), <= 0, else NaN; -inf clears
            a channel.

    Cost:
        With chunks of C = 16 tokens (32 beyond 4096, unless values alone are wanted on a CPU),
        2 (3 K V + 2 C K + 2 C V) FLOPs and 2 K exponentials per token and value head forward, about
        2.2 times as much more backward. In a chunk where a channel decays below 1e-28, scores are
        log2(C) products instead of one. Reads the inputs once.

    Source:
        Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture"
        (arXiv:2510.26692), equations 1 and 2 and section 3.

    Example:
        >>> q = k = v = jnp.full((1, 3, 2, 4), 0.5)
        >>> out, state = kimi_delta_attention(q, k, v, g=-q, beta=q[..., 0])
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    tokens = gather_tokens(q, k, v, beta, g=g, scale=scale, normalize_qk=normalize_qk)
    return run(DELTA_RULE, tokens, initial_state, segment_ids, implementation, chunk)


@checked
def kimi_delta_attention_reference(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, g: shapes.KeyLogDecays,
    beta: shapes.Strengths, *,
    scale: float | None = None, normalize_qk: bool = False,
    initial_state: shapes.State | None = None, segment_ids: shapes.SegmentIds | None = None,
) -> shapes.Outputs:  # fmt: skip
    """The equation token by token: a slow oracle. Arguments as `kimi_delta_attention`."""

    def token(S, q, k, v, g, beta):
        S = jnp.exp(g)[:, None] * S
        S = S + beta * jnp.outer(k, v - S.T @ k)
        return S, S.T @ q

    arrays = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return scan_tokens(token, initial_state, segment_ids, scale, normalize_qk, **arrays)


@checked
@compiled
def kimi_delta_attention_step(
    q_t: shapes.Query, k_t: shapes.Key, v_t: shapes.Value, g_t: shapes.KeyLogDecay,
    beta_t: shapes.Strength, state: shapes.State, *,
    scale: float | None = None, normalize_qk: bool = False,
    implementation: shapes.StepForm | None = None,
) -> shapes.Output:  # fmt: skip
    r"""Decode one token: one read and one write of the state.

        u = beta (v - S^T (e^g k)),   o = scale (S^T (e^g q) + (q . k) u)
        S <- Diag(e^g) S + k u^T

    Arguments as `kimi_delta_attention`, without the time axis; state, implementation and cost as
    `gated_delta_net_step`.

    Example:
        >>> q = k = v = jnp.full((1, 2, 4), 0.5)
        >>> state = jnp.zeros((1, 2, 4, 4))
        >>> kimi_delta_attention_step(q, k, v, -q, q[..., 0], state)[0].shape
        (1, 2, 4)
    """
    tokens = gather_tokens(q_t, k_t, v_t, beta_t, g=g_t, scale=scale, normalize_qk=normalize_qk)
    return step(DELTA_RULE, tokens, state, implementation)


ROW = recurrent(
    name="kda", title="Kimi Delta Attention",
    paper="Kimi Team, Kimi Linear (arXiv:2510.26692)",
    inputs=(Q, K, V, CHANNEL_G, BETA),
    function=kimi_delta_attention, step=kimi_delta_attention_step,
    reference=kimi_delta_attention_reference,
    forward_flops=partial(delta_forward_flops, decays_channels=True),
)  # fmt: skip
