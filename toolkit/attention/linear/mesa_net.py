r"""MesaNet: a memory that is fitted anew at every token, by regularised least squares.

    G  <- e^g G + beta k k^T,   S  <- e^g S + beta k v^T
    o   = scale S^T (G + Diag(penalty))^-1 q

S^T (G + Diag(penalty))^-1 is the linear map W that minimises, over all tokens s so far,

    sum_s weight_s |v_s - W k_s|^2 / 2 + tr(W Diag(penalty) W^T) / 2

where a delta rule takes one step of gradient descent per token. The system is solved by
conjugate gradients; each of their steps multiplies by G, for all tokens of a chunk at once.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

import toolkit.attention._shapes as shapes
from toolkit._annotations import AtLeast, Between
from toolkit._checks import checked
from toolkit._pytrees import register_dataclass
from toolkit.attention.costs import STATE_BYTES
from toolkit.attention.execution.compiled import compiled
from toolkit.attention.execution.derivatives import without_transpose
from toolkit.attention.execution.precision import accumulator, precise_einsum
from toolkit.attention.inputs import FRACTION, TOKEN, G, Input, K, Q, V, Values, recurrent
from toolkit.attention.linear.engine.chunks import cut, cut_documents, join
from toolkit.attention.linear.engine.decays import chunk_decays, decayed_scores, within_documents
from toolkit.attention.linear.engine.quarantine import quarantine
from toolkit.attention.linear.engine.recurrence import (
    document_starts,
    first_state,
    log_decays,
    scan_tokens,
    spread,
)
from toolkit.attention.linear.engine.rule import adding_chunk_size
from toolkit.attention.linear.engine.tokens import Tokens, gather_tokens, own_keys

ITERATIONS, LEAST_PENALTY = 30, 0.25
PENALTY = Between("a penalty", 0.0, float("inf"))
Penalties = Annotated[Float[Array, "batch time value_heads key"], PENALTY]
Penalty = Annotated[Float[Array, "batch value_heads key"], PENALTY]
Iterations = Annotated[int, AtLeast(1)]


@register_dataclass
@dataclass(frozen=True)
class MesaState:
    """What a sequence leaves: weighted sums of k k^T and of k v^T, float32.

    Example:
        >>> MesaState(jnp.zeros((1, 2, 4, 4)), jnp.zeros((1, 2, 4, 8))).memory.shape
        (1, 2, 4, 8)
    """

    covariance: Float[Array, "batch value_heads key key"]
    memory: Float[Array, "batch value_heads key value"]


@checked
@compiled
def mesa_net(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, g: shapes.LogDecays,
    beta: shapes.Strengths, penalty: Penalties, *,
    scale: float = 1.0, iterations: Iterations = ITERATIONS,
    initial_state: MesaState | None = None, segment_ids: shapes.SegmentIds | None = None,
    implementation: Literal["xla"] | None = None, chunk: shapes.Chunk | None = None,
) -> tuple[shapes.Values, MesaState]:  # fmt: skip
    r"""Mix tokens by the linear map that fits values to keys best, in linear time.

        G_t = e^(g_t) G_(t-1) + beta_t k_t k_t^T,   S_t = e^(g_t) S_(t-1) + beta_t k_t v_t^T
        o_t = scale S_t^T x_t,   (G_t + Diag(penalty_t)) x_t = q_t

    Arguments and results as `gated_delta_net`, except:

    Args:
        g: [batch, time, value_heads] log-decay of both sums, <= 0, else NaN; -inf clears them.
        beta: [batch, time, value_heads] weight of the token, in [0, 2].
        penalty: [batch, time, value_heads, key] above 0, else NaN; the paper has one for all
            tokens.
        scale: multiplies the outputs.
        iterations: steps of conjugate gradients. With a largest eigenvalue L of G and a least
            penalty m the error of x falls by (r - 1) / (r + 1) a step, r^2 = 1 + L / m; after as
            many steps as there are key channels only rounding is left.
        implementation: "xla", the chunks; None picks it.

    Returns:
        Outputs [batch, time, value_heads, value] in the dtype of v, and the final sums. Both have
        gradients, those of the exact solution wherever the steps have reached it.

    Cost:
        With chunks of C = 32 tokens (64 if a head exceeds 64), 2 K (K + 2 C) FLOPs per iteration,
        token and value head, and those of linear attention with heads of K + V values; three times
        as much more backward, which solves again. All chunks are solved at once.

    Source:
        von Oswald et al., "MesaNet: Sequence Modeling by Locally Optimal Test-Time Training"
        (arXiv:2506.05233), sections 3 and 4.

    Example:
        >>> q = k = v = jnp.full((1, 3, 2, 4), 0.5)
        >>> g, beta = -jnp.ones((1, 3, 2)), jnp.ones((1, 3, 2))
        >>> out, state = mesa_net(q, k, v, g, beta, penalty=jnp.ones((1, 3, 2, 4)))
        >>> out.shape, state.covariance.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    tokens = gather_tokens(q, k, v, beta, _above_zero(penalty), g=g, scale=scale)
    return spread(partial(_share, iterations, chunk), tokens, initial_state, segment_ids)


