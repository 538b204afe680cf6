r"""Retention: linear attention that forgets at a constant rate, another one in every head.

    S_t = gamma_h S_(t-1) + k_t v_t^T,   o_t = scale S_t^T q_t,   gamma_h = 1 - 2^(-5-h)

Head 0 halves what it holds in 22 tokens, every next head in twice as many.
"""

from typing import Annotated

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from toolkit._annotations import AtLeast
from toolkit._checks import checked
from toolkit.attention._compiled import compiled
from toolkit.attention._shapes import (
    LOG_DECAY,
    Chunk,
    Form,
    Gate,
    Gates,
    Key,
    Keys,
    Output,
    Outputs,
    Queries,
    Query,
    SegmentIds,
    State,
    StepForm,
    Value,
    Values,
)
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

    Raises:
        TypeError, ValueError: heads is not a whole number of at least 1.

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
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float | None = None,
    log_decay: Annotated[Float[Array, "value_heads"], LOG_DECAY] | None = None,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: Form | None = None,
    chunk: Chunk | None = None,
) -> Outputs:
    r"""Mix tokens through a state that decays at a constant rate in every head.

        S_t = gamma_h S_(t-1) + k_t v_t^T,   o_t = scale S_t^T q_t,   gamma_h = 1 - 2^(-5-h)

    with h the number of a value head, from 0. Rotate q and k beforehand where the paper does.

    Args:
        q: [batch, time, heads, key] queries.
        k: [batch, time, heads, key] keys.
        v: [batch, time, value_heads, value]; value_heads is a multiple of heads, and every
            head of q and k serves a group of consecutive value heads.
        scale: multiplies the outputs; key**-0.5 if None.
        log_decay: [value_heads] ln gamma, <= 0, else NaN; `retention_log_decay` of the heads of v
            if None.
            Heads spread over devices by `jax.shard_map` must be given theirs.
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
        per token and value head forward, about 2.5 times as much more backward. Reads q, k, v once.

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
    q: Queries,
    k: Keys,
    v: Values,
    *,
    scale: float | None = None,
    log_decay: Annotated[Float[Array, "value_heads"], LOG_DECAY] | None = None,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
) -> Outputs:
    r"""The equation of `retention`, token by token: slow, and the oracle.

        S <- gamma_h S + k v^T,   o = scale S^T q

    Arguments as `retention`.

    Example:
        >>> q = k = v = jnp.ones((1, 3, 2, 4))
        >>> out, state = retention_reference(q, k, v)
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    log_decay = retention_log_decay(v.shape[2]) if log_decay is None else log_decay
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def token(S, q, k, v, g):
        S = jnp.exp(g) * S + jnp.outer(k, v)
        return S, scale * (S.T @ q)

    g = _at_every_token(log_decay, v)
    return scan_tokens(token, initial_state, segment_ids, q=q, k=k, v=v, g=g)


@checked
@compiled
def retention_step(
    q_t: Query,
    k_t: Key,
    v_t: Value,
    state: State,
    *,
    scale: float | None = None,
    log_decay: Annotated[Float[Array, "value_heads"], LOG_DECAY] | None = None,
    implementation: StepForm | None = None,
) -> Output:
    r"""Decode one token: one read and one write of the state.

        o = scale (gamma_h S^T q + (q . k) v),   S <- gamma_h S + k v^T

    Arguments as `retention`, without the time axis; `state` as it returns it.
    `implementation` is "xla" (None picks it) or "pallas", the experimental decode
    kernel of TPUs and Hopper GPUs.

    Cost:
        About 5 K V FLOPs and 8 K V bytes of a float32 state per value head: bound by memory. Donate
        the state under `jax.jit` so that it is updated in place.

    Example:
        >>> q = k = v = jnp.ones((1, 2, 4))
        >>> out, state = retention_step(q, k, v, jnp.zeros((1, 2, 4, 4)))
        >>> out.shape, state.shape
        ((1, 2, 4), (1, 2, 4, 4))
    """
    log_decay = retention_log_decay(v_t.shape[1]) if log_decay is None else log_decay
    tokens = gather_tokens(q_t, k_t, v_t, g=_at_every_token(log_decay, v_t), scale=scale)
    return step(ADDITIVE_RULE, tokens, state, implementation)


def _at_every_token(log_decay: Float[Array, "value_heads"], v: Values | Value) -> Gates | Gate:
    # zeros_like, so that under `jax.shard_map` the decay varies wherever the values do.
    zeros = jnp.zeros_like(v[..., 0], dtype=log_decay.dtype)
    return zeros + jnp.broadcast_to(log_decay, zeros.shape)


ROW = recurrent(
    name="retention",
    title="Retention",
    paper="Sun et al., Retentive Network (arXiv:2307.08621)",
    transition="diagonal",
    inputs=(Q, K, V),
    function=retention,
    step=retention_step,
    reference=retention_reference,
)
"""The row of `MIXERS`."""
