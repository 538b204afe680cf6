r"""Retention: linear attention that forgets at a constant rate, another one in every head.

Head 0 halves what it holds in 22 tokens, every next head in twice as many.
"""

from typing import Annotated

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import toolkit.attention._shapes as shapes
from toolkit._annotations import AtLeast
from toolkit._checks import checked
from toolkit.attention.execution.compiled import compiled
from toolkit.attention.inputs import K, Q, V, recurrent
from toolkit.attention.linear.engine.recurrence import run, scan_tokens, step
from toolkit.attention.linear.engine.rule import ADDITIVE_RULE
from toolkit.attention.linear.engine.tokens import gather_tokens


@checked
def retention_log_decay(heads: Annotated[int, AtLeast(1)]) -> Float[Array, "heads"]:
    r"""The rates of retention's heads, from the fastest to forget to the slowest.

        ln gamma_h = ln(1 - 2^(-5-h)),   h = 0 .. heads - 1

    Args:
        heads: how many.

    Returns:
        [heads] natural-log decays of the default floating type.

    Source:
        Sun et al., "Retentive Network" (arXiv:2307.08621), equation 8.

    Example:
        >>> jnp.exp(retention_log_decay(2)).tolist()
        [0.96875, 0.984375]
    """
    return jnp.asarray(np.log1p(-np.exp2(-5.0 - np.arange(heads))))


@checked
@compiled
def retention(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, *,
    scale: float | None = None,
    log_decay: Annotated[Float[Array, "value_heads"], shapes.LOG_DECAY] | None = None,
    initial_state: shapes.State | None = None, segment_ids: shapes.SegmentIds | None = None,
    implementation: shapes.Form | None = None, chunk: shapes.Chunk | None = None,
) -> shapes.Outputs:  # fmt: skip
    r"""Mix tokens through a state that decays at a constant rate in every head.

        S_t = gamma_h S_(t-1) + k_t v_t^T,   o_t = scale S_t^T q_t,   gamma_h = 1 - 2^(-5-h)

    with h the number of a value head, from 0. Rotate q and k beforehand where the paper does.
    MiniMax's lightning attention is this with scale 1 and slopes of its own for `log_decay`.

    Arguments and results as `linear_attention`, and:

    Args:
        log_decay: [value_heads] ln gamma, <= 0, else NaN; `retention_log_decay` of the heads of v
            if None. Heads spread over devices by `jax.shard_map` must be given theirs.

    Cost:
        That of `linear_attention`.

    Source:
        Sun et al., "Retentive Network: A Successor to Transformer for Large Language Models"
        (arXiv:2307.08621), equations 5 to 8.

    Example:
        >>> q = k = v = jnp.ones((1, 3, 2, 4))
        >>> out, state = retention(q, k, v)
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    log_decay = retention_log_decay(v.shape[2]) if log_decay is None else log_decay
    tokens = gather_tokens(q, k, v, g=_at_every_token(log_decay, v), scale=scale)
    return run(ADDITIVE_RULE, tokens, initial_state, segment_ids, implementation, chunk)


@checked
def retention_reference(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, *,
    scale: float | None = None,
    log_decay: Annotated[Float[Array, "value_heads"], shapes.LOG_DECAY] | None = None,
    initial_state: shapes.State | None = None, segment_ids: shapes.SegmentIds | None = None,
) -> shapes.Outputs:  # fmt: skip
    """The equation token by token: a slow oracle. Arguments as `retention`."""

    log_decay = retention_log_decay(v.shape[2]) if log_decay is None else log_decay

    def token(S, q, k, v, g):
        S = jnp.exp(g) * S + jnp.outer(k, v)
        return S, S.T @ q

    arrays = {"q": q, "k": k, "v": v, "g": _at_every_token(log_decay, v)}
    return scan_tokens(token, initial_state, segment_ids, scale, **arrays)


@checked
@compiled
def retention_step(
    q_t: shapes.Query, k_t: shapes.Key, v_t: shapes.Value, state: shapes.State, *,
    scale: float | None = None,
    log_decay: Annotated[Float[Array, "value_heads"], shapes.LOG_DECAY] | None = None,
    implementation: shapes.StepForm | None = None,
) -> shapes.Output:  # fmt: skip
    r"""Decode one token: one read and one write of the state.

        o = scale (gamma_h S^T q + (q . k) v),   S <- gamma_h S + k v^T

    Arguments as `retention`, without the time axis; state, implementation and cost as
    `gated_linear_attention_step`.

    Example:
        >>> q = k = v = jnp.ones((1, 2, 4))
        >>> retention_step(q, k, v, jnp.zeros((1, 2, 4, 4)))[0].shape
        (1, 2, 4)
    """
    log_decay = retention_log_decay(v_t.shape[1]) if log_decay is None else log_decay
    tokens = gather_tokens(q_t, k_t, v_t, g=_at_every_token(log_decay, v_t), scale=scale)
    return step(ADDITIVE_RULE, tokens, state, implementation)


def _at_every_token(log_decay: Float[Array, "value_heads"], v: Array) -> Array:
    # zeros_like, so that under `jax.shard_map` the decay varies wherever the values do.
    zeros = jnp.zeros_like(v[..., 0], dtype=log_decay.dtype)
    return zeros + jnp.broadcast_to(log_decay, zeros.shape)


ROW = recurrent(
    name="retention", title="Retention",
    paper="Sun et al., Retentive Network (arXiv:2307.08621)",
    transition="diagonal",
    inputs=(Q, K, V),
    function=retention, step=retention_step, reference=retention_reference,
)  # fmt: skip
