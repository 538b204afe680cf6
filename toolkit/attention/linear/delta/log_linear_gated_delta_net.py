r"""Log-linear Gated DeltaNet: its state once per power of two behind, each weighed by the token.

    S_l <- e^g (I - beta k k^T) S_l,   S_0 <- beta k v^T,   o = scale sum_l w_l S_l^T q

The sum of all levels is the state of Gated DeltaNet, and equal weights give it back: a token
corrects what every level holds under its key, and writes its value into level 0.
"""

from functools import partial
from typing import Literal

import jax.numpy as jnp

import toolkit.attention._shapes as shapes
from toolkit._checks import checked
from toolkit.attention.costs import LEVELS
from toolkit.attention.execution.compiled import compiled
from toolkit.attention.inputs import ANY, BETA, TOKEN, G, Input, K, Q, V, recurrent
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
from toolkit.attention.linear.engine.tokens import gather_tokens
from toolkit.attention.linear.log_linear_mamba2 import Weight, Weights

CHUNK = 32


@checked
@compiled
def log_linear_gated_delta_net(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, g: shapes.LogDecays,
    beta: shapes.Strengths, weights: Weights, *,
    scale: float | None = None, normalize_qk: bool = False,
    initial_state: LevelState | None = None, segment_ids: shapes.SegmentIds | None = None,
    implementation: Literal["xla"] | None = None, chunk: shapes.Chunk | None = None,
) -> tuple[shapes.Values, LevelState]:  # fmt: skip
    r"""Mix tokens through self-correcting states of spans that double.

        o_t = scale sum_(s <= t) w_(t, level(s, t)) (q_t . A_t ... A_(s+1) k_s) beta_s v_s
        A_t = e^(g_t) (I - beta_t k_t k_t^T),   level(s, t) = length of the binary number s xor t

    Arguments and results as `gated_delta_net`, except:

    Args:
        weights: [batch, time, value_heads, levels], levels from 1 on: of a token for what lies on
            each level, the last of which holds all that is older. Positions count from the
            beginning of a document.
        implementation: "xla", the chunks; None picks it.

    Returns:
        Outputs [batch, time, value_heads, value] in the dtype of v, and the final levels.

    Cost:
        With chunks of C = 32 tokens and L levels, 2 (4 L K V + 6 C K + C V + C^2) FLOPs and a
        little per token and value head forward, about 2.5 times as much more backward, which keeps
        the levels of every chunk.

    Source:
        Guo, Yang, Goel, Xing, Dao, Kim, "Log-Linear Attention" (arXiv:2506.04761), section 3.3.

    Example:
        >>> q = k = v = jnp.full((1, 3, 2, 4), 0.5)
        >>> one = jnp.ones((1, 3, 2))
        >>> out, state = log_linear_gated_delta_net(q, k, v, -one, one, jnp.ones((1, 3, 2, 5)))
        >>> out.shape, state.levels.shape
        ((1, 3, 2, 4), (1, 2, 5, 4, 4))
    """
    tokens = gather_tokens(q, k, v, beta, weights, g=g, scale=scale, normalize_qk=normalize_qk)
    return spread(partial(run_levels, True, chunk or CHUNK), tokens, initial_state, segment_ids)


@checked
def log_linear_gated_delta_net_reference(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, g: shapes.LogDecays,
    beta: shapes.Strengths, weights: Weights, *,
    scale: float | None = None, normalize_qk: bool = False,
    initial_state: LevelState | None = None, segment_ids: shapes.SegmentIds | None = None,
) -> tuple[shapes.Values, LevelState]:  # fmt: skip
    """The equation token by token: a slow oracle. Arguments as `log_linear_gated_delta_net`."""

    levels = weights.shape[-1]

    def token(state, q, k, v, g, beta, weights):
        least = level_between(state.count, state.count - 1, levels)
        S = jnp.exp(g) * merged(state.levels, least)
        S = S - beta * jnp.einsum("k,j,ljv->lkv", k, k, S)
        S = S.at[0].add(beta * jnp.outer(k, v))
        o = jnp.einsum("l,lkv,k->v", weights, S, q)
        return LevelState(S, state.count + 1), o

    arrays = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "weights": weights}
    empty = partial(empty_levels, levels=levels)
    return scan_tokens(token, initial_state, segment_ids, scale, normalize_qk, empty, **arrays)


@checked
@compiled
def log_linear_gated_delta_net_step(
    q_t: shapes.Query, k_t: shapes.Key, v_t: shapes.Value, g_t: shapes.LogDecay,
    beta_t: shapes.Strength, weights_t: Weight, state: LevelState, *,
    scale: float | None = None, normalize_qk: bool = False,
) -> tuple[shapes.Value, LevelState]:  # fmt: skip
    r"""Decode one token: levels merge as a binary counter carries, are corrected, then read.

        S_l <- e^g (I - beta k k^T) S_l,   S_0 <- beta k v^T,   o = scale sum_l w_l S_l^T q

    Arguments as `log_linear_gated_delta_net`, without the time axis; `state` as it returns it.

    Cost:
        About 12 L K V FLOPs and 8 L K V bytes of float32 levels per value head: bound by memory.

    Example:
        >>> q = k = v = jnp.full((1, 2, 4), 0.5)
        >>> one = jnp.ones((1, 2))
        >>> state = MIXERS["log_gdn"].empty_state(1, 2, 4, 4, 8, "float32", levels=5)
        >>> log_linear_gated_delta_net_step(q, k, v, -one, one, jnp.ones((1, 2, 5)), state)[0].shape
        (1, 2, 4)
    """
    token = gather_tokens(
        q_t, k_t, v_t, beta_t, weights_t, g=g_t, scale=scale, normalize_qk=normalize_qk
    )
    return step_levels(True, token, state)


def _forward_flops(batch, time, heads, key, value, *, chunk=None, levels=LEVELS):
    """Scores of q and k, the products that correct them; every level read twice, written twice."""
    size = chunk or CHUNK
    inverse = (15 * 256 if size <= 16 else size**3 / 2) + size**3
    within = size**2 * (5 * key + value) + int(inverse)
    states = 4 * levels * size * key * value
    return 2 * batch * heads * -(-time // size) * (within + states)


def _step_flops(batch, context, heads, key, value, *, levels=LEVELS):
    """Of each level two to be summed, two to be left and decay, four to be written and corrected,
    and two reads; one outer product."""
    return batch * heads * key * value * (12 * levels + 1)


ROW = recurrent(
    name="log_gdn", title="Log-linear Gated DeltaNet",
    paper="Guo, Yang, Goel, Xing, Dao, Kim, Log-Linear Attention (arXiv:2506.04761)",
    transition=None,
    inputs=(Q, K, V, G, BETA, Input("weights", (*TOKEN, "levels"), ANY)),
    implementations=("xla",),
    function=log_linear_gated_delta_net, step=log_linear_gated_delta_net_step,
    reference=log_linear_gated_delta_net_reference,
    empty_state=empty_levels,
    forward_flops=_forward_flops, step_flops=_step_flops,
    state_bytes=level_state_bytes,
)  # fmt: skip
