"""A loss rewritten so that each parameter is gathered where the program first uses it.

The traced loss is run again, equation by equation. A parameter of which devices hold shards stays
a shard through calls and into loops over stacked layers, so that one layer is whole at a time, and
is gathered before the first operation that reads it. After each product, what descends from the
batch is held to the batch's devices; otherwise a compiler may gather activations instead of
weights.

Products of one array with several parameters that another axis cuts by columns, such as queries,
keys and values, are one group: its gradient is summed over that axis once, as Megatron does.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from toolkit.parallel.axes import axes_of
from toolkit.parallel.dataflow.loops import Loops
from toolkit.parallel.dataflow.programs import (
    CALLS,
    REMATERIALISED,
    inlined,
    inner_program,
    scan_counts,
)
from toolkit.parallel.shared_weights import Copies, copies_of, product_of_copies

_PRODUCTS = ("dot_general", "conv_general_dilated", "gather", "ragged_dot", "ragged_dot_general")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shard:
    """A parameter that is not gathered yet: the arrays held, its spec, and loops entered."""

    value: Array
    spec: PartitionSpec = field(metadata={"static": True})
    depth: int = field(default=0, metadata={"static": True})

    @property
    def inner_spec(self) -> PartitionSpec:
        """The spec without the dimensions over which the loops around run."""
        return PartitionSpec(*self.spec[self.depth :])


@dataclass(frozen=True)
class FirstUse:
    """How a program is run again.

    Attributes:
        gather: (array, its spec) -> the array, whole along the axes of the batch.
        batch: the mesh axes that cut the batch.
        keep: (equation, its results) -> the results, held to devices.
        mesh: the devices; None inside of `jax.shard_map`.
        rows: (variable) -> the dimension that the batch's axes cut, or None.
        policy: what a loop over stacked layers keeps for the backward pass; None: everything.
    """

    gather: Callable[[Array, PartitionSpec], Array]
    batch: tuple[str, ...]
    keep: Callable[[Any, list[Any]], list[Any]] = lambda equation, results: results
    mesh: Mesh | None = None
    policy: Callable[..., Any] | None = None
    rows: Callable[[Any], int | None] = lambda variable: None

    def run(self, program: ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
        """The program's results; `values` are arrays, or Shards of parameters."""
        jaxpr = program.jaxpr
        known = dict(zip(jaxpr.constvars, program.consts, strict=True))
        known |= zip(jaxpr.invars, values, strict=True)

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else known[atom]

        products: dict[int, list[Any]] = {}
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                products.setdefault(id(equation.invars[0]), []).append(equation)
        done: set[int] = set()
        for equation in jaxpr.eqns:
            if id(equation) in done:
                continue
            group = products.get(id(equation.invars[0]), []) if equation.invars else []
            group = [product for product in group if self._is_column(product, known)]
            name, given = equation.primitive.name, [read(atom) for atom in equation.invars]
            inner = inner_program(equation) if name in CALLS + REMATERIALISED else None
            if inner is not None and name in CALLS:
                results = self.run(inner, given)
            elif inner is not None:
                results = self._rematerialised(equation, inner, given)
            elif name == "scan":
                results = self._scan(equation, given)
            elif name == "convert_element_type" and isinstance(given[0], Copies):
                results = [given[0].astype(equation.params["new_dtype"])]
            elif name == "convert_element_type" and isinstance(given[0], Shard):
                value = given[0].value.astype(equation.params["new_dtype"])
                results = [dataclasses.replace(given[0], value=value)]
            elif len(group) > 1 and any(equation is product for product in group):
                done |= set(map(id, group))
                (x,), shards = (
                    self._whole(given[:1]),
                    [known[product.invars[1]] for product in group],
                )
                for product, result in zip(group, self._columns(group, x, shards), strict=True):
                    known |= zip(product.outvars, self.keep(product, [result]), strict=True)
                continue
            elif (result := self._of_copies(equation, given)) is not None:
                results = self.keep(equation, [result])
            else:
                given = self._whole(given)
                known |= {
                    atom: value  # for later uses too
                    for atom, value in zip(equation.invars, given, strict=True)
                    if isinstance(atom, Var)
                }
                results = self.keep(equation, _evaluate(jaxpr, equation, given))
            known |= zip(equation.outvars, results, strict=True)
        return self._whole([read(atom) for atom in jaxpr.outvars])

    def _whole(self, values: Sequence[Any]) -> list[Any]:
        return [
            self.gather(x.value, x.inner_spec)
            if isinstance(x, Shard)
            else x.whole
            if isinstance(x, Copies)
            else x
            for x in values
        ]

    def _of_copies(self, equation: Any, given: list[Any]) -> Array | None:
        """The product of shared weights with rows of the batch, device by device."""
        are_copies = [isinstance(x, Copies) for x in given]
        if equation.primitive.name != "dot_general" or sum(are_copies) != 1:
            return None
        left, right = (x if isinstance(x, Copies) else self._whole([x])[0] for x in given)
        rows = self.rows(equation.invars[are_copies.index(False)])
        return product_of_copies(equation, left, right, rows)

    def _copied(self, variable: Any, value: Any) -> Any:
        """A weight that a loop shares, with copies for each part of the batch."""
        if isinstance(value, Copies):
            return value
        (value,) = self._whole([value])
        is_weight = value.ndim > 1 and jnp.issubdtype(value.dtype, jnp.floating)
        if self.mesh is None or not is_weight or self.rows(variable) is not None:
            return value
        return copies_of(value, self.mesh, self.batch)

    def _is_column(self, product: Any, known: dict[Any, Any]) -> bool:
        """Whether another axis than the batch's cuts only kept dimensions of a right operand."""
        (_, summed), (_, batched) = product.params["dimension_numbers"]
        right = product.invars[1]
        shard = None if isinstance(right, Literal) else known.get(right)
        if not isinstance(shard, Shard):
            return False
        cuts = axes_of(without(shard.inner_spec, self.batch))
        inner = {*summed, *batched}
        return any(cuts) and not any(axes for at, axes in enumerate(cuts) if at in inner)

    def _columns(self, group: list[Any], x: Array, shards: list[Shard]) -> list[Array]:
        places = [without(shard.inner_spec, self.batch) for shard in shards]
        # Over all axes: XLA for CPUs ends the process at a sum in bfloat16 over some of them.
        rows = self.rows(group[0].invars[0])
        if any(rows in (*left, *batched) for (left, _), (batched, _) in map(_numbers, group)):
            rows = None
        outs = []
        for product, place in zip(group, places, strict=True):
            (left, summed), (batched_left, batched) = _numbers(product)
            rank, right = product.outvars[0].aval.ndim, product.invars[1].aval.ndim
            entries = [*place, *[None] * (right - len(place))]
            kept = [entry for at, entry in enumerate(entries) if at not in (*summed, *batched)]
            free = [at for at in range(x.ndim) if at not in (*left, *batched_left)]
            first = [self.batch if at == rows else None for at in free]
            outs.append(PartitionSpec(*[None] * (rank - len(first) - len(kept)), *first, *kept))

        def each(x: Array, *weights: Array) -> list[Array]:
            return [
                jax.lax.dot_general(
                    x,
                    weight,
                    product.params["dimension_numbers"],
                    precision=product.params["precision"],
                    preferred_element_type=product.params["preferred_element_type"],
                )
                for product, weight in zip(group, weights, strict=True)
            ]

        weights = [self.gather(shard.value, shard.inner_spec) for shard in shards]
        axes = {axis for place in places for names in axes_of(place) for axis in names}
        options = {} if self.mesh is None else {"mesh": self.mesh}
        axes |= set() if self.mesh is None else {*self.mesh.axis_names}
        row_spec = PartitionSpec(*[self.batch if at == rows else None for at in range(x.ndim)])
        return jax.shard_map(
            each,
            in_specs=(row_spec, *places),
            out_specs=outs,
            axis_names=axes,
            check_vma=False,
            **options,
        )(x, *weights)

    def _rematerialised(self, equation: Any, inner: ClosedJaxpr, given: list[Any]) -> list[Any]:
        params = equation.params
        options = {name: params[name] for name in ("prevent_cse", "policy")}
        return jax.checkpoint(lambda *values: self.run(inner, values), **options)(*given)

    def _scan(self, equation: Any, given: list[Any]) -> list[Any]:
        params, body = equation.params, equation.params["jaxpr"]
        constants, carries = scan_counts(equation, body.jaxpr)
        carried = self._whole(given[constants : constants + carries])
        shared = [  # by every trip
            self._copied(atom, value)
            for atom, value in zip(body.jaxpr.invars, given[:constants], strict=False)
        ]
        stacks = [
            self._whole([x])[0] if isinstance(x, Shard) and any(x.inner_spec[:1]) else x
            for x in given[constants + carries :]
        ]

        def trip(carry: list[Any], layers: list[Any]) -> tuple[list[Any], list[Any]]:
            layers = [
                Shard(x.value, x.spec, x.depth + 1) if isinstance(x, Shard) else x for x in layers
            ]
            results = self.run(body, [*shared, *carry, *layers])
            return results[:carries], results[carries:]

        if self.policy is not None and any(isinstance(x, Shard) for x in stacks):
            trip = jax.checkpoint(trip, policy=self.policy, prevent_cse=False)
        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, stacked = jax.lax.scan(trip, carried, stacks, **options)
        return [*carry, *stacked]


