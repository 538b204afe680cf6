"""Layouts by logical axes: every dimension has a name, and rules map names to mesh axes.

flax, t5x and MaxText describe layouts this way. Unlike `auto_layout`, it needs a name for every
dimension and knows no costs.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from toolkit._checks import checked
from toolkit.parallel.layout import Layout, Placement, placements_of


@checked
def logical_layout(
    params: Any, mesh: Mesh, names: Mapping[str, Sequence[str | None]],
    rules: Sequence[tuple[str, str | tuple[str, ...] | None]], *,
    batch_axis: str = "data",
) -> Layout:  # fmt: skip
    """Shard parameters by the names of their dimensions, as flax's logical axis rules do.

    The first rule with the dimension's name, whose mesh axis that parameter does not use yet,
    applies.

    Args:
        params: pytree of arrays or ShapeDtypeStructs.
        mesh: the devices.
        names: pattern (a regular expression searched in a parameter's path) -> names of its
            dimensions, each a string or None; the first match counts. Other parameters are
            replicated.
        rules: pairs (name, mesh axis, or several in a tuple, or None).
        batch_axis: the mesh axis that shards the batch.

    Returns:
        A `Layout` whose reasons are the names.

    Source: flax, `flax.linen.logical_to_mesh_axes`; Roberts et al., "Scaling up models and data
        with t5x and seqio", 2022, section 2.

    Example:
        >>> mesh = make_mesh({"data": 1, "model": len(jax.devices())})
        >>> names, rules = {"up/kernel": ("embed", "mlp")}, (("mlp", "model"), ("embed", None))
        >>> layout = logical_layout({"up": {"kernel": jnp.ones((4, 64))}}, mesh, names, rules)
        >>> tuple(layout.placements[0].spec), layout.placements[0].reason
        ((None, 'model'), 'logical axes: embed, mlp')
    """
    in_rules = (("rules", axis) for _, cut in rules for axis in _tuple(cut))
    for given, axis in (("batch_axis", batch_axis), *in_rules):
        if axis not in mesh.shape:
            known = ", ".join(map(repr, mesh.shape))
            raise ValueError(f"{given}: no axis {axis!r}; the mesh has {known}")
    for pattern, own in names.items():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"names: {pattern!r} is not a regular expression: {error}") from None
        known = [name for name in own if name is not None]
        if len(known) != len(set(known)):
            raise ValueError(f"names: {pattern!r} names a dimension twice: {', '.join(known)}")

    def choose(row: Placement) -> Placement:
        pattern = next((pattern for pattern in names if re.search(pattern, row.path)), None)
        if pattern is None:
            return Placement(row.path, row.shape, row.dtype, row.spec, "whole: nobody named it")
        if len(names[pattern]) != len(row.shape):
            raise ValueError(
                f"names: {pattern!r} names {len(names[pattern])} dimensions, {row.path} has "
                f"{len(row.shape)}"
            )
        reason = f"logical axes: {', '.join(str(name) for name in names[pattern])}"
        spec = PartitionSpec(*_axes(names[pattern], rules))
        return Placement(row.path, row.shape, row.dtype, spec, reason)

    rows = placements_of(params, lambda shape: (PartitionSpec(), ""))
    return Layout(mesh, tuple(map(choose, rows)), PartitionSpec(batch_axis))


def _tuple(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes or ()


def _axes(
    names: Sequence[str | None], rules: Sequence[tuple[str, str | tuple[str, ...] | None]]
) -> list[str | tuple[str, ...] | None]:
    found: dict[str, str | tuple[str, ...] | None] = {}
    for name, cut in rules:
        used = {axis for cut in found.values() for axis in _tuple(cut)}
        if name in names and name not in found and not used & {*_tuple(cut)}:
            found[name] = cut
    axes = [None if name is None else found.get(name) for name in names]
    while axes and axes[-1] is None:
        axes.pop()
    return axes
