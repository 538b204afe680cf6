"""The two basic layouts: data parallel, and fully sharded (ZeRO-3, FSDP).

With N devices and Psi parameter bytes, per device and step (K: optimiser bytes per parameter
byte; the bytes sent are of order Psi, times (N-1)/N):

    layout          parameters and optimiser    bytes sent
    data parallel   (1 + K) Psi                 2 Psi    all-reduce of gradients
    fully sharded   (1 + K) Psi / N             3 Psi    all-gather twice, reduce-scatter once

Source: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter
models", 2020, sections 5 and 7.
"""

from typing import Any

from jax.sharding import Mesh, PartitionSpec

from toolkit._checks import check_choice, checked
from toolkit.parallel.cuts import largest_cut, with_axes
from toolkit.parallel.layout import Layout, placements_of


@checked
def data_parallel(params: Any, mesh: Mesh, *, axis: str = "data") -> Layout:
    """Replicate all parameters; each device gets its share of the batch.

    Args:
        params: pytree of arrays or ShapeDtypeStructs, for instance an `nnx.State`.
        mesh: the devices.
        axis: the mesh axis that shards the batch.

    Returns:
        A `Layout` whose rows are all replicated.

    Cost: Per device Psi bytes; a step all-reduces the gradients: 2 Psi (N-1)/N bytes sent.

    Source: Li et al., "PyTorch Distributed: Experiences on accelerating data parallel training",
        2020.

    Example:
        >>> mesh = make_mesh({"data": len(jax.devices())})
        >>> layout = data_parallel({"kernel": jnp.ones((2048, 8))}, mesh)
        >>> layout.bytes_per_device
        65536
    """
    check_choice("axis", axis, mesh.axis_names)
    reason = "replicated: every device keeps it whole"
    rows = placements_of(params, lambda shape: (PartitionSpec(), reason))
    return Layout(mesh, rows, PartitionSpec(axis))


@checked
def fully_sharded(
    params: Any, mesh: Mesh, *, axis: str = "data", min_elements: int = 1024
) -> Layout:
    """Shard every parameter over N devices; each gets its share of the batch (ZeRO-3).

    Each tensor is sharded along its largest dimension that the axis divides (the first of equals).
    Small tensors are replicated, because sharding them saves little and costs a message each.

    Args:
        params: pytree of arrays or ShapeDtypeStructs, for instance an `nnx.State`.
        mesh: the devices.
        axis: the mesh axis that shards parameters and batch.
        min_elements: tensors with fewer elements are replicated.

    Returns:
        A `Layout` whose reasons name the chosen dimension, or tell why there is none.

    Cost: Per device Psi/N bytes; a step sends 3 Psi (N-1)/N bytes: each parameter is gathered for
        the forward pass and again for the backward pass, each gradient is reduce-scattered.

    Source: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter
        models", 2020, section 5.3; Zhao et al., "PyTorch FSDP", 2023.

    Example:
        >>> mesh = make_mesh({"data": len(jax.devices())})
        >>> layout = fully_sharded({"kernel": jnp.ones((2048, 8))}, mesh)
        >>> layout.bytes_per_device == 65536 // mesh.size
        True
    """
    check_choice("axis", axis, mesh.axis_names)
    if min_elements < 0:
        raise ValueError(f"min_elements={min_elements}: want at least 0")

    def choose(shape: tuple[int, ...]) -> tuple[PartitionSpec, str]:
        whole = PartitionSpec()
        best, reason = largest_cut(shape, whole, mesh, (axis,), min_elements)
        return whole if best is None else with_axes(whole, best, (axis,)), reason

    return Layout(mesh, placements_of(params, choose), PartitionSpec(axis))