def _numbers(product: Any) -> Any:
    return product.params["dimension_numbers"]


def _evaluate(jaxpr: Jaxpr, equation: Any, values: list[Any]) -> list[Any]:
    """The results of one equation, with its source line, name and context."""
    pairs = zip(equation.invars, values, strict=True)
    given = {atom: value for atom, value in pairs if not isinstance(atom, Literal)}
    alone = jaxpr.replace(
        constvars=[],
        invars=list(given),
        outvars=equation.outvars,
        eqns=[equation],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*given.values())


def batch_dimensions(program: ClosedJaxpr, batch: Sequence[int], pieces: int) -> Callable:
    """(variable) -> the dimension that descends from the first of the inputs `batch`, or None."""
    loops = Loops(program, pieces)
    roots = {loops.root((program.jaxpr.invars[place], 0)) for place in batch}

    def dimension(variable: Var) -> int | None:
        ranks = range(len(getattr(variable.aval, "shape", ())))
        return next((atom for atom in ranks if loops.root((variable, atom)) in roots), None)

    return dimension


def holding(function: Callable, mesh: Mesh, batch: tuple[str, ...], specs_of: Callable) -> Callable:
    """(params, ..., batch) -> what `function` returns, with activations held to the batch.

    `specs_of(params)` gives the tree of specs. Where the batch's axes do not divide the batch, as
    in an evaluation of a few rows, the function is left as it is.
    """
    pieces = 1
    for axis in batch:
        pieces *= mesh.shape[axis]

    def constrain(x: Array, entries: Sequence[Any]) -> Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*entries)))

    def gather(x: Array, spec: PartitionSpec) -> Array:
        return constrain(x, [*without(spec, batch)])

    def loss_of_shards(params: Any, *others: Any, **options: Any) -> Any:
        rows = jax.tree.leaves(others[-1:])
        shapes = [getattr(leaf, "shape", ()) for leaf in rows]
        specs = jax.tree.leaves(specs_of(params), is_leaf=_is_spec)
        is_cut = pieces > 1 or any(any(spec) for spec in specs)
        if not is_cut or not shapes or any(not shape or shape[0] % pieces for shape in shapes):
            return function(params, *others, **options)
        traced = jax.make_jaxpr(partial(function, **options), return_shape=True)
        program, shape = traced(params, *others)
        program = inlined(program)
        values = jax.tree.leaves((params, *others))
        dimension = batch_dimensions(program, range(len(values) - len(rows), len(values)), pieces)

        def keep(equation: Any, results: list[Any]) -> list[Any]:
            if equation.primitive.name not in _PRODUCTS:
                return results
            found = [dimension(atom) for atom in equation.outvars]
            free = PartitionSpec.UNCONSTRAINED
            return [
                x
                if at is None
                else constrain(x, [*[free] * at, batch, *[free] * (x.ndim - at - 1)])
                for x, at in zip(results, found, strict=True)
            ]

        values[: len(specs)] = [
            Shard(value, spec) if any(spec) else value
            for value, spec in zip(values, specs, strict=False)
        ]
        results = FirstUse(gather, batch, keep, mesh, _is_not_constrained, dimension).run(
            program, values
        )
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return loss_of_shards


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def _is_not_constrained(primitive: Any, *_: Any, **__: Any) -> bool:
    """A rematerialisation policy: weights are gathered again, and holding costs nothing."""
    return primitive.name != "sharding_constraint"


def without(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
    """The spec without some mesh axes."""
    kept = [tuple(axis for axis in entry if axis not in axes) for entry in axes_of(spec)]
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in kept))


def only(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
    """The spec with no other mesh axes than these."""
    kept = [tuple(axis for axis in entry if axis in axes) for entry in axes_of(spec)]
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in kept))


def unshared(spec: PartitionSpec, finest: PartitionSpec, batch: tuple[str, ...]) -> PartitionSpec:
    """The spec without the batch's axes where another axis cuts the same dimension.

    There the pieces of the batch's axes are no neighbours: the compiler gathers these, mostly
    biases.
    """
    is_shared = any({*batch} & {*axes} and {*axes} - {*batch} for axes in axes_of(finest))
    return without(spec, batch) if is_shared else spec
