"""Layers that look a few tokens back, over sharded time: the last tokens are sent on."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from toolkit.parallel.axes import devices_along
from toolkit.parallel.context.checks import check_cut, documents


def look_back(
    function: Callable[..., tuple[Array, Any]], x: Float[Array, "batch time channels"],
    weights: tuple[Array | None, ...], reach: int, mesh: Mesh, *,
    axis: str, batch_axis: str | tuple[str, ...] | None,
    segment_ids: Int[Array, "batch time"] | None,
) -> Float[Array, "batch time channels"]:  # fmt: skip
    """function(x, *weights), which looks `reach` tokens back: one permute of these each way, or
    more if a device has fewer."""
    check_cut(x.shape, mesh, axis, batch_axis)

    def on_each_device(x: Array, weights: tuple[Array | None, ...], segments: Any) -> Array:
        tail = _tokens_before(x, reach, axis)
        if segments is not None:  # they count from 1; 0 stands for nothing before the first device
            is_same = _tokens_before(segments, reach, axis) == segments[:, :1]
            tail = jnp.where(is_same[..., None], tail, 0)
        return function(x, *weights, initial_state=tail, segment_ids=segments)[0]

    cut = PartitionSpec(batch_axis, axis)
    specs = (cut, PartitionSpec(), cut)
    return jax.shard_map(on_each_device, mesh=mesh, in_specs=specs, out_specs=cut, check_vma=False)(
        x, weights, documents(segment_ids, x.shape[:2])
    )


def _tokens_before(
    x: Shaped[Array, "batch time *rest"], count: int, axis: str
) -> Shaped[Array, "batch count *rest"]:
    """The last tokens of the devices before this one; zeros before the first."""
    devices, time = devices_along(axis), x.shape[1]
    pieces = []
    for hop in range(1, -(-count // time) + 1):
        wanted = x[:, -min(time, count - (hop - 1) * time) :]
        pairs = [(device, device + hop) for device in range(devices - hop)]
        pieces.insert(0, lax.ppermute(wanted, axis, pairs))
    return jnp.concatenate(pieces, axis=1)
