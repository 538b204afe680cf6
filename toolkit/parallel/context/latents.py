"""Latent attention over sharded time: every device gathers all latents.

A latent is much smaller than the keys and values of all heads. It is gathered once; every device
expands the keys and values of all tokens and attends with its own queries.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from toolkit.attention._attend import Mask, Segments
from toolkit.attention.latent import LatentConfig, LatentWeights
from toolkit.attention.latent.mla import attend_latents
from toolkit.attention.latent.weights import project
from toolkit.parallel.context.checks import check_cut, documents


def context_latents(
    x: Float[Array, "batch time width"], weights: LatentWeights, config: LatentConfig, mesh: Mesh,
    *,
    axis: str, batch_axis: str | tuple[str, ...] | None,
    segment_ids: Int[Array, "batch time"] | None,
) -> Float[Array, "batch time width"]:  # fmt: skip
    """`mla` on whole arrays with time sharded along a mesh axis: an all-gather forward and a
    reduce-scatter backward of latent + rope numbers per token."""
    check_cut(x.shape, mesh, axis, batch_axis)

    def on_each_device(x: Array, weights: LatentWeights, segments: Array | None) -> Array:
        time = x.shape[1]
        first = lax.axis_index(axis) * time
        made = project(x, weights, first + jnp.arange(time)[None], config)
        small = jnp.concatenate([made.latents, made.rope_keys], axis=-1)
        small = lax.all_gather(small, axis, axis=1, tiled=True)
        latents, rope_keys = jnp.split(small, [made.latents.shape[-1]], axis=-1)
        made = made._replace(latents=latents, rope_keys=rope_keys)
        both = None
        if segments is not None:
            both = Segments(segments, lax.all_gather(segments, axis, axis=1, tiled=True))
        mask = Mask(query_start=first, documents=both)
        out = attend_latents(made, weights, mask, scale=config.scale, form="expanded")
        return jnp.einsum("bthv,hvw->btw", out, weights.output)

    cut = PartitionSpec(batch_axis, axis)
    specs = (cut, PartitionSpec(), cut)
    return jax.shard_map(on_each_device, mesh=mesh, in_specs=specs, out_specs=cut, check_vma=False)(
        x, weights, documents(segment_ids, x.shape[:2])
    )
