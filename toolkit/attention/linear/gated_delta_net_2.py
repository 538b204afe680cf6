r"""Gated DeltaNet-2: a delta rule that erases by key channel and writes by value channel.

    S  <- Diag(e^g) S
    S  <- S + k (w * v - S^T (b * k))^T
    o   = scale S^T q

with an erase gate b per key channel and a write gate w per value channel, where Kimi Delta
Attention has one beta for both: b = w = beta is that method, and with equal decays per channel it
is Gated DeltaNet. Keys must be of unit length: `normalize_qk` makes them so.
"""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array

from toolkit._checks import checked
from toolkit.attention._compiled import compiled
from toolkit.attention._shapes import (
    Chunk,
    Form,
    Key,
    KeyGate,
    KeyGates,
    KeyLogDecay,
    KeyLogDecays,
    Keys,
    Output,
    Outputs,
    Queries,
    Query,
    SegmentIds,
    State,
    Value,
    ValueGate,
    ValueGates,
    Values,
)
from toolkit.attention.costs import delta_forward_flops
from toolkit.attention.inputs import CHANNEL_G, FRACTION, TOKEN, Input, K, Q, V, recurrent
from toolkit.attention.linear.engine.recurrence import run, scan_tokens, step
from toolkit.attention.linear.engine.rule import Action, Correction, Rule, correcting_chunk_size
from toolkit.attention.linear.engine.tokens import gather_tokens
from toolkit.attention.linear.gates import unit_length


def _action(q: Array, k: Array, v: Array, erase: Array, write: Array) -> Action:
    return Action(q, Correction(erase * k, k, write * v, strength=None), addition=None)


GATED_DELTA_RULE_2 = Rule(_action, correcting_chunk_size)


@checked
@compiled
def gated_delta_net_2(
    q: Queries,
    k: Keys,
    v: Values,
    g: KeyLogDecays,
    erase: KeyGates,
    write: ValueGates,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: Form | None = None,
    chunk: Chunk | None = None,
) -> Outputs:
    r"""Mix tokens through a state that erases by key channel and writes by value channel.

        S_t = (I - k_t (b_t * k_t)^T) Diag(e^(g_t)) S_(t-1) + k_t (w_t * v_t)^T
        o_t = scale S_t^T q_t

    Args:
        q: [batch, time, heads, key] queries, of unit length or nearly so.
        k: [batch, time, heads, key] keys, of unit length or nearly so.
        v: [batch, time, value_heads, value]; value_heads is a multiple of heads, and every
            head of q and k serves a group of consecutive value heads.
        g: [batch, time, value_heads, key] log-decay (natural), <= 0, else NaN; -inf clears
            a channel.
        erase: [batch, time, value_heads, key] share b of what the key recalls that is erased, in
            [0, 1]; up to 2 where a step may reflect.
        write: [batch, time, value_heads, value] share w of the value that is written, likewise.
        scale: multiplies the outputs; key**-0.5 if None.
        normalize_qk: bring queries and keys to unit length first (`unit_length`).
        initial_state: [batch, value_heads, key, value] before the first token; zero if None.
        segment_ids: [batch, time] document of each token; the state is cleared wherever the
            number changes. `initial_state` belongs to the first, the final state to the last.
        implementation: "xla" (chunks; None picks it) or "scan" (token by token).
        chunk: tokens per chunk of "xla", a power of two from 16 on; None chooses.

    Returns:
        Outputs [batch, time, value_heads, value] in the dtype of v, and the final state
        [batch, value_heads, key, value], float32 (float64 for float64 inputs). Both have
        gradients.

    Raises:
        ValueError: wrong rank, sizes that do not fit, no tokens, an unknown implementation, or a
            chunk that is no power of two from 16 on; inside `toolkit.checking()`, a gate out of
            range.
        TypeError: not floating point, or q, k and v of different dtypes.

    Cost:
        That of `kimi_delta_attention`, and K + V products per token and value head.

    Source:
        Hatamizadeh, Choi, Kautz, "Gated DeltaNet-2: Decoupling Erase and Write in Linear
        Attention" (arXiv:2605.22791), section 3.

    Example:
        >>> q = k = v = jnp.full((1, 3, 2, 4), 0.5)
        >>> out, state = gated_delta_net_2(q, k, v, -q, erase=q, write=q)
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    if normalize_qk:
        q, k = unit_length(q), unit_length(k)
    tokens = gather_tokens(q, k, v, erase, write, g=g, scale=scale)
    return run(GATED_DELTA_RULE_2, tokens, initial_state, segment_ids, implementation, chunk)


@checked
def gated_delta_net_2_reference(
    q: Queries,
    k: Keys,
    v: Values,
    g: KeyLogDecays,
    erase: KeyGates,
    write: ValueGates,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
) -> Outputs:
    r"""The equation of `gated_delta_net_2`, token by token: slow, and the oracle.

        S <- (I - k (b * k)^T) Diag(e^g) S + k (w * v)^T,   o = scale S^T q

    Arguments as `gated_delta_net_2`.

    Example:
        >>> q = k = v = jnp.full((1, 3, 2, 4), 0.5)
        >>> out, state = gated_delta_net_2_reference(q, k, v, -q, erase=q, write=q)
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    arrays = {"q": q, "k": k, "v": v, "g": g, "erase": erase, "write": write}
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def token(S, q, k, v, g, erase, write):
        if normalize_qk:
            q, k = unit_length(q), unit_length(k)
        S = jnp.exp(g)[:, None] * S
        S = S - jnp.outer(k, S.T @ (erase * k)) + jnp.outer(k, write * v)
        return S, scale * (S.T @ q)

    return scan_tokens(token, initial_state, segment_ids, **arrays)


