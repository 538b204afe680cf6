r"""Preconditioned Kimi Delta Attention: keys write more in channels that have seen little.

    A  <- e^h A + w k^2
    S  <- Diag(e^g) S
    S  <- S + beta (m k) (v - S^T k)^T,    m = 3/2 ** (-r / (1 + |r|)),   r = log(A + epsilon)
    o   = scale S^T q

A is the diagonal of the matrix by which Newton's method would divide the gradient that the delta
rule follows. Instead of its inverse, the write is multiplied by m, which lies between 2/3 and 3/2,
channel by channel.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

import toolkit.attention._shapes as shapes
from toolkit._annotations import Positive
from toolkit._checks import checked
from toolkit._pytrees import register_dataclass
from toolkit.attention.costs import (
    STATE_BYTES,
    additive_forward_flops,
    additive_step_flops,
    delta_forward_flops,
    delta_step_flops,
)
from toolkit.attention.execution.compiled import compiled
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.inputs import (
    CHANNEL_G,
    FRACTION,
    LOG_DECAY,
    TOKEN,
    Input,
    K,
    Q,
    V,
    recurrent,
)
from toolkit.attention.linear.engine.recurrence import log_decays, run, scan_tokens, step
from toolkit.attention.linear.engine.rule import (
    ADDITIVE_RULE,
    Action,
    Correction,
    Rule,
    correcting_chunk_size,
)
from toolkit.attention.linear.engine.tokens import for_value_heads, gather_tokens

EPSILON = 1e-6
MOST = 1.5

PRECONDITIONED_RULE = Rule(
    lambda q, k, v, beta, m: Action(q, Correction(k, m * k, v, beta), addition=None),
    correcting_chunk_size,
)


@register_dataclass
@dataclass(frozen=True)
class PreconditionedState:
    """What a sequence leaves: decayed sums of the squares of keys, and the memory, float32.

    Example:
        >>> PreconditionedState(jnp.zeros((1, 2, 4)), jnp.zeros((1, 2, 4, 8))).memory.shape
        (1, 2, 4, 8)
    """

    curvature: Float[Array, "batch value_heads key"]
    memory: Float[Array, "batch value_heads key value"]


def _stretch(curvature: Array, epsilon: float | Array) -> Array:
    """m, of the sums of squares."""
    r = jnp.log(curvature + epsilon)
    return MOST ** (-r / (1 + jnp.abs(r)))


@checked
@compiled
def preconditioned_kda(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, g: shapes.KeyLogDecays,
    beta: shapes.Strengths, fading: shapes.LogDecays, weight: shapes.TimeSteps, *,
    scale: float | None = None, epsilon: Annotated[float, Positive()] = EPSILON,
    initial_state: PreconditionedState | None = None, segment_ids: shapes.SegmentIds | None = None,
    implementation: Literal["xla", "scan"] | None = None, chunk: shapes.Chunk | None = None,
) -> tuple[shapes.Values, PreconditionedState]:  # fmt: skip
    r"""Mix tokens as `kimi_delta_attention` does, writing more in channels that have seen little.

        A_t = e^(fading_t) A_(t-1) + weight_t k_t^2,   m_t = 3/2 ** (-r_t / (1 + |r_t|))
        r_t = log(A_t + epsilon)
        S_t = Diag(e^(g_t)) S_(t-1) + beta_t (m_t k_t) (v_t - S_(t-1)^T Diag(e^(g_t)) k_t)^T

    The paper's center c of log A is a factor e^(-c) of all weights here.
    Arguments as `gated_delta_net`, except:

    Args:
        g: [batch, time, value_heads, key] log-decay (natural), <= 0, else NaN; -inf clears
            a channel.
        beta: [batch, time, value_heads] writing strength; the state cannot expand up to 4/3.
        fading: [batch, time, value_heads] log-decay of A, <= 0, else NaN.
        weight: [batch, time, value_heads] of the squares, at least 0.
        epsilon: added to A.
        implementation: "xla" (chunks; None picks it) or "scan" (token by token).

    Returns:
        Outputs [batch, time, value_heads, value] in the dtype of v, and the final A and S.

    Cost:
        That of `kimi_delta_attention`, and of the sums of squares: 4 K + 2 C (1 + K) FLOPs and 3 K
        exponentials and logarithms per token and value head, with chunks of C = 32 tokens.

    Source:
        Tumma, Loo, Rus, "Preconditioned DeltaNet: Curvature-aware Sequence Modeling for Linear
        Recurrences" (arXiv:2604.21100), sections 3 and 4.

    Example:
        >>> q = k = v = jnp.full((1, 3, 2, 4), 0.5)
        >>> one = jnp.ones((1, 3, 2))
        >>> out, state = preconditioned_kda(q, k, v, -q, one, fading=-one, weight=one)
        >>> out.shape, state.curvature.shape
        ((1, 3, 2, 4), (1, 2, 4))
    """
    start, dtype = initial_state, accumulator(v.dtype)
    keys, weights = _own(k, v).astype(dtype), weight[..., None].astype(dtype)
    # A product with what is not finite would spoil the gradients of its token's other numbers.
    is_finite = jnp.isfinite(weights) & jnp.isfinite(keys).all(axis=-1, keepdims=True)
    squares = jnp.where(is_finite, weights, 0) * jnp.where(is_finite, keys, 0) ** 2
    fading = jnp.where(is_finite[..., 0], fading, jnp.nan)
    ones = jnp.ones_like(weights)
    sums = gather_tokens(ones, ones, squares, g=fading, scale=1.0)
    given = None if start is None else start.curvature[:, :, None]
    A, last = run(ADDITIVE_RULE, sums, given, segment_ids, implementation, None)
    m = _stretch(A, epsilon)
    tokens = gather_tokens(q, k, v, beta, m, g=g, scale=scale)
    given = None if start is None else start.memory
    out, S = run(PRECONDITIONED_RULE, tokens, given, segment_ids, implementation, chunk)
    return out, PreconditionedState(last[:, :, 0], S)


def _own(k: Array, v: Array) -> Array:
    """Keys of every value head."""
    return for_value_heads(k, v.shape[-2], axis=-2)


@checked
def preconditioned_kda_reference(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, g: shapes.KeyLogDecays,
    beta: shapes.Strengths, fading: shapes.LogDecays, weight: shapes.TimeSteps, *,
    scale: float | None = None, epsilon: Annotated[float, Positive()] = EPSILON,
    initial_state: PreconditionedState | None = None, segment_ids: shapes.SegmentIds | None = None,
) -> tuple[shapes.Values, PreconditionedState]:  # fmt: skip
    """The equation token by token: a slow oracle. Arguments as `preconditioned_kda`."""

    def token(state, q, k, v, g, beta, fading, weight):
        A = jnp.exp(fading) * state.curvature + weight * k**2
        r = jnp.log(A + epsilon)
        m = MOST ** (-r / (1 + jnp.abs(r)))
        S = jnp.exp(g)[:, None] * state.memory
        S = S + beta * jnp.outer(m * k, v - S.T @ k)
        return PreconditionedState(A, S), S.T @ q

    arrays = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "weight": weight}
    arrays["fading"] = log_decays(fading)
    return scan_tokens(token, initial_state, segment_ids, scale, False, _empty_state, **arrays)


@checked
@compiled
def preconditioned_kda_step(
    q_t: shapes.Query, k_t: shapes.Key, v_t: shapes.Value, g_t: shapes.KeyLogDecay,
    beta_t: shapes.Strength, fading_t: shapes.LogDecay, weight_t: shapes.TimeStep,
    state: PreconditionedState, *,
    scale: float | None = None, epsilon: Annotated[float, Positive()] = EPSILON,
) -> tuple[shapes.Value, PreconditionedState]:  # fmt: skip
    r"""Decode one token: the sums of squares, then the step of `kimi_delta_attention`.

    Arguments as `preconditioned_kda`, without the time axis; `state` as it returns it.

    Cost:
        About 7 K V FLOPs and 8 K (V + 1) bytes of a float32 state per value head: bound by memory.

    Example:
        >>> q = k = v = jnp.full((1, 2, 4), 0.5)
        >>> one, state = jnp.ones((1, 2)), PreconditionedState(0 * k, jnp.zeros((1, 2, 4, 4)))
        >>> out, state = preconditioned_kda_step(q, k, v, -q, one, -one, one, state)
        >>> out.shape
        (1, 2, 4)
    """
    dtype = accumulator(v_t.dtype)
    fade, weight = (x[..., None].astype(dtype) for x in (log_decays(fading_t), weight_t))
    A = jnp.exp(fade) * state.curvature.astype(dtype) + weight * _own(k_t, v_t).astype(dtype) ** 2
    m = _stretch(A, epsilon)
    token = gather_tokens(q_t, k_t, v_t, beta_t, m, g=g_t, scale=scale)
    out, S = step(PRECONDITIONED_RULE, token, state.memory)
    return out, PreconditionedState(A, S)


def _empty_state(batch, heads, key, value, capacity, dtype):
    dtype = accumulator(dtype)
    zeros = jnp.zeros((batch, heads, key), dtype), jnp.zeros((batch, heads, key, value), dtype)
    return PreconditionedState(*zeros)


def _state_bytes(batch, context, heads, key, value, *, element_bytes=4):
    return batch * heads * key * (value + 1) * STATE_BYTES


def _forward_flops(batch, time, heads, key, value, *, chunk=None):
    sums = additive_forward_flops(batch, time, heads, 1, key)
    sizes = batch, time, heads, key, value
    return sums + delta_forward_flops(*sizes, decays_channels=True, chunk=chunk)


def _step_flops(batch, context, heads, key, value):
    sums = additive_step_flops(batch, context, heads, 1, key)
    return sums + delta_step_flops(batch, context, heads, key, value)


ROW = recurrent(
    name="pkda", title="Preconditioned KDA",
    paper="Tumma, Loo, Rus, Preconditioned DeltaNet (arXiv:2604.21100)",
    transition=None,
    inputs=(
        Q, K, V,
        CHANNEL_G,
        Input("beta", TOKEN, FRACTION),
        Input("fading", TOKEN, LOG_DECAY),
        Input("weight", TOKEN, FRACTION),
    ),
    implementations=("xla", "scan"),
    function=preconditioned_kda, step=preconditioned_kda_step,
    reference=preconditioned_kda_reference,
    empty_state=_empty_state,
    forward_flops=_forward_flops, step_flops=_step_flops,
    state_bytes=_state_bytes,
)  # fmt: skip
