r"""DeltaNet: a linear-time memory that corrects what it holds under a key.

    S  <- S + beta k (v - S^T k)^T
    o   = scale S^T q

The delta rule of Widrow and Hoff, one step of gradient descent on |v - S^T k|^2 / 2 with rate
beta for every token. beta = 1 with a unit key overwrites what was under it. Keys must be
of unit length: `normalize_qk` makes them so.
"""

import jax.numpy as jnp

from toolkit._checks import checked
from toolkit.attention._compiled import compiled
from toolkit.attention._shapes import (
    Chunk,
    Form,
    Key,
    Keys,
    Output,
    Outputs,
    Queries,
    Query,
    SegmentIds,
    State,
    StepForm,
    Strength,
    Strengths,
    Value,
    Values,
)
from toolkit.attention.inputs import BETA, K, Q, V, recurrent
from toolkit.attention.linear.engine.recurrence import run, scan_tokens, step
from toolkit.attention.linear.engine.rule import DELTA_RULE
from toolkit.attention.linear.engine.tokens import gather_tokens
from toolkit.attention.linear.gates import unit_length


@checked
@compiled
def delta_net(
    q: Queries,
    k: Keys,
    v: Values,
    beta: Strengths,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: Form | None = None,
    chunk: Chunk | None = None,
) -> Outputs:
    r"""Mix tokens through a self-correcting state, in time linear in the sequence.

        S_t = S_(t-1) + beta_t k_t (v_t - S_(t-1)^T k_t)^T,   o_t = scale S_t^T q_t

    Args:
        q: [batch, time, heads, key] queries, of unit length or nearly so.
        k: [batch, time, heads, key] keys, of unit length or nearly so.
        v: [batch, time, value_heads, value]; value_heads is a multiple of heads, and every
            head of q and k serves a group of consecutive value heads.
        beta: [batch, time, value_heads] writing strength in [0, 2].
        scale: multiplies the outputs; key**-0.5 if None.
        normalize_qk: bring queries and keys to unit length first (`unit_length`).
        initial_state: [batch, value_heads, key, value] before the first token; zero if None.
        segment_ids: [batch, time] document of each token; the state is cleared wherever the
            number changes. `initial_state` belongs to the first, the final state to the last.
        implementation: "xla" (chunks; None picks it), "scan" (token by token) or "pallas"
            (experimental kernels for TPUs and Hopper GPUs).
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
        With chunks of C = 16 tokens (32 if a head exceeds 64, or beyond 4096 tokens, unless
        values alone are wanted on a CPU), 2 (3 K V + 2 C K + 2 C V) FLOPs and a little per token
        and value head forward, about 2.2 times as much more backward. Reads q, k, v once.

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
    if normalize_qk:
        q, k = unit_length(q), unit_length(k)
    tokens = gather_tokens(q, k, v, beta, g=None, scale=scale)
    return run(DELTA_RULE, tokens, initial_state, segment_ids, implementation, chunk)


@checked
def delta_net_reference(
    q: Queries,
    k: Keys,
    v: Values,
    beta: Strengths,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
) -> Outputs:
    r"""The equation of `delta_net`, token by token: slow, and the oracle.

        S <- S + beta k (v - S^T k)^T,   o = scale S^T q

    Arguments as `delta_net`.

    Example:
        >>> q = k = v = jnp.full((1, 3, 2, 4), 0.5)
        >>> out, state = delta_net_reference(q, k, v, beta=jnp.ones((1, 3, 2)))
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    arrays = {"q": q, "k": k, "v": v, "beta": beta}
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def token(S, q, k, v, beta):
        if normalize_qk:
            q, k = unit_length(q), unit_length(k)
        S = S + beta * jnp.outer(k, v - S.T @ k)
        return S, scale * (S.T @ q)

    return scan_tokens(token, initial_state, segment_ids, **arrays)


@checked
@compiled
def delta_net_step(
    q_t: Query,
    k_t: Key,
    v_t: Value,
    beta_t: Strength,
    state: State,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    implementation: StepForm | None = None,
) -> Output:
    r"""Decode one token: one read and one write of the state.

        u = beta (v - S^T k),   o = scale (S^T q + (q . k) u),   S <- S + k u^T

    Arguments as `delta_net`, without the time axis; `state` as it returns it.
    `implementation` is "xla" (None picks it) or "pallas", the experimental decode
    kernel of TPUs and Hopper GPUs.

    Cost:
        About 7 K V FLOPs and 8 K V bytes of a float32 state per value head: bound by memory. Donate
        the state under `jax.jit` so that it is updated in place.

    Example:
        >>> q = k = v = jnp.full((1, 2, 4), 0.5)
        >>> out, state = delta_net_step(q, k, v, jnp.ones((1, 2)), jnp.zeros((1, 2, 4, 4)))
        >>> out.shape, state.shape
        ((1, 2, 4), (1, 2, 4, 4))
    """
    if normalize_qk:
        q_t, k_t = unit_length(q_t), unit_length(k_t)
    tokens = gather_tokens(q_t, k_t, v_t, beta_t, g=None, scale=scale)
    return step(DELTA_RULE, tokens, state, implementation)


ROW = recurrent(
    name="delta",
    title="DeltaNet",
    paper="Yang, Wang, Zhang, Shen, Kim, DeltaNet in parallel (arXiv:2406.06484)",
    inputs=(Q, K, V, BETA),
    function=delta_net,
    step=delta_net_step,
    reference=delta_net_reference,
)
"""The row of `MIXERS`."""