def _above_zero(penalty: Array) -> Array:
    """Penalties, NaN where the system might have no solution, which only `checking()` refuses."""
    return jnp.where(penalty > 0, penalty, jnp.nan)


def _share(
    iterations: int, chunk: int | None, tokens: Tokens,
    initial_state: MesaState | None, segment_ids: shapes.SegmentIds | None,
) -> tuple[Array, MesaState]:  # fmt: skip
    tokens = own_keys(tokens)
    _, k, v, *_ = arrays = tokens.arrays
    batch, time, heads, value = v.shape
    dtype, key = tokens.g.dtype, k.shape[-1]
    empty = _empty_state(batch, heads, key, value, 0, dtype)
    state = first_state((*arrays, tokens.g), initial_state, empty)
    starts = None if segment_ids is None else document_starts(segment_ids)
    tokens, state, poison = quarantine(tokens, state, initial_state is not None, starts)

    most = chunk or adding_chunk_size(shapes.known(time), key, value)
    size = min(most, max(16, 1 << (shapes.known(time) - 1).bit_length()))
    q, k, v, beta, penalty = (cut(x.astype(dtype), size) for x in tokens.arrays)
    penalty = jnp.where(penalty > 0, penalty, 1)  # of tokens that show NaN, and of padding
    documents = None if starts is None else cut_documents(starts, heads, size)
    decays = chunk_decays(cut(tokens.g, size), documents)
    # What is left at token i of what token j writes.
    ones = jnp.ones_like(beta)[..., None]
    weights = decayed_scores(ones, ones[..., None, :, :], decays, lax.Precision.HIGHEST)
    weights = within_documents(weights, documents)[..., 0, :] * beta[..., None, :]
    # Both sums as one matrix [key, key + value], that of each chunk's entry.
    written = jnp.concatenate([k, v], axis=-1)
    added = precise_einsum("...ik,...iv->...kv", decays.exit * beta[..., None] * k, written)
    start = jnp.concatenate([state.covariance.swapaxes(-1, -2), state.memory], axis=-1)
    start = start.reshape(-1, key, key + value)
    final, entering = lax.scan(lambda S, x: (x[0] * S + x[1], S), start, (decays.through, added))

    def read(x: Array, part: slice) -> Array:
        """What x reads of the sums of some columns, at each of a chunk's tokens."""
        scores = precise_einsum("...ik,...jk->...ij", x, k) * weights
        inside = precise_einsum("...ij,...jv->...iv", scores, written[..., part])
        before = precise_einsum("...ik,...kv->...iv", decays.entry * x, entering[..., part])
        return before + inside

    x = _solve(iterations, lambda x: read(x, slice(None, key)) + penalty * x, q)
    out = join(read(x, slice(key, None)), batch, time) * tokens.scale.astype(dtype)
    final = final.reshape(batch, heads, key, key + value)
    state = MesaState(final[..., :key].swapaxes(-1, -2), final[..., key:])
    out, state = poison.shown(out, state)
    return without_transpose((out.astype(arrays[2].dtype), state))


def _solve(iterations: int, apply: Any, b: Array) -> Array:
    """x with apply(x) = b, of a symmetric positive map of the last axis, by conjugate gradients.

    Derivatives are those of the solution, which solve once more; no step is differentiated.
    """
    tiny = np.finfo(b.dtype).eps ** 2

    def dot(x: Array, y: Array) -> Array:
        return jnp.sum(x * y, axis=-1, keepdims=True)

    def solve(apply: Any, b: Array) -> Array:
        least = tiny * dot(b, b)

        def improve(_: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            x, residual, direction, size = carry
            moved = apply(direction)
            goes_on = size > least  # else nothing but rounding is left, and steps would divide by 0
            step = jnp.where(goes_on, size / jnp.where(goes_on, dot(direction, moved), 1), 0)
            x, residual = x + step * direction, residual - step * moved
            new = dot(residual, residual)
            direction = (
                residual + jnp.where(goes_on, new / jnp.where(goes_on, size, 1), 0) * direction
            )
            return x, residual, direction, new

        start = (jnp.zeros_like(b), b, b, dot(b, b))
        return lax.fori_loop(0, iterations, improve, start)[0]

    return lax.custom_linear_solve(apply, b, solve, symmetric=True)


@checked
def mesa_net_reference(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, g: shapes.LogDecays,
    beta: shapes.Strengths, penalty: Penalties, *,
    scale: float = 1.0,
    initial_state: MesaState | None = None, segment_ids: shapes.SegmentIds | None = None,
) -> tuple[shapes.Values, MesaState]:  # fmt: skip
    r"""The equation of `mesa_net`, token by token and solved exactly: slow, and the oracle.

        G <- e^g G + beta k k^T,   S <- e^g S + beta k v^T,   o = scale S^T (G + Diag(penalty))^-1 q

    Arguments as `mesa_net`.
    """
    arrays = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "penalty": penalty}

    def token(state, q, k, v, g, beta, penalty):
        G = jnp.exp(g) * state.covariance + beta * jnp.outer(k, k)
        S = jnp.exp(g) * state.memory + beta * jnp.outer(k, v)
        x = jnp.linalg.solve(G + jnp.diag(penalty), q)
        return MesaState(G, S), S.T @ x

    return scan_tokens(token, initial_state, segment_ids, scale, False, _empty_state, **arrays)


