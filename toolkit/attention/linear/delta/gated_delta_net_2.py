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

import toolkit.attention._shapes as shapes
from toolkit._checks import checked
from toolkit.attention.costs import delta_forward_flops
from toolkit.attention.execution.compiled import compiled
from toolkit.attention.inputs import CHANNEL_G, FRACTION, TOKEN, Input, K, Q, V, recurrent
from toolkit.attention.linear.engine.recurrence import run, scan_tokens, step
from toolkit.attention.linear.engine.rule import Action, Correction, Rule, correcting_chunk_size
from toolkit.attention.linear.engine.tokens import gather_tokens


def _action(q: Array, k: Array, v: Array, erase: Array, write: Array) -> Action:
    return Action(q, Correction(erase * k, k, write * v, strength=None), addition=None)


GATED_DELTA_RULE_2 = Rule(_action, correcting_chunk_size)


@checked
@compiled
def gated_delta_net_2(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, g: shapes.KeyLogDecays,
    erase: shapes.KeyGates, write: shapes.ValueGates, *,
    scale: float | None = None, normalize_qk: bool = False,
    initial_state: shapes.State | None = None, segment_ids: shapes.SegmentIds | None = None,
    implementation: shapes.Form | None = None, chunk: shapes.Chunk | None = None,
) -> shapes.Outputs:  # fmt: skip
    r"""Mix tokens through a state that erases by key channel and writes by value channel.

        S_t = (I - k_t (b_t * k_t)^T) Diag(e^(g_t)) S_(t-1) + k_t (w_t * v_t)^T
        o_t = scale S_t^T q_t

    Arguments and results as `gated_delta_net`, without beta, except:

    Args:
        g: [batch, time, value_heads, key] log-decay (natural), <= 0, else NaN; -inf clears
            a channel.
        erase: [batch, time, value_heads, key] share b of what the key recalls that is erased, in
            [0, 1]; up to 2 where a step may reflect.
        write: [batch, time, value_heads, value] share w of the value that is written, likewise.
        implementation: "xla" (chunks; None picks it) or "scan" (token by token).

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
    tokens = gather_tokens(q, k, v, erase, write, g=g, scale=scale, normalize_qk=normalize_qk)
    return run(GATED_DELTA_RULE_2, tokens, initial_state, segment_ids, implementation, chunk)


@checked
def gated_delta_net_2_reference(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, g: shapes.KeyLogDecays,
    erase: shapes.KeyGates, write: shapes.ValueGates, *,
    scale: float | None = None, normalize_qk: bool = False,
    initial_state: shapes.State | None = None, segment_ids: shapes.SegmentIds | None = None,
) -> shapes.Outputs:  # fmt: skip
    """The equation token by token: a slow oracle. Arguments as `gated_delta_net_2`."""

    def token(S, q, k, v, g, erase, write):
        S = jnp.exp(g)[:, None] * S
        S = S - jnp.outer(k, S.T @ (erase * k)) + jnp.outer(k, write * v)
        return S, S.T @ q

    arrays = {"q": q, "k": k, "v": v, "g": g, "erase": erase, "write": write}
    return scan_tokens(token, initial_state, segment_ids, scale, normalize_qk, **arrays)


@checked
@compiled
def gated_delta_net_2_step(
    q_t: shapes.Query, k_t: shapes.Key, v_t: shapes.Value, g_t: shapes.KeyLogDecay,
    erase_t: shapes.KeyGate, write_t: shapes.ValueGate, state: shapes.State, *,
    scale: float | None = None, normalize_qk: bool = False,
) -> shapes.Output:  # fmt: skip
    r"""Decode one token: one read and one write of the state.

        u = w * v - S^T (e^g b * k),   o = scale (S^T (e^g q) + (q . k) u)
        S <- Diag(e^g) S + k u^T

    Arguments as `gated_delta_net_2`, without the time axis; state and cost as
    `gated_delta_net_step`.

    Example:
        >>> q = k = v = jnp.full((1, 2, 4), 0.5)
        >>> gated_delta_net_2_step(q, k, v, -q, q, q, jnp.zeros((1, 2, 4, 4)))[0].shape
        (1, 2, 4)
    """
    tokens = gather_tokens(
        q_t, k_t, v_t, erase_t, write_t, g=g_t, scale=scale, normalize_qk=normalize_qk
    )
    return step(GATED_DELTA_RULE_2, tokens, state)


ROW = recurrent(
    name="gdn2", title="Gated DeltaNet-2",
    paper="Hatamizadeh, Choi, Kautz, Gated DeltaNet-2 (arXiv:2605.22791)",
    inputs=(
        Q, K, V,
        CHANNEL_G,
        Input("erase", (*TOKEN, "key"), FRACTION),
        Input("write", (*TOKEN, "value"), FRACTION),
    ),
    implementations=("xla", "scan"),
    function=gated_delta_net_2, step=gated_delta_net_2_step, reference=gated_delta_net_2_reference,
    forward_flops=partial(delta_forward_flops, decays_channels=True),
)  # fmt: skip
