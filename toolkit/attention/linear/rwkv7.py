r"""RWKV-7: a memory that erases under one key, writes under another, and decays by channel.

    S_t = Diag(e^(g_t)) S_(t-1) - (rate_t * r_t) (r_t^T S_(t-1)) + k_t v_t^T
    o_t = scale S_t^T q_t

with r the removal key. The paper's names on the left, those of this room on the right:

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

from toolkit._checks import checked
from toolkit.attention._compiled import compiled
from toolkit.attention._shapes import (
    Chunk,
    Form,
    HeadKeyGate,
    HeadKeyGates,
    HeadKeyLogDecay,
    HeadKeyLogDecays,
    HeadKeyShare,
    HeadKeyShares,
    HeadState,
    HeadValue,
    HeadValues,
    Key,
    Keys,
    Queries,
    Query,
    SegmentIds,
)
from toolkit.attention.costs import rwkv7_forward_flops, rwkv7_step_flops
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
    q: Queries,
    k: Keys,
    v: HeadValues,
    g: HeadKeyLogDecays,
    removal_key: HeadKeyGates,
    rate: HeadKeyShares,
    *,
    scale: float = 1.0,
    initial_state: HeadState | None = None,
    segment_ids: SegmentIds | None = None,
    implementation: Form | None = None,
    chunk: Chunk | None = None,
) -> tuple[Float[Array, "batch time heads value"], HeadState]:
    r"""Mix tokens through a decaying state that erases and writes under keys of their own.

        S_t = Diag(e^(g_t)) S_(t-1) - (rate_t * r_t) (r_t^T S_(t-1)) + k_t v_t^T
        o_t = scale S_t^T q_t

    Args:
        q: [batch, time, heads, key] queries (receptance).
        k: [batch, time, heads, key] keys that values are added under.
        v: [batch, time, heads, value].
        g: [batch, time, heads, key] log-decay (natural), <= 0, else NaN.
        removal_key: [batch, time, heads, key] of unit length, what is erased under.
        rate: [batch, time, heads, key] share of it that is erased, in [0, 1].
        scale: multiplies the outputs; 1 as in the paper.
        initial_state: [batch, heads, key, value] before the first token; zero if None.
        segment_ids: [batch, time] document of each token; the state is cleared wherever the
            number changes. `initial_state` belongs to the first, the final state to the last.
        implementation: "xla" (chunks; None picks it) or "scan" (token by token).
        chunk: tokens per chunk of "xla", a power of two from 16 on; None chooses.

    Returns:
        Outputs [batch, time, heads, value] in the dtype of v, and the final state
        [batch, heads, key, value], float32 (float64 for float64 inputs). Both have
        gradients.

    Raises:
        ValueError: wrong rank, sizes that do not fit, no tokens, an unknown implementation, or a
            chunk that is no power of two from 16 on; inside `toolkit.checking()`, a gate out of
            range.
        TypeError: not floating point, or q, k and v of different dtypes.

    Cost:
        With chunks of C = 16 tokens (32 beyond 4096, unless values alone are wanted on a CPU),
        2 (4 K V + 4 C K + 4 C V) FLOPs and 2 K exponentials per token and head forward, about 2.3
        times as much more backward. Reads the inputs once.

    Source:
        Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution" (arXiv:2503.14456),
        equation 17 and section 3.

    Example:
        >>> q = k = v = jnp.ones((1, 3, 2, 4))
        >>> g, erase, rate = -q, q / 2, q / 2
        >>> out, state = rwkv7(q, k, v, g, erase, rate)
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    tokens = gather_tokens(q, k, v, removal_key, rate, g=g, scale=scale)
    return run(RWKV7, tokens, initial_state, segment_ids, implementation, chunk)


@checked
def rwkv7_reference(
    q: Queries,
    k: Keys,
    v: HeadValues,
    g: HeadKeyLogDecays,
    removal_key: HeadKeyGates,
    rate: HeadKeyShares,
    *,
    scale: float = 1.0,
    initial_state: HeadState | None = None,
    segment_ids: SegmentIds | None = None,
) -> tuple[Float[Array, "batch time heads value"], HeadState]:
    r"""The equation of `rwkv7`, token by token: slow, and the oracle.

        S <- Diag(e^g) S - (rate * r) (r^T S) + k v^T,   o = scale S^T q,   r the removal key

    Arguments as `rwkv7`.

    Example:
        >>> q = k = v = jnp.ones((1, 3, 2, 4))
        >>> g, erase, rate = -q, q / 2, q / 2
        >>> out, state = rwkv7_reference(q, k, v, g, erase, rate)
        >>> out.shape, state.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    arrays = {"q": q, "k": k, "v": v, "g": g, "removal_key": removal_key, "rate": rate}

    def token(S, q, k, v, g, removal_key, rate):
        erased = jnp.outer(rate * removal_key, S.T @ removal_key)
        S = jnp.exp(g)[:, None] * S - erased + jnp.outer(k, v)
        return S, scale * (S.T @ q)

    return scan_tokens(token, initial_state, segment_ids, **arrays)


@checked
@compiled
def rwkv7_step(
    q_t: Query,
    k_t: Key,
    v_t: HeadValue,
    g_t: HeadKeyLogDecay,
    removal_key_t: HeadKeyGate,
    rate_t: HeadKeyShare,
    state: HeadState,
    *,
    scale: float = 1.0,
) -> tuple[Float[Array, "batch heads value"], HeadState]:
    r"""Decode one token: one read and one write of the state.

        u = -S^T r,   o = scale (S^T (e^g q) + (q . (rate * r)) u + (q . k) v)
        S <- Diag(e^g) S + (rate * r) u^T + k v^T

    Arguments as `rwkv7`, without the time axis; `state` as it returns it.

    Cost:
        About 9 K V FLOPs and 8 K V bytes of a float32 state per head: bound by memory. Donate
        the state under `jax.jit` so that it is updated in place.

    Example:
        >>> q = k = v = jnp.ones((1, 2, 4))
        >>> g, erase, rate = -q, q / 2, q / 2
        >>> out, state = rwkv7_step(q, k, v, g, erase, rate, jnp.zeros((1, 2, 4, 4)))
        >>> out.shape, state.shape
        ((1, 2, 4), (1, 2, 4, 4))
    """
    tokens = gather_tokens(q_t, k_t, v_t, removal_key_t, rate_t, g=g_t, scale=scale)
    return step(RWKV7, tokens, state)


ROW = recurrent(
    name="rwkv7",
    title="RWKV-7",
    paper="Peng et al., RWKV-7 Goose (arXiv:2503.14456)",
    inputs=(
        Q,
        K,
        V,
        replace(CHANNEL_G, values=log_decay_above(-(math.e**-0.5))),  # its layer's
        replace(CHANNEL_G, name="removal_key", values=UNIT),
        replace(CHANNEL_G, name="rate", values=FRACTION),
    ),
    implementations=("xla", "scan"),
    function=rwkv7,
    step=rwkv7_step,
    reference=rwkv7_reference,
    forward_flops=rwkv7_forward_flops,
    step_flops=rwkv7_step_flops,
)
"""The row of `MIXERS`."""
