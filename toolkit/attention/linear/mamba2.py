r"""Mamba-2 (state-space duality): a state space whose decay and input share one time step.

The paper's names on the left, those of this room on the right:

    C [batch, time, groups, state]    q      how the output reads the state
    B [batch, time, groups, state]    k      how the input enters the state
    x [batch, time, heads, size]      v      the input
    dt A                              g      log-decay: A = -e^(A_log) < 0 per head
    dt                                dt     time step, after softplus

    S_t = e^(g_t) S_(t-1) + dt_t k_t v_t^T,   o_t = scale S_t^T q_t

A group of B and C serves several consecutive heads of x. The skip D x, the convolution and the
gate belong to the layer around it.
"""

import jax.numpy as jnp

from toolkit._checks import checked
from toolkit.attention._compiled import compiled
from toolkit.attention._shapes import (
    Chunk,
    Form,
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
    StepForm,
    TimeStep,
    TimeSteps,
    Value,
    Values,
)
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
    q: Queries,
    k: Keys,
    v: Values,
    g: LogDecays,
    dt: TimeSteps,
    *,
    scale: float = 1.0,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: Form | None = None,
    chunk: Chunk | None = None,
) -> Outputs:
    r"""Mix tokens through a state-space model with one decay per head.

        S_t = e^(g_t) S_(t-1) + dt_t k_t v_t^T,   o_t = scale S_t^T q_t

    Args:
        q: [batch, time, heads, key] C.
        k: [batch, time, heads, key] B.
        v: [batch, time, value_heads, value] x; value_heads is a multiple of heads, and every
            head of q and k serves a group of consecutive value heads.
        g: [batch, time, value_heads] log-decay dt A, <= 0, else NaN; -inf clears the state.
        dt: [batch, time, value_heads] time step, by which v is multiplied.
        scale: multiplies the outputs; 1 as in the paper.
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
        With chunks of C = 32 tokens (64 if a head exceeds 64), 2 (2 K V + C K + C V) FLOPs
        per token and value head forward, about 2.5 times as much more backward. Reads the inputs
        once.

    Source:
        Dao, Gu, "Transformers are SSMs" (arXiv:2405.21060), equations 1 and 2 discretised as in
        section 7.1, and the chunks of section 6.

    Example:
        >>> q = k = v = jnp.ones((1, 3, 2, 4))
        >>> g, dt = -jnp.ones((1, 3, 2)), jnp.ones((1, 3, 2))
        >>> out, state = mamba2(q, k, v, g, dt)
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    tokens = gather_tokens(q, k, v, dt, g=g, scale=scale)
    return run(MAMBA2_RULE, tokens, initial_state, segment_ids, implementation, chunk)


@checked
def mamba2_reference(
    q: Queries,
    k: Keys,
    v: Values,
    g: LogDecays,
    dt: TimeSteps,
    *,
    scale: float = 1.0,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
) -> Outputs:
    r"""The equation of `mamba2`, token by token: slow, and the oracle.

        S <- e^g S + dt k v^T,   o = scale S^T q

    Arguments as `mamba2`.

    Example:
        >>> q = k = v = jnp.ones((1, 3, 2, 4))
        >>> g, dt = -jnp.ones((1, 3, 2)), jnp.ones((1, 3, 2))
        >>> out, state = mamba2_reference(q, k, v, g, dt)
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    arrays = {"q": q, "k": k, "v": v, "g": g, "dt": dt}

    def token(S, q, k, v, g, dt):
        S = jnp.exp(g) * S + dt * jnp.outer(k, v)
        return S, scale * (S.T @ q)

    return scan_tokens(token, initial_state, segment_ids, **arrays)


@checked
@compiled
def mamba2_step(
    q_t: Query,
    k_t: Key,
    v_t: Value,
    g_t: LogDecay,
    dt_t: TimeStep,
    state: State,
    *,
    scale: float = 1.0,
    implementation: StepForm | None = None,
) -> Output:
    r"""Decode one token: one read and one write of the state.

        o = scale (e^g S^T q + dt (q . k) v),   S <- e^g S + dt k v^T

    Arguments as `mamba2`, without the time axis; `state` as it returns it.
    `implementation` is "xla" (None picks it) or "pallas", the experimental decode
    kernel of TPUs and Hopper GPUs.

    Cost:
        About 5 K V FLOPs and 8 K V bytes of a float32 state per value head: bound by memory. Donate
        the state under `jax.jit` so that it is updated in place.

    Example:
        >>> q = k = v = jnp.ones((1, 2, 4))
        >>> g, dt = -jnp.ones((1, 2)), jnp.ones((1, 2))
        >>> out, state = mamba2_step(q, k, v, g, dt, jnp.zeros((1, 2, 4, 4)))
        >>> out.shape, state.shape
        ((1, 2, 4), (1, 2, 4, 4))
    """
    tokens = gather_tokens(q_t, k_t, v_t, dt_t, g=g_t, scale=scale)
    return step(MAMBA2_RULE, tokens, state, implementation)


ROW = recurrent(
    name="mamba2",
    title="Mamba-2",
    paper="Dao, Gu, Transformers are SSMs (arXiv:2405.21060)",
    transition="diagonal",
    inputs=(Q, K, V, G, Input("dt", TOKEN, FRACTION)),
    function=mamba2,
    step=mamba2_step,
    reference=mamba2_reference,
)
"""The row of `MIXERS`."""
