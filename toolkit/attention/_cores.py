"""Sequences or heads spread over the cores of a CPU, one jax device each.

XLA's CPU backend spreads single large products over cores, never a scan whose body is small: one
core walks through time. Sequences are independent, and so are heads, so each core takes its share
of them. Nothing is spread before `toolkit.parallel.use_cores` says so, nor inside a program that
has placed its arrays on a mesh of its own (`jax.shard_map`, `jax.set_mesh`).

A caller's arrays on one device are first cut and copied to the others: 3 of 12 ms for the forward
pass of Gated DeltaNet (2,048 tokens, 8 heads of 64, two cores). Shares that lie on their cores
already stay there.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

_AXIS = "cores"
_mesh: Mesh | None = None


def set_cores(devices: list[jax.Device] | None) -> None:
    """Spread over these devices from now on; None for not at all."""
    global _mesh
    _mesh = None
    if devices is not None and len(devices) > 1:
        _mesh = jax.make_mesh((len(devices),), (_AXIS,), (AxisType.Auto,), devices=devices)


def free_cores() -> Mesh | None:
    """The cores over which a mixer may spread where it is called; None for it alone."""
    return _mesh if jax.sharding.get_abstract_mesh().empty else None


def over_cores(
    cores: Mesh | None,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    heads: tuple[int | None, ...],
    heads_out: tuple[int, ...] | int,
) -> Any:
    """function(*arguments), by shares of the batch if the cores divide it, else of the heads.

    Called inside `jax.jit`. Every array but scalars begins with `batch`; `heads` says for each
    argument, and `heads_out` for the result or each of them, on which axis its heads lie (None: it
    has none).
    """
    if cores is None:
        return function(*arguments)
    arrays = [
        (array, axis)
        for argument, axis in zip(arguments, heads, strict=True)
        for array in jax.tree.leaves(argument)
        if array.ndim
    ]
    if all(array.shape[0] % cores.size == 0 for array, _ in arrays):
        spec = lambda axis: P(_AXIS)  # noqa: E731
    elif all(axis is None or array.shape[axis] % cores.size == 0 for array, axis in arrays):
        spec = lambda axis: P() if axis is None else P(*(None,) * axis, _AXIS)  # noqa: E731
    else:
        return function(*arguments)
    spread = jax.shard_map(
        function,
        mesh=cores,
        in_specs=tuple(
            jax.tree.map(lambda array, axis=axis: spec(axis) if array.ndim else P(), argument)
            for argument, axis in zip(arguments, heads, strict=True)
        ),
        out_specs=jax.tree.map(spec, heads_out),
    )
    return spread(*arguments)
