r"""Linear attention without a gate: a state that adds every token up and forgets nothing.

    S_t = S_(t-1) + k_t v_t^T,   o_t = scale S_t^T q_t

It is softmax attention with exp(q . k) replaced by q . k and without the division; any feature
map is applied to q and k beforehand.
"""

from jaxtyping import Array, Float, Int

from toolkit.attention._checks import check_recurrence
from toolkit.attention.linear.engine.fading_memory import (
    fading_memory,
    fading_memory_reference,
    fading_memory_step,
)
from toolkit.attention.linear.engine.recurrence import add_time, no_decay


def linear_attention(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time value_heads value"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "batch value_heads key value"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
    implementation: str | None = None,
    chunk: int | None = None,
) -> tuple[
    Float[Array, "batch time value_heads value"], Float[Array, "batch value_heads key value"]
]:
    r"""Mix tokens through the plain sum of their keys and values.

        S_t = S_(t-1) + k_t v_t^T,   o_t = scale S_t^T q_t

    Args:
        q: [batch, time, heads, key] queries.
        k: [batch, time, heads, key] keys.
        v: [batch, time, value_heads, value]; value_heads is a multiple of heads, and every
            head of q and k serves a group of consecutive value heads.
        scale: multiplies the outputs; key**-0.5 if None.
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
        ValueError: wrong rank, sizes that do not fit, no tokens, an
            unknown implementation, or a chunk that is no power of two from 16 on.
        TypeError: not floating point, or q, k and v of different dtypes.

    Cost:
        With chunks of C = 32 tokens (64 if a head exceeds 64), 2 (2 K V + C K + C V) FLOPs a
        token and value head forward, about 2.5 times as much more backward. Reads q, k, v once.

    Source:
        Katharopoulos, Vyas, Pappas, Fleuret, "Transformers are RNNs" (arXiv:2006.16236),
        equations 16 to 20 without the normaliser.
    """
    check_recurrence(q, k, v, initial_state=initial_state, segment_ids=segment_ids)
    return fading_memory(
        q,
        k,
        v,
        no_decay(v),
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
        implementation=implementation,
        chunk=chunk,
    )


def linear_attention_reference(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time value_heads value"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "batch value_heads key value"] | None = None,
    segment_ids: Int[Array, "batch time"] | None = None,
) -> tuple[
    Float[Array, "batch time value_heads value"], Float[Array, "batch value_heads key value"]
]:
    r"""The equations of `linear_attention`, token by token: slow, and the oracle of the others.

        S <- S + k v^T,   o = scale S^T q

    Args:
        q: [batch, time, heads, key].
        k: [batch, time, heads, key].
        v: [batch, time, value_heads, value].
        scale: multiplies the outputs; key**-0.5 if None.
        initial_state: [batch, value_heads, key, value]; zero if None.
        segment_ids: [batch, time]; the state is cleared wherever the number changes.

    Returns:
        Outputs [batch, time, value_heads, value] and the final state.

    Raises:
        ValueError: wrong rank or sizes that do not fit.
        TypeError: not floating point, or q, k and v of different dtypes.

    Source:
        Katharopoulos et al., "Transformers are RNNs" (arXiv:2006.16236), section 3.4.
    """
    check_recurrence(q, k, v, initial_state=initial_state, segment_ids=segment_ids)
    return fading_memory_reference(
        q,
        k,
        v,
        no_decay(v),
        scale=scale,
        initial_state=initial_state,
        segment_ids=segment_ids,
    )


def linear_attention_step(
    q_t: Float[Array, "batch heads key"],
    k_t: Float[Array, "batch heads key"],
    v_t: Float[Array, "batch value_heads value"],
    state: Float[Array, "batch value_heads key value"],
    *,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "batch value_heads value"], Float[Array, "batch value_heads key value"]]:
    r"""Decode one token: one read and one write of the state.

        o = scale (S^T q + (q . k) v),   S <- S + k v^T

    Args:
        q_t: [batch, heads, key] query of this token.
        k_t: [batch, heads, key] key of this token.
        v_t: [batch, value_heads, value]; value_heads is a multiple of heads.
        state: [batch, value_heads, key, value], as `linear_attention` returns it.
        scale: multiplies the output; key**-0.5 if None.
        implementation: "xla" (None picks it) or "pallas", the decode kernel of TPUs and Hopper
            GPUs.

    Returns:
        The output [batch, value_heads, value] in the dtype of v_t, and the new state.

    Raises:
        ValueError: wrong rank or sizes that do not fit.
        TypeError: not floating point, or q_t, k_t and v_t of different dtypes.

    Cost:
        About 4 K V FLOPs and 8 K V bytes of a float32 state a value head: bound by memory.
        Donate the state under `jax.jit` so that it is updated in place.
    """
    q, k, v = add_time(
        q_t=(q_t, "batch heads key"),
        k_t=(k_t, "batch heads key"),
        v_t=(v_t, "batch value_heads value"),
    )
    check_recurrence(q, k, v, initial_state=state, segment_ids=None)
    return fading_memory_step(
        q, k, v, no_decay(v), state, scale=scale, implementation=implementation
    )
