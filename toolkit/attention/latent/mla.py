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

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from toolkit._checks import check_shape, checked
from toolkit.attention._attend import Mask, packed, positions_in_documents
from toolkit.attention._caches import check_room, continue_rows, show_overflow, write_token
from toolkit.attention._shapes import SegmentIds
from toolkit.attention.execution.cores import refuse_explicit_axes
from toolkit.attention.latent.cache import LatentCache, check_latent_cache
from toolkit.attention.latent.config import LatentConfig
from toolkit.attention.latent.slots import Implementation, attend_slots
from toolkit.attention.latent.weights import LatentWeights, Projected, check_weights, project
from toolkit.attention.softmax.forms import attend_to_keys
from toolkit.attention.softmax.scores import Context, Inputs, Options

Form = Literal["expanded", "absorbed"]


@checked
def mla(
    x: Float[Array, "batch time width"], weights: LatentWeights, config: LatentConfig, *,
    form: Form = "expanded", segment_ids: SegmentIds | None = None,
    initial_state: LatentCache | None = None,
) -> tuple[Float[Array, "batch time width"], LatentCache | None]:  # fmt: skip
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
    return _mla(x, weights, segment_ids, initial_state, config=config, form=form)


@partial(jax.jit, static_argnames=("config", "form"))
def _mla(x, weights, segment_ids, initial_state, *, config, form):
    positions = token_positions(x, segment_ids, initial_state)
    made = project(x, weights, positions, config)
    latents, rope_keys, mask, cache = appended(made, segment_ids, initial_state)
    made = made._replace(latents=latents, rope_keys=rope_keys)
    out = attend_latents(made, weights, mask, scale=config.scale, form=form)
    y = jnp.einsum("bthv,hvw->btw", out, weights.output)
    return (y if cache is None else show_overflow(y, cache)), cache


@checked
def mla_step(
    x_t: Float[Array, "batch width"], weights: LatentWeights, cache: LatentCache,
    config: LatentConfig, *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "batch width"], LatentCache]:  # fmt: skip
    """Append one token to the cache and attend to all tokens in it, in the absorbed form.

        y = sum_h O_h V_h sum_j softmax_j(scale (K_h^T q_h . c_j + p_h . r_j)) c_j

    Arguments as `mla`, without the time axis, and:

    Args:
        cache: of the tokens before this one. Numbers in slots without a token never show in the
            output or in gradients, even NaN.
        implementation: "xla", or "pallas": a kernel for NVIDIA's Hopper GPUs in bfloat16, without
            gradients. None: the kernel on a single such GPU, else "xla".

    Raises:
        ValueError: "pallas" on another platform, or with latents of other sizes than 64, 128, 192,
            256, 384 and 512 with 64 rotary channels.
        TypeError: "pallas" with other numbers than bfloat16.

    Cost:
        2 heads (2 latent + rope) FLOPs and one read of latent + rope numbers per slot ("pallas":
        per filled slot), beside one read of the weights.

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
    return _step(x_t, weights, cache, config=config, implementation=implementation)


@partial(jax.jit, static_argnames=("config", "implementation"))
def _step(x_t, weights, cache, *, config, implementation):
    refuse_explicit_axes((x_t, *jax.tree.leaves(cache)), "a step of latent attention")
    made = project(x_t, weights, cache.length, config)
    cache = write_token(cache, cache.length, axis=1, **kept(made))
    out = attend_latents_step(made, weights, cache, config.scale, implementation)
    return show_overflow(jnp.einsum("bhv,hvw->bw", out, weights.output), cache), cache


def attend_latents_step(
    made: Projected, weights: Any, cache: LatentCache, scale: float,
    implementation: Implementation | None,
) -> Float[Array, "batch heads value"]:  # fmt: skip
    """Softmax of one query per head over the filled slots, before the output projection."""
    q = absorbed_queries(made, weights)
    arrays = q, made.rope_queries, cache.latents, cache.rope_keys, cache.length
    out, _ = attend_slots(*arrays, scale=scale, implementation=implementation)
    return head_values(out.astype(q.dtype), weights)


def head_values(
    latents: Float[Array, "batch heads latent"], weights: Any
) -> Float[Array, "batch heads value"]:
    """Values of weighted latents, V_h u_h."""
    # In this order XLA for CPUs copies rows of the weights, not single numbers.
    return jnp.einsum("rhv,bhr->bhv", weights.value_up, latents)


def attend_latents(
    made: Projected, weights: Any, mask: Mask, *, scale: float, form: Form
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
    out, _ = attend_to_keys(inputs, Context(mask), Options(scale))
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


def appended(made: Projected, segment_ids, cache) -> tuple[Array, Array, Mask, Any]:
    """All latents and rotary keys, which of them the new tokens see, the new cache."""
    if cache is None:
        return made.latents, made.rope_keys, Mask(documents=packed(segment_ids)), None
    new: Any = kept(made)
    arrays, mask, cache = continue_rows(cache, segment_ids, axis=-2, **new)
    return arrays["latents"], arrays["rope_keys"], mask, cache


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
