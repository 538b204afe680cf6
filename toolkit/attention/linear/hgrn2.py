r"""HGRN2: a gated linear recurrence whose keys are one minus its gates.

This is gated linear attention with keys 1 - e^g, tied to the forget gate: every channel keeps a
running average of the values, with weights that add up to at most one, so the state stays bounded.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

import toolkit.attention._shapes as shapes
from toolkit._checks import checked
from toolkit.attention.execution.compiled import compiled
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.inputs import CHANNEL_G, Q, V, recurrent
from toolkit.attention.linear.engine.recurrence import run, scan_tokens, step
from toolkit.attention.linear.engine.rule import ADDITIVE_RULE
from toolkit.attention.linear.engine.tokens import gather_tokens


@checked
@compiled
def hgrn2(
    q: shapes.Queries, v: shapes.HeadValues, g: shapes.HeadKeyLogDecays, *,
    scale: float | None = None,
    initial_state: shapes.HeadState | None = None, segment_ids: shapes.SegmentIds | None = None,
    implementation: shapes.Form | None = None, chunk: shapes.Chunk | None = None,
) -> tuple[Float[Array, "batch time heads value"], shapes.HeadState]:  # fmt: skip
    r"""Mix tokens through a state whose channels take in as much as they forget.

        S_t = Diag(e^(g_t)) S_(t-1) + (1 - e^(g_t)) v_t^T,   o_t = scale S_t^T q_t

    Arguments and results as `linear_attention`, without k; v has as many heads as q.

    Args:
        g: [batch, time, heads, key] logarithm of the forget gate, <= 0, else NaN; -inf replaces
            what the channel holds.

    Cost:
        That of `gated_linear_attention`.

    Source:
        Qin, Yang, Sun, Shen, Li, Sun, Zhong, "HGRN2: Gated Linear RNNs with State Expansion"
        (arXiv:2404.07904), section 3.2.

    Example:
        >>> q = v = jnp.ones((1, 3, 2, 4))
        >>> out, state = hgrn2(q, v, g=-q)
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    tokens = gather_tokens(q, _keys(v, g), v, g=g, scale=scale)
    return run(ADDITIVE_RULE, tokens, initial_state, segment_ids, implementation, chunk)


@checked
def hgrn2_reference(
    q: shapes.Queries, v: shapes.HeadValues, g: shapes.HeadKeyLogDecays, *,
    scale: float | None = None,
    initial_state: shapes.HeadState | None = None, segment_ids: shapes.SegmentIds | None = None,
) -> tuple[Float[Array, "batch time heads value"], shapes.HeadState]:  # fmt: skip
    """The equation token by token: a slow oracle. Arguments as `hgrn2`."""

    def token(S, q, v, g):
        S = jnp.exp(g)[:, None] * S + jnp.outer(-jnp.expm1(g), v)
        return S, S.T @ q

    arrays = {"q": q, "v": v, "g": g}
    return scan_tokens(token, initial_state, segment_ids, scale, **arrays)


@checked
@compiled
def hgrn2_step(
    q_t: shapes.Query, v_t: shapes.HeadValue, g_t: shapes.HeadKeyLogDecay, state: shapes.HeadState,
    *,
    scale: float | None = None, implementation: shapes.StepForm | None = None,
) -> tuple[Float[Array, "batch heads value"], shapes.HeadState]:  # fmt: skip
    r"""Decode one token: one read and one write of the state.

        k = 1 - e^g,   o = scale (S^T (e^g * q) + (q . k) v),   S <- Diag(e^g) S + k v^T

    Arguments as `hgrn2`, without the time axis; state, implementation and cost as
    `gated_linear_attention_step`.

    Example:
        >>> q = v = jnp.ones((1, 2, 4))
        >>> hgrn2_step(q, v, -q, jnp.zeros((1, 2, 4, 4)))[0].shape
        (1, 2, 4)
    """
    tokens = gather_tokens(q_t, _keys(v_t, g_t), v_t, g=g_t, scale=scale)
    return step(ADDITIVE_RULE, tokens, state, implementation)


def _keys(v: Array, g: shapes.HeadKeyLogDecays) -> shapes.Keys:
    """1 - e^g, exact also where the gate is nearly open."""
    is_decay = g <= 0
    # Twice `where`, so that no gradient meets what is not finite.
    keys = -jnp.expm1(jnp.where(is_decay, g, 0).astype(accumulator(v.dtype)))
    return jnp.where(is_decay, keys, jnp.nan)


ROW = recurrent(
    name="hgrn2", title="HGRN2",
    paper="Qin et al., HGRN2: Gated Linear RNNs with State Expansion (arXiv:2404.07904)",
    transition="diagonal",
    inputs=(Q, V, CHANNEL_G),  # its keys are made of g
    function=hgrn2, step=hgrn2_step, reference=hgrn2_reference,
)  # fmt: skip
