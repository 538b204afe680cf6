r"""Comba: a delta rule with closed-loop control, feedback to the state and to the output.

    S  <- e^g S + beta k (v - b S^T k)^T                 both read the state of the token before
    o   = scale S^T (q - d k)

What a key recalls is fed back by the share b before the value is written, and a share d of the key
is taken from the query. The transition e^g - beta b k k^T is a scalar plus a matrix of rank one,
where Gated DeltaNet's is their product e^g (1 - beta k k^T): the state is read before it decays.
With b = e^g and d = 0 it is Gated DeltaNet.

This is the paper's equation, and the one of the authors' kernels in flash-linear-attention, chunked
and recurrent. Their plain loop over tokens (`naive_recurrent_comba`) decays the state first and
then reads it, which is the same with b e^g in place of b: `decays_first` asks for that form.

The paper's names on the left, those of this room on the right:

    alpha_t                            e^g
    beta_t, beta~_t = b beta_t         beta, feedback * beta
    d                                  correction

The paper learns one b and one d per head; here every token may have its own. The keys of flash-
linear-attention's `p` are feedback * k. Keys must be of unit length: `normalize_qk` makes them so.
"""

import jax.numpy as jnp
from jaxtyping import Array

import toolkit.attention._shapes as shapes
from toolkit._checks import checked
from toolkit.attention.execution.compiled import compiled
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.inputs import BETA, FRACTION, TOKEN, G, Input, K, Q, V, recurrent
from toolkit.attention.linear.engine.recurrence import run, scan_tokens, step
from toolkit.attention.linear.engine.rule import Action, Correction, Rule, correcting_chunk_size
from toolkit.attention.linear.engine.tokens import gather_tokens


def _action(
    q: Array, k: Array, v: Array, beta: Array, feedback: Array, correction: Array
) -> Action:
    erase = feedback[..., None] * k
    return Action(q - correction[..., None] * k, Correction(erase, k, v, beta), addition=None)


def _decayed(feedback: Array, g: Array) -> Array:
    precise = accumulator(g.dtype)
    return feedback.astype(precise) * jnp.exp(g.astype(precise))


COMBA_RULE = Rule(_action, correcting_chunk_size, erases_before_decay=True)


@checked
@compiled
def comba(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, g: shapes.LogDecays,
    beta: shapes.Strengths, feedback: shapes.Gates, correction: shapes.Gates, *,
    scale: float | None = None, normalize_qk: bool = False, decays_first: bool = False,
    initial_state: shapes.State | None = None, segment_ids: shapes.SegmentIds | None = None,
    implementation: shapes.Form | None = None, chunk: shapes.Chunk | None = None,
) -> shapes.Outputs:  # fmt: skip
    r"""Mix tokens through a decaying state whose reads are fed back, in linear time.

        S_t = (e^(g_t) - beta_t b_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T
        o_t = scale S_t^T (q_t - d_t k_t)

    Arguments, results and cost as `gated_delta_net`, except:

    Args:
        feedback: [batch, time, value_heads] share b of what the key recalls that is erased, in
            [0, 1]. Where beta b exceeds 1 + e^g the state grows.
        correction: [batch, time, value_heads] share d of the key taken from the query.
        decays_first: whether what a key recalls is read from the state after its decay, so that
            b e^g takes the place of b.
        implementation: "xla" (chunks; None picks it) or "scan" (token by token).

    Source:
        Hu et al., "Improving Bilinear RNNs with Closed-loop Control" (arXiv:2506.02475), section
        3.

    Example:
        >>> q = k = v = jnp.full((1, 3, 2, 4), 0.5)
        >>> gate = q[..., 0]
        >>> out, state = comba(q, k, v, -gate, beta=gate, feedback=gate, correction=gate)
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    if decays_first:
        feedback = _decayed(feedback, g)
    tokens = gather_tokens(
        q, k, v, beta, feedback, correction, g=g, scale=scale, normalize_qk=normalize_qk
    )
    return run(COMBA_RULE, tokens, initial_state, segment_ids, implementation, chunk)


@checked
def comba_reference(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, g: shapes.LogDecays,
    beta: shapes.Strengths, feedback: shapes.Gates, correction: shapes.Gates, *,
    scale: float | None = None, normalize_qk: bool = False, decays_first: bool = False,
    initial_state: shapes.State | None = None, segment_ids: shapes.SegmentIds | None = None,
) -> shapes.Outputs:  # fmt: skip
    """The equation token by token: a slow oracle. Arguments as `comba`."""

    def token(S, q, k, v, g, beta, feedback, correction):
        read = jnp.exp(g) * S if decays_first else S
        S = jnp.exp(g) * S + beta * jnp.outer(k, v - feedback * (read.T @ k))
        return S, S.T @ (q - correction * k)

    arrays = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    arrays |= {"feedback": feedback, "correction": correction}
    return scan_tokens(token, initial_state, segment_ids, scale, normalize_qk, **arrays)


@checked
@compiled
def comba_step(
    q_t: shapes.Query, k_t: shapes.Key, v_t: shapes.Value, g_t: shapes.LogDecay,
    beta_t: shapes.Strength, feedback_t: shapes.Gate, correction_t: shapes.Gate,
    state: shapes.State, *,
    scale: float | None = None, normalize_qk: bool = False, decays_first: bool = False,
) -> shapes.Output:  # fmt: skip
    r"""Decode one token: one read and one write of the state.

        u = beta (v - b S^T k),   r = q - d k,   o = scale (e^g S^T r + (r . k) u)
        S <- e^g S + k u^T

    Arguments as `comba`, without the time axis; state and cost as `gated_delta_net_step`.

    Example:
        >>> q = k = v = jnp.full((1, 2, 4), 0.5)
        >>> gate, state = q[..., 0], jnp.zeros((1, 2, 4, 4))
        >>> comba_step(q, k, v, -gate, gate, gate, gate, state)[0].shape
        (1, 2, 4)
    """
    if decays_first:
        feedback_t = _decayed(feedback_t, g_t)
    tokens = gather_tokens(
        q_t,
        k_t,
        v_t,
        beta_t,
        feedback_t,
        correction_t,
        g=g_t,
        scale=scale,
        normalize_qk=normalize_qk,
    )
    return step(COMBA_RULE, tokens, state)


ROW = recurrent(
    name="comba", title="Comba",
    paper="Hu et al., Bilinear RNNs with Closed-loop Control (arXiv:2506.02475)",
    inputs=(
        Q, K, V, G, BETA,
        Input("feedback", TOKEN, FRACTION),
        Input("correction", TOKEN, FRACTION),
    ),
    implementations=("xla", "scan"),
    function=comba, step=comba_step, reference=comba_reference,
)  # fmt: skip
