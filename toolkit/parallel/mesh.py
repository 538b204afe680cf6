"""One helper that makes every mesh, with a stated axis type."""

import math
from collections.abc import Mapping, Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from toolkit._checks import check_choice, checked

_AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@checked
def make_mesh(
    axes: Mapping[str, int], *, axis_type: str = "auto", devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Arrange devices in a grid with named axes.

    "auto" axes leave the sharding of intermediate arrays to the compiler. "explicit" axes make it
    part of each array's type and refuse ambiguous operations; that is the default of
    `jax.make_mesh`. Slices of a TPU pod, which a data centre's network joins, are divided by the
    outermost axes.

    Args:
        axes: name -> size, outermost first, such as {"data": 4, "model": 2}.
        axis_type: "auto" or "explicit", for all axes.
        devices: the devices to use; None takes all of `jax.devices()`.

    Returns:
        A `jax.sharding.Mesh` of shape `tuple(axes.values())`.

    Source: JAX documentation, "Explicit sharding" (axis types).

    Example:
        >>> mesh = make_mesh({"data": len(jax.devices()), "model": 1})
        >>> mesh.axis_names
        ('data', 'model')
    """
    check_choice("axis_type", axis_type, _AXIS_TYPES)
    if not axes:
        raise ValueError('axes is empty: want name -> size, such as {"data": 8}')
    for name, size in axes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"axis {name!r} has size {size!r}: want a positive integer")
    devices = list(jax.devices() if devices is None else devices)
    if math.prod(axes.values()) != len(devices):
        product = " x ".join(f"{name} {size}" for name, size in axes.items())
        raise ValueError(
            f"axes {product} = {math.prod(axes.values())} devices, but there are {len(devices)} "
            f"({devices[0].platform if devices else 'none'}); on a CPU, "
            f"simulate_devices({math.prod(axes.values())}) makes them"
        )
    types = (_AXIS_TYPES[axis_type],) * len(axes)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices > 1:
        return Mesh(_over_slices(axes, slices, devices), tuple(axes), axis_types=types)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=devices)


def _over_slices(axes: Mapping[str, int], slices: int, devices: list[jax.Device]):
    """The grid of devices of several slices, whose number is the product of outer axes' parts."""
    left, beyond = slices, []
    for size in axes.values():
        beyond.append(math.gcd(size, left))
        left //= beyond[-1]
    if left > 1:
        raise ValueError(f"axes {dict(axes)}: want axes that divide the {slices} slices evenly")
    within = [size // part for size, part in zip(axes.values(), beyond, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(
        within, beyond, devices, allow_split_physical_axes=True
    )
