r"""Multi-head latent attention (MLA): all keys and values of a token come out of one latent.

    c_j = RMSNorm(x_j W_c)        r_j = rope(x_j W_r)                kept in the cache
    s_hij = scale (q_hi . K_h c_j + p_hi . r_j)                      q plain, p rotated
    y_i = sum_h O_h V_h sum_j softmax_j(s_hij) c_j

"expanded" makes keys K_h c_j and values V_h c_j of every token first, and runs softmax attention
with heads of key + rope and value channels: right for many queries per token. "absorbed" moves K_h
to the query, K_h^T q_hi, and V_h behind the sum, and all heads attend to one head of
latent + rope channels: 3.4 times the operations in DeepSeek-V3 and 71 times fewer bytes, right for
decoding. Both are the same function.

Source: DeepSeek-V2 (2024), arXiv:2405.04434, section 2.1 and appendix C.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from toolkit._checks import checked
from toolkit.attention._attend import masked_softmax
from toolkit.attention._caches import check_room, continue_rows, show_overflow, write_token
from toolkit.attention._checks import check_shape
from toolkit.attention._precision import accumulator
from toolkit.attention._shapes import SegmentIds
from toolkit.attention._visibility import Extent, packed, positions_in_documents
from toolkit.attention.latent.cache import LatentCache, check_latent_cache
from toolkit.attention.latent.config import LatentConfig
from toolkit.attention.latent.weights import LatentWeights, Projected, check_weights, project
from toolkit.attention.softmax.forms import attend_to_keys
from toolkit.attention.softmax.scores import Context, Inputs, Options

Form = Literal["expanded", "absorbed"]
BLOCK = 512
"""Slots that a step meets at a time on CPUs: what it has read for the scores, a core still has at
hand for the sum."""


@checked
def mla(
    x: Float[Array, "batch time width"],
    weights: LatentWeights,
    config: LatentConfig,
    *,
    form: Form = "expanded",
    segment_ids: SegmentIds | None = None,
    initial_state: LatentCache | None = None,
) -> tuple[Float[Array, "batch time width"], LatentCache | None]:
    """Multi-head latent attention over a sequence, causal, from stream to stream.

        y_i = sum_h O_h V_h sum_{j <= i} softmax_j(scale (q_hi . K_h c_j + p_hi . r_j)) c_j

    Args:
        x: the residual stream, normalised.
        weights: the layer's.
        config: its sizes.
        form: "expanded" for many tokens, "absorbed" for few against a long cache; the same numbers.
        segment_ids: document number of every token; equal numbers in a row are one document, and a
            token sees its own.
        initial_state: tokens before these, the first document of which these continue; they are
            seen too, and the new ones are appended.

    Returns:
        What attention adds to the stream [batch, time, width], and the new cache (None without
        `initial_state`).

    Raises:
        ValueError: shapes that do not fit, an unknown form, a full cache.
        TypeError: not floating point, dtypes that differ.

    Cost:
        heads time^2 (key + rope + value) FLOPs per sequence when expanded, heads time^2
        (2 latent + rope) when absorbed, beside 2 per parameter and token; memory linear in time.

    Source: DeepSeek-V2 (2024), arXiv:2405.04434, equations 9 to 19.

    Example:
        >>> config = LatentConfig(
        ...     width=8, heads=2, latent_size=4, key_size=4, rope_size=2, value_size=4)
        >>> weights = LatentWeights.random(config, jax.random.key(0))
        >>> mla(jnp.ones((1, 3, 8)), weights, config)[0].shape
        (1, 3, 8)
    """
    _check(x, "batch time width", weights, config, initial_state)
    if initial_state is not None:
        check_room(initial_state, x.shape[1], segment_ids)
    if segment_ids is not None:
        check_shape("segment_ids", segment_ids, x.shape[:2], "batch time")
    return _mla(x, weights, segment_ids, initial_state, config=config, form=form)


@partial(jax.jit, static_argnames=("config", "form"))
def _mla(x, weights, segment_ids, initial_state, *, config, form):
    positions = token_positions(x, segment_ids, initial_state)
    made = project(x, weights, positions, config)
    latents, rope_keys, extent, segments, cache = appended(made, segment_ids, initial_state)
    made = made._replace(latents=latents, rope_keys=rope_keys)
    out = attend_latents(made, weights, extent, segments, scale=config.scale, form=form)
    y = jnp.einsum("bthv,hvw->btw", out, weights.output)
    return (y if cache is None else show_overflow(y, cache)), cache


@checked
def mla_step(
    x_t: Float[Array, "batch width"],
    weights: LatentWeights,
    cache: LatentCache,
    config: LatentConfig,
) -> tuple[Float[Array, "batch width"], LatentCache]:
    """Append one token to the cache and attend to all tokens in it, in the absorbed form.

        y = sum_h O_h V_h sum_j softmax_j(scale (K_h^T q_h . c_j + p_h . r_j)) c_j

    Arguments as `mla`, without the time axis; `cache` holds the tokens before this one. Numbers in
    slots without a token never show in the output, even NaN.

    Cost:
        2 heads (2 latent + rope) FLOPs and one read of latent + rope numbers per slot, beside one
        read of the weights.

    Example:
        >>> config = LatentConfig(
        ...     width=8, heads=2, latent_size=4, key_size=4, rope_size=2, value_size=4)
        >>> weights = LatentWeights.random(config, jax.random.key(0))
        >>> y_t, cache = mla_step(jnp.ones((1, 8)), weights, LatentCache.empty(1, 4, 2, 3), config)
        >>> y_t.shape, cache.length.tolist()
        ((1, 8), [1])
    """
    _check(x_t, "batch width", weights, config, cache)
    check_room(cache, 1)
    return _step(x_t, weights, cache, config=config)


@partial(jax.jit, static_argnames="config")
def _step(x_t, weights, cache, *, config):
    made = project(x_t, weights, cache.length, config)
    cache = write_token(cache, cache.length, axis=1, **kept(made))
    visible = jnp.arange(cache.capacity, dtype=jnp.int32)[None] < cache.length[:, None]
    out = attend_latents_step(made, weights, cache, visible, config.scale)
    return show_overflow(jnp.einsum("bhv,hvw->bw", out, weights.output), cache), cache


def attend_latents_step(
    made: Projected,
    weights: Any,
    cache: LatentCache,
    visible: Bool[Array, "batch slots"],
    scale: float,
) -> Float[Array, "batch heads value"]:
    """Softmax of one query per head over the visible slots, before the output projection."""
    q = absorbed_queries(made, weights)

    def attended(latents, rope_keys, visible):
        scores = dot_slots(q, latents) + dot_slots(made.rope_queries, rope_keys)
        p, total, lse = masked_softmax(scale * scores, visible[:, None])
        return weighted_latents(p, latents, visible) / total, lse

    def whole(*arrays):
        return attended(*arrays)[0]

    arrays, by_blocks = (cache.latents, cache.rope_keys, visible), partial(_by_blocks, attended)
    if cache.capacity <= 2 * BLOCK:
        out = whole(*arrays)
    else:
        out = lax.platform_dependent(*arrays, cpu=by_blocks, default=whole)
    return head_values(out.astype(q.dtype), weights)


def _by_blocks(attended: Callable, *arrays: Array) -> Float[Array, "batch heads latent"]:
    """Attention to all slots, some at a time: softmaxes are merged by the logs of their sums."""
    slots = arrays[0].shape[1]

    def block(start):
        first = jnp.minimum(start, slots - BLOCK)  # the last one overlaps the one before
        *rows, visible = (lax.dynamic_slice_in_dim(x, first, BLOCK, axis=1) for x in arrays)
        is_new = first + jnp.arange(BLOCK, dtype=jnp.int32) >= start
        return attended(*rows, visible & is_new[None])

    def merge(before, start):
        out, lse = before
        new, own = block(start)
        total = jnp.logaddexp(lse, own)
        return (out * jnp.exp(lse - total) + new * jnp.exp(own - total), total), None

    starts = jnp.arange(0, slots, BLOCK, dtype=jnp.int32)
    return lax.scan(merge, block(starts[0]), starts[1:])[0][0]


def dot_slots(
    q: Float[Array, "batch heads size"], rows: Float[Array, "batch slots size"]
) -> Float[Array, "batch heads slots"]:
    """Products of one query per head with every slot, in the precision of sums."""
    # On CPUs XLA takes two thirds of the time with the long operand first.
    precise = accumulator(rows.dtype)
    return jnp.einsum("bsr,bhr->bsh", rows, q, preferred_element_type=precise).swapaxes(1, 2)


def head_values(
    latents: Float[Array, "batch heads latent"], weights: Any
) -> Float[Array, "batch heads value"]:
    """Values of weighted latents, V_h u_h."""
    # In this order XLA for CPUs copies rows of the weights, not single numbers.
    return jnp.einsum("rhv,bhr->bhv", weights.value_up, latents)


def weighted_latents(
    p: Float[Array, "batch heads slots"],
    latents: Float[Array, "batch slots latent"],
    visible: Bool[Array, "batch slots"],
) -> Float[Array, "batch heads latent"]:
    """Sum of the latents of visible slots, in the precision of p."""
    weights = p.astype(latents.dtype)
    out = jnp.einsum("bhs,bsr->bhr", weights, latents, preferred_element_type=p.dtype)

    def without_the_others():  # 0 * NaN is NaN: slower, and right where an empty slot holds one
        clean = jnp.where(visible[..., None], latents, 0)
        return jnp.einsum("bhs,bsr->bhr", weights, clean, preferred_element_type=p.dtype)

    return lax.cond(jnp.isfinite(out).all(), lambda: out, without_the_others)


def attend_latents(
    made: Projected, weights: Any, extent: Extent, segments: Any, *, scale: float, form: Form
) -> Float[Array, "batch time heads value"]:
    """Causal attention of all queries to all latents, before the output projection."""
    latents, rope_keys = made.latents, made.rope_keys[:, :, None]
    if form == "absorbed":
        q, k, v = absorbed_queries(made, weights), latents[:, :, None], latents[:, :, None]
    else:
        q = made.queries
        k, v = (
            jnp.einsum("bsr,rhk->bshk", latents, up) for up in (weights.key_up, weights.value_up)
        )
        rope_keys = jnp.broadcast_to(rope_keys, (*k.shape[:3], rope_keys.shape[3]))
    q = jnp.concatenate([q, made.rope_queries], axis=-1)
    k = jnp.concatenate([k, rope_keys], axis=-1)
    inputs = Inputs(q, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 3, 1))
    out, _ = attend_to_keys(inputs, Context(extent, segments), Options(scale, (None, 0)))
    return out if form == "expanded" else jnp.einsum("bthr,rhv->bthv", out, weights.value_up)


def absorbed_queries(made: Projected, weights: Any) -> Float[Array, "*tokens heads latent"]:
    """Queries in the space of latents, K_h^T q_h."""
    return jnp.einsum("...hk,rhk->...hr", made.queries, weights.key_up)


def token_positions(x, segment_ids, cache) -> Array:
    """Places of the tokens of [batch, time]: in their documents where there is a cache."""
    index = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    if cache is None:  # scores depend on differences alone
        return index
    if segment_ids is None:
        return index + cache.length[:, None]
    return positions_in_documents(segment_ids, cache.length)


def appended(made: Projected, segment_ids, cache) -> tuple[Array, Array, Extent, Any, Any]:
    """All latents and rotary keys that the new tokens may see, where they lie, the new cache."""
    if cache is None:
        extent = Extent(0, 0, made.latents.shape[1])
        return made.latents, made.rope_keys, extent, packed(segment_ids), None
    new: Any = kept(made)
    arrays, extent, segments, cache = continue_rows(cache, segment_ids, axis=-2, **new)
    return arrays["latents"], arrays["rope_keys"], extent, segments, cache


def kept(made: Projected) -> dict[str, Array]:
    """What the cache keeps of tokens, by its fields."""
    return {"latents": made.latents, "rope_keys": made.rope_keys}


def _check(x, axes, weights, config, cache):
    check_weights(weights, config)
    name = "x" if "time" in axes else "x_t"
    check_shape(name, x, (*x.shape[:-1], config.width), axes)
    if 0 in x.shape:
        raise ValueError(f"{name} must hold at least one token; got shape {tuple(x.shape)}.")
    for field, array in vars(weights).items():
        if array is not None and array.dtype != x.dtype:
            raise TypeError(
                f"{name} and weights must share a dtype; got {x.dtype}, {field} {array.dtype}."
            )
    if cache is not None:
        check_latent_cache(cache, x, config.latent_size, config.rope_size)
