r"""Forgetting attention (FoX): softmax attention whose tokens fade by gates that the data choose.

    o_t = sum_(s <= t) softmax_s(scale q_t . k_s + D_ts) v_s,    D_ts = g_(s+1) + ... + g_t

The log-gate g <= 0 of a token weakens all tokens before it, so D is the decay that a linear mixer
with the same gates would apply; `fading.py` says how it is summed.
"""

from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

import toolkit.attention._shapes as shapes
from toolkit._checks import checked
from toolkit._pytrees import register_dataclass
from toolkit.attention._attend import (
    Mask,
    fixed_scale,
    packed,
    run_numbers,
)
from toolkit.attention._caches import (
    Rows,
    check_room,
    continue_rows,
    cut_as_arrays_are,
    show_overflow,
    write_token,
)
from toolkit.attention._checks import check_dtype, check_sizes
from toolkit.attention.costs import (
    STATE_BYTES,
    softmax_forward_bytes,
    softmax_forward_flops,
    softmax_state_bytes,
    softmax_step_bytes,
    softmax_step_flops,
)
from toolkit.attention.execution.cores import free_cores, over_cores
from toolkit.attention.execution.derivatives import without_transpose
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.inputs import G, K, Mixer, Q, V
from toolkit.attention.softmax.cache import KVCache, attend_to_slots
from toolkit.attention.softmax.positions.fading import attend_fading, sum_of_later
from toolkit.attention.softmax.rows import ROWS
from toolkit.attention.softmax.scores import Inputs, Options


@register_dataclass
@dataclass(frozen=True)
class ForgettingCache(Rows):
    """Keys, values and log-gates of the tokens seen so far; a pytree.

    Attributes:
        keys: [batch, key_value_heads, key, capacity].
        values: [batch, key_value_heads, value, capacity].
        log_gates: [batch, heads, capacity], at least float32; of every token its own, so that
            tokens can be taken back.
        length: tokens seen so far by each row, int32.

    Example:
        >>> cache = ForgettingCache.empty(1, 4, 2, 8, 8, capacity=16)
        >>> cache.keys.shape, cache.log_gates.shape
        ((1, 2, 8, 16), (1, 4, 16))
    """

    keys: Annotated[Float[Array, "batch key_value_heads key capacity"], shapes.TOKENS]
    values: Annotated[Float[Array, "batch key_value_heads value capacity"], shapes.TOKENS]
    log_gates: Float[Array, "batch heads capacity"]
    length: Int[Array, "batch"]

    @classmethod
    def empty(
        cls, batch: int, heads: int, key_value_heads: int, key_size: int, value_size: int,
        capacity: int, dtype=jnp.float32,
    ) -> "ForgettingCache":  # fmt: skip
        """Make a cache without tokens, with room for `capacity` of them in every row."""
        check_sizes(
            "a ForgettingCache",
            batch=batch,
            heads=heads,
            key_value_heads=key_value_heads,
            key_size=key_size,
            value_size=value_size,
            capacity=capacity,
        )
        check_dtype(dtype)
        return cls(
            jnp.zeros((batch, key_value_heads, key_size, capacity), dtype),
            jnp.zeros((batch, key_value_heads, value_size, capacity), dtype),
            jnp.zeros((batch, heads, capacity), accumulator(dtype)),
            jnp.zeros(batch, jnp.int32),
        )

    @property
    def capacity(self) -> int:
        """Slots for tokens."""
        return self.keys.shape[-1]


