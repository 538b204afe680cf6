"""Functions of a model on a layout: weights gathered where they are used, activations held.

What descends from the batch is held to the batch's devices after each product; otherwise a compiler
may gather activations instead of weights.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Var
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from toolkit.parallel.axes import without
from toolkit.parallel.dataflow.first_use import FirstUse, Shard
from toolkit.parallel.dataflow.fused import separated
from toolkit.parallel.dataflow.loops import Loops
from toolkit.parallel.dataflow.programs import inlined

_PRODUCTS = ("dot_general", "conv_general_dilated", "gather", "ragged_dot", "ragged_dot_general")


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

    def gather(x: Shard) -> Array:
        return constrain(x.value, [*without(x.inner_spec, batch)])

    def loss_of_shards(params: Any, *others: Any, **options: Any) -> Any:
        rows = jax.tree.leaves(others[-1:])
        shapes = [getattr(leaf, "shape", ()) for leaf in rows]
        specs = jax.tree.leaves(specs_of(params), is_leaf=_is_spec)
        is_cut = pieces > 1 or any(any(spec) for spec in specs)
        if not is_cut or not shapes or any(not shape or shape[0] % pieces for shape in shapes):
            return function(params, *others, **options)
        traced = jax.make_jaxpr(partial(function, **options), return_shape=True)
        program, shape = traced(params, *others)
        program = separated(inlined(program))
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
