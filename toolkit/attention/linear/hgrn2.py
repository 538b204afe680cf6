r"""HGRN2: a gated linear recurrence whose keys are what its gates let go.

    S_t = Diag(e^(g_t)) S_(t-1) + k_t v_t^T,   k_t = 1 - e^(g_t),   o_t = scale S_t^T q_t

Gated linear attention with the key tied to the forget gate: every channel keeps a running
average of the values, with weights that add up to at most one, so the state stays bounded.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from toolkit._checks import checked
from toolkit.attention._compiled import compiled
from toolkit.attention._precision import accumulator
from toolkit.attention._shapes import (
    Chunk,
    Form,
    HeadKeyLogDecay,
    HeadKeyLogDecays,
    HeadState,
    HeadValue,
    HeadValues,
    Keys,
    Queries,
    Query,
    SegmentIds,
    StepForm,
)
from toolkit.attention.inputs import CHANNEL_G, Q, V, recurrent
from toolkit.attention.linear.engine.recurrence import run, scan_tokens, step
from toolkit.attention.linear.engine.rule import ADDITIVE_RULE
from toolkit.attention.linear.engine.tokens import gather_tokens


@checked
@compiled
def hgrn2(
    q: Queries,
    v: HeadValues,
    g: HeadKeyLogDecays,
    *,
    scale: float | None = None,
    initial_state: HeadState | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: Form | None = None,
    chunk: Chunk | None = None,
) -> tuple[Float[Array, "batch time heads value"], HeadState]:
    r"""Mix tokens through a state whose channels take in as much as they forget.

        S_t = Diag(e^(g_t)) S_(t-1) + (1 - e^(g_t)) v_t^T,   o_t = scale S_t^T q_t

    Args:
        q: [batch, time, heads, key] queries.
        v: [batch, time, heads, value].
        g: [batch, time, heads, key] logarithm of the forget gate, <= 0, else NaN; -inf replaces
            what the channel holds.
        scale: multiplies the outputs; key**-0.5 if None.
        initial_state: [batch, heads, key, value] before the first token; zero if None.
        segment_ids: [batch, time] document of each token; the state is cleared wherever the
            number changes. `initial_state` belongs to the first, the final state to the last.
        implementation: "xla" (chunks; None picks it), "scan" (token by token) or "pallas"
            (experimental kernels for TPUs and Hopper GPUs).
        chunk: tokens per chunk of "xla", a power of two from 16 on; None chooses.

    Returns:
        Outputs [batch, time, heads, value] in the dtype of v, and the final state
        [batch, heads, key, value], float32 (float64 for float64 inputs).

    Raises:
        ValueError: wrong rank, sizes that do not fit, no tokens, an unknown implementation, or a
            chunk that is no power of two from 16 on; inside `toolkit.checking()`, a gate out of
            range.
        TypeError: not floating point, or q and v of different dtypes.

    Cost:
        With chunks of C = 32 tokens (64 if a head exceeds 64), 2 (2 K V + C K + C V) FLOPs and
        one exponential per key channel, per token and head forward; about 2.5 times as much
        more backward. In a chunk where a channel decays below 1e-28, scores are log2(C) products
        instead of one. Reads q, v and g once.

    Source:
        Qin, Yang, Sun, Shen, Li, Sun, Zhong, "HGRN2: Gated Linear RNNs with State Expansion"
        (arXiv:2404.07904), section 3.2.

    Example:
        >>> q = v = jnp.ones((1, 3, 2, 4))
        >>> out, state = hgrn2(q, v, g=-q)
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    tokens = gather_tokens(q, _keys(v, g), v, g=g, scale=scale)
    return run(ADDITIVE_RULE, tokens, initial_state, segment_ids, implementation, chunk)


@checked
def hgrn2_reference(
    q: Queries,
    v: HeadValues,
    g: HeadKeyLogDecays,
    *,
    scale: float | None = None,
    initial_state: HeadState | None = None,
    segment_ids: SegmentIds | None = None,
) -> tuple[Float[Array, "batch time heads value"], HeadState]:
    r"""The equation of `hgrn2`, token by token: slow, and the oracle.

        S <- Diag(e^g) S + (1 - e^g) v^T,   o = scale S^T q

    Arguments as `hgrn2`.

    Example:
        >>> q = v = jnp.ones((1, 3, 2, 4))
        >>> out, state = hgrn2_reference(q, v, g=-q)
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    arrays = {"q": q, "v": v, "g": g}
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def token(S, q, v, g):
        S = jnp.exp(g)[:, None] * S + jnp.outer(-jnp.expm1(g), v)
        return S, scale * (S.T @ q)

    return scan_tokens(token, initial_state, segment_ids, **arrays)


@checked
@compiled
def hgrn2_step(
    q_t: Query,
    v_t: HeadValue,
    g_t: HeadKeyLogDecay,
    state: HeadState,
    *,
    scale: float | None = None,
    implementation: StepForm | None = None,
) -> tuple[Float[Array, "batch heads value"], HeadState]:
    r"""Decode one token: one read and one write of the state.

        k = 1 - e^g,   o = scale (S^T (e^g * q) + (q . k) v),   S <- Diag(e^g) S + k v^T

    Arguments as `hgrn2`, without the time axis; `state` as it returns it.
    `implementation` is "xla" (None picks it) or "pallas", the experimental decode
    kernel of TPUs and Hopper GPUs.

    Cost:
        About 5 K V FLOPs and 8 K V bytes of a float32 state per head: bound by memory. Donate
        the state under `jax.jit` so that it is updated in place.

    Example:
        >>> q = v = jnp.ones((1, 2, 4))
        >>> out, state = hgrn2_step(q, v, -q, jnp.zeros((1, 2, 4, 4)))
        >>> out.shape, state.shape
        ((1, 2, 4), (1, 2, 4, 4))
    """
    tokens = gather_tokens(q_t, _keys(v_t, g_t), v_t, g=g_t, scale=scale)
    return step(ADDITIVE_RULE, tokens, state, implementation)


def _keys(v: Array, g: HeadKeyLogDecays) -> Keys:
    """1 - e^g, exact also where the gate is nearly open."""
    is_decay = g <= 0
    # Twice `where`, so that no gradient meets what is not finite.
    keys = -jnp.expm1(jnp.where(is_decay, g, 0).astype(accumulator(v.dtype)))
    return jnp.where(is_decay, keys, jnp.nan)


ROW = recurrent(
    name="hgrn2",
    title="HGRN2",
    paper="Qin et al., HGRN2: Gated Linear RNNs with State Expansion (arXiv:2404.07904)",
    transition="diagonal",
    inputs=(Q, V, CHANNEL_G),  # its keys are made of g
    function=hgrn2,
    step=hgrn2_step,
    reference=hgrn2_reference,
)
"""The row of `MIXERS`."""
