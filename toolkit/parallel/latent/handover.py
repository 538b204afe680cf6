"""Prefill on many devices, and the transfer of its cache to the decoding devices."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from toolkit._checks import check_shape, checked
from toolkit.attention._attend import Mask
from toolkit.attention._checks import check_count
from toolkit.attention.latent import LatentCache, LatentConfig, LatentSlices, LatentWeights
from toolkit.attention.latent.mla import attend_latents, token_positions
from toolkit.attention.latent.weights import check_weights, project
from toolkit.parallel.axes import sum_of_parts
from toolkit.parallel.latent.schemes import AXES, Scheme, cache_cut, cache_specs, plan_of

Source = Literal["replicated", "batch", "sequence"]


@checked
def prefill(
    x: Float[Array, "batch time width"], weights: LatentWeights, config: LatentConfig, *,
    mesh: Mesh, capacity: int | None = None,
) -> tuple[Float[Array, "batch time width"], LatentCache]:  # fmt: skip
    """Read a prompt exactly, with heads sharded over all devices.

        y = sum over devices of sum_{h of the device} O_h attention_h(x)

    Args:
        x: the normalised residual stream of the prompt, replicated.
        weights: the layer's weights, folded as for decoding.
        config: its sizes.
        mesh: with the axes "latent" and "heads".
        capacity: slots of the cache; None: as many as there are tokens.

    Returns:
        The layer's output [batch, time, width] and the cache of the prompt, both replicated.

    Cost: `mla`, divided by the devices but for latents and rotary keys; one all-reduce of y.

    Source: Tang et al. (2025), arXiv:2508.15881, section 3.5 (prefill and decoding apart).

    Example:
        >>> from toolkit.attention.latent import *
        >>> c = LatentConfig(width=8, heads=2, latent_size=4, key_size=4, rope_size=2, value_size=4)
        >>> weights = LatentWeights.random(c, jax.random.key(0))
        >>> mesh = jax.make_mesh((1, 1), ("latent", "heads"))
        >>> prefill(jnp.ones((1, 3, 8)), weights, c, mesh=mesh)[1].length.tolist()
        [3]
    """
    check_weights(weights, config)
    check_shape("x", x, (*x.shape[:2], config.width), "batch time width")
    if 0 in x.shape:
        raise ValueError(f"x must hold at least one token; got shape {tuple(x.shape)}.")
    capacity = x.shape[1] if capacity is None else capacity
    check_count("capacity", capacity, x.shape[1], " token of the prompt")
    if set(mesh.shape) != set(AXES) or config.heads % mesh.size:
        raise ValueError(
            f"mesh must have the axes {' and '.join(AXES)} and divide {config.heads} heads; "
            f"got {dict(mesh.shape)}."
        )
    return _prefill(x, weights, config=config, mesh=mesh, capacity=capacity)


@partial(jax.jit, static_argnames=("config", "mesh", "capacity"))
def _prefill(x, weights, *, config, mesh, capacity):
    names = tuple(axis for axis in AXES if mesh.shape[axis] > 1)
    of_heads = {
        "query_up": P(None, names),
        "key_up": P(None, names),
        "value_up": P(None, names),
        "output": P(names),
    }
    fields: dict[str, Any] = {
        name: None if array is None else of_heads.get(name, P())
        for name, array in vars(weights).items()
    }
    specs = LatentWeights(**fields)

    def device(x, weights):
        made = project(x, weights, token_positions(x, None, None), config)
        out = attend_latents(made, weights, Mask(), scale=config.scale, form="expanded")
        y = jnp.einsum("bthv,hvw->btw", out, weights.output)
        return sum_of_parts(y, names) if names else y, made.latents, made.rope_keys

    y, *arrays = jax.shard_map(device, mesh=mesh, in_specs=(P(), specs), out_specs=P())(x, weights)
    room = [(0, 0), (0, capacity - x.shape[1]), (0, 0)]
    latents, rope_keys = (jnp.pad(array, room) for array in arrays)
    return y, LatentCache(latents, rope_keys, jnp.full(x.shape[0], x.shape[1], jnp.int32))


@checked
def hand_over(
    cache: LatentCache, sliced: LatentSlices, mesh: Mesh, *,
    scheme: Scheme = "tpla", source: Source = "replicated",
) -> LatentCache:  # fmt: skip
    """Reshard the cache of a prompt for a scheme.

        "replicated"           every device keeps its features or tokens: no collective
        "batch", "sequence"    one all-to-all of latents, and an all-gather of rotary keys

    Args:
        cache: of `prefill` or `mla`, with the latents of the folded layer.
        sliced: the layer's weights, as `decode_step` takes them.
        mesh: with the axes "latent" and "heads".
        scheme: see `decode_step`.
        source: the sharding of the cache: none, or its rows or slots along "latent".

    Returns:
        The cache for `decode_step`, latents of all slices side by side.

    Source: Tang et al. (2025), arXiv:2508.15881, section 3.5.

    Example:
        >>> from toolkit.attention.latent import *
        >>> c = LatentConfig(width=8, heads=2, latent_size=4, key_size=4, rope_size=2, value_size=4)
        >>> sliced = slice_latents(fold(LatentWeights.random(c, jax.random.key(0))), 1)
        >>> mesh = jax.make_mesh((1, 1), ("latent", "heads"))
        >>> hand_over(LatentCache.empty(2, 4, 2, 3), sliced, mesh).latents.shape
        (2, 3, 4)
    """
    plan = plan_of(mesh, sliced, scheme, "plain")
    rows, slots, _ = cache.latents.shape
    cut = {"replicated": 1, "batch": rows, "sequence": slots}[source]
    if source != "replicated" and cut % plan.slices:
        raise ValueError(
            f"cache has {cut} along {source!r}; {plan.slices} devices do not divide it."
        )
    if plan.cuts_tokens and slots % plan.heads:
        raise ValueError(f"cache has {slots} slots; {plan.heads} devices do not divide them.")
    before = {
        "replicated": P(),
        "batch": plan.spec("latent"),
        "sequence": plan.spec(None, "latent"),
    }
    specs = cache_cut(before[source], before[source])
    cache = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), cache, specs)
    features = jax.device_put(sliced.features, NamedSharding(mesh, P()))
    return _hand_over(cache, features, mesh=mesh, plan=plan, source=source)


@partial(jax.jit, static_argnames=("mesh", "plan", "source"))
def _hand_over(cache, features, *, mesh, plan, source):
    after = cache_specs(plan)
    axis = {"replicated": None, "batch": 0, "sequence": 1}[source] if plan.slices > 1 else None
    before = plan.spec(*[None] * axis, "latent") if axis is not None else P()

    def device(cache, features):
        latents, rope_keys = cache.latents, cache.rope_keys
        if axis is not None:
            latents = latents[:, :, features.ravel()]
            latents = lax.all_to_all(latents, "latent", split_axis=2, concat_axis=axis, tiled=True)
            rope_keys = lax.all_gather(rope_keys, "latent", axis=axis, tiled=True, to="invarying")
        else:
            own = features[lax.axis_index("latent")] if plan.slices > 1 else features[0]
            latents = latents[:, :, own]
        if plan.cuts_tokens and plan.heads > 1:  # token p is the column's p % heads
            turn = lax.axis_index("heads")
            latents, rope_keys = (_every(array, plan.heads, turn) for array in (latents, rope_keys))
        return LatentCache(latents, rope_keys, cache.length)

    specs = cache_cut(before, before)
    return jax.shard_map(device, mesh=mesh, in_specs=(specs, P()), out_specs=after)(cache, features)


def _every(array: Array, stride: int, start: Array) -> Array:
    """Slots start, start + stride, ... of [batch, slots, size]."""
    batch, slots, size = array.shape
    return array.reshape(batch, slots // stride, stride, size)[:, :, start]