@checked
def forgetting_attention(
    q: shapes.Queries, k: shapes.SharedKeys, v: shapes.SharedValues, g: shapes.HeadLogDecays, *,
    scale: float | None = None,
    segment_ids: shapes.SegmentIds | None = None, initial_state: ForgettingCache | None = None,
    implementation: Literal["dense", "chunked"] | None = None,
) -> tuple[shapes.HeadValues, ForgettingCache | None]:  # fmt: skip
    r"""Causal softmax attention in which a token's gate weakens all tokens before it.

        o_t = sum_(s <= t) softmax_s(scale q_t . k_s + g_(s+1) + ... + g_t) v_s

    Args:
        q: queries [batch, time, heads, key].
        k: keys [batch, time, key_value_heads, key]; heads is a multiple of key_value_heads.
        v: values [batch, time, key_value_heads, value].
        g: logarithms of the forget gates [batch, time, heads], <= 0, else NaN. With -inf no later
            token sees any before this one.
        scale: factor of the products; None for key ** -0.5.
        segment_ids: document number of every token [batch, time]; equal numbers in a row are one
            document, and a token sees its own.
        initial_state: tokens before these, the first document of which these continue; they are
            seen too, and the new ones are appended.
        implementation: "dense" (all scores at once), "chunked" (128 queries at a time, computed
            again on the way back), or None for "chunked". Both compute the same function.

    Returns:
        The output [batch, time, heads, value] in q's dtype, and the new cache (None without
        `initial_state`).

    Cost:
        2 batch heads time^2 (key + value) FLOPs, and 5/4 from 4,096 tokens on, where chunks of
        queries meet the keys in four stages; about 8 (5) time^2 additions per head for the decays;
        three times that more backward. Memory is linear in time when chunked, batch heads time^2
        when dense.

    Source: Lin, Nikishin, He, Courville (2025), arXiv:2503.02130, section 3.

    Example:
        >>> q = k = v = jnp.ones((1, 3, 2, 4))
        >>> out, _ = forgetting_attention(q, k, v, -jnp.ones((1, 3, 2)))
        >>> out.shape
        (1, 3, 2, 4)
    """
    q, scale = fixed_scale(q, scale)
    rows = q.shape[1] if implementation == "dense" else ROWS
    how = (("scale", scale), ("rows", rows))
    if initial_state is not None:
        check_room(initial_state, q.shape[1], segment_ids)
        return _continue(how, q, k, v, g, segment_ids, initial_state)
    return _spread(free_cores(), how, q, k, v, g, segment_ids), None


# Compiled as a whole, or an eager call would compile its loops anew every time.
@partial(jax.jit, static_argnums=(0, 1))
def _spread(cores, how, *arrays):
    def share(q, k, v, g, segment_ids):
        k, v, g = (jnp.moveaxis(x, 1, -1) for x in (k, v, _gates(g, q)))
        mask = Mask(documents=packed(segment_ids))
        out = attend_fading(Inputs(q, k, v), g, mask, **dict(how))
        return without_transpose(out)

    return over_cores(cores, share, arrays, heads=(2, 2, 2, 2, None), heads_out=2)


@partial(jax.jit, static_argnums=0)
def _continue(how, *arrays):
    *tokens, cache = arrays

    def share(q, k, v, g, segment_ids, cache):
        k, v, g = (jnp.moveaxis(x, 1, -1) for x in (k, v, _gates(g, q)))
        arrays, mask, cache = continue_rows(
            cache, segment_ids, axis=-1, keys=k, values=v, log_gates=g
        )
        k, v, g = (arrays[name] for name in ("keys", "values", "log_gates"))
        out = without_transpose(attend_fading(Inputs(q, k, v), g, mask, **dict(how)))
        return show_overflow(out, cache), cache

    return cut_as_arrays_are(share, tokens, cache, heads=(2, 2, 2, 2, None), heads_out=(2,))


def _gates(g: Array, q: Array) -> Array:
    """Gates in the precision of sums; NaN where they are above 0."""
    g = g.astype(accumulator(q.dtype))
    return jnp.where(g <= 0, g, jnp.nan)


@checked
def forgetting_attention_reference(
    q: shapes.Queries, k: shapes.SharedKeys, v: shapes.SharedValues, g: shapes.HeadLogDecays, *,
    scale: float | None = None,
    segment_ids: shapes.SegmentIds | None = None,
) -> tuple[shapes.HeadValues, None]:  # fmt: skip
    r"""The equation of `forgetting_attention`, token by token: slow, and the oracle.

        D <- D + g_t for all earlier tokens,   o_t = sum_s softmax_s(scale q_t . k_s + D_s) v_s

    Arguments as `forgetting_attention`.
    """
    group, dtype, time = q.shape[2] // k.shape[2], q.dtype, q.shape[1]
    g = _gates(g, q)
    q, k, v = (x.astype(g.dtype) for x in (q, k, v))
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    document = jnp.zeros(q.shape[:2], jnp.int32)
    if segment_ids is not None:
        document = run_numbers(segment_ids)
    token = jnp.arange(time, dtype=jnp.int32)[None]

    def attend(decays, t):
        decays = jnp.where((token < t)[..., None], decays + g[:, t][:, None], 0)
        seen = ((token <= t) & (document == document[:, t][:, None]))[..., None]
        scores = factor * jnp.einsum("bhk,bshk->bsh", q[:, t], k) + decays
        weights = jax.nn.softmax(scores, axis=1, where=seen)
        return decays, jnp.einsum("bsh,bshv->bhv", weights, v)

    with jax.default_matmul_precision("highest"):
        _, out = lax.scan(attend, jnp.zeros_like(g), token[0])
    return jnp.moveaxis(out, 0, 1).astype(dtype), None


