r"""DeltaNet: a linear-time memory that corrects what it holds under a key.

    S  <- S + beta k (v - S^T k)^T
    o   = scale S^T q

This is the delta rule of Widrow and Hoff: every token takes one step of gradient descent on
|v - S^T k|^2 / 2 with rate beta. beta = 1 with a unit key overwrites what was under it. Keys must
be of unit length: `normalize_qk` makes them so.
"""

import jax.numpy as jnp

import toolkit.attention._shapes as shapes
from toolkit._checks import checked
from toolkit.attention.execution.compiled import compiled
from toolkit.attention.inputs import BETA, K, Q, V, recurrent
from toolkit.attention.linear.engine.recurrence import run, scan_tokens, step
from toolkit.attention.linear.engine.rule import DELTA_RULE
from toolkit.attention.linear.engine.tokens import gather_tokens


@checked
@compiled
def delta_net(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, beta: shapes.Strengths, *,
    scale: float | None = None, normalize_qk: bool = False,
    initial_state: shapes.State | None = None, segment_ids: shapes.SegmentIds | None = None,
    implementation: shapes.Form | None = None, chunk: shapes.Chunk | None = None,
) -> shapes.Outputs:  # fmt: skip
    r"""Mix tokens through a self-correcting state, in time linear in the sequence.

        S_t = S_(t-1) + beta_t k_t (v_t - S_(t-1)^T k_t)^T,   o_t = scale S_t^T q_t

    Arguments, results and cost as `gated_delta_net`, without g.

    Source:
        Yang, Wang, Zhang, Shen, Kim, "Parallelizing Linear Transformers with the Delta Rule over
        Sequence Length" (arXiv:2406.06484), section 3; Schlag, Irie, Schmidhuber
        (arXiv:2102.11174), equation 24.

    Example:
        >>> q = k = v = jnp.full((1, 3, 2, 4), 0.5)
        >>> out, state = delta_net(q, k, v, beta=jnp.ones((1, 3, 2)))
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    tokens = gather_tokens(q, k, v, beta, g=None, scale=scale, normalize_qk=normalize_qk)
    return run(DELTA_RULE, tokens, initial_state, segment_ids, implementation, chunk)


@checked
def delta_net_reference(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, beta: shapes.Strengths, *,
    scale: float | None = None, normalize_qk: bool = False,
    initial_state: shapes.State | None = None, segment_ids: shapes.SegmentIds | None = None,
) -> shapes.Outputs:  # fmt: skip
    """The equation token by token: a slow oracle. Arguments as `delta_net`."""

    def token(S, q, k, v, beta):
        S = S + beta * jnp.outer(k, v - S.T @ k)
        return S, S.T @ q

    arrays = {"q": q, "k": k, "v": v, "beta": beta}
    return scan_tokens(token, initial_state, segment_ids, scale, normalize_qk, **arrays)


@checked
@compiled
def delta_net_step(
    q_t: shapes.Query, k_t: shapes.Key, v_t: shapes.Value, beta_t: shapes.Strength,
    state: shapes.State, *,
    scale: float | None = None, normalize_qk: bool = False,
    implementation: shapes.StepForm | None = None,
) -> shapes.Output:  # fmt: skip
    r"""Decode one token: one read and one write of the state.

        u = beta (v - S^T k),   o = scale (S^T q + (q . k) u),   S <- S + k u^T

    Arguments as `delta_net`, without the time axis; state, implementation and cost as
    `gated_delta_net_step`.

    Example:
        >>> q = k = v = jnp.full((1, 2, 4), 0.5)
        >>> delta_net_step(q, k, v, q[..., 0], jnp.zeros((1, 2, 4, 4)))[0].shape
        (1, 2, 4)
    """
    tokens = gather_tokens(q_t, k_t, v_t, beta_t, g=None, scale=scale, normalize_qk=normalize_qk)
    return step(DELTA_RULE, tokens, state, implementation)


ROW = recurrent(
    name="delta", title="DeltaNet",
    paper="Yang, Wang, Zhang, Shen, Kim, DeltaNet in parallel (arXiv:2406.06484)",
    inputs=(Q, K, V, BETA),
    function=delta_net, step=delta_net_step, reference=delta_net_reference,
)  # fmt: skip