@checked
@compiled
def gated_delta_net_2_step(
    q_t: Query,
    k_t: Key,
    v_t: Value,
    g_t: KeyLogDecay,
    erase_t: KeyGate,
    write_t: ValueGate,
    state: State,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
) -> Output:
    r"""Decode one token: one read and one write of the state.

        u = w * v - S^T (e^g b * k),   o = scale (S^T (e^g q) + (q . k) u)
        S <- Diag(e^g) S + k u^T

    Arguments as `gated_delta_net_2`, without the time axis; `state` as it returns it.

    Cost:
        About 7 K V FLOPs and 8 K V bytes of a float32 state per value head: bound by memory. Donate
        the state under `jax.jit` so that it is updated in place.

    Example:
        >>> q = k = v = jnp.full((1, 2, 4), 0.5)
        >>> out, state = gated_delta_net_2_step(q, k, v, -q, q, q, jnp.zeros((1, 2, 4, 4)))
        >>> out.shape, state.shape
        ((1, 2, 4), (1, 2, 4, 4))
    """
    if normalize_qk:
        q_t, k_t = unit_length(q_t), unit_length(k_t)
    tokens = gather_tokens(q_t, k_t, v_t, erase_t, write_t, g=g_t, scale=scale)
    return step(GATED_DELTA_RULE_2, tokens, state)


ROW = recurrent(
    name="gdn2",
    title="Gated DeltaNet-2",
    paper="Hatamizadeh, Choi, Kautz, Gated DeltaNet-2 (arXiv:2605.22791)",
    inputs=(
        Q,
        K,
        V,
        CHANNEL_G,
        Input("erase", (*TOKEN, "key"), FRACTION),
        Input("write", (*TOKEN, "value"), FRACTION),
    ),
    implementations=("xla", "scan"),
    function=gated_delta_net_2,
    step=gated_delta_net_2_step,
    reference=gated_delta_net_2_reference,
    forward_flops=partial(delta_forward_flops, decays_channels=True),
)
"""The row of `MIXERS`."""