@checked
@compiled
def mesa_net_step(
    q_t: shapes.Query, k_t: shapes.Key, v_t: shapes.Value, g_t: shapes.LogDecay,
    beta_t: shapes.Strength, penalty_t: Penalty, state: MesaState, *,
    scale: float = 1.0, iterations: Iterations = ITERATIONS,
) -> tuple[shapes.Value, MesaState]:  # fmt: skip
    r"""Decode one token: both sums are updated, then the system is solved.

        G <- e^g G + beta k k^T,   S <- e^g S + beta k v^T,   o = scale S^T (G + Diag(penalty))^-1 q

    Arguments as `mesa_net`, without the time axis; `state` as it returns it.

    Cost:
        About (2 iterations + 3) K^2 + 5 K V FLOPs and 8 K (K + V) bytes of float32 sums per value
        head, and K^2 more numbers per iteration wherever no cache keeps them.

    Example:
        >>> q = k = v = jnp.full((1, 2, 4), 0.5)
        >>> g, beta = -jnp.ones((1, 2)), jnp.ones((1, 2))
        >>> state = MesaState(jnp.zeros((1, 2, 4, 4)), jnp.zeros((1, 2, 4, 4)))
        >>> out, state = mesa_net_step(q, k, v, g, beta, jnp.ones((1, 2, 4)), state)
        >>> out.shape
        (1, 2, 4)
    """
    penalty_t = _above_zero(penalty_t)
    token = own_keys(gather_tokens(q_t, k_t, v_t, beta_t, penalty_t, g=g_t, scale=scale))
    dtype = token.g.dtype
    q, k, v, beta, penalty = (x.astype(dtype) for x in token.arrays)
    decay, written = jnp.exp(log_decays(token.g))[..., None], (beta[..., None] * k)[..., None]
    G = decay * state.covariance.astype(dtype) + written * k[..., None, :]
    S = decay * state.memory.astype(dtype) + written * v[..., None, :]
    x = _solve(iterations, lambda x: precise_einsum("bhij,bhj->bhi", G, x) + penalty * x, q)
    out = precise_einsum("bhkv,bhk->bhv", S, x) * token.scale.astype(dtype)
    return out.astype(v_t.dtype), MesaState(G, S)


def _empty_state(batch, heads, key, value, capacity, dtype):
    zeros = partial(jnp.zeros, dtype=accumulator(dtype))
    return MesaState(zeros((batch, heads, key, key)), zeros((batch, heads, key, value)))


def _state_bytes(batch, context, heads, key, value, *, element_bytes=4):
    return batch * heads * key * (key + value) * STATE_BYTES


def _forward_flops(batch, time, heads, key, value, *, chunk=None, iterations=ITERATIONS):
    """Sums of k k^T and k v^T, one pass of products per iteration, and one that reads values."""
    size = adding_chunk_size(time, key, value) if chunk is None else chunk
    sums = size * key * (key + value)
    solving = iterations * size * key * (key + 2 * size)
    reading = size * (key * value + size * (key + value))
    return 2 * batch * heads * -(-time // size) * (sums + solving + reading)


def _step_flops(batch, context, heads, key, value, *, iterations=ITERATIONS):
    """A product per iteration and one that reads values; decay, outer products and their sums."""
    return batch * heads * key * (2 * iterations * key + 3 * key + 5 * value)


ROW = recurrent(
    name="mesa", title="MesaNet",
    paper="von Oswald et al., MesaNet (arXiv:2506.05233)",
    transition=None,
    inputs=(
        Q, K, V, G,
        Input("beta", TOKEN, FRACTION),
        Input(
            "penalty",
            (*TOKEN, "key"),
            Values(LEAST_PENALTY, np.inf, lambda x: LEAST_PENALTY + np.logaddexp(0, x)),
        ),
    ),
    implementations=("xla",),
    function=mesa_net, step=mesa_net_step, reference=mesa_net_reference,
    empty_state=_empty_state,
    forward_flops=_forward_flops, step_flops=_step_flops,
    state_bytes=_state_bytes,
)  # fmt: skip
