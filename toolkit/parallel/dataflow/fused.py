"""Products that a program splits by columns at once, as of fused queries, keys and values.

    q, k, v = split(x w + b)       becomes       q = x w_q + b_q, ...,     w_q, w_k, w_v = split(w)

A device that holds neighbouring columns of w holds other columns of q, k and v than it needs. Where
activations are split, they change devices, forward and backward; here the weights do, which are
fewer than the tokens' numbers, and their gradients.
"""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from toolkit.parallel.dataflow.programs import REMATERIALISED, equations_of

_BETWEEN = ("add", "mul", "convert_element_type")


def separated(program: ClosedJaxpr) -> ClosedJaxpr:
    """The same program with a product for each part, also inside of its scans."""
    return ClosedJaxpr(_everywhere(_separated, with_splits(program).jaxpr), program.consts)


def with_splits(program: ClosedJaxpr) -> ClosedJaxpr:
    """The same program with one split in place of slices that are all columns of an array."""
    return ClosedJaxpr(_everywhere(_with_splits, program.jaxpr), program.consts)


def _everywhere(change: Callable[[Jaxpr], list[Any]], jaxpr: Jaxpr) -> Jaxpr:
    equations = []
    for equation in change(jaxpr):
        if equation.primitive.name in ("scan", *REMATERIALISED):
            body = equation.params["jaxpr"]
            inner = _everywhere(change, body if isinstance(body, Jaxpr) else body.jaxpr)
            body = inner if isinstance(body, Jaxpr) else ClosedJaxpr(inner, body.consts)
            equation = equation.replace(params=equation.params | {"jaxpr": body})
        equations.append(equation)
    return jaxpr.replace(eqns=equations)


def _uses(jaxpr: Jaxpr) -> Counter:
    atoms = [atom for equation in jaxpr.eqns for atom in equation.invars]
    return Counter(atom for atom in (*atoms, *jaxpr.outvars) if isinstance(atom, Var))


def _separated(jaxpr: Jaxpr) -> list[Any]:
    makers = {out: equation for equation in jaxpr.eqns for out in equation.outvars}
    uses, instead = _uses(jaxpr), {}
    for split in jaxpr.eqns:
        if split.primitive.name == "split" and (path := _path(split, makers, uses)):
            instead |= {id(equation): [] for equation in path} | {id(split): _parts(split, path)}
    return [own for equation in jaxpr.eqns for own in instead.get(id(equation), [equation])]


def _with_splits(jaxpr: Jaxpr) -> list[Any]:
    uses, instead = _uses(jaxpr), {}
    readers: dict[Any, list[Any]] = {}
    for equation in jaxpr.eqns:
        for atom in {atom for atom in equation.invars if isinstance(atom, Var)}:
            readers.setdefault(atom, []).append(equation)
    for whole, parts in readers.items():
        is_read = len(parts) == uses[whole] and all(map(_is_slice, parts))
        if is_read and (sizes := _columns(_shape(whole), parts)) is not None:
            parts = sorted(parts, key=lambda part: part.params["start_indices"][-1])
            outs = [part.outvars[0] for part in parts]
            first = readers[whole][0]
            split = partial(jax.lax.split, sizes=sizes, axis=len(_shape(whole)) - 1)
            instead |= {id(part): [] for part in parts}
            instead[id(first)] = equations_of(split, [whole], outs, first)
    for reshape in jaxpr.eqns:
        if reshape.primitive.name == "reshape" and isinstance(reshape.invars[0], Var):
            instead |= _of_reshape(reshape, readers, uses)
    return [own for equation in jaxpr.eqns for own in instead.get(id(equation), [equation])]


def _is_slice(equation: Any) -> bool:
    return equation.primitive.name == "slice" and {*(equation.params["strides"] or (1,))} == {1}


