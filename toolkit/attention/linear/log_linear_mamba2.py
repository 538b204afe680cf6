r"""Log-linear Mamba-2: its state once per power of two that lies behind, each weighed by the token.

    S_l <- e^g S_l,   S_0 <- dt k v^T,   o = scale sum_l w_l S_l^T q

What is near keeps a state of its own, what is far shares one with as much that is as far: `levels`
of the engine says which tokens are on which level. Equal weights give Mamba-2.
"""

from functools import partial
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

import toolkit.attention._shapes as shapes
from toolkit._checks import checked
from toolkit.attention.costs import LEVELS
from toolkit.attention.execution.compiled import compiled
from toolkit.attention.inputs import ANY, FRACTION, TOKEN, G, Input, K, Q, V, recurrent
from toolkit.attention.linear.engine.levels import (
    LevelState,
    empty_levels,
    level_between,
    level_state_bytes,
    merged,
    run_levels,
    step_levels,
)
from toolkit.attention.linear.engine.recurrence import scan_tokens, spread
from toolkit.attention.linear.engine.rule import adding_chunk_size
from toolkit.attention.linear.engine.tokens import gather_tokens

Weights = Float[Array, "batch time value_heads levels"]
Weight = Float[Array, "batch value_heads levels"]


@checked
@compiled
def log_linear_mamba2(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, g: shapes.LogDecays, dt: shapes.TimeSteps,
    weights: Weights, *,
    scale: float = 1.0,
    initial_state: LevelState | None = None, segment_ids: shapes.SegmentIds | None = None,
    implementation: Literal["xla"] | None = None, chunk: shapes.Chunk | None = None,
) -> tuple[shapes.Values, LevelState]:  # fmt: skip
    r"""Mix tokens through states of spans that double, one decay per head.

        o_t = scale sum_(s <= t) w_(t, level(s, t)) e^(g_(s+1) + ... + g_t) dt_s (q_t . k_s) v_s
        level(s, t) = length of the binary number s xor t, at most levels - 1

    Arguments and results as `mamba2`, except:

    Args:
        weights: [batch, time, value_heads, levels], levels from 1 on: of a token for what lies on
            each level. Positions count from the beginning of a document.
        implementation: "xla", the chunks; None picks it.

    Returns:
        Outputs [batch, time, value_heads, value] in the dtype of v, and the final levels.

    Cost:
        With chunks of C = 32 tokens (64 if a head exceeds 64) and L levels, 2 (2 L K V + C K + C V)
        FLOPs per token and value head forward, about 2.5 times as much more backward, which keeps
        the levels of every chunk.

    Source:
        Guo, Yang, Goel, Xing, Dao, Kim, "Log-Linear Attention" (arXiv:2506.04761), section 3.3.

    Example:
        >>> q = k = v = jnp.ones((1, 3, 2, 4))
        >>> one = jnp.ones((1, 3, 2))
        >>> out, state = log_linear_mamba2(q, k, v, -one, one, jnp.ones((1, 3, 2, 5)))
        >>> out.shape, state.levels.shape
        ((1, 3, 2, 4), (1, 2, 5, 4, 4))
    """
    size = chunk or adding_chunk_size(shapes.known(v.shape[1]), k.shape[-1], v.shape[-1])
    tokens = gather_tokens(q, k, v, dt, weights, g=g, scale=scale)
    return spread(partial(run_levels, False, size), tokens, initial_state, segment_ids)


@checked
def log_linear_mamba2_reference(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, g: shapes.LogDecays, dt: shapes.TimeSteps,
    weights: Weights, *,
    scale: float = 1.0,
    initial_state: LevelState | None = None, segment_ids: shapes.SegmentIds | None = None,
) -> tuple[shapes.Values, LevelState]:  # fmt: skip
    """The equation token by token: a slow oracle. Arguments as `log_linear_mamba2`."""

    levels = weights.shape[-1]

    def token(state, q, k, v, g, dt, weights):
        least = level_between(state.count, state.count - 1, levels)
        S = jnp.exp(g) * merged(state.levels, least)
        S = S.at[0].add(dt * jnp.outer(k, v))
        o = jnp.einsum("l,lkv,k->v", weights, S, q)
        return LevelState(S, state.count + 1), o

    arrays = {"q": q, "k": k, "v": v, "g": g, "dt": dt, "weights": weights}
    empty = partial(empty_levels, levels=levels)
    return scan_tokens(token, initial_state, segment_ids, scale, False, empty, **arrays)


@checked
@compiled
def log_linear_mamba2_step(
    q_t: shapes.Query, k_t: shapes.Key, v_t: shapes.Value, g_t: shapes.LogDecay,
    dt_t: shapes.TimeStep, weights_t: Weight, state: LevelState, *,
    scale: float = 1.0,
) -> tuple[shapes.Value, LevelState]:  # fmt: skip
    r"""Decode one token: levels merge as a binary counter carries, then all decay and are read.

        S_l <- e^g S_l,   S_0 <- dt k v^T,   o = scale sum_l w_l S_l^T q

    Arguments as `log_linear_mamba2`, without the time axis; `state` as it returns it.

    Cost:
        About 8 L K V FLOPs and 8 L K V bytes of float32 levels per value head: bound by memory.

    Example:
        >>> q = k = v = jnp.ones((1, 2, 4))
        >>> one = jnp.ones((1, 2))
        >>> state = MIXERS["log_mamba2"].empty_state(1, 2, 4, 4, 8, "float32", levels=5)
        >>> log_linear_mamba2_step(q, k, v, -one, one, jnp.ones((1, 2, 5)), state)[0].shape
        (1, 2, 4)
    """
    token = gather_tokens(q_t, k_t, v_t, dt_t, weights_t, g=g_t, scale=scale)
    return step_levels(False, token, state)


def _forward_flops(batch, time, heads, key, value, *, chunk=None, levels=LEVELS):
    """Scores and their use within chunks; every level read, and written under."""
    size = adding_chunk_size(time, key, value) if chunk is None else chunk
    within, states = size**2 * (key + value), 2 * levels * size * key * value
    return 2 * batch * heads * -(-time // size) * (within + states)


def _step_flops(batch, context, heads, key, value, *, levels=LEVELS):
    """Of each level two to be summed, two to be left and decay, two to be written and a read; one
    outer product."""
    return batch * heads * key * value * (8 * levels + 1)


ROW = recurrent(
    name="log_mamba2", title="Log-linear Mamba-2",
    paper="Guo, Yang, Goel, Xing, Dao, Kim, Log-Linear Attention (arXiv:2506.04761)",
    transition=None,
    inputs=(Q, K, V, G, Input("dt", TOKEN, FRACTION), Input("weights", (*TOKEN, "levels"), ANY)),
    implementations=("xla",),
    function=log_linear_mamba2, step=log_linear_mamba2_step, reference=log_linear_mamba2_reference,
    empty_state=empty_levels,
    forward_flops=_forward_flops, step_flops=_step_flops,
    state_bytes=level_state_bytes,
)  # fmt: skip
