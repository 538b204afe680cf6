r"""Error-free linear attention (EFLA): the delta rule as a differential equation, solved exactly.

    dS/dt = k (v - S^T k)^T   for a time beta:

    S  <- S + alpha k (v - S^T k)^T,    alpha = (1 - e^(-beta |k|^2)) / |k|^2
    o   = scale S^T q

DeltaNet takes one Euler step of the same equation, alpha = beta, which overshoots where
beta |k|^2 > 1 and expands the state where it exceeds 2. The exact step overwrites what is under a
long key and no more, so keys need no unit length: their length says how firmly they write.
"""

import jax.numpy as jnp
from jaxtyping import Array

import toolkit.attention._shapes as shapes
from toolkit._checks import checked
from toolkit.attention.execution.compiled import compiled
from toolkit.attention.inputs import BETA, Input, K, Q, V, recurrent
from toolkit.attention.linear.engine.recurrence import run, scan_tokens, step
from toolkit.attention.linear.engine.rule import Action, Correction, Rule, correcting_chunk_size
from toolkit.attention.linear.engine.tokens import gather_tokens

SERIES_BELOW = 0.1
TERMS = 12


def _mean_decay(x: Array) -> Array:
    """(1 - e^-x) / x, the mean of e^-t up to x; by its series near 0, where the quotient and its
    derivative lose their digits."""
    is_small = x < SERIES_BELOW
    small, large = jnp.where(is_small, x, 0), jnp.where(is_small, 1, x)
    series = jnp.ones_like(x)
    for n in range(TERMS, 1, -1):
        series = 1 - small / n * series
    return jnp.where(is_small, series, -jnp.expm1(-large) / large)


def _action(q: Array, k: Array, v: Array, beta: Array) -> Action:
    alpha = beta * _mean_decay(beta * jnp.sum(k * k, axis=-1))
    return Action(q, Correction(k, k, v, alpha), addition=None)


EXACT_RULE = Rule(_action, correcting_chunk_size)


@checked
@compiled
def error_free_linear_attention(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, beta: shapes.Strengths, *,
    scale: float | None = None,
    initial_state: shapes.State | None = None, segment_ids: shapes.SegmentIds | None = None,
    implementation: shapes.Form | None = None, chunk: shapes.Chunk | None = None,
) -> shapes.Outputs:  # fmt: skip
    r"""Mix tokens through a state that solves the delta rule's equation, in linear time.

        S_t = S_(t-1) + alpha_t k_t (v_t - S_(t-1)^T k_t)^T,   o_t = scale S_t^T q_t
        alpha_t = (1 - e^(-beta_t |k_t|^2)) / |k_t|^2

    Arguments, results and cost as `gated_delta_net`, without g, except:

    Args:
        k: [batch, time, heads, key] keys, of any length.
        beta: [batch, time, value_heads] time for which the equation runs, in [0, 2].
        implementation: "xla" (chunks; None picks it) or "scan" (token by token).

    Source:
        Lei, Zhang, Poria, "Error-Free Linear Attention is a Free Lunch" (arXiv:2512.12602),
        section 3.

    Example:
        >>> q = k = v = jnp.full((1, 3, 2, 4), 0.5)
        >>> out, state = error_free_linear_attention(q, k, v, beta=q[..., 0])
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    tokens = gather_tokens(q, k, v, beta, g=None, scale=scale)
    return run(EXACT_RULE, tokens, initial_state, segment_ids, implementation, chunk)


@checked
def error_free_linear_attention_reference(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, beta: shapes.Strengths, *,
    scale: float | None = None,
    initial_state: shapes.State | None = None, segment_ids: shapes.SegmentIds | None = None,
) -> shapes.Outputs:  # fmt: skip
    """The equation token by token: a slow oracle. Arguments as `error_free_linear_attention`."""

    def token(S, q, k, v, beta):
        S = S + beta * _mean_decay(beta * (k @ k)) * jnp.outer(k, v - S.T @ k)
        return S, S.T @ q

    arrays = {"q": q, "k": k, "v": v, "beta": beta}
    return scan_tokens(token, initial_state, segment_ids, scale, **arrays)


@checked
@compiled
def error_free_linear_attention_step(
    q_t: shapes.Query, k_t: shapes.Key, v_t: shapes.Value, beta_t: shapes.Strength,
    state: shapes.State, *,
    scale: float | None = None,
) -> shapes.Output:  # fmt: skip
    r"""Decode one token: one read and one write of the state.

        u = alpha (v - S^T k),   o = scale (S^T q + (q . k) u),   S <- S + k u^T

    Arguments as `error_free_linear_attention`, without the time axis; state and cost as
    `gated_delta_net_step`.

    Example:
        >>> q = k = v = jnp.full((1, 2, 4), 0.5)
        >>> error_free_linear_attention_step(q, k, v, q[..., 0], jnp.zeros((1, 2, 4, 4)))[0].shape
        (1, 2, 4)
    """
    tokens = gather_tokens(q_t, k_t, v_t, beta_t, g=None, scale=scale)
    return step(EXACT_RULE, tokens, state)


ROW = recurrent(
    name="efla", title="Error-free linear attention",
    paper="Lei, Zhang, Poria, Error-Free Linear Attention (arXiv:2512.12602)",
    inputs=(Q, Input("k", K.axes, is_gate=False), V, BETA),
    implementations=("xla", "scan"),
    function=error_free_linear_attention, step=error_free_linear_attention_step,
    reference=error_free_linear_attention_reference,
)  # fmt: skip
