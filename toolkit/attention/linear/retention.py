r"""Retention: linear attention that forgets at a constant rate, another one in every head.

    S_t = gamma_h S_(t-1) + k_t v_t^T,   o_t = scale S_t^T q_t,   gamma_h = 1 - 2^(-5-h)

Head 0 halves what it holds in 22 tokens, every next head in twice as many.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from toolkit.attention._checks import check_floating, check_log_decay, check_recurrence, check_shape
from toolkit.attention.linear.engine.fading_memory import (
    fading_memory,
    fading_memory_reference,
    fading_memory_step,
)
from toolkit.attention.linear.engine.recurrence import add_time, no_decay


def retention_log_decay(heads: int) -> Float[Array, "heads"]:
    r"""The rates of retention's heads, from the fastest to forget to the slowest.

        ln gamma_h = ln(1 - 2^(-5-h)),   h = 0 .. heads - 1

    Args:
        heads: how many.

    Returns:
        [heads] natural-log decays of the default floating type.

    Source:
        Sun et al., "Retentive Network" (arXiv:2307.08621), equation 8.
    """
    return jnp.asarray(np.log1p(-np.exp2(-5.0 - np.arange(heads))))


def retention(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time value_heads value"],
    *,
    scale: float | None = None,
    log_decay: Float[Array, "value_heads"] | None = None,
    initial_state: Float[Array, "batch value_heads key value"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
    implementation: str | None = None,
    chunk: int | None = None,
) -> tuple[
    Float[Array, "batch time value_heads value"], Float[Array, "batch value_heads key value"]
]:
    r"""Mix tokens through a state that fades at a constant rate in every head.

        S_t = gamma_h S_(t-1) + k_t v_t^T,   o_t = scale S_t^T q_t,   gamma_h = 1 - 2^(-5-h)

    with h the number of a value head, from 0. Rotate q and k beforehand where the paper does.

    Args:
        q: [batch, time, heads, key] queries.
        k: [batch, time, heads, key] keys.
        v: [batch, time, value_heads, value]; value_heads is a multiple of heads, and every
            head of q and k serves a group of consecutive value heads.
        scale: multiplies the outputs; key**-0.5 if None.
        log_decay: [value_heads] ln gamma, <= 0; `retention_log_decay` of the heads of v if None.
            Heads spread over devices by `jax.shard_map` must be given theirs.
        initial_state: [batch, value_heads, key, value] before the first token; zero if None.
        segment_ids: [batch, time] document of each token; the state is cleared wherever the
            number changes. `initial_state` belongs to the first, the final state to the last.
        implementation: "xla" (chunks; None picks it), "scan" (token by token) or "pallas"
            (kernels for TPUs and Hopper GPUs).
        chunk: tokens a chunk of "xla", a power of two from 16 on; None chooses.

    Returns:
        Outputs [batch, time, value_heads, value] in the dtype of v, and the final state
        [batch, value_heads, key, value], float32 (float64 for float64 inputs).

    Raises:
        ValueError: wrong rank, sizes that do not fit, no tokens, a positive log_decay, an
            unknown implementation, or a chunk that is no power of two from 16 on.
        TypeError: not floating point, or q, k and v of different dtypes.

    Cost:
        With chunks of C = 32 tokens (64 if a head exceeds 64), 2 (2 K V + C K + C V) FLOPs a
        token and value head forward, about 2.5 times as much more backward. Reads q, k, v once.

    Source:
        Sun et al., "Retentive Network: A Successor to Transformer for Large Language Models"
        (arXiv:2307.08621), equations 5 to 8.
    """
    check_recurrence(q, k, v, initial_state=initial_state, segment_ids=segment_ids)
    return fading_memory(
        q,
        k,
        v,
        _decay(v, log_decay),
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        implementation=implementation,
        chunk=chunk,
    )


def retention_reference(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time value_heads value"],
    *,
    scale: float | None = None,
    log_decay: Float[Array, "value_heads"] | None = None,
    initial_state: Float[Array, "batch value_heads key value"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
) -> tuple[
    Float[Array, "batch time value_heads value"], Float[Array, "batch value_heads key value"]
]:
    r"""The equations of `retention`, token by token: slow, and the oracle of the others.

        S <- gamma_h S + k v^T,   o = scale S^T q

    Args:
        q: [batch, time, heads, key].
        k: [batch, time, heads, key].
        v: [batch, time, value_heads, value].
        scale: multiplies the outputs; key**-0.5 if None.
        log_decay: [value_heads] ln gamma, <= 0; `retention_log_decay` of the heads if None.
        initial_state: [batch, value_heads, key, value]; zero if None.
        segment_ids: [batch, time]; the state is cleared wherever the number changes.

    Returns:
        Outputs [batch, time, value_heads, value] and the final state.

    Raises:
        ValueError: wrong rank, sizes that do not fit, or a positive log_decay.
        TypeError: not floating point, or q, k and v of different dtypes.

    Source:
        Sun et al., "Retentive Network" (arXiv:2307.08621), equation 6.
    """
    check_recurrence(q, k, v, initial_state=initial_state, segment_ids=segment_ids)
    return fading_memory_reference(
        q,
        k,
        v,
        _decay(v, log_decay),
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
    )


def retention_step(
    q_t: Float[Array, "batch heads key"],
    k_t: Float[Array, "batch heads key"],
    v_t: Float[Array, "batch value_heads value"],
    state: Float[Array, "batch value_heads key value"],
    *,
    scale: float | None = None,
    log_decay: Float[Array, "value_heads"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "batch value_heads value"], Float[Array, "batch value_heads key value"]]:
    r"""Decode one token: one read and one write of the state.

        o = scale (gamma_h S^T q + (q . k) v),   S <- gamma_h S + k v^T

    Args:
        q_t: [batch, heads, key] query of this token.
        k_t: [batch, heads, key] key of this token.
        v_t: [batch, value_heads, value]; value_heads is a multiple of heads.
        state: [batch, value_heads, key, value], as `retention` returns it.
        scale: multiplies the output; key**-0.5 if None.
        log_decay: [value_heads] ln gamma, <= 0; `retention_log_decay` of the heads if None.
        implementation: "xla" (None picks it) or "pallas", the decode kernel of TPUs and Hopper
            GPUs.

    Returns:
        The output [batch, value_heads, value] in the dtype of v_t, and the new state.

    Raises:
        ValueError: wrong rank, sizes that do not fit, or a positive log_decay.
        TypeError: not floating point, or q_t, k_t and v_t of different dtypes.

    Cost:
        About 5 K V FLOPs and 8 K V bytes of a float32 state a value head: bound by memory.
        Donate the state under `jax.jit` so that it is updated in place.
    """
    q, k, v = add_time(
        q_t=(q_t, "batch heads key"),
        k_t=(k_t, "batch heads key"),
        v_t=(v_t, "batch value_heads value"),
    )
    check_recurrence(q, k, v, initial_state=state, segment_ids=None)
    return fading_memory_step(
        q, k, v, _decay(v, log_decay), state, scale=scale, implementation=implementation
    )


def _decay(v: Array, log_decay: Array | None) -> Array:
    """[batch, time, value_heads] of every head's constant."""
    if log_decay is None:
        log_decay = retention_log_decay(v.shape[2])
    check_shape("log_decay", log_decay, v.shape[2:3], "value_heads")
    check_floating("log_decay", log_decay)
    check_log_decay(log_decay)
    none = no_decay(v)
    return none + jnp.broadcast_to(log_decay.astype(none.dtype), none.shape)
