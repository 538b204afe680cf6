r"""Gated DeltaProduct: several delta-rule corrections a token, after one decay.

    S  <- e^g S
    S  <- S + beta_i k_i (v_i - S^T k_i)^T     for i = 1 ... n
    o   = scale S^T q

A token's transition is a product of n generalised Householder matrices I - beta_i k_i k_i^T:
with beta = 2 each is a reflection, and two of them make any rotation of a plane, which one alone
cannot. With n = 1 it is Gated DeltaNet. The corrections run as tokens of their own
through the same engine. Keys are not normalised here: give unit keys.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from toolkit.attention._checks import (
    check_floating,
    check_rank,
    check_recurrence,
    check_shape,
    check_write_strength,
)
from toolkit.attention.linear.engine.delta_rule import delta_rule, delta_rule_step
from toolkit.attention.linear.engine.recurrence import (
    Inputs,
    add_time,
    for_value_heads,
    log_decay_channels,
    run_equation,
    scaled_queries,
)


def gated_delta_product(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads steps key"],
    v: Float[Array, "batch time value_heads steps value"],
    g: Float[Array, "batch time value_heads"],
    beta: Float[Array, "batch time value_heads steps"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "batch value_heads key value"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
    implementation: str | None = None,
    chunk: int | None = None,
) -> tuple[
    Float[Array, "batch time value_heads value"], Float[Array, "batch value_heads key value"]
]:
    r"""Mix tokens through a state that every token corrects several times, in linear time.

        S_t^0 = e^(g_t) S_(t-1),   S_t^i = S_t^(i-1) + beta_ti k_ti (v_ti - S_t^(i-1)^T k_ti)^T
        o_t = scale (S_t^n)^T q_t


    Args:
        q: [batch, time, heads, key] queries.
        k: [batch, time, heads, steps, key] keys of the corrections, of unit length or nearly so.
        v: [batch, time, value_heads, steps, value]; value_heads is a multiple of heads, and
            every head of q and k serves a group of consecutive value heads.
        g: [batch, time, value_heads] log-decay (natural), <= 0, before the first correction.
        beta: [batch, time, value_heads, steps] writing strength in [0, 2].
        scale: multiplies the outputs; key**-0.5 if None.
        initial_state: [batch, value_heads, key, value] before the first token; zero if None.
        segment_ids: [batch, time] document of each token; the state is cleared wherever the
            number changes. `initial_state` belongs to the first, the final state to the last.
        implementation: "xla" (chunks; None picks it), "scan" (token by token) or "pallas"
            (kernels for TPUs and Hopper GPUs).
        chunk: tokens a chunk of "xla", a power of two from 16 on; None chooses.

    Returns:
        Outputs [batch, time, value_heads, value] in the dtype of v, and the final state
        [batch, value_heads, key, value], float32 (float64 for float64 inputs). Both have
        gradients.

    Raises:
        ValueError: wrong rank, sizes that do not fit, no tokens, a positive log-decay or a beta
            outside [0, 2] (of a concrete array), an unknown implementation, or a chunk that is no
            power of two from 16 on.
        TypeError: not floating point, or q, k and v of different dtypes.

    Cost:
        That of `gated_delta_net` on steps x time tokens, queries of zero included.

    Source:
        Siems, Carstensen, Zela, Hutter, Pontil, Grazzi, "DeltaProduct: Improving
        State-Tracking in Linear RNNs via Householder Products" (arXiv:2502.10297), section 3.
    """
    _check(q, k, v, g, beta, initial_state, segment_ids)
    steps = k.shape[3]
    out, state = delta_rule(
        *_as_tokens(q, k, v, g, beta),
        scale=scale,
        initial_state=initial_state,
        segment_ids=None if segment_ids is None else jnp.repeat(segment_ids, steps, axis=1),
        implementation=implementation,
        chunk=chunk,
    )
    return out[:, steps - 1 :: steps], state


def gated_delta_product_reference(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads steps key"],
    v: Float[Array, "batch time value_heads steps value"],
    g: Float[Array, "batch time value_heads"],
    beta: Float[Array, "batch time value_heads steps"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "batch value_heads key value"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
) -> tuple[
    Float[Array, "batch time value_heads value"], Float[Array, "batch value_heads key value"]
]:
    r"""The equations of `gated_delta_product`, token by token: slow, and the oracle of the others.

        S <- e^g S,   S <- S + beta_i k_i (v_i - S^T k_i)^T for i = 1 ... n,   o = scale S^T q


    Args:
        q: [batch, time, heads, key].
        k: [batch, time, heads, steps, key].
        v: [batch, time, value_heads, steps, value].
        g: [batch, time, value_heads] log-decay, <= 0.
        beta: [batch, time, value_heads, steps] in [0, 2].
        scale: multiplies the outputs; key**-0.5 if None.
        initial_state: [batch, value_heads, key, value]; zero if None.
        segment_ids: [batch, time]; the state is cleared wherever the number changes.

    Returns:
        Outputs [batch, time, value_heads, value] and the final state.

    Raises:
        ValueError: wrong rank, sizes that do not fit, a positive log-decay or a beta outside [0,
            2].
        TypeError: not floating point, or q, k and v of different dtypes.

    Source:
        Siems, Carstensen, Zela, Hutter, Pontil, Grazzi, "DeltaProduct: Improving
        State-Tracking in Linear RNNs via Householder Products" (arXiv:2502.10297), section 3.
    """
    _check(q, k, v, g, beta, initial_state, segment_ids)
    queries, keys = (for_value_heads(x, v.shape[2]) for x in (scaled_queries(q, scale), k))

    def one_token(state, g_t, q_t, k_t, v_t, beta_t):
        state = jnp.exp(g_t)[..., None] * state
        for i in range(k_t.shape[2]):
            error = v_t[:, :, i] - jnp.einsum("bhk,bhkv->bhv", k_t[:, :, i], state)
            state += jnp.einsum("bh,bhk,bhv->bhkv", beta_t[:, :, i], k_t[:, :, i], error)
        return state, jnp.einsum("bhk,bhkv->bhv", q_t, state)

    out, state = run_equation(
        one_token,
        Inputs((queries, keys, v, beta), log_decay_channels(g, v)),
        initial_state,
        sizes=(k.shape[-1], v.shape[-1]),
        segment_ids=segment_ids,
    )
    return out.astype(v.dtype), state


def gated_delta_product_step(
    q_t: Float[Array, "batch heads key"],
    k_t: Float[Array, "batch heads steps key"],
    v_t: Float[Array, "batch value_heads steps value"],
    g_t: Float[Array, "batch value_heads"],
    beta_t: Float[Array, "batch value_heads steps"],
    state: Float[Array, "batch value_heads key value"],
    *,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "batch value_heads value"], Float[Array, "batch value_heads key value"]]:
    r"""Decode one token: one read and one write of the state.

        S <- e^g S,   S <- S + beta_i k_i (v_i - S^T k_i)^T for i = 1 ... n,   o = scale S^T q


    Args:
        q_t: [batch, heads, key] query of this token.
        k_t: [batch, heads, steps, key] keys of its corrections.
        v_t: [batch, value_heads, steps, value]; value_heads is a multiple of heads.
        g_t: [batch, value_heads] log-decay, <= 0.
        beta_t: [batch, value_heads, steps] writing strength in [0, 2].
        state: [batch, value_heads, key, value], as `gated_delta_product` returns it.
        scale: multiplies the output; key**-0.5 if None.
        implementation: "xla" (None picks it) or "pallas", the decode kernel of TPUs and Hopper
            GPUs.

    Returns:
        The output [batch, value_heads, value] in the dtype of v_t, and the new state.

    Raises:
        ValueError: wrong rank, sizes that do not fit, a positive log-decay or a beta outside [0,
            2].
        TypeError: not floating point, or q_t, k_t and v_t of different dtypes.

    Cost:
        About 7 K V FLOPs a correction and value head; the state is read and written once a
        correction.
        Donate the state under `jax.jit` so that it is updated in place.

    Source:
        Siems, Carstensen, Zela, Hutter, Pontil, Grazzi, "DeltaProduct: Improving
        State-Tracking in Linear RNNs via Householder Products" (arXiv:2502.10297), section 3.
    """
    q, k, v, g, beta = add_time(
        q_t=(q_t, "batch heads key"),
        k_t=(k_t, "batch heads steps key"),
        v_t=(v_t, "batch value_heads steps value"),
        g_t=(g_t, "batch value_heads"),
        beta_t=(beta_t, "batch value_heads steps"),
    )
    _check(q, k, v, g, beta, state, None)
    tokens = _as_tokens(q, k, v, g, beta)
    for i in range(k.shape[3]):
        q_i, k_i, v_i, g_i, beta_i = (x[:, i : i + 1] for x in tokens)
        out, state = delta_rule_step(
            q_i, k_i, v_i, g_i, beta_i, state, scale=scale, implementation=implementation
        )
    return out, state


def _as_tokens(q, k, v, g, beta) -> tuple[Array, ...]:
    """Every correction a token: the decay is the first one's, the query the last one's."""
    steps = k.shape[3]

    def spread(x: Array, place: int) -> Array:
        """[batch, time, ...] -> [batch, time * steps, ...], zero but for one place a token."""
        widths = [(0, 0), (0, 0), (place, steps - 1 - place)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x[:, :, None], widths)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def in_time(x: Array) -> Array:
        """[batch, time, heads, steps, ...] -> [batch, time * steps, heads, ...]."""
        x = jnp.moveaxis(x, 3, 2)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    return spread(q, steps - 1), in_time(k), in_time(v), spread(g, 0), in_time(beta)


def _check(q, k, v, g, beta, initial_state, segment_ids) -> None:
    check_rank("q", q, "batch time heads key")
    check_rank("k", k, "batch time heads steps key")
    check_rank("v", v, "batch time value_heads steps value")
    check_rank("g", g, "batch time value_heads")
    steps = k.shape[3]
    wanted = (*q.shape[:2], v.shape[2], steps)
    check_shape("v", v, (*wanted, v.shape[4]), "batch time value_heads steps value")
    check_shape("beta", beta, wanted, "batch time value_heads steps")
    if steps == 0:
        raise ValueError("k must hold at least one correction a token; got steps = 0.")
    check_recurrence(
        q,
        k[:, :, :, 0],
        v[:, :, :, 0],
        g=g,
        initial_state=initial_state,
        segment_ids=segment_ids,
    )
    check_floating("beta", beta)
    check_write_strength(beta)
