"""A traced program with its shardings as data, so that one of them can be changed and compiled.

Shardings of arguments, of results, and of constraints on intermediate arrays (by source line) can
be changed.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from toolkit.parallel.causes.program_trace import compiled_with_own_lines
from toolkit.parallel.dataflow.flow import Flow, Machine, cut_of, source_of
from toolkit.parallel.dataflow.propagation import follow
from toolkit.parallel.faults.explicit_axes import (
    constraint,
    has_explicit_axes,
    on_auto_axes,
    with_constraints,
)

Specs = tuple[PartitionSpec, ...]
Constraint = tuple[str, tuple[int, ...], PartitionSpec]
"""A constraint: line, shape of the array, and spec; one line may constrain several trees."""


@dataclass(frozen=True)
class Variant:
    """A program with all its shardings."""

    program: ClosedJaxpr  # the traced function of its flat arguments
    mesh: Mesh  # the devices
    # names, arguments: path and spec of each flat argument
    names: tuple[tuple[str, ...], ...]
    arguments: Specs
    # result_names, results: likewise for results; a spec of None lets the compiler choose
    result_names: tuple[tuple[str, ...], ...]
    results: Specs | None
    call: Callable[[ClosedJaxpr], Callable]  # (program) -> a function of the original arguments
    shapes: Any  # the original arguments as ShapeDtypeStructs
    is_converted: bool = False  # whether it was traced on explicit axes; `mesh` has auto axes

    def compile(self) -> jax.stages.Compiled:
        """The program compiled by this backend."""
        places = [NamedSharding(self.mesh, spec) for spec in self.arguments]
        leaves, tree = jax.tree.flatten(self.shapes)
        given = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
            for leaf, place in zip(leaves, places, strict=True)
        ]
        options = {}
        if self.results is not None:
            options["out_shardings"] = [NamedSharding(self.mesh, spec) for spec in self.results]
        function = jax.jit(self.call(self.program), **options)
        with jax.set_mesh(self.mesh) if self.is_converted else contextlib.nullcontext():
            return compiled_with_own_lines(function.lower(*jax.tree.unflatten(tree, given)))

    def flow(self, machine: Machine) -> Flow:
        """The modelled cost of the program."""
        axes = list(self.mesh.shape)
        jaxpr = self.program.jaxpr
        cuts = [
            cut_of(spec, len(atom.aval.shape), axes)  # type: ignore[attr-defined]
            for atom, spec in zip(jaxpr.invars, self.arguments, strict=True)
        ]
        results = [
            cut_of(spec, len(atom.aval.shape), axes)  # type: ignore[attr-defined]
            for atom, spec in zip(jaxpr.outvars, self.results or (), strict=False)
        ]
        sizes = dict(self.mesh.shape)
        return follow(self.program, cuts, sizes, results=results or None, machine=machine)

    def constraints(self) -> list[Constraint]:
        """The constraints on intermediate arrays in the program."""
        found = [
            constraint_of(equation)
            for equation in equations(self.program.jaxpr)
            if equation.primitive.name == "sharding_constraint"
        ]
        return list(dict.fromkeys(found))

    def constrain(self, where: Constraint, spec: PartitionSpec) -> "Variant":
        """The same program with the equal constraints of one line set to a spec."""
        sharding = NamedSharding(self.mesh, spec)

        def change(equation: Any) -> list[Any]:
            is_it = equation.primitive.name == "sharding_constraint" and where == constraint_of(
                equation
            )
            return [
                equation.replace(params=equation.params | {"sharding": sharding})
                if is_it
                else equation
            ]

        return dataclasses.replace(self, program=changed(self.program, change))

    def add_constraints(self, specs: dict[int, PartitionSpec]) -> "Variant":
        """The same program with the results of some equations, by `id`, constrained to specs."""

        def change(equation: Any) -> list[Any]:
            if id(equation) not in specs:
                return [equation]
            outer = equation.outvars[0]
            inner = Var(outer.aval)
            sharding = NamedSharding(self.mesh, specs[id(equation)])
            constrained = constraint(inner, outer, sharding, equation.source_info)
            return [equation.replace(outvars=[inner, *equation.outvars[1:]]), constrained]

        return dataclasses.replace(self, program=changed(self.program, change))


def constraint_of(equation: Any) -> Constraint:
    """Source, shape and spec of an equation that constrains a sharding."""
    return source_of(equation), equation.invars[0].aval.shape, equation.params["sharding"].spec


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Every equation of a program, including its sub-programs."""
    for program in programs_of(jaxpr):
        yield from program.eqns