@checked
def forgetting_attention_step(
    q_t: shapes.Query, k_t: shapes.SharedKey, v_t: shapes.SharedValue, g_t: shapes.HeadLogDecay,
    cache: ForgettingCache, *,
    scale: float | None = None,
) -> tuple[shapes.HeadValue, ForgettingCache]:  # fmt: skip
    r"""Append one token to the cache and attend to all tokens in it, each with its decay.

        o_t = sum_(s <= t) softmax_s(scale q_t . k_s + g_(s+1) + ... + g_t) v_s

    Arguments as `forgetting_attention`, without the time axis; `cache` holds the tokens before this
    one.

    Cost:
        2 batch heads capacity (key + value) FLOPs, and one read of the cache, which decides the
        time; in place when the cache is donated.

    Example:
        >>> q = k = v = jnp.ones((1, 2, 4))
        >>> cache = ForgettingCache.empty(1, 2, 2, 4, 4, capacity=8)
        >>> out, cache = forgetting_attention_step(q, k, v, -jnp.ones((1, 2)), cache)
        >>> out.shape, cache.length.tolist()
        ((1, 2, 4), [1])
    """
    check_room(cache, 1)
    q_t, scale = fixed_scale(q_t, scale)
    return _step(scale, q_t, k_t, v_t, g_t, cache)


@partial(jax.jit, static_argnums=0)
def _step(scale, *arrays):
    *tokens, cache = arrays
    step = partial(_step_share, Options(scale))
    return cut_as_arrays_are(step, tokens, cache, heads=(1, 1, 1, 1), heads_out=(1,))


def _step_share(options, q_t, k_t, v_t, g_t, cache):
    slot, (batch, heads, _) = cache.length, q_t.shape
    new = {"keys": k_t, "values": v_t, "log_gates": _gates(g_t, q_t)}
    cache = write_token(cache, slot, axis=-1, **new)
    index = jnp.arange(cache.capacity, dtype=slot.dtype)[None]
    visible = (index <= slot[:, None])[:, None]
    gates = jnp.where(visible, cache.log_gates, 0)
    is_wrong = jnp.isnan(gates).any(axis=-1)
    decays = sum_of_later(jnp.where(jnp.isnan(gates), 0, gates))
    visible &= decays != -jnp.inf
    q, visible, decays = (x.reshape(batch, k_t.shape[1], -1, x.shape[-1]) for x in (
        q_t, visible, decays))  # fmt: skip
    tokens = KVCache(cache.keys, cache.values, cache.length, cache.length)
    out, _ = attend_to_slots(q, tokens, visible, -decays, options)
    out = jnp.where(is_wrong[..., None], jnp.nan, out.reshape(batch, heads, -1))
    return show_overflow(out, cache).astype(q_t.dtype), cache


def _empty_state(batch, heads, key, value, capacity, dtype):
    return ForgettingCache.empty(batch, heads, heads, key, value, capacity, dtype)


def _with_gates(cost: Any, more: int = 0) -> Any:
    """Bytes of softmax attention, and a gate per token and head."""

    def total(batch, tokens, heads, key, value, *, element_bytes=4):
        gates = batch * heads * (tokens + more) * STATE_BYTES
        return cost(batch, tokens, heads, key, value, element_bytes=element_bytes) + gates

    return total


ROW = Mixer(
    name="fox", title="Forgetting attention",
    paper="Lin, Nikishin, He, Courville, Forgetting Transformer (arXiv:2503.02130)",
    is_linear_time=False,
    inputs=(Q, K, V, G),
    implementations=("dense", "chunked"),
    options=MappingProxyType({}),
    function=forgetting_attention, step=forgetting_attention_step,
    reference=forgetting_attention_reference,
    empty_state=_empty_state,
    forward_flops=softmax_forward_flops, forward_bytes=_with_gates(softmax_forward_bytes),
    step_flops=softmax_step_flops, step_bytes=_with_gates(softmax_step_bytes, more=1),
    state_bytes=_with_gates(softmax_state_bytes),
)  # fmt: skip
"""The row of `MIXERS`."""
