"""The one entry point of layouts by name: a scheme, or several joined by "+"."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from toolkit._checks import checked
from toolkit.parallel.context.along import CONTEXT_AXIS
from toolkit.parallel.context.along import METHODS as CONTEXT_SCHEMES
from toolkit.parallel.cuts import largest_cut, with_axes
from toolkit.parallel.dataflow.auto_layout import Found, find_cuts
from toolkit.parallel.dataflow.flow import RANKING
from toolkit.parallel.layout import Layout, Placement, placements_of
from toolkit.parallel.schemes.degrees import PLAIN, axes_of_states
from toolkit.parallel.schemes.roles import heads_of, role_of

TENSOR_AXIS = "model"
DATA_SCHEMES = (*PLAIN, "hierarchical")
SCHEMES = (*DATA_SCHEMES, "tensor", *CONTEXT_SCHEMES)


@checked
def layout(
    model: Any, mesh: Mesh, scheme: str = "data", *,
    degrees: Mapping[str, int] | None = None, min_elements: int = 1024,
    head_size: int | None = None, loss_fn: Callable | None = None, batch: Any = None,
) -> Layout:  # fmt: skip
    """A layout by the name of its scheme, such as "zero3" or "zero3+tensor".

        scheme          weights, gradients, moments   the batch        per layer and step
        data (ZeRO-0)   1,   1,   1                   cut              gradients summed
        zero1           1,   1,   1/N                 cut              and weights gathered once
        zero2           1,   1/N, 1/N                 cut              as zero1
        zero3 (FSDP)    1/N, 1/N, 1/N                 cut              weights gathered twice
        hierarchical    1/d_w, 1/d_g, 1/d_o           cut              within d_w, within d_g, once
        tensor          1/M of heads, hidden size     whole            2 all-reduces each way
        ring, zigzag,   as the one beside it          cut along time   see `context_attention`,
        ulysses                                                        `context_mixer`

    The mesh axis "model" belongs to "tensor", the axis "context" to the last three, and all others
    are data parallel, the last being the nearest. ZeRO shards along these and along "context"; N is
    their product. With `loss_fn` and `batch` the model may be anyone's: "tensor" cuts what the
    traced program computes together (`auto_layout`), and ZeRO cuts no dimension over which a loop
    runs. Without them, "tensor" identifies parameters by their paths, those of `toolkit.looped`.

    Args:
        model: the model, or a pytree of its arrays or ShapeDtypeStructs.
        mesh: the devices.
        scheme: one of the names above for each kind of axis, joined by "+"; "data" is the default
            for data parallelism.
        degrees: for "hierarchical", into how many parts "weights", "gradient" and "optimizer" are
            cut, each a product of the innermost axes.
        min_elements: ZeRO replicates tensors with fewer elements.
        head_size: channels per attention head if `model` is a plain pytree, so that no head is cut
            in two. None allows any cut that divides the channels.
        loss_fn: (params, batch) -> scalar loss, with `model` or its arrays as params; it is traced.
        batch: pytree of arrays or ShapeDtypeStructs [batch, ...], of the global batch.

    Returns:
        A `Layout`: a row per parameter with the reason, and specs of gradients and moments that
        differ.

    Source: Rajbhandari et al., "ZeRO", 2020; Dash et al., "3-level hierarchical partitioning on
        Frontier", 2025, arXiv:2501.04266 (degrees per state); Shoeybi et al., "Megatron-LM", 2019.

    Example:
        >>> mesh = make_mesh({"data": 1, "model": len(jax.devices())})
        >>> params = {"feed_forward": {"up": {"kernel": jnp.ones((16, 64))}}}
        >>> found = layout(params, mesh, "tensor")
        >>> found.placements[0].reason
        'columns: a part of the hidden size each'
    """
    parts = _parts(scheme, mesh)
    if min_elements < 0:
        raise ValueError(f"min_elements={min_elements}: want at least 0")
    if head_size is not None and head_size < 1:
        raise ValueError(f"head_size={head_size}: want at least 1")
    data_axes = tuple(axis for axis in mesh.axis_names if axis not in (TENSOR_AXIS, CONTEXT_AXIS))
    nearest_first = tuple(axis for axis in reversed(mesh.axis_names) if axis != TENSOR_AXIS)
    kind = next((part for part in parts if part in DATA_SCHEMES), "data")
    axes = axes_of_states(kind, degrees, mesh, nearest_first)
    found = _from_program(loss_fn, model, batch, mesh, data_axes, "tensor" in parts)

    def choose(place: int, row: Placement) -> Placement:
        spec, reasons = PartitionSpec(), []
        if "tensor" in parts and found is not None:
            spec, reasons = found.rows[place].spec, [found.rows[place].reason]
        elif "tensor" in parts:
            spec, reason = _tensor_cut(row, mesh.shape[TENSOR_AXIS], model, head_size)
            reasons.append(reason)
        specs = dict.fromkeys(axes, spec)
        if widest := axes["optimizer"]:
            stacked = [at for where, at in found.stacked if where == place] if found else ()
            best, reason = largest_cut(row.shape, spec, mesh, widest, min_elements, stacked)
            if best is not None:
                specs = {state: with_axes(spec, best, cut) for state, cut in axes.items()}
                if not axes["weights"]:
                    what = "gradient and moments" if axes["gradient"] else "moments"
                    reason = f"whole while it is used, {what} cut: {reason}"
            elif any(spec):
                reason = reason.replace("replicated", "cut no further")
            reasons.append(reason)
        return dataclasses.replace(
            row,
            spec=specs["weights"],
            gradient=specs["gradient"],
            optimizer=specs["optimizer"],
            reason="; ".join(reasons) or "replicated: every device keeps it whole",
        )

    rows = placements_of(model, lambda shape: (PartitionSpec(), ""))
    rows = tuple(choose(place, row) for place, row in enumerate(rows))
    if "tensor" in parts and not any(TENSOR_AXIS in _used(row) for row in rows):
        cause = (
            "it knows parameters by the paths of toolkit.looped, such as "
            "blocks/0/feed_forward/up/kernel; with loss_fn= and batch= it follows the program"
            if found is None
            else "no cut of a loop in loss_fn saves time in the model"
        )
        raise ValueError(
            f"model: 'tensor' finds nothing to cut: {cause}, and {TENSOR_AXIS}="
            f"{mesh.shape[TENSOR_AXIS]} must divide heads and hidden sizes"
        )
    attention = next((part for part in parts if part in CONTEXT_SCHEMES), None)
    rows_of_batch = data_axes[0] if len(data_axes) == 1 else data_axes or None
    if attention is None:
        return Layout(mesh, rows, PartitionSpec(rows_of_batch))
    return Layout(mesh, rows, PartitionSpec(rows_of_batch, CONTEXT_AXIS), attention)


def _from_program(
    loss_fn: Callable | None, model: Any, batch: Any, mesh: Mesh, data_axes: tuple[str, ...],
    is_tensor: bool,
) -> Found | None:  # fmt: skip
    """What the traced loss says of each parameter; None without a loss."""
    if (loss_fn is None) != (batch is None):
        raise ValueError("loss_fn and batch belong together: want both or neither")
    if loss_fn is None:
        return None
    parts = math.prod(mesh.shape[axis] for axis in data_axes)
    sizes = {"data": parts, TENSOR_AXIS: mesh.shape[TENSOR_AXIS] if is_tensor else 1}
    return find_cuts(loss_fn, model, batch, sizes, "data", TENSOR_AXIS, RANKING)


def _parts(scheme: str, mesh: Mesh) -> list[str]:
    """The names in a scheme, checked against each other and against the mesh."""
    parts = scheme.split("+")
    for part in parts:
        if part not in SCHEMES:
            raise ValueError(f"scheme={scheme!r}: want {', '.join(SCHEMES)}, joined by '+'")
    for group in (DATA_SCHEMES, ("tensor", *CONTEXT_SCHEMES)):
        if len(chosen := [part for part in parts if part in group]) > 1:
            raise ValueError(f"scheme={scheme!r}: {' and '.join(chosen)} exclude each other")
    for axis, users in ((TENSOR_AXIS, ("tensor",)), (CONTEXT_AXIS, CONTEXT_SCHEMES)):
        is_used = any(part in users for part in parts)
        axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        if is_used and axis not in mesh.shape:
            raise ValueError(f"scheme={scheme!r} needs a mesh axis {axis!r}; the mesh has {axes}")
        if axis in mesh.shape and not is_used:
            raise ValueError(
                f"scheme={scheme!r} leaves the mesh axis {axis!r} idle (the mesh has {axes}); "
                f"add {' or '.join(f'+{user}' for user in users)}"
            )
    return parts


def _tensor_cut(
    row: Placement, devices: int, model: Any, head_size: int | None
) -> tuple[PartitionSpec, str]:
    role = role_of(row.path)
    if role is None:
        return PartitionSpec(), "whole: every device needs all of it"
    if role.dimension is None or role.dimension >= len(row.shape):
        return PartitionSpec(), f"whole: {role.reason}"
    size = row.shape[role.dimension]
    heads = heads_of(row.path, size, model, head_size)
    count, what = (size, "channels") if heads is None else (heads, "heads")
    if count % devices or size % devices:
        return PartitionSpec(), f"whole: {TENSOR_AXIS}={devices} does not divide {count} {what}"
    return with_axes(PartitionSpec(), role.dimension, (TENSOR_AXIS,)), role.reason


def _used(row: Placement) -> set[str]:
    return {
        axis for entry in row.spec for axis in ((entry,) if isinstance(entry, str) else entry or ())
    }
