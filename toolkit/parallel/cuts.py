"""A further cut of a parameter: which dimension, and its spec."""

import math
from collections.abc import Collection

from jax.sharding import Mesh, PartitionSpec

from toolkit.parallel.axes import axes_of


def with_axes(spec: PartitionSpec, dimension: int, axes: tuple[str, ...]) -> PartitionSpec:
    """The spec with `axes` added to a dimension."""
    entries = axes_of(spec) + [()] * (dimension + 1 - len(spec))
    entries[dimension] += axes
    while entries and not entries[-1]:
        entries.pop()
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))


def largest_cut(
    shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh, axes: tuple[str, ...],
    min_elements: int, stacked: Collection[int] = (),
) -> tuple[int | None, str]:  # fmt: skip
    """The dimension to shard along `axes` in addition to `spec`, or None, and the reason.

    It is the largest that the axes divide (the first of equals), is not sharded, and is none of
    `stacked`, over which a loop runs. Small tensors are replicated, because sharding them saves
    little and costs a message each.
    """
    parts = math.prod(mesh.shape[axis] for axis in axes)
    elements = math.prod(shape)
    if elements < min_elements:
        return None, f"replicated: small ({elements} elements < {min_elements})"
    taken = axes_of(spec) + [()] * (len(shape) - len(spec))
    free = [index for index in range(len(shape)) if not taken[index] and index not in stacked]
    fitting = [index for index in free if shape[index] and shape[index] % parts == 0]
    if not fitting:
        named = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
        return None, f"replicated: no free dimension is divisible by {named}"
    best = max(fitting, key=lambda index: shape[index])
    return best, f"dimension {best} ({shape[best]}) is the largest divisible by {parts}"
