"""The mesh axes over which functions communicate: what they must be."""

from jax import lax
from jax.sharding import AxisType, Mesh


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
