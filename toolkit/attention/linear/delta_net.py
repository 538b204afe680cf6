r"""DeltaNet: a linear-time memory that corrects what it holds under a key.

    S  <- S + beta k (v - S^T k)^T
    o   = scale S^T q

The delta rule of Widrow and Hoff, one step of gradient descent on |v - S^T k|^2 / 2 with rate
beta for every token. beta = 1 with a unit key overwrites what was under it. Keys are not
normalised here: give unit keys.
"""

from jaxtyping import Array, Float, Int

from toolkit.attention._checks import check_rank, check_recurrence
from toolkit.attention.linear.engine.delta_rule import (
    delta_rule,
    delta_rule_reference,
    delta_rule_step,
)
from toolkit.attention.linear.engine.recurrence import add_time, no_decay


def delta_net(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time value_heads value"],
    beta: Float[Array, "batch time value_heads"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "batch value_heads key value"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
    implementation: str | None = None,
    chunk: int | None = None,
) -> tuple[
    Float[Array, "batch time value_heads value"], Float[Array, "batch value_heads key value"]
]:
    r"""Mix tokens through a self-correcting state, in time linear in the sequence.

        S_t = S_(t-1) + beta_t k_t (v_t - S_(t-1)^T k_t)^T,   o_t = scale S_t^T q_t


    Args:
        q: [batch, time, heads, key] queries, of unit length or nearly so.
        k: [batch, time, heads, key] keys, of unit length or nearly so.
        v: [batch, time, value_heads, value]; value_heads is a multiple of heads, and every
            head of q and k serves a group of consecutive value heads.
        beta: [batch, time, value_heads] writing strength in [0, 2].
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
        ValueError: wrong rank, sizes that do not fit, no tokens, a beta outside [0, 2] (of a
            concrete array), an unknown implementation, or a chunk that is no power of two from 16
            on.
        TypeError: not floating point, or q, k and v of different dtypes.

    Cost:
        With chunks of C = 16 tokens (32 if a head exceeds 64, or beyond 4096 tokens),
        2 (3 K V + 2 C K + 2 C V) FLOPs and a little a token and value head forward, about 2.2
        times as much more backward. Reads q, k, v once.

    Source:
        Yang, Wang, Zhang, Shen, Kim, "Parallelizing Linear Transformers with the Delta Rule over
        Sequence Length" (arXiv:2406.06484), section 3; Schlag, Irie, Schmidhuber
        (arXiv:2102.11174), equation 24.
    """
    _check(q, k, v, beta, initial_state, segment_ids)
    return delta_rule(
        q,
        k,
        v,
        no_decay(v),
        beta,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        implementation=implementation,
        chunk=chunk,
    )


def delta_net_reference(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time value_heads value"],
    beta: Float[Array, "batch time value_heads"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "batch value_heads key value"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
) -> tuple[
    Float[Array, "batch time value_heads value"], Float[Array, "batch value_heads key value"]
]:
    r"""The equations of `delta_net`, token by token: slow, and the oracle of the others.

        S <- S + beta k (v - S^T k)^T,   o = scale S^T q


    Args:
        q: [batch, time, heads, key].
        k: [batch, time, heads, key].
        v: [batch, time, value_heads, value].
        beta: [batch, time, value_heads] in [0, 2].
        scale: multiplies the outputs; key**-0.5 if None.
        initial_state: [batch, value_heads, key, value]; zero if None.
        segment_ids: [batch, time]; the state is cleared wherever the number changes.

    Returns:
        Outputs [batch, time, value_heads, value] and the final state.

    Raises:
        ValueError: wrong rank, sizes that do not fit, or a beta outside [0, 2].
        TypeError: not floating point, or q, k and v of different dtypes.

    Source:
        Yang, Wang, Zhang, Shen, Kim, "Parallelizing Linear Transformers with the Delta Rule over
        Sequence Length" (arXiv:2406.06484), section 3; Schlag, Irie, Schmidhuber
        (arXiv:2102.11174), equation 24.
    """
    _check(q, k, v, beta, initial_state, segment_ids)
    return delta_rule_reference(
        q,
        k,
        v,
        no_decay(v),
        beta,
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
    )


def delta_net_step(
    q_t: Float[Array, "batch heads key"],
    k_t: Float[Array, "batch heads key"],
    v_t: Float[Array, "batch value_heads value"],
    beta_t: Float[Array, "batch value_heads"],
    state: Float[Array, "batch value_heads key value"],
    *,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "batch value_heads value"], Float[Array, "batch value_heads key value"]]:
    r"""Decode one token: one read and one write of the state.

        u = beta (v - S^T k),   o = scale (S^T q + (q . k) u),   S <- S + k u^T


    Args:
        q_t: [batch, heads, key] query of this token.
        k_t: [batch, heads, key] key of this token.
        v_t: [batch, value_heads, value]; value_heads is a multiple of heads.
        beta_t: [batch, value_heads] writing strength in [0, 2].
        state: [batch, value_heads, key, value], as `delta_net` returns it.
        scale: multiplies the output; key**-0.5 if None.
        implementation: "xla" (None picks it) or "pallas", the decode kernel of TPUs and Hopper
            GPUs.

    Returns:
        The output [batch, value_heads, value] in the dtype of v_t, and the new state.

    Raises:
        ValueError: wrong rank, sizes that do not fit, or a beta outside [0, 2].
        TypeError: not floating point, or q_t, k_t and v_t of different dtypes.

    Cost:
        About 7 K V FLOPs and 8 K V bytes of a float32 state a value head: bound by memory.
        Donate the state under `jax.jit` so that it is updated in place.

    Source:
        Yang, Wang, Zhang, Shen, Kim, "Parallelizing Linear Transformers with the Delta Rule over
        Sequence Length" (arXiv:2406.06484), section 3; Schlag, Irie, Schmidhuber
        (arXiv:2102.11174), equation 24.
    """
    q, k, v, beta = add_time(
        q_t=(q_t, "batch heads key"),
        k_t=(k_t, "batch heads key"),
        v_t=(v_t, "batch value_heads value"),
        beta_t=(beta_t, "batch value_heads"),
    )
    _check(q, k, v, beta, state, None)
    return delta_rule_step(
        q, k, v, no_decay(v), beta, state, scale=scale, implementation=implementation
    )


def _check(q, k, v, beta, initial_state, segment_ids) -> None:
    check_rank("beta", beta, "batch time value_heads")
    check_recurrence(q, k, v, beta=beta, initial_state=initial_state, segment_ids=segment_ids)
