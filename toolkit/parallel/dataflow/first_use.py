"""A loss rewritten so that each parameter is gathered where the program first uses it.

The traced loss is run again, equation by equation. A parameter of which devices hold shards stays
a shard through calls and into loops over stacked layers, so that one layer is whole at a time, and
is gathered before the first operation that reads it.

Products of one array with several parameters that another axis cuts by columns, such as queries,
keys and values, are one group: its gradient is summed over that axis once, as Megatron does.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from toolkit._pytrees import register_dataclass
from toolkit.parallel.axes import axes_of, without
from toolkit.parallel.dataflow.fused import parts_of_shard
from toolkit.parallel.dataflow.programs import CALLS, REMATERIALISED, inner_program, scan_counts
from toolkit.parallel.dataflow.shared_weights import Copies, copies_of, product_of_copies, spread

_SPREADS = ("broadcast_in_dim",)
_VIEWS = ("transpose", "convert_element_type", "reshape", "squeeze", *_SPREADS)
_PRODUCTS = ("dot_general", "gather", "add", "sub", "mul")


@register_dataclass
@dataclass(frozen=True)
class Shard:
    """A parameter that is not gathered yet: the arrays held, its spec, loops entered, and what
    `gather` wants to know of it."""

    value: Array
    spec: PartitionSpec = field(metadata={"static": True})
    depth: int = field(default=0, metadata={"static": True})
    how: Any = field(default=None, metadata={"static": True})

    @property
    def inner_spec(self) -> PartitionSpec:
        """The spec without the dimensions over which the loops around run."""
        return PartitionSpec(*self.spec[self.depth :])


@dataclass(frozen=True)
class FirstUse:
    """How a program is run again."""

    gather: Callable[[Shard], Array]  # (shard) -> its array, whole along the axes of the batch
    batch: tuple[str, ...]  # the mesh axes that cut the batch
    # (equation, its results) -> the results, held to devices
    keep: Callable[[Any, list[Any]], list[Any]] = lambda equation, results: results
    mesh: Mesh | None = None  # the devices; None inside of `jax.shard_map`
    # what a loop over stacked layers keeps for the backward pass; None: everything
    policy: Callable[..., Any] | None = None
    # (variable) -> the dimension that the batch's axes cut, or None
    rows: Callable[[Any], int | None] = lambda variable: None

    def run(self, program: ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
        """The program's results; `values` are arrays, or Shards of parameters."""
        jaxpr = program.jaxpr
        known = dict(zip(jaxpr.constvars, program.consts, strict=True))
        known |= zip(jaxpr.invars, values, strict=True)

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else known[atom]

        readers: dict[Any, list[Any]] = {}
        for equation in jaxpr.eqns if self.mesh is not None else ():
            for atom in equation.invars:
                if isinstance(atom, Var):
                    readers.setdefault(atom, []).append(equation)
        for atom in jaxpr.invars:
            uses = readers.get(atom, [])
            names = {use.primitive.name for use in uses}
            # A table of which rows of the batch do not choose, such as a bias by distance.
            is_table = names == {"gather"} and self.rows(uses[0].outvars[0]) is None
            if (len(uses) > 1 or is_table) and names <= {*_VIEWS, *_PRODUCTS}:
                known[atom] = self._copied(atom, known[atom])
        products: dict[int, list[Any]] = {}
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                products.setdefault(id(equation.invars[0]), []).append(equation)
        done: set[int] = set()
        # Parts of weights come first, so that products with all of them are a group.
        weights = {atom for atom in jaxpr.invars if isinstance(known[atom], Shard)}
        early, late = [], []
        for equation in jaxpr.eqns:
            is_early = equation.primitive.name in ("convert_element_type", "split")
            is_early &= any(isinstance(x, Var) and x in weights for x in equation.invars)
            weights |= {*equation.outvars} if is_early else set()
            (early if is_early else late).append(equation)
        for equation in (*early, *late):
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
            elif name == "split" and (parts := self._parts(equation, given[0])) is not None:
                results = parts
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
            elif (result := self._of_copies(jaxpr, equation, given)) is not None:
                results = [result] if isinstance(result, Copies) else self.keep(equation, [result])
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
            self.gather(x) if isinstance(x, Shard) else x.whole if isinstance(x, Copies) else x
            for x in values
        ]

    def _parts(self, split: Any, shard: Any) -> list[Shard] | None:
        """Shards of the parts of a weight whose columns another axis cuts."""
        if not isinstance(shard, Shard):
            return None
        spec, axis = shard.inner_spec, split.params["axis"]
        cut = dict(enumerate(axes_of(spec))).get(axis, ())
        if not cut or {*cut} & {*self.batch}:
            return None
        parts = parts_of_shard(shard.value, cut, split, self.mesh)
        return None if parts is None else [Shard(part, spec, how=shard.how) for part in parts]

    def _of_copies(self, jaxpr: Jaxpr, equation: Any, given: list[Any]) -> Any:
        """A view of copies, or their product with rows of the batch, device by device; or None."""
        name, after = equation.primitive.name, self.rows(equation.outvars[0])
        pairs = list(zip(equation.invars, given, strict=True))
        copies = [x for x in given if isinstance(x, Copies)]
        before = [self.rows(atom) for atom, x in pairs if not isinstance(x, Copies)]
        if len(copies) != 1 or name not in _VIEWS + _PRODUCTS:
            return None
        if not before and after is not None:
            return spread(copies[0], equation.params, after) if name in _SPREADS else None
        given = [x if isinstance(x, Copies) else self._whole([x])[0] for x in given]

        def alone(*values: Array) -> Array:
            return _evaluate(jaxpr, equation, [*values])[0]

        if after is None and before in ([], [None]):
            return copies[0].map(
                lambda copy: alone(*(copy if isinstance(x, Copies) else x for x in given))
            )
        if after is None or before[0] is None:
            return None
        return product_of_copies(alone, given, (before[0], after), equation.outvars[0].aval.shape)

    def _copied(self, variable: Any, value: Any) -> Any:
        """A weight that several uses share, with copies for each part of the batch."""
        if isinstance(value, Copies):
            return value
        (value,) = self._whole([value])
        is_weight = value.ndim > 0 and jnp.issubdtype(value.dtype, jnp.floating)
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

        weights = [self.gather(shard) for shard in shards]
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
                dataclasses.replace(x, depth=x.depth + 1) if isinstance(x, Shard) else x
                for x in layers
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
