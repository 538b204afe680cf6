"""The mesh axes of a spec, and checks of those over which functions communicate."""

from jax import Array, lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from toolkit._compat import varying_axes


def devices_along(axis: str) -> int:
    """The number of devices of a mesh axis; ValueError outside of a `shard_map` over it."""
    try:
        return lax.axis_size(axis)
    except NameError:
        raise ValueError(
            f"axis={axis!r}: no such mesh axis here; wanted one of a jax.shard_map around this call"
        ) from None


def axes_of(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension, as tuples: P("a", None, ("b", "c")) -> [a], [], [b, c]."""
    none = (None, PartitionSpec.UNCONSTRAINED)
    return [
        () if entry in none else (entry,) if isinstance(entry, str) else tuple(entry)
        for entry in spec
    ]


def without(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
    """The spec without some mesh axes."""
    kept = [tuple(axis for axis in entry if axis not in axes) for entry in axes_of(spec)]
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in kept))


def only(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
    """The spec with no other mesh axes than these."""
    kept = [tuple(axis for axis in entry if axis in axes) for entry in axes_of(spec)]
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in kept))


def unshared(spec: PartitionSpec, finest: PartitionSpec, batch: tuple[str, ...]) -> PartitionSpec:
    """The spec without the batch's axes where another axis cuts the same dimension.

    There the pieces of the batch's axes are no neighbours: the compiler gathers these, mostly
    biases.
    """
    is_shared = any({*batch} & {*axes} and {*axes} - {*batch} for axes in axes_of(finest))
    return without(spec, batch) if is_shared else spec


def check_auto_axes(mesh: Mesh) -> None:
    """ValueError for explicit axes: functions on whole arrays need auto axes."""
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"mesh has axis types {mesh.axis_types}: want auto axes, "
            'make_mesh(..., axis_type="auto")'
        )


def sum_of_parts(x: Array, axes: tuple[str, ...]) -> Array:
    """`lax.psum`, refused for a value that does not differ along all of `axes`.

    The check needs `jax.shard_map` with `check_vma`, and costs nothing at run time.
    """
    if alike := [axis for axis in axes if axis not in varying_axes(x)]:
        raise ValueError(
            f"the sum of {x.dtype}{list(x.shape)} over {', '.join(map(repr, axes))} would count it "
            f"once per device: it is the same along {', '.join(map(repr, alike))}."
        )
    return lax.psum(x, axes)
