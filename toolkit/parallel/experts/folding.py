"""The axes of a mesh that shard experts: the innermost ones, independent of their use in
attention."""

import math

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from toolkit._checks import checked


@checked
def expert_axes(
    mesh: Mesh | AbstractMesh, degree: int, *, hidden_axis: str | None = None
) -> tuple[str, ...]:
    """The innermost axes of a mesh that shard experts `degree` times.

        TP CP DP = ETP EP EDP          attention and experts share the devices, not the axes

    Axes that attention uses for heads, time or the batch serve experts too ("folding"). The
    all-to-all then stays on the innermost links; along the axes left over, experts are replicated.

    Args:
        mesh: the outermost axis first.
        degree: number of shards of the experts.
        hidden_axis: the axis that shards the hidden size of every expert, or None.

    Returns:
        Names of axes, the outermost first; none for degree 1.

    Source: Liu et al., "MoE Parallel Folding", 2025, arXiv:2504.14960, section 3.

    Example:
        >>> mesh = jax.sharding.AbstractMesh((2, 2, 2), ("data", "time", "heads"))
        >>> expert_axes(mesh, 4)
        ('time', 'heads')
        >>> expert_axes(mesh, 4, hidden_axis="heads")
        ('data', 'time')
    """
    names = [name for name in mesh.axis_names if name != hidden_axis]
    chosen = {math.prod(mesh.shape[name] for name in names[i:]): i for i in range(len(names) + 1)}
    if degree not in chosen:
        nearest = min(chosen, key=lambda product: abs(product - degree))
        raise ValueError(
            f"degree must be a product of the innermost axes of {dict(mesh.shape)}, one of "
            f"{sorted(chosen)}; got {degree}, and {nearest} is the nearest"
        )
    return tuple(names[chosen[degree] :])


@checked
def expert_specs(
    axes: tuple[str, ...], *, hidden_axis: str | None = None, fsdp_axes: tuple[str, ...] = ()
) -> dict[str, PartitionSpec]:
    """The specs of experts' weights that `sharded_mixture` expects.

    Args:
        axes: the axes that shard experts.
        hidden_axis: the axis that shards the hidden size, or None.
        fsdp_axes: axes that shard the width, along which weights are gathered before use.

    Returns:
        The `PartitionSpec` of gate, up, down, gate_bias, up_bias and down_bias by name.

    Example:
        >>> tuple(expert_specs(("model",))["down"])
        ('model', None, None)
    """
    experts, width = axes or None, fsdp_axes or None
    inner = PartitionSpec(experts, width, hidden_axis)
    return {
        "gate": inner,
        "up": inner,
        "down": PartitionSpec(experts, hidden_axis, width),
        "gate_bias": PartitionSpec(experts, hidden_axis),
        "up_bias": PartitionSpec(experts, hidden_axis),
        "down_bias": PartitionSpec(experts),
    }
