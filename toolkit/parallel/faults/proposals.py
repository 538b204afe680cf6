"""Changes of a layout that may remove a collective, most promising first by the cost model."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from toolkit.parallel.axes import axes_of
from toolkit.parallel.causes.cause import ExplainedCollective
from toolkit.parallel.dataflow.flow import PARTIAL, Flow, Machine, source_of, spec_of
from toolkit.parallel.faults.microbatches import reordered
from toolkit.parallel.faults.variant import Variant, equations


@dataclass(frozen=True)
class Proposal:
    """A change in words, the program with it, and its modelled cost.

    `bytes_held` counts arguments; `flow` is the modelled cost; `is_aligned` tells that the change
    aligns arrays that belong together, such as a weight and its moments.
    """

    words: str
    variant: Variant
    flow: Flow
    bytes_held: float
    is_aligned: bool = False


def all_proposals(variant: Variant, machine: Machine) -> list[Proposal]:
    """Every single change: an array with those that belong to it, a result, a constraint, the
    reshapes that make microbatches."""
    reshapes = ((*change, False) for change in reordered(variant))
    changes = itertools.chain(_arrays(variant), _constraints(variant), reshapes)
    return [
        Proposal(words, changed, changed.flow(machine), bytes_held(changed), is_aligned)
        for words, changed, is_aligned in changes
    ]


def proposals_for(
    item: ExplainedCollective, base: Proposal, every: list[Proposal], machine: Machine
) -> list[Proposal]:
    """Proposals that reduce the modelled communication of a collective, or constrain to the model's
    choice.

    Those that align arrays that belong together come first, then those that only move a cut. None
    increases the memory held per device.
    """
    before = _moved(base.flow, item)
    if before == 0.0 and (kept := _held_as_modelled(item, base, machine)) is not None:
        return [kept]
    better = [
        proposal
        for proposal in every
        if proposal.flow.bytes_sent < base.flow.bytes_sent
        and proposal.bytes_held <= base.bytes_held
        and (_moved(proposal.flow, item) < before or before == 0.0)
    ]
    return sorted(
        better,
        key=lambda proposal: (
            not proposal.is_aligned,
            proposal.bytes_held < base.bytes_held,
            proposal.flow.seconds(machine),
        ),
    )


def bytes_held(variant: Variant) -> float:
    """Bytes of arguments per device."""
    total = 0.0
    for atom, spec in zip(variant.program.jaxpr.invars, variant.arguments, strict=True):
        size = float(atom.aval.size * atom.aval.dtype.itemsize)  # type: ignore[attr-defined]
        for axis in itertools.chain.from_iterable(axes_of(spec)):
            size /= variant.mesh.shape[axis]
        total += size
    return total


def _moved(flow: Flow, item: ExplainedCollective) -> float:
    """Modelled bytes for the line of a collective; the compiler may use another axis."""
    return sum(move.bytes_sent * move.count for move in flow.moves if item.source in move.sources)


def _held_as_modelled(
    item: ExplainedCollective, base: Proposal, machine: Machine
) -> Proposal | None:
    """Constrain the results of a line to a sharding for which the model moves nothing."""
    axes, specs, words = list(base.variant.mesh.shape), {}, []
    for equation in equations(base.variant.program.jaxpr):
        cuts = base.flow.cuts.get(id(equation))
        if cuts is None or source_of(equation) != item.source:
            continue
        shape = equation.outvars[0].aval.shape
        if PARTIAL in cuts[0] or len(shape) < 2:
            continue
        specs[id(equation)] = spec_of(cuts[0], len(shape), axes)
        words.append(written(specs[id(equation)]))
    if not specs:
        return None
    changed = base.variant.add_constraints(specs)
    text = f"constrain what {item.source} makes to {words[-1]}"
    return Proposal(text, changed, changed.flow(machine), base.bytes_held)


def _arrays(variant: Variant) -> Iterator[tuple[str, Variant, bool]]:
    """Move one axis to another dimension, in an argument and all arrays that belong to it."""
    seen = set()
    shapes = [tuple(atom.aval.shape) for atom in variant.program.jaxpr.invars]  # type: ignore
    for names, shape in zip(variant.names, shapes, strict=True):
        family = [
            i
            for i, (other, size) in enumerate(zip(variant.names, shapes, strict=True))
            if size == shape and _go_together(names, other)
        ]
        results = [
            i
            for i, other in enumerate(variant.result_names)
            if variant.results is not None
            and tuple(variant.program.jaxpr.outvars[i].aval.shape) == shape  # type: ignore
            and _go_together(names, other)
        ]
        if tuple(family) in seen or not shape:
            continue
        seen.add(tuple(family))
        places = [variant.arguments[i] for i in family]
        places += [variant.results[i] for i in results] if variant.results else []
        present = {_key(spec): spec for spec in places}
        options = dict(present)
        for spec in list(options.values()):
            for place in _other_places(spec, shape, variant):
                options.setdefault(_key(place), place)
        for spec in options.values():
            if any(_key(spec) != _key(place) for place in places):
                is_aligned = len(present) > 1 and _key(spec) in present
                yield *_move(variant, family, results, spec), is_aligned


def _move(
    variant: Variant, family: list[int], results: list[int], spec: PartitionSpec
) -> tuple[str, Variant]:
    arguments = list(variant.arguments)
    changed = [i for i in family if _key(arguments[i]) != _key(spec)]
    before = {written(arguments[i]) for i in changed}
    for i in family:
        arguments[i] = spec
    outs = variant.results
    if outs is not None:
        outs = tuple(spec if i in results else place for i, place in enumerate(outs))
    named = [path_of(variant.names[i]) for i in changed]
    if not named:
        named = ["result " + path_of(variant.result_names[i]) for i in results]
        before = {written(variant.results[i]) for i in results if variant.results}
    others = f" and {len(named) - 1} like it" if len(named) > 1 else ""
    words = f"lay {named[0]}{others} as {written(spec)}, not {' or '.join(sorted(before))}"
    return words, dataclasses.replace(variant, arguments=tuple(arguments), results=outs)


def _constraints(variant: Variant) -> Iterator[tuple[str, Variant, bool]]:
    for where in variant.constraints():
        source, shape, spec = where
        for place in _other_places(spec, shape, variant):
            # With fewer parts, devices would hold and compute more.
            if _key(place) == _key(spec) or _parts(place, variant) < _parts(spec, variant):
                continue
            size = "x".join(map(str, shape))
            words = f"constrain {size} at {source} to {written(place)}, not {written(spec)}"
            yield words, variant.constrain(where, place), False


def _parts(spec: PartitionSpec, variant: Variant) -> int:
    return math.prod(variant.mesh.shape[axis] for axes in axes_of(spec) for axis in axes)


def _other_places(
    spec: PartitionSpec, shape: tuple[int, ...], variant: Variant
) -> Iterator[PartitionSpec]:
    """The spec with one axis on another dimension, or on none."""
    sizes = variant.mesh.shape
    entries = [*axes_of(spec), *([()] * (len(shape) - len(axes_of(spec))))]
    for axis in sizes:
        without = [tuple(name for name in names if name != axis) for names in entries]
        yield _spec(without)
        for dimension in range(len(shape)):
            pieces = sizes[axis]
            for name in without[dimension]:
                pieces *= sizes[name]
            if shape[dimension] % pieces == 0:
                moved = list(without)
                moved[dimension] = (*without[dimension], axis)
                yield _spec(moved)


def spec_with(
    spec: PartitionSpec, rank: int, dimension: int, axes: tuple[str, ...]
) -> PartitionSpec:
    """The spec with a dimension cut along just these axes, and no other dimension along them."""
    entries = [*axes_of(spec), *[()] * (rank - len(axes_of(spec)))]
    entries = [tuple(axis for axis in entry if axis not in axes) for entry in entries]
    entries[dimension] = axes
    return _spec(entries)


def _spec(entries: list[tuple[str, ...]]) -> PartitionSpec:
    places = [None if not entry else entry[0] if len(entry) == 1 else entry for entry in entries]
    while places and places[-1] is None:
        places.pop()
    return PartitionSpec(*places)


def _key(spec: PartitionSpec) -> tuple:
    entries = axes_of(spec)
    while entries and not entries[-1]:
        entries.pop()
    return tuple(entries)


def _go_together(names: tuple[str, ...], others: tuple[str, ...]) -> bool:
    """Whether one path, without its argument's name, is a suffix of the other, as for moments and
    gradients."""
    ends = (names[1:], others[1:])
    short, long = sorted(ends, key=len)
    return names == others or (bool(short) and long[len(long) - len(short) :] == short)


def path_of(names: tuple[str, ...]) -> str:
    """Where in the program an equation is, as the messages write it."""
    return "/".join(names) or "of the program"


def written(spec: PartitionSpec) -> str:
    """The spec as code, with `PartitionSpec as P`."""
    return str(spec).replace("PartitionSpec", "P")
