r"""Mamba-2 (state-space duality): a state space whose decay and input share one time step.

The paper's names on the left, those of this room on the right:

    C [batch, time, groups, state]    q      how the output reads the state
    B [batch, time, groups, state]    k      how the input enters the state
    x [batch, time, heads, size]      v      the input
    dt A                              g      log-decay: A = -e^(A_log) < 0 per head
    dt                                dt     time step, after softplus

A group of B and C serves several consecutive heads of x. The skip D x, the convolution and the
gate belong to the layer around it.
"""

import jax.numpy as jnp

import toolkit.attention._shapes as shapes
from toolkit._checks import checked
from toolkit.attention.execution.compiled import compiled
from toolkit.attention.inputs import FRACTION, TOKEN, G, Input, K, Q, V, recurrent
from toolkit.attention.linear.engine.recurrence import run, scan_tokens, step
from toolkit.attention.linear.engine.rule import Action, Addition, Rule, adding_chunk_size
from toolkit.attention.linear.engine.tokens import gather_tokens

# What a token writes under its key is its input over one time step.
MAMBA2_RULE = Rule(
    lambda q, k, v, dt: Action(q, correction=None, addition=Addition(k, dt[..., None] * v)),
    adding_chunk_size,
    has_kernels=True,
)


@checked
@compiled
def mamba2(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, g: shapes.LogDecays, dt: shapes.TimeSteps,
    *,
    scale: float = 1.0,
    initial_state: shapes.State | None = None, segment_ids: shapes.SegmentIds | None = None,
    implementation: shapes.Form | None = None, chunk: shapes.Chunk | None = None,
) -> shapes.Outputs:  # fmt: skip
    r"""Mix tokens through a state-space model with one decay per head.

        S_t = e^(g_t) S_(t-1) + dt_t k_t v_t^T,   o_t = scale S_t^T q_t

    Arguments and results as `linear_attention`, with q, k and v for C, B and x, except:

    Args:
        g: [batch, time, value_heads] log-decay dt A, <= 0, else NaN; -inf clears the state.
        dt: [batch, time, value_heads] time step, by which v is multiplied.
        scale: multiplies the outputs; 1 as in the paper.

    Cost:
        With chunks of C = 32 tokens (64 if a head exceeds 64), 2 (2 K V + C K + C V) FLOPs
        per token and value head forward, about 2.5 times as much more backward. Reads the inputs
        once.

    Source:
        Dao, Gu, "Transformers are SSMs" (arXiv:2405.21060), equations 1 and 2 discretised as in
        section 7.1, and the chunks of section 6.

    Example:
        >>> q = k = v = jnp.ones((1, 3, 2, 4))
        >>> out, state = mamba2(q, k, v, g=-q[..., 0], dt=q[..., 0])
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    tokens = gather_tokens(q, k, v, dt, g=g, scale=scale)
    return run(MAMBA2_RULE, tokens, initial_state, segment_ids, implementation, chunk)


@checked
def mamba2_reference(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, g: shapes.LogDecays, dt: shapes.TimeSteps,
    *,
    scale: float = 1.0,
    initial_state: shapes.State | None = None, segment_ids: shapes.SegmentIds | None = None,
) -> shapes.Outputs:  # fmt: skip
    """The equation token by token: a slow oracle. Arguments as `mamba2`."""

    def token(S, q, k, v, g, dt):
        S = jnp.exp(g) * S + dt * jnp.outer(k, v)
        return S, S.T @ q

    arrays = {"q": q, "k": k, "v": v, "g": g, "dt": dt}
    return scan_tokens(token, initial_state, segment_ids, scale, **arrays)


@checked
@compiled
def mamba2_step(
    q_t: shapes.Query, k_t: shapes.Key, v_t: shapes.Value, g_t: shapes.LogDecay,
    dt_t: shapes.TimeStep, state: shapes.State, *,
    scale: float = 1.0, implementation: shapes.StepForm | None = None,
) -> shapes.Output:  # fmt: skip
    r"""Decode one token: one read and one write of the state.

        o = scale (e^g S^T q + dt (q . k) v),   S <- e^g S + dt k v^T

    Arguments as `mamba2`, without the time axis; state, implementation and cost as
    `gated_linear_attention_step`.

    Example:
        >>> q = k = v = jnp.ones((1, 2, 4))
        >>> mamba2_step(q, k, v, -q[..., 0], q[..., 0], jnp.zeros((1, 2, 4, 4)))[0].shape
        (1, 2, 4)
    """
    tokens = gather_tokens(q_t, k_t, v_t, dt_t, g=g_t, scale=scale)
    return step(MAMBA2_RULE, tokens, state, implementation)


ROW = recurrent(
    name="mamba2", title="Mamba-2",
    paper="Dao, Gu, Transformers are SSMs (arXiv:2405.21060)",
    transition="diagonal",
    inputs=(Q, K, V, G, Input("dt", TOKEN, FRACTION)),
    function=mamba2, step=mamba2_step, reference=mamba2_reference,
)  # fmt: skip
