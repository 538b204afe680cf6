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

from toolkit.parallel.dataflow.programs import REMATERIALISED

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
    slices: dict[Any, list[Any]] = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name == "slice" and isinstance(equation.invars[0], Var):
            slices.setdefault(equation.invars[0], []).append(equation)
    for whole, parts in slices.items():
        shape, first = _shape(whole), parts[0]
        parts = sorted(parts, key=lambda part: part.params["start_indices"][-1])
        shapes = [_shape(part.outvars[0]) for part in parts]
        starts = [part.params["start_indices"][-1] for part in parts]
        sizes = [own[-1] for own in shapes]
        is_all = len(parts) == uses[whole] and sum(sizes) == shape[-1]
        is_all &= starts == [0, *np.cumsum(sizes)[:-1]]
        if is_all and len(parts) > 1 and all(own[:-1] == shape[:-1] for own in shapes):
            split = partial(jax.lax.split, sizes=sizes, axis=len(shape) - 1)
            (split,) = jax.make_jaxpr(split)(whole.aval).jaxpr.eqns
            outs = [part.outvars[0] for part in parts]
            instead |= {id(part): [] for part in parts}
            instead[id(first)] = [split.replace(invars=[whole], outvars=outs)]
    return [own for equation in jaxpr.eqns for own in instead.get(id(equation), [equation])]


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
