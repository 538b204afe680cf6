r"""RWKV-7: a memory that erases under one key, writes under another, and decays by channel.

The paper's names on the left, those of this room on the right:

    r (receptance)                    q
    k~ (replacement key), v           k, v
    log w = -e^-0.5 sigmoid(...)      g
    kappa^ (unit removal key)         removal_key
    a (in-context learning rate)      rate, in [0, 1], one per channel

What is erased is read before the state decays. A generalised delta rule: with equal keys, equal
rates and beta = rate it corrects as DeltaNet does.
"""

import math
from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float

import toolkit.attention._shapes as shapes
from toolkit._checks import checked
from toolkit.attention.costs import rwkv7_forward_flops, rwkv7_step_flops
from toolkit.attention.execution.compiled import compiled
from toolkit.attention.inputs import CHANNEL_G, FRACTION, UNIT, K, Q, V, log_decay_above, recurrent
from toolkit.attention.linear.engine.recurrence import run, scan_tokens, step
from toolkit.attention.linear.engine.rule import (
    Action,
    Addition,
    Correction,
    Rule,
    correcting_chunk_size,
)
from toolkit.attention.linear.engine.tokens import gather_tokens


def _action(q: Array, k: Array, v: Array, removal_key: Array, rate: Array) -> Action:
    erasure = Correction(removal_key, rate * removal_key, value=None, strength=None)
    return Action(q, correction=erasure, addition=Addition(k, v))


RWKV7 = Rule(_action, correcting_chunk_size, erases_before_decay=True)


@checked
@compiled
def rwkv7(
    q: shapes.Queries, k: shapes.Keys, v: shapes.HeadValues, g: shapes.HeadKeyLogDecays,
    removal_key: shapes.HeadKeyGates, rate: shapes.HeadKeyShares, *,
    scale: float = 1.0,
    initial_state: shapes.HeadState | None = None, segment_ids: shapes.SegmentIds | None = None,
    implementation: shapes.Form | None = None, chunk: shapes.Chunk | None = None,
) -> tuple[Float[Array, "batch time heads value"], shapes.HeadState]:  # fmt: skip
    r"""Mix tokens through a decaying state that erases and writes under keys of their own.

        S_t = Diag(e^(g_t)) S_(t-1) - (rate_t * r_t) (r_t^T S_(t-1)) + k_t v_t^T
        o_t = scale S_t^T q_t,   r the removal key

    Arguments and results as `linear_attention`, with one number of heads in all arrays, except:

    Args:
        g: [batch, time, heads, key] log-decay (natural), <= 0, else NaN.
        removal_key: [batch, time, heads, key] of unit length, what is erased under.
        rate: [batch, time, heads, key] share of it that is erased, in [0, 1].
        scale: multiplies the outputs; 1 as in the paper.
        implementation: "xla" (chunks; None picks it) or "scan" (token by token).

    Cost:
        With chunks of C = 16 tokens (32 beyond 4096, unless values alone are wanted on a CPU),
        2 (4 K V + 4 C K + 4 C V) FLOPs and 2 K exponentials per token and head forward, about 2.3
        times as much more backward. Reads the inputs once.

    Source:
        Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution" (arXiv:2503.14456),
        equation 17 and section 3.

    Example:
        >>> q = k = v = jnp.ones((1, 3, 2, 4))
        >>> out, state = rwkv7(q, k, v, -q, removal_key=q / 2, rate=q / 2)
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    tokens = gather_tokens(q, k, v, removal_key, rate, g=g, scale=scale)
    return run(RWKV7, tokens, initial_state, segment_ids, implementation, chunk)


@checked
def rwkv7_reference(
    q: shapes.Queries, k: shapes.Keys, v: shapes.HeadValues, g: shapes.HeadKeyLogDecays,
    removal_key: shapes.HeadKeyGates, rate: shapes.HeadKeyShares, *,
    scale: float = 1.0,
    initial_state: shapes.HeadState | None = None, segment_ids: shapes.SegmentIds | None = None,
) -> tuple[Float[Array, "batch time heads value"], shapes.HeadState]:  # fmt: skip
    """The equation token by token: a slow oracle. Arguments as `rwkv7`."""

    def token(S, q, k, v, g, removal_key, rate):
        erased = jnp.outer(rate * removal_key, S.T @ removal_key)
        S = jnp.exp(g)[:, None] * S - erased + jnp.outer(k, v)
        return S, S.T @ q

    arrays = {"q": q, "k": k, "v": v, "g": g, "removal_key": removal_key, "rate": rate}
    return scan_tokens(token, initial_state, segment_ids, scale, **arrays)


@checked
@compiled
def rwkv7_step(
    q_t: shapes.Query, k_t: shapes.Key, v_t: shapes.HeadValue, g_t: shapes.HeadKeyLogDecay,
    removal_key_t: shapes.HeadKeyGate, rate_t: shapes.HeadKeyShare, state: shapes.HeadState, *,
    scale: float = 1.0,
) -> tuple[Float[Array, "batch heads value"], shapes.HeadState]:  # fmt: skip
    r"""Decode one token: one read and one write of the state.

        u = -S^T r,   o = scale (S^T (e^g q) + (q . (rate * r)) u + (q . k) v)
        S <- Diag(e^g) S + (rate * r) u^T + k v^T

    Arguments as `rwkv7`, without the time axis; state as `gated_delta_net_step`.

    Cost:
        About 9 K V FLOPs and 8 K V bytes of a float32 state per head.

    Example:
        >>> q = k = v = jnp.ones((1, 2, 4))
        >>> rwkv7_step(q, k, v, -q, q / 2, q / 2, jnp.zeros((1, 2, 4, 4)))[0].shape
        (1, 2, 4)
    """
    tokens = gather_tokens(q_t, k_t, v_t, removal_key_t, rate_t, g=g_t, scale=scale)
    return step(RWKV7, tokens, state)


ROW = recurrent(
    name="rwkv7", title="RWKV-7",
    paper="Peng et al., RWKV-7 Goose (arXiv:2503.14456)",
    inputs=(
        Q, K, V,
        replace(CHANNEL_G, values=log_decay_above(-(math.e**-0.5))),  # its layer's
        replace(CHANNEL_G, name="removal_key", values=UNIT),
        replace(CHANNEL_G, name="rate", values=FRACTION),
    ),
    implementations=("xla", "scan"),
    function=rwkv7, step=rwkv7_step, reference=rwkv7_reference,
    forward_flops=rwkv7_forward_flops, step_flops=rwkv7_step_flops,
)  # fmt: skip