def programs_of(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    """A program and all its sub-programs."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for _, inner in _inner(equation):
            yield from programs_of(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)


def _inner(equation: Any) -> Iterator[tuple[str, Any]]:
    for name, value in equation.params.items():
        if isinstance(value, ClosedJaxpr | Jaxpr):
            yield name, value


def changed(program: Any, change: Callable[[Any], list[Any]]) -> Any:
    """The program with each equation, also in its sub-programs, replaced by `change` of it."""
    if not isinstance(program, Jaxpr):  # closed; from jax 0.11 on they are the same
        return program.replace(jaxpr=changed(program.jaxpr, change))
    found = []
    for equation in program.eqns:
        (first, *rest) = change(equation)
        inner = {name: changed(value, change) for name, value in _inner(first)}
        found += [first.replace(params=first.params | inner) if inner else first, *rest]
    return program.replace(eqns=found)


def variant_of(function: Callable, arguments: tuple, results: Any) -> Variant:
    """Trace a function whose arguments carry NamedShardings; `results` is a tree of these or
    None."""
    leaves = jax.tree_util.tree_leaves_with_path(arguments)
    named = [getattr(leaf, "sharding", None) for _, leaf in leaves]
    meshes = [
        sharding.mesh
        for sharding in named
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    ]
    if not meshes:
        raise ValueError("arguments: none has a NamedSharding; want arrays or structs on a mesh")
    if any(not hasattr(leaf, "shape") or not hasattr(leaf, "dtype") for _, leaf in leaves):
        raise TypeError("arguments: want trees of arrays or ShapeDtypeStructs")
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
    mesh, is_explicit, specs = meshes[0], has_explicit_axes(meshes[0]), None
    if is_explicit:
        with jax.set_mesh(mesh):
            program, out = jax.make_jaxpr(function, return_shape=True)(*arguments)
        specs = tuple(atom.aval.sharding.spec for atom in program.jaxpr.outvars)  # type: ignore
        mesh = on_auto_axes(mesh)
        program = with_constraints(program, mesh)
    else:
        program, out = jax.make_jaxpr(function, return_shape=True)(*shapes)
    out_leaves = jax.tree_util.tree_leaves_with_path(out)
    if results is not None:
        places = jax.tree.leaves(
            results, is_leaf=lambda sharding: isinstance(sharding, NamedSharding)
        )
        if len(places) != len(out_leaves):
            raise ValueError(f"results has {len(places)} shardings; want {len(out_leaves)}")
        specs = tuple(place.spec for place in places)
    signature = inspect.signature(function)

    def call(program: ClosedJaxpr) -> Callable:
        flat = jaxpr_as_fun(program)

        def run(*arguments: Any) -> Any:
            return flat(*jax.tree.leaves(arguments))

        run.__signature__ = signature  # type: ignore[attr-defined]
        return run

    parameters = list(signature.parameters)
    return Variant(
        program,
        mesh,
        tuple(_words(path, parameters) for path, _ in leaves),
        tuple(
            sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
            for sharding in named
        ),
        tuple(_words(path, ()) for path, _ in out_leaves),
        specs,
        call,
        shapes,
        is_explicit,
    )


def _words(path: tuple, parameters: Any) -> tuple[str, ...]:
    words = [jax.tree_util.keystr((key,), simple=True) for key in path]
    if parameters and int(words[0]) < len(parameters):
        words[0] = parameters[int(words[0])]
    return tuple(words)
