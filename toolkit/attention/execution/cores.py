"""Spread sequences or heads over devices: the cores of a CPU, or the devices that hold the arrays.

XLA's CPU backend spreads single large products over cores, never a scan whose body is small: one
core walks through time. Sequences are independent, and so are heads, so each core takes its share
of them. Nothing is spread before `toolkit.parallel.use_cores` says so, nor inside a program that
has placed its arrays on a mesh of its own (`jax.shard_map`, `jax.set_mesh`).

A caller's arrays on one device are first cut and copied to the others: 3 of 12 ms for the forward
pass of Gated DeltaNet (2,048 tokens, 8 heads of 64, two cores). Shares that lie on their cores
already stay there.

Arrays on a mesh with explicit axes (the default of `jax.make_mesh`) carry how batch and heads are
cut: each device computes the share that it holds, value and gradient.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

_AXIS = "cores"
_mesh: Mesh | None = None


def set_cores(devices: list[jax.Device] | None) -> None:
    """Spread over these devices from now on; None turns it off."""
    global _mesh
    _mesh = None
    if devices is not None and len(devices) > 1:
        _mesh = jax.make_mesh((len(devices),), (_AXIS,), (AxisType.Auto,), devices=devices)


def free_cores() -> Mesh | None:
    """The cores over which a mixer may spread where it is called; None if it may not."""
    return None if _mesh is None or not jax.sharding.get_abstract_mesh().empty else _mesh


class Cut(NamedTuple):
    """The axes of a mesh along which the batch, and the heads, are cut."""

    mesh: Mesh | AbstractMesh
    batch: Any
    heads: Any

    def spec(self, shape: tuple[int, ...], heads: int | None) -> P:
        """The spec of an array with heads on axis `heads`; else the first axis is the batch."""
        names = [self.batch if axis == 0 else None for axis in range(len(shape))]
        if heads is None or not shape:
            return P(*names)
        names[heads] = self.heads
        if heads < 0:
            names = [None if size == 1 else name for name, size in zip(names, shape, strict=True)]
        return P(*names)

    def out_spec(self, heads: int | None) -> P:
        """The spec of a result."""
        if heads is None or self.heads is None:
            return P(self.batch)
        return P(self.batch, *(None,) * (heads - 1), self.heads)


def over_cores(
    cores: Mesh | None, function: Callable[..., Any], arguments: tuple[Any, ...],
    heads: tuple[int | None, ...], heads_out: tuple[int | None, ...] | int,
) -> Any:  # fmt: skip
    """Run function(*arguments) inside `jax.jit`, each device on a share of the batch or the heads.

    Arrays with explicit axes determine the cut; otherwise the batch is cut if the cores divide it,
    else the heads. `heads` names for each argument, and `heads_out` for each result, the axis of
    its heads: None without heads, and counted from the end if axes may have size 1, meaning all.
    Every array but scalars begins with `batch`, or without cores with its heads.
    """
    arrays = [
        (array, axis)
        for argument, axis in zip(arguments, heads, strict=True)
        for array in jax.tree.leaves(argument)
        if np.ndim(array)  # a number outside `jax.jit` is no array
    ]
    explicit = _explicit_cut(arrays)
    cut = explicit or _cut_by_cores(cores, arrays)
    if cut is None:
        return function(*arguments)

    def specs(argument, axis):
        return jax.tree.map(lambda array: cut.spec(np.shape(array), axis), argument)

    in_specs = tuple(map(specs, arguments, heads))
    if explicit:
        places = jax.tree.map(lambda spec: NamedSharding(cut.mesh, spec), in_specs)
        arguments = jax.sharding.reshard(arguments, places)
    is_one = isinstance(heads_out, int)
    out_specs = cut.out_spec(heads_out) if is_one else tuple(map(cut.out_spec, heads_out))
    names = set(_explicit_axes(cut.mesh)) if explicit else set(cut.mesh.axis_names)
    spread = jax.shard_map(
        function, mesh=cut.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names
    )
    return spread(*arguments)


def refuse_explicit_axes(arrays: Iterable[Any], what: str) -> None:
    """Refuse arrays cut along explicit axes, which loops do not carry, before JAX does."""
    for array in arrays:
        if any(_axes_of(array)):
            raise NotImplementedError(
                f"{what} is not available for arrays cut along explicit axes of a mesh, here "
                f"{jax.typeof(array)}; make the mesh with axis_types=(AxisType.Auto, ...), or call "
                "inside jax.shard_map."
            )


def _cut_by_cores(cores: Mesh | None, arrays: list[tuple[Any, int | None]]) -> Cut | None:
    if cores is None:
        return None
    if all(array.shape[0] % cores.size == 0 for array, _ in arrays):
        return Cut(cores, _AXIS, None)
    if all(axis is None or array.shape[axis] % cores.size == 0 for array, axis in arrays):
        return Cut(cores, None, _AXIS)
    return None


def _explicit_cut(arrays: list[tuple[Any, int | None]]) -> Cut | None:
    """How arrays on explicit axes are cut, all alike; None where none is."""
    batch, heads, mesh = set(), set(), None
    for array, axis in arrays:
        for at, names in enumerate(_axes_of(array)):
            if not names:
                continue
            axis = axis if axis is None else axis % array.ndim
            if at not in (0, axis):
                raise NotImplementedError(
                    f"an array is cut along its axis {at}, {jax.typeof(array)}; attention "
                    "supports explicit axes on batch and heads only: reshard it."
                )
            (heads if at == axis else batch).add(names)
            mesh = jax.typeof(array).sharding.mesh
    if mesh is None:
        return None
    if len(batch) > 1 or len(heads) > 1:
        raise ValueError(
            f"arrays are cut differently along the axes of a mesh: the batch along "
            f"{sorted(batch)}, the heads along {sorted(heads)}; cut all alike, or not at all."
        )
    cut = Cut(mesh, *(names.pop() if names else None for names in (batch, heads)))
    if cut.heads:
        count = math.prod(mesh.shape[name] for name in cut.heads)
        for array, axis in arrays:
            if axis is not None and axis >= 0 and array.shape[axis] % count:
                raise ValueError(
                    f"{array.shape[axis]} heads of {jax.typeof(array)} are not divided by {count}, "
                    f"the size of {cut.heads}, along which other arrays are cut."
                )
    return cut


def _explicit_axes(mesh: Mesh | AbstractMesh) -> list[str]:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [name for name, kind in kinds if kind == AxisType.Explicit]


def _axes_of(array: Any) -> list[tuple[str, ...]]:
    """For every axis of an array, the explicit mesh axes along which it is cut."""
    sharding = jax.typeof(array).sharding
    explicit = set(_explicit_axes(sharding.mesh)) if not sharding.mesh.empty else set()
    named = ((names,) if isinstance(names, str) else names or () for names in sharding.spec)
    return [tuple(n for n in names if n in explicit) for names in named] if explicit else []
