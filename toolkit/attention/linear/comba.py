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

from toolkit._checks import checked
from toolkit.attention._compiled import compiled
from toolkit.attention._precision import accumulator
from toolkit.attention._shapes import (
    Chunk,
    Form,
    Gate,
    Gates,
    Key,
    Keys,
    LogDecay,
    LogDecays,
    Output,
    Outputs,
    Queries,
    Query,
    SegmentIds,
    State,
    Strength,
    Strengths,
    Value,
    Values,
)
from toolkit.attention.inputs import BETA, FRACTION, TOKEN, G, Input, K, Q, V, recurrent
from toolkit.attention.linear.engine.recurrence import run, scan_tokens, step
from toolkit.attention.linear.engine.rule import Action, Correction, Rule, correcting_chunk_size
from toolkit.attention.linear.engine.tokens import gather_tokens
from toolkit.attention.linear.gates import unit_length


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
    q: Queries,
    k: Keys,
    v: Values,
    g: LogDecays,
    beta: Strengths,
    feedback: Gates,
    correction: Gates,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    decays_first: bool = False,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: Form | None = None,
    chunk: Chunk | None = None,
) -> Outputs:
    r"""Mix tokens through a decaying state whose reads are fed back, in linear time.

        S_t = (e^(g_t) - beta_t b_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T
        o_t = scale S_t^T (q_t - d_t k_t)

    Args:
        q: [batch, time, heads, key] queries, of unit length or nearly so.
        k: [batch, time, heads, key] keys, of unit length or nearly so.
        v: [batch, time, value_heads, value]; value_heads is a multiple of heads, and every
            head of q and k serves a group of consecutive value heads.
        g: [batch, time, value_heads] log-decay (natural), <= 0, else NaN; -inf clears the state.
        beta: [batch, time, value_heads] writing strength in [0, 2].
        feedback: [batch, time, value_heads] share b of what the key recalls that is erased, in
            [0, 1]. Where beta b exceeds 1 + e^g the state grows.
        correction: [batch, time, value_heads] share d of the key taken from the query.
        scale: multiplies the outputs; key**-0.5 if None.
        normalize_qk: bring queries and keys to unit length first (`unit_length`).
        decays_first: whether what a key recalls is read from the state after its decay, so that
            b e^g takes the place of b.
        initial_state: [batch, value_heads, key, value] before the first token; zero if None.
        segment_ids: [batch, time] document of each token; the state is cleared wherever the
            number changes. `initial_state` belongs to the first, the final state to the last.
        implementation: "xla" (chunks; None picks it) or "scan" (token by token).
        chunk: tokens per chunk of "xla", a power of two from 16 on; None chooses.

    Returns:
        Outputs [batch, time, value_heads, value] in the dtype of v, and the final state
        [batch, value_heads, key, value], float32 (float64 for float64 inputs). Both have
        gradients.

    Raises:
        ValueError: wrong rank, sizes that do not fit, no tokens, an unknown implementation, or a
            chunk that is no power of two from 16 on; inside `toolkit.checking()`, a gate out of
            range.
        TypeError: not floating point, or q, k and v of different dtypes.

    Cost:
        That of `gated_delta_net`.

    Source:
        Hu et al., "Improving Bilinear RNNs with Closed-loop Control" (arXiv:2506.02475), section
        3.

    Example:
        >>> q = k = v = jnp.full((1, 3, 2, 4), 0.5)
        >>> g, gate = -jnp.ones((1, 3, 2)), jnp.ones((1, 3, 2))
        >>> out, state = comba(q, k, v, g, beta=gate, feedback=gate, correction=0 * gate)
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    if normalize_qk:
        q, k = unit_length(q), unit_length(k)
    if decays_first:
        feedback = _decayed(feedback, g)
    tokens = gather_tokens(q, k, v, beta, feedback, correction, g=g, scale=scale)
    return run(COMBA_RULE, tokens, initial_state, segment_ids, implementation, chunk)


@checked
def comba_reference(
    q: Queries,
    k: Keys,
    v: Values,
    g: LogDecays,
    beta: Strengths,
    feedback: Gates,
    correction: Gates,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    decays_first: bool = False,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
) -> Outputs:
    r"""The equation of `comba`, token by token: slow, and the oracle.

        S <- e^g S + beta k (v - b S^T k)^T,   o = scale S^T (q - d k)

    Arguments as `comba`.

    Example:
        >>> q = k = v = jnp.full((1, 3, 2, 4), 0.5)
        >>> g, gate = -jnp.ones((1, 3, 2)), jnp.ones((1, 3, 2))
        >>> out, state = comba_reference(q, k, v, g, gate, feedback=gate, correction=0 * gate)
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    arrays = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    arrays |= {"feedback": feedback, "correction": correction}
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def token(S, q, k, v, g, beta, feedback, correction):
        if normalize_qk:
            q, k = unit_length(q), unit_length(k)
        read = jnp.exp(g) * S if decays_first else S
        S = jnp.exp(g) * S + beta * jnp.outer(k, v - feedback * (read.T @ k))
        return S, scale * (S.T @ (q - correction * k))

    return scan_tokens(token, initial_state, segment_ids, **arrays)


@checked
@compiled
def comba_step(
    q_t: Query,
    k_t: Key,
    v_t: Value,
    g_t: LogDecay,
    beta_t: Strength,
    feedback_t: Gate,
    correction_t: Gate,
    state: State,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    decays_first: bool = False,
) -> Output:
    r"""Decode one token: one read and one write of the state.

        u = beta (v - b S^T k),   r = q - d k,   o = scale (e^g S^T r + (r . k) u)
        S <- e^g S + k u^T

    Arguments as `comba`, without the time axis; `state` as it returns it.

    Cost:
        About 7 K V FLOPs and 8 K V bytes of a float32 state per value head: bound by memory. Donate
        the state under `jax.jit` so that it is updated in place.

    Example:
        >>> q = k = v = jnp.full((1, 2, 4), 0.5)
        >>> g, gate = -jnp.ones((1, 2)), jnp.ones((1, 2))
        >>> out, state = comba_step(q, k, v, g, gate, gate, 0 * gate, jnp.zeros((1, 2, 4, 4)))
        >>> out.shape, state.shape
        ((1, 2, 4), (1, 2, 4, 4))
    """
    if normalize_qk:
        q_t, k_t = unit_length(q_t), unit_length(k_t)
    if decays_first:
        feedback_t = _decayed(feedback_t, g_t)
    tokens = gather_tokens(q_t, k_t, v_t, beta_t, feedback_t, correction_t, g=g_t, scale=scale)
    return step(COMBA_RULE, tokens, state)


ROW = recurrent(
    name="comba",
    title="Comba",
    paper="Hu et al., Bilinear RNNs with Closed-loop Control (arXiv:2506.02475)",
    inputs=(
        Q,
        K,
        V,
        G,
        BETA,
        Input("feedback", TOKEN, FRACTION),
        Input("correction", TOKEN, FRACTION),
    ),
    implementations=("xla", "scan"),
    function=comba,
    step=comba_step,
    reference=comba_reference,
)
"""The row of `MIXERS`."""
