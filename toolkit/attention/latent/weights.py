"""The weights of latent attention; the queries, latents and rotary keys computed from a token."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from toolkit._checks import check_shape
from toolkit._kinds import check_floating, shown
from toolkit._pytrees import register_dataclass
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.latent.config import LatentConfig


@register_dataclass
@dataclass(frozen=True)
class LatentWeights:
    """The weights of one layer of latent attention; a pytree.

    Attributes:
        query_up: queries of all heads, the part without position first
            [query_latent or width, heads, key + rope].
        latent_down: latents before their norm [width, latent].
        rope_key: rotary key of a token, shared by all heads [width, rope].
        latent_norm: gain of the latents' RMSNorm [latent].
        key_up: keys of all heads out of a latent [latent, heads, key].
        value_up: values likewise [latent, heads, value].
        output: [heads, value, width].
        query_down: query latents before their norm [width, query_latent]; None without.
        query_norm: gain of their RMSNorm [query_latent]; None without.
        basis: what normalised latents are multiplied by before they are kept [latent, latent];
            None: nothing. See `fold`.

    Source: DeepSeek-V2 (2024), arXiv:2405.04434, equations 9 to 19.

    Example:
        >>> config = LatentConfig(
        ...     width=64, heads=4, latent_size=32, key_size=16, rope_size=8, value_size=16
        ... )
        >>> LatentWeights.random(config, jax.random.key(0)).key_up.shape
        (32, 4, 16)
    """

    query_up: Float[Array, "query heads key_and_rope"]
    latent_down: Float[Array, "width latent"]
    rope_key: Float[Array, "width rope"]
    latent_norm: Float[Array, "latent"]
    key_up: Float[Array, "latent heads key"]
    value_up: Float[Array, "latent heads value"]
    output: Float[Array, "heads value width"]
    query_down: Float[Array, "width query"] | None = None
    query_norm: Float[Array, "query"] | None = None
    basis: Float[Array, "latent kept"] | None = None

    @classmethod
    def random(cls, config: LatentConfig, key: Array, dtype: Any = jnp.float32) -> "LatentWeights":
        """Weights drawn so that every product keeps the size of its input, gains of one."""
        shapes = shapes_of(config)
        keys = jax.random.split(key, len(shapes))
        drawn = {}
        for (name, shape), own in zip(shapes.items(), keys, strict=True):
            fan_in = shape[0] * shape[1] if name == "output" else shape[0]
            is_gain = name.endswith("norm")
            drawn[name] = (
                jnp.ones(shape, dtype)
                if is_gain
                else jax.random.normal(own, shape, dtype) * jnp.asarray(fan_in**-0.5, dtype)
            )
        return cls(**drawn)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Any], config: LatentConfig) -> "LatentWeights":
        """Weights under the names of DeepSeek's checkpoints, without the layer's prefix.

        "q_a_proj.weight", "q_a_layernorm.weight" and "q_b_proj.weight", or "q_proj.weight";
        "kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight", "kv_b_proj.weight", "o_proj.weight".
        """
        has_latent = config.query_latent_size is not None
        query = ("q_a_proj", "q_a_layernorm", "q_b_proj") if has_latent else ("q_proj",)
        names = (*query, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
        names = [f"{name}.weight" for name in names]
        if set(names) != set(tensors):
            raise ValueError(f"the tensors must be {', '.join(names)}; got {', '.join(tensors)}.")
        *of_query, down, norm, up, output = (jnp.asarray(np.asarray(tensors[n])) for n in names)
        heads, latent = config.heads, config.latent_size
        query_up = of_query[-1].T.reshape(-1, heads, config.key_size + config.rope_size)
        up = up.T.reshape(latent, heads, config.key_size + config.value_size)
        key_up, value_up = jnp.split(up, [config.key_size], axis=2)
        latent_down, rope_key = jnp.split(down.T, [latent], axis=1)
        output = output.T.reshape(heads, config.value_size, config.width)
        parts = (query_up, latent_down, rope_key, norm, key_up, value_up, output)
        return cls(*parts, *((of_query[0].T, of_query[1]) if has_latent else ()))


def shapes_of(config: LatentConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights by name, in the order of their fields; without a basis."""
    query, heads, latent = config.query_latent_size, config.heads, config.latent_size
    shapes = {
        "query_up": (query or config.width, heads, config.key_size + config.rope_size),
        "latent_down": (config.width, latent),
        "rope_key": (config.width, config.rope_size),
        "latent_norm": (latent,),
        "key_up": (latent, heads, config.key_size),
        "value_up": (latent, heads, config.value_size),
        "output": (heads, config.value_size, config.width),
    }
    if query is not None:
        shapes |= {"query_down": (config.width, query), "query_norm": (query,)}
    return shapes


