"""The mesh axes over which functions communicate: what they must be."""

from jax import Array, lax
from jax.sharding import AxisType, Mesh

from toolkit._compat import varying_axes


def devices_along(axis: str) -> int:
    """Devices of a mesh axis here; ValueError where no `shard_map` has given it."""
    try:
        return lax.axis_size(axis)
    except NameError:
        raise ValueError(
            f"axis={axis!r}: no such mesh axis here; wanted one of a jax.shard_map around this call"
        ) from None


def check_auto_axes(mesh: Mesh) -> None:
    """Whole arrays come in as the compiler placed them: ValueError for explicit axes."""
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"mesh has axis types {mesh.axis_types}: want auto axes, "
            'make_mesh(..., axis_type="auto")'
        )


def sum_of_parts(x: Array, axes: tuple[str, ...]) -> Array:
    """`lax.psum` of what differs along all of `axes`; of what does not, it would be a multiple.

    Under `jax.shard_map` with `check_vma`, when traced: nothing is left of it in the program.
    """
    if alike := [axis for axis in axes if axis not in varying_axes(x)]:
        raise ValueError(
            f"the sum of {x.dtype}{list(x.shape)} over {', '.join(map(repr, axes))} would count it "
            f"once per device: it is the same along {', '.join(map(repr, alike))}."
        )
    return lax.psum(x, axes)
