"""Several changes of a layout, one on top of another, by modelled time.

The unit of a change is a loop of the program: all dimensions of arguments, results and constraints
that an operation computes together, such as the heads of queries, keys, values and result. A loop
is cut along a set of mesh axes everywhere or nowhere. Besides, two axes of an array may change
places. At each step the change counts that makes the modelled step fastest, or a pair where no
single one does; memory held per device never grows.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jax.sharding import PartitionSpec

from toolkit.parallel.axes import axes_of
from toolkit.parallel.dataflow.flow import Machine
from toolkit.parallel.dataflow.loops import Loops
from toolkit.parallel.faults.proposals import (
    Proposal,
    all_proposals,
    bytes_held,
    path_of,
    spec_with,
)
from toolkit.parallel.faults.variant import Variant, constraint_of, equations

_PAIRS = 6  # of the best first changes, each with every second


def best_changes(base: Proposal, machine: Machine, most: int) -> list[Proposal]:
    """The changes, each proposal on top of those before it."""
    found: list[Proposal] = []
    now = base
    while len(found) < most:
        options = _options(now, base.bytes_held, machine)
        best = options[:1]
        if not best or not _is_faster(best[0], now, machine):
            pairs = [
                [first, two]
                for first in options[:_PAIRS]
                for two in _options(first, base.bytes_held, machine)[:1]
            ]
            best = min(pairs, key=lambda pair: pair[1].flow.seconds(machine), default=[])
        if not best or not _is_faster(best[-1], now, machine):
            break
        found += best
        now = best[-1]
    return found[:most]


def _is_faster(proposal: Proposal, now: Proposal, machine: Machine) -> bool:
    return proposal.flow.seconds(machine) < now.flow.seconds(machine) * (1 - 1e-6)


def _options(now: Proposal, most_bytes: float, machine: Machine) -> list[Proposal]:
    """Every change of a program that holds no more, fastest first; of equals a loop's."""
    changes = list(_loops(now.variant)) + list(_swaps(now.variant))
    options = [
        Proposal(words, changed, changed.flow(machine), bytes_held(changed))
        for words, changed in changes
    ]
    options += all_proposals(now.variant, machine)
    return sorted(
        (proposal for proposal in options if proposal.bytes_held <= most_bytes),
        key=lambda proposal: proposal.flow.seconds(machine),
    )


def _loops(variant: Variant) -> Iterator[tuple[str, Variant]]:
    """Each loop, cut along each of the sets of axes that it or one of the mesh suggests."""
    jaxpr, sizes = variant.program.jaxpr, variant.mesh.shape
    loops = Loops(variant.program, 1)
    results: Any = variant.results or ()
    constraints = {
        id(equation): equation
        for equation in equations(jaxpr)
        if equation.primitive.name == "sharding_constraint"
    }
    places: dict[Any, list[tuple[str, Any, int]]] = {}
    arrays = [("argument", i, atom) for i, atom in enumerate(jaxpr.invars)]
    arrays += [("result", i, atom) for i, atom in enumerate(jaxpr.outvars[: len(results)])]
    arrays += [("constraint", i, equation.invars[0]) for i, equation in constraints.items()]
    for kind, i, variable in arrays:
        for dimension, size in enumerate(getattr(variable.aval, "shape", ())):
            if size > 1:
                root = loops.root((variable, dimension))
                places.setdefault(root, []).append((kind, i, dimension))

    def spec_at(kind: str, i: Any) -> PartitionSpec:
        if kind == "constraint":
            return constraints[i].params["sharding"].spec
        places = variant.arguments if kind == "argument" else results
        return places[i]

    shapes = {(kind, i): tuple(atom.aval.shape) for kind, i, atom in arrays}
    for members in places.values():
        present = [(*axes_of(spec_at(kind, i)), *[()] * 9)[at] for kind, i, at in members]
        options = dict.fromkeys([*present, (), tuple(sizes), *[(axis,) for axis in sizes]])
        for axes in options:
            if all(axes == other for other in present):
                continue
            changed, named = variant, []
            done: set[tuple[str, Any]] = set()
            for kind, i, at in members:
                if (kind, i) in done:
                    continue
                done.add((kind, i))
                before, shape = spec_at(kind, i), shapes[kind, i]
                spec = spec_with(before, len(shape), at, axes)
                pieces = 1
                for axis in axes:
                    pieces *= sizes[axis]
                if spec == before or shape[at] % pieces:
                    continue
                if kind == "constraint":
                    where = constraint_of(constraints[i])
                    changed = changed.constrain(where, spec)
                    named.append(f"what {where[0]} constrains {_code(spec)}")
                    continue
                names = variant.names[i] if kind == "argument" else variant.result_names[i]
                named.append(f"{'result ' * (kind == 'result')}{path_of(names)} {_code(spec)}")
                changed = _placed(changed, kind, i, spec)
            if named:
                others = f" and {len(named) - 3} more" if len(named) > 3 else ""
                yield f"lay {', '.join(named[:3])}{others}", changed


def _swaps(variant: Variant) -> Iterator[tuple[str, Variant]]:
    """Two axes of an argument change places."""
    for i, spec in enumerate(variant.arguments):
        entries = axes_of(spec)
        shape = variant.program.jaxpr.invars[i].aval.shape  # type: ignore[attr-defined]
        cut = [at for at, axes in enumerate(entries) if axes]
        if len(cut) != 2:
            continue
        a, b = cut
        entries[a], entries[b] = entries[b], entries[a]
        swapped = spec_with(PartitionSpec(), len(shape), a, entries[a])
        swapped = spec_with(swapped, len(shape), b, entries[b])
        pieces = [[variant.mesh.shape[axis] for axis in entries[at]] for at in cut]
        if any(shape[at] % max(sizes) for at, sizes in zip(cut, pieces, strict=True)):
            continue
        words = f"lay {path_of(variant.names[i])} {_code(swapped)}"
        yield words, _placed(variant, "argument", i, swapped)


def _placed(variant: Variant, kind: str, i: int, spec: PartitionSpec) -> Variant:
    places = list(variant.arguments if kind == "argument" else variant.results or ())
    places[i] = spec
    return dataclasses.replace(
        variant, **{"arguments" if kind == "argument" else "results": tuple(places)}
    )


def _code(spec: PartitionSpec) -> str:
    return "as " + str(spec).replace("PartitionSpec", "P")
