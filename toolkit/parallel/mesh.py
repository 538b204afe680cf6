"""One helper that makes every mesh, with a stated axis type."""

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh

from toolkit._checks import checked

_AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@checked
def make_mesh(
    axes: Mapping[str, int],
    *,
    axis_type: str = "auto",
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Arrange devices in a grid with named axes.

    "auto" axes leave the sharding of intermediate arrays to the compiler. "explicit" axes make it
    part of each array's type and refuse ambiguous operations; that is the default of
    `jax.make_mesh`.

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
    if axis_type not in _AXIS_TYPES:
        raise ValueError(f"axis_type={axis_type!r}: want one of {', '.join(_AXIS_TYPES)}")
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
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(_AXIS_TYPES[axis_type],) * len(axes),
        devices=devices,
    )