def _columns(shape: tuple[int, ...], slices: list[Any]) -> list[int] | None:
    """The sizes of slices that are all columns of an array of this shape, in their order."""
    ends = sorted((p.params["start_indices"], p.params["limit_indices"]) for p in slices)
    starts, limits = ([end[side][-1] for end in ends] for side in (0, 1))
    is_all = [*starts, shape[-1]] == [0, *limits] and len(slices) > 1
    is_all &= all(_shape(part.outvars[0])[:-1] == shape[:-1] for part in slices)
    return [b - a for a, b in zip(starts, limits, strict=True)] if is_all else None


def _of_reshape(reshape: Any, readers: dict[Any, list[Any]], uses: Counter) -> dict[int, Any]:
    """Columns reshaped to [parts, width] of which parts are read: a split comes first instead.

    The reshape, a transpose after it and what reads parts, by `id`, with the equations instead.
    """
    (before,), (atom,) = reshape.invars, reshape.outvars
    shape, place = _shape(atom), len(_shape(before)) - 1
    if place < 0 or len(shape) < place + 2 or shape[:place] != _shape(before)[:-1]:
        return {}
    parts, order, path = shape[place], tuple(range(len(shape))), [reshape]
    while [e.primitive.name for e in readers.get(atom, ())] == ["transpose"]:
        path += readers[atom]
        order = tuple(order[at] for at in path[-1].params["permutation"])
        (atom,) = path[-1].outvars
    axis, ends = order.index(place), readers.get(atom, [])
    found = [_parts_read(end, axis, parts) for end in ends]
    if len(ends) != uses[atom] or not ends or parts < 2 or None in found:
        return {}

    def parted(x: Array) -> list[Array]:
        pieces = jax.lax.split(x, [x.shape[-1] // parts] * parts, axis=place)
        own = (*shape[:place], 1, *shape[place + 1 :])
        laid = [
            (end, jax.lax.transpose(jax.lax.reshape(pieces[at], own), order))
            for end, places in zip(ends, found, strict=True)
            for at in places or ()
        ]
        return [
            jax.lax.squeeze(y, (axis,)) if end.primitive.name == "unstack" else y for end, y in laid
        ]

    outs = [out for end in ends for out in end.outvars]
    instead: dict[int, Any] = {id(equation): [] for equation in (*path, *ends)}
    return instead | {id(reshape): equations_of(parted, [before], outs, reshape)}


def _parts_read(equation: Any, axis: int, parts: int) -> list[int] | None:
    """Which single places along an axis an equation's results are; None if it reads otherwise."""
    name, params = equation.primitive.name, equation.params
    if name in ("split", "unstack"):
        is_each = params["axis"] == axis and len(equation.outvars) == parts
        return list(range(parts)) if is_each else None
    shape, out = _shape(equation.invars[0]), _shape(equation.outvars[0])
    is_single = _is_slice(equation) and out == (*shape[:axis], 1, *shape[axis + 1 :])
    return [params["start_indices"][axis]] if is_single else None


def _path(split: Any, makers: dict[Var, Any], uses: Counter) -> list[Any]:
    """The product of which only parts of its columns are read, and what is between; or nothing."""
    atom, path = split.invars[0], []
    if split.params["axis"] != len(_shape(atom)) - 1:
        return []
    while uses[atom] == 1 and (maker := makers.get(atom)) is not None:
        path.insert(0, maker)
        if maker.primitive.name == "dot_general":
            (_, summed), batched = maker.params["dimension_numbers"]
            weight = maker.invars[1]
            is_plain = isinstance(weight, Var) and len(_shape(weight)) == 2 and not any(batched)
            return path if is_plain and summed == (0,) else []
        if maker.primitive.name not in _BETWEEN:
            return []
        # The product is the operand of full size that is made here; others are biases and scales.
        shape = _shape(atom)
        full = [x for x in maker.invars if isinstance(x, Var) and _shape(x) == shape]
        if len(full) != 1:
            return []
        atom = full[0]
    return []


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _parts(split: Any, path: list[Any]) -> list[Any]:
    product, *between = path
    equations = []

    def split_of(atom: Any) -> list[Any]:
        if isinstance(atom, Literal) or _shape(atom)[-1:] in ((), (1,)):
            return [atom] * len(split.outvars)
        own = [
            Var(atom.aval.update(shape=(*_shape(atom)[:-1], size)))
            for size in split.params["sizes"]
        ]
        params = split.params | {"axis": len(_shape(atom)) - 1}
        equations.append(split.replace(invars=[atom], outvars=own, params=params))
        return own

    weights = split_of(product.invars[1])
    sides = {}
    before = product.outvars[0]
    for step in between:
        sides |= {x: split_of(x) for x in step.invars if x is not before and isinstance(x, Var)}
        before = step.outvars[0]
    for at, out in enumerate(split.outvars):
        names: dict[Any, Any] = {side: parts[at] for side, parts in sides.items()}
        for step in path:
            shape = (*_shape(step.outvars[0])[:-1], split.params["sizes"][at])
            own = out if step is path[-1] else Var(step.outvars[0].aval.update(shape=shape))
            given = [x if isinstance(x, Literal) else names.get(x, x) for x in step.invars]
            if step is product:
                given = [step.invars[0], weights[at]]
            equations.append(step.replace(invars=given, outvars=[own]))
            names[step.outvars[0]] = own
    return equations


def parts_of_shard(
    shard: Array, axes: tuple[str, ...], split: Any, mesh: Mesh | None
) -> list[Array] | None:
    """The parts of an array cut along `axes`, each cut as the whole was; None if they cannot be.

    Cost: Each device sends at most what it holds, of queries, keys and values two thirds.
    """
    axis, sizes = split.params["axis"], split.params["sizes"]
    known = (mesh or jax.sharding.get_abstract_mesh()).shape
    devices = math.prod(known[name] for name in axes)
    if devices == 1 or any(size % devices for size in sizes):
        return None
    unit = math.gcd(*(size // devices for size in sizes))
    own_pieces = sum(sizes) // unit // devices  # pieces per device
    starts = np.cumsum([0, *sizes]) // unit
    stays = np.zeros(
        (devices, own_pieces), np.int32
    )  # for each place of a device, where it has its own
    rounds: list[dict[int, tuple[int, int, int]]] = []  # source -> target, and the places there
    filled = [0] * devices
    for start, size in zip(starts, sizes, strict=False):
        for piece in range(size // unit):
            source, place = divmod(int(start) + piece, own_pieces)
            target = piece // (size // unit // devices)
            filled[target] += 1
            if source == target:
                stays[target, filled[target] - 1] = place
                continue
            free = (
                row
                for row in rounds
                if source not in row and all(target != other for other, *_ in row.values())
            )
            if (row := next(free, None)) is None:
                rounds.append(row := {})
            row[source] = target, place, filled[target] - 1

    def exchange(own: Array) -> list[Array]:
        here = jax.lax.axis_index(axes)
        own = jnp.moveaxis(own, axis, 0)
        pieces = own.reshape(own_pieces, unit, *own.shape[1:])
        found = pieces[jnp.asarray(stays)[here]]
        for row in rounds:
            left, right = np.zeros(devices, np.int32), np.full(devices, own_pieces)
            for source, (target, place, other) in row.items():
                left[source], right[target] = place, other
            pairs = [(source, target) for source, (target, *_) in row.items()]
            moved = jax.lax.ppermute(pieces[jnp.asarray(left)[here]], axes, pairs)
            found = found.at[jnp.asarray(right)[here]].set(moved, mode="drop")
        whole = jnp.moveaxis(found.reshape(own.shape), 0, axis)
        return jnp.split(whole, np.cumsum(sizes)[:-1] // devices, axis)

    own = PartitionSpec(*[None] * axis, axes)
    options: dict[str, Any] = {} if mesh is None else {"mesh": mesh}
    return jax.shard_map(
        exchange,
        in_specs=own,
        out_specs=[own] * len(sizes),
        axis_names={*axes},
        check_vma=False,
        **options,
    )(shard)
