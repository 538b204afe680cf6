r"""Kimi Delta Attention: a self-correcting memory in which every key channel forgets on its own.

    S  <- Diag(e^g) S
    S  <- S + beta k (v - S^T k)^T
    o   = scale S^T q

Gated DeltaNet with the decay of a head refined to one per key channel, so that a head keeps some
features long and others short. With equal channels it is Gated DeltaNet. Keys must be of unit
length: `normalize_qk` makes them so.
"""

from functools import partial

import jax.numpy as jnp

from toolkit._checks import checked
from toolkit.attention._compiled import compiled
from toolkit.attention._shapes import (
    Chunk,
    Form,
    Key,
    KeyLogDecay,
    KeyLogDecays,
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
from toolkit.attention.costs import delta_forward_flops
from toolkit.attention.inputs import BETA, CHANNEL_G, K, Q, V, recurrent
from toolkit.attention.linear.engine.recurrence import run, scan_tokens, step
from toolkit.attention.linear.engine.rule import DELTA_RULE
from toolkit.attention.linear.engine.tokens import gather_tokens
from toolkit.attention.linear.gates import unit_length


@checked
@compiled
def kimi_delta_attention(
    q: Queries,
    k: Keys,
    v: Values,
    g: KeyLogDecays,
    beta: Strengths,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: Form | None = None,
    chunk: Chunk | None = None,
) -> Outputs:
    r"""Mix tokens through a self-correcting state with a decay per channel, in linear time.

        S_t = Diag(e^(g_t)) S_(t-1) + beta_t k_t (v_t - S_(t-1)^T Diag(e^(g_t)) k_t)^T
        o_t = scale S_t^T q_t

    Args:
        q: [batch, time, heads, key] queries, of unit length or nearly so.
        k: [batch, time, heads, key] keys, of unit length or nearly so.
        v: [batch, time, value_heads, value]; value_heads is a multiple of heads, and every
            head of q and k serves a group of consecutive value heads.
        g: [batch, time, value_heads, key] log-decay (natural), <= 0, else NaN; -inf clears
            a channel.
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
        With chunks of C = 16 tokens (32 beyond 4096, unless values alone are wanted on a CPU),
        2 (3 K V + 2 C K + 2 C V) FLOPs and 2 K exponentials per token and value head forward, about
        2.2 times as much more backward. In a chunk where a channel decays below 1e-28, scores are
        log2(C) products instead of one. Reads the inputs once.

    Source:
        Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture"
        (arXiv:2510.26692), equations 1 and 2 and section 3.

    Example:
        >>> q = k = v = jnp.full((1, 3, 2, 4), 0.5)
        >>> g, beta = -jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 2))
        >>> out, state = kimi_delta_attention(q, k, v, g, beta)
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    if normalize_qk:
        q, k = unit_length(q), unit_length(k)
    tokens = gather_tokens(q, k, v, beta, g=g, scale=scale)
    return run(DELTA_RULE, tokens, initial_state, segment_ids, implementation, chunk)


@checked
def kimi_delta_attention_reference(
    q: Queries,
    k: Keys,
    v: Values,
    g: KeyLogDecays,
    beta: Strengths,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
) -> Outputs:
    r"""The equation of `kimi_delta_attention`, token by token: slow, and the oracle.

        S <- Diag(e^g) S,   S <- S + beta k (v - S^T k)^T,   o = scale S^T q

    Arguments as `kimi_delta_attention`.

    Example:
        >>> q = k = v = jnp.full((1, 3, 2, 4), 0.5)
        >>> g, beta = -jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 2))
        >>> out, state = kimi_delta_attention_reference(q, k, v, g, beta)
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    arrays = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def token(S, q, k, v, g, beta):
        if normalize_qk:
            q, k = unit_length(q), unit_length(k)
        S = jnp.exp(g)[:, None] * S
        S = S + beta * jnp.outer(k, v - S.T @ k)
        return S, scale * (S.T @ q)

    return scan_tokens(token, initial_state, segment_ids, **arrays)


@checked
@compiled
def kimi_delta_attention_step(
    q_t: Query,
    k_t: Key,
    v_t: Value,
    g_t: KeyLogDecay,
    beta_t: Strength,
    state: State,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    implementation: StepForm | None = None,
) -> Output:
    r"""Decode one token: one read and one write of the state.

        u = beta (v - S^T (e^g k)),   o = scale (S^T (e^g q) + (q . k) u)
        S <- Diag(e^g) S + k u^T

    Arguments as `kimi_delta_attention`, without the time axis; `state` as it returns it.
    `implementation` is "xla" (None picks it) or "pallas", the experimental decode
    kernel of TPUs and Hopper GPUs.

    Cost:
        About 7 K V FLOPs and 8 K V bytes of a float32 state per value head: bound by memory. Donate
        the state under `jax.jit` so that it is updated in place.

    Example:
        >>> q = k = v = jnp.full((1, 2, 4), 0.5)
        >>> g, beta = -jnp.ones((1, 2, 4)), jnp.ones((1, 2))
        >>> out, state = kimi_delta_attention_step(q, k, v, g, beta, jnp.zeros((1, 2, 4, 4)))
        >>> out.shape, state.shape
        ((1, 2, 4), (1, 2, 4, 4))
    """
    if normalize_qk:
        q_t, k_t = unit_length(q_t), unit_length(k_t)
    tokens = gather_tokens(q_t, k_t, v_t, beta_t, g=g_t, scale=scale)
    return step(DELTA_RULE, tokens, state, implementation)


ROW = recurrent(
    name="kda",
    title="Kimi Delta Attention",
    paper="Kimi Team, Kimi Linear (arXiv:2510.26692)",
    inputs=(Q, K, V, CHANNEL_G, BETA),
    function=kimi_delta_attention,
    step=kimi_delta_attention_step,
    reference=kimi_delta_attention_reference,
    forward_flops=partial(delta_forward_flops, decays_channels=True),
)
"""The row of `MIXERS`."""
