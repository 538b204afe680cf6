r"""Mamba-3: a state space whose input is a trapezoid between two tokens, and whose state turns.

Queries and keys are turned first, pair by pair of their channels, by the sum of all angles so far:
relative to the token that wrote it, a state has turned by the angles in between, as one with
complex eigenvalues does. mix = 1 gives Mamba-2 with such a rotation.

The paper's names on the left, those of this room on the right:

    C, B, x        q, k, v
    Delta A        g           log-decay
    Delta          dt          time step
    lambda         mix         share of the interval's input that its end gives
    Delta theta    angle       by which each pair of channels turns
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

import toolkit.attention._shapes as shapes
from toolkit._checks import checked
from toolkit._pytrees import register_dataclass
from toolkit.attention.costs import STATE_BYTES, additive_forward_flops, delta_step_flops
from toolkit.attention.execution.compiled import compiled
from toolkit.attention.execution.precision import accumulator, precise_einsum
from toolkit.attention.inputs import FRACTION, TOKEN, G, Input, K, Q, V, Values, recurrent
from toolkit.attention.linear.engine.quarantine import quarantine
from toolkit.attention.linear.engine.recurrence import (
    document_starts,
    first_state,
    log_decays,
    run,
    scan_tokens,
    spread,
)
from toolkit.attention.linear.engine.rule import ADDITIVE_RULE
from toolkit.attention.linear.engine.tokens import Tokens, gather_tokens, own_keys

MOST_OF_A_PART = 3217 / 2**15  # of a turn's 64th, with so few digits that multiples are exact

Angles = Float[Array, "batch time value_heads pairs"]
Angle = Float[Array, "batch value_heads pairs"]
Mixes = Annotated[Float[Array, "batch time value_heads"], shapes.SHARE]
Mix = Annotated[Float[Array, "batch value_heads"], shapes.SHARE]


@register_dataclass
@dataclass(frozen=True)
class Mamba3State:
    """What a sequence leaves: H, the last token's turned key and its value, and the sum of angles,
    float32.

    Example:
        >>> state = Mamba3State(*map(jnp.zeros, [(1, 2, 4, 8), (1, 2, 4), (1, 2, 8), (1, 2, 2)]))
        >>> state.memory.shape
        (1, 2, 4, 8)
    """

    memory: Float[Array, "batch value_heads key value"]
    key: Float[Array, "batch value_heads key"]
    value: Float[Array, "batch value_heads value"]
    angle: Float[Array, "batch value_heads pairs"]


@checked
@compiled
def mamba3(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, g: shapes.LogDecays, dt: shapes.TimeSteps,
    mix: Mixes, angle: Angles, *,
    scale: float = 1.0,
    initial_state: Mamba3State | None = None, segment_ids: shapes.SegmentIds | None = None,
    implementation: Literal["xla", "scan"] | None = None, chunk: shapes.Chunk | None = None,
) -> tuple[shapes.Values, Mamba3State]:  # fmt: skip
    r"""Mix tokens through a state space of second order whose state turns.

        H_t = e^(g_t) (H_(t-1) + (1 - mix_t) dt_t k_(t-1) v_(t-1)^T) + mix_t dt_t k_t v_t^T
        o_t = scale H_t^T q_t,   q_t, k_t turned by angle_1 + ... + angle_t

    This is the paper's form of one input and one output per head. Arguments and results as
    `mamba2`, except:

    Args:
        mix: [batch, time, value_heads] share of the token itself in the input, in [0, 1].
        angle: [batch, time, value_heads, key // 2] by which each pair of neighbouring channels of
            q and k turns, in radians; 0 for those that do not.
        implementation: "xla" (chunks; None picks it) or "scan" (token by token).

    Returns:
        Outputs [batch, time, value_heads, value] in the dtype of v, and the final state.

    Cost:
        That of `mamba2`, and about 12 K + 4 V FLOPs, a sine and a cosine per pair of channels, per
        token and value head.

    Source:
        Lahoti, Li, Chen, Wang, Bick, Kolter, Dao, Gu, "Mamba-3: Improved Sequence Modeling using
        State Space Principles" (arXiv:2603.15569), section 3.

    Example:
        >>> q = k = v = jnp.ones((1, 3, 2, 4))
        >>> one = jnp.ones((1, 3, 2))
        >>> out, state = mamba3(q, k, v, -one, one, mix=one / 2, angle=q[..., :2])
        >>> out.shape, state.memory.shape
        ((1, 3, 2, 4), (1, 2, 4, 4))
    """
    _check_pairs(angle, k)
    tokens = gather_tokens(q, k, v, dt, mix, angle, g=g, scale=scale)
    share = partial(_share, implementation, chunk)
    return spread(share, tokens, initial_state, segment_ids)


def _check_pairs(angle: Array, k: Array) -> None:
    if angle.shape[-1] != k.shape[-1] // 2:
        raise ValueError(
            f"angle must have {k.shape[-1] // 2} pairs, half of the {k.shape[-1]} key channels; "
            f"got {angle.shape[-1]}."
        )


def _turned(x: Array, angle: Array) -> Array:
    """Pairs of neighbouring channels turned; an odd last one stays."""
    pairs = x[..., : 2 * angle.shape[-1]].reshape(*angle.shape, 2)
    (first, second), cos, sin = (pairs[..., 0], pairs[..., 1]), jnp.cos(angle), jnp.sin(angle)
    turned = jnp.stack([first * cos - second * sin, first * sin + second * cos], axis=-1)
    rest = x[..., 2 * angle.shape[-1] :]
    return jnp.concatenate([turned.reshape(*x.shape[:-1], -1), rest], axis=-1)


def _angles(angle: Array, earlier: Array, starts: Array | None) -> Array:
    """Sums of angles since the document began, the first of which continues from `earlier`.

    Whole 64ths of a turn add up exactly, whole turns are dropped, and what is left is small.
    """
    begins = jnp.zeros(angle.shape[:2], jnp.int32)
    if starts is not None:
        index = jnp.arange(angle.shape[1], dtype=jnp.int32)[None]
        begins = lax.cummax(jnp.where(starts, index, 0), axis=1)

    def since_beginning(x: Array) -> Array:
        total = jnp.cumsum(x, axis=1)
        return total - jnp.take_along_axis(total - x, begins[..., None, None], axis=1)

    parts = jnp.round(lax.stop_gradient(angle) * (32 / np.pi))
    rest = angle - parts * MOST_OF_A_PART - parts * (np.pi / 32 - MOST_OF_A_PART)
    turned = jnp.mod(since_beginning(parts), 64) * (np.pi / 32) + since_beginning(rest)
    return turned + jnp.where(begins[..., None, None] == 0, earlier[:, None], 0)


def _share(
    form: Any, chunk: int | None, tokens: Tokens,
    initial_state: Mamba3State | None, segment_ids: shapes.SegmentIds | None,
) -> tuple[Array, Mamba3State]:  # fmt: skip
    """The trapezoid as a sum: what is behind a token enters with both its weights, and the token
    itself beside the state, so that no output reads a later token."""
    tokens = own_keys(tokens)
    (*_, angle), dtype = tokens.arrays, tokens.g.dtype
    k, v = tokens.arrays[1:3]
    empty = _empty_state(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1], 0, dtype)
    state = first_state((*tokens.arrays, tokens.g), initial_state, empty)
    starts = None if segment_ids is None else document_starts(segment_ids)
    value_dtype = v.dtype
    tokens, state, poison = quarantine(tokens, state, initial_state is not None, starts)
    q, k, v, dt, mix, angle = (x.astype(dtype) for x in tokens.arrays)

    total = _angles(angle, state.angle, starts)
    q, k = _turned(q, total), _turned(k, total)

    def shifted(first: Array, x: Array) -> Array:
        return jnp.concatenate([first[:, None], x[:, :-1]], axis=1)

    own = mix * dt
    entering = shifted(jnp.zeros_like(own[:, 0]), own) + (1 - mix) * dt
    if starts is not None:
        entering = jnp.where(starts[..., None], 0, entering)
    entering *= jnp.exp(tokens.g[..., 0])
    before = shifted(state.key, k), entering[..., None] * shifted(state.value, v)
    past = gather_tokens(q, *before, g=tokens.g[..., 0], scale=1.0)
    out, memory = run(ADDITIVE_RULE, past, state.memory, segment_ids, form, chunk)
    written = own[..., None] * v
    out += jnp.sum(q * k, axis=-1, keepdims=True) * written
    memory += k[:, -1, ..., None] * written[:, -1, :, None]
    angle = jnp.mod(total[:, -1], 2 * np.pi)
    out, state = poison.shown(
        out * tokens.scale.astype(dtype), Mamba3State(memory, k[:, -1], v[:, -1], angle)
    )
    return out.astype(value_dtype), state


@checked
def mamba3_reference(
    q: shapes.Queries, k: shapes.Keys, v: shapes.Values, g: shapes.LogDecays, dt: shapes.TimeSteps,
    mix: Mixes, angle: Angles, *,
    scale: float = 1.0,
    initial_state: Mamba3State | None = None, segment_ids: shapes.SegmentIds | None = None,
) -> tuple[shapes.Values, Mamba3State]:  # fmt: skip
    """The equation token by token: a slow oracle. Arguments as `mamba3`."""

    _check_pairs(angle, k)

    def token(state, q, k, v, g, dt, mix, angle):
        angle = state.angle + angle
        q, k = _turned(q, angle), _turned(k, angle)
        H = state.memory + (1 - mix) * dt * jnp.outer(state.key, state.value)
        H = jnp.exp(g) * H + mix * dt * jnp.outer(k, v)
        return Mamba3State(H, k, v, jnp.mod(angle, 2 * np.pi)), H.T @ q

    arrays = {"q": q, "k": k, "v": v, "g": g, "dt": dt, "mix": mix, "angle": angle}
    return scan_tokens(token, initial_state, segment_ids, scale, False, _empty_state, **arrays)


@checked
@compiled
def mamba3_step(
    q_t: shapes.Query, k_t: shapes.Key, v_t: shapes.Value, g_t: shapes.LogDecay,
    dt_t: shapes.TimeStep, mix_t: Mix, angle_t: Angle, state: Mamba3State, *,
    scale: float = 1.0,
) -> tuple[shapes.Value, Mamba3State]:  # fmt: skip
    r"""Decode one token: one read and one write of the state.

        H <- e^g (H + (1 - mix) dt k' v'^T) + mix dt k v^T,   o = scale H^T q

    with k' and v' of the token before. Arguments as `mamba3`, without the time axis; `state` as it
    returns it.

    Cost:
        About 7 K V FLOPs and 8 K V bytes of a float32 state per value head: bound by memory.

    Example:
        >>> q = k = v = jnp.ones((1, 2, 4))
        >>> one = jnp.ones((1, 2))
        >>> state = MIXERS["mamba3"].empty_state(1, 2, 4, 4, 8, "float32")
        >>> mamba3_step(q, k, v, -one, one, one / 2, q[..., :2], state)[0].shape
        (1, 2, 4)
    """
    _check_pairs(angle_t, k_t)
    token = own_keys(gather_tokens(q_t, k_t, v_t, dt_t, mix_t, angle_t, g=g_t, scale=scale))
    dtype = token.g.dtype
    q, k, v, dt, mix, angle = (x.astype(dtype) for x in token.arrays)
    memory, key, value, earlier = (
        x.astype(dtype) for x in (state.memory, state.key, state.value, state.angle)
    )
    angle += earlier
    q, k = _turned(q, angle), _turned(k, angle)
    decay, own = jnp.exp(log_decays(token.g))[..., None], (mix * dt)[..., None]
    before = ((1 - mix) * dt)[..., None] * key
    H = decay * (memory + before[..., None] * value[..., None, :])
    H += (own * k)[..., None] * v[..., None, :]
    out = precise_einsum("bhkv,bhk->bhv", H, q) * token.scale.astype(dtype)
    return out.astype(v_t.dtype), Mamba3State(H, k, v, jnp.mod(angle, 2 * np.pi))


def _empty_state(batch, heads, key, value, capacity, dtype):
    zeros = partial(jnp.zeros, dtype=accumulator(dtype))
    rows = batch, heads
    memory, angle = zeros((*rows, key, value)), zeros((*rows, key // 2))
    return Mamba3State(memory, zeros((*rows, key)), zeros((*rows, value)), angle)


def _state_bytes(batch, context, heads, key, value, *, element_bytes=4):
    return batch * heads * (key * value + key + value + key // 2) * STATE_BYTES


ROW = recurrent(
    name="mamba3", title="Mamba-3",
    paper="Lahoti et al., Mamba-3 (arXiv:2603.15569)",
    transition=None,
    inputs=(
        Q, K, V, G,
        Input("dt", TOKEN, FRACTION),
        Input("mix", TOKEN, FRACTION),
        Input("angle", (*TOKEN, "pairs"), Values(-np.pi, np.pi, lambda x: np.pi * np.tanh(x))),
    ),
    implementations=("xla", "scan"),
    function=mamba3, step=mamba3_step, reference=mamba3_reference,
    empty_state=_empty_state,
    forward_flops=additive_forward_flops, step_flops=delta_step_flops,
    state_bytes=_state_bytes,
)  # fmt: skip