def check_weights(weights: LatentWeights, config: LatentConfig) -> None:
    """Refuse weights that are not of the sizes that `config` says."""
    wanted = shapes_of(config)
    if weights.basis is not None:
        wanted["basis"] = (config.latent_size, config.latent_size)
    for field in fields(weights):
        array = getattr(weights, field.name)
        if (array is None) != (field.name not in wanted):
            what = "an array" if field.name in wanted else "None without query_latent_size"
            raise ValueError(f"weights.{field.name} must be {what}; got {shown(array)}.")
        if array is not None:
            shape = wanted[field.name]
            axes = " ".join(f"axis{i}" for i in range(len(shape)))
            check_shape(f"weights.{field.name}", array, shape, axes)
            check_floating(f"weights.{field.name}", array)


class Projected(NamedTuple):
    """What a layer computes from its tokens."""

    queries: Float[Array, "*tokens heads key"]  # without position [..., heads, key]
    rope_queries: Float[Array, "*tokens heads rope"]  # rotated [..., heads, rope]
    latents: Float[Array, "*tokens latent"]  # normalised, as they are kept [..., latent]
    rope_keys: Float[Array, "*tokens rope"]  # rotated [..., rope]


def project(
    x: Float[Array, "*tokens width"],
    weights: LatentWeights,
    positions: Int[Array, "*tokens"],
    config: LatentConfig,
) -> Projected:
    """Queries, latents and rotary keys of tokens."""
    q, q_r = queries(x, weights, positions, config)
    latents = rms_norm(x @ weights.latent_down, config.epsilon) * over(weights.latent_norm, x)
    if weights.basis is not None:
        latents = latents @ weights.basis
    return Projected(q, q_r, latents, rotated(x @ weights.rope_key, positions, config))


def queries(x: Array, weights: Any, positions: Array, config: LatentConfig) -> tuple[Array, Array]:
    """Queries of the heads that the weights have: without position, and rotated."""
    if weights.query_down is not None:
        x = rms_norm(x @ weights.query_down, config.epsilon) * over(weights.query_norm, x)
    both = jnp.einsum("...q,qhk->...hk", x, weights.query_up)
    q, q_r = jnp.split(both, [config.key_size], axis=-1)
    return q, rotated(q_r, positions, config)


def rms_norm(x: Float[Array, "*tokens size"], epsilon: float) -> Float[Array, "*tokens size"]:
    """x / sqrt(mean(x^2) + epsilon), the mean in the precision of sums."""
    wide = x.astype(accumulator(x.dtype))
    mean = jnp.square(wide).mean(axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean + epsilon)).astype(x.dtype)


def over(vector: Float[Array, "size"], x: Float[Array, "*axes any"]) -> Array:
    """A vector with as many axes as x, so that it broadcasts over the tokens."""
    return vector.reshape((1,) * (x.ndim - 1) + (-1,))


def rotated(x: Array, positions: Int[Array, "*tokens"], config: LatentConfig) -> Array:
    """Turn neighbouring channels (2i, 2i + 1) by position * f_i; heads, if any, are between."""
    if not config.rotary:
        return x
    precise = accumulator(x.dtype)
    frequencies = jnp.asarray(config.frequencies, precise)
    angles = positions[..., None].astype(precise) * over(frequencies, positions[..., None])
    cos, sin = (f(angles) * config.rotary_factor for f in (jnp.cos, jnp.sin))
    if x.ndim > angles.ndim:
        cos, sin = cos[..., None, :], sin[..., None, :]
    pairs = x.astype(precise).reshape(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)
