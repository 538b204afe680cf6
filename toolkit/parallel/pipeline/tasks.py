"""What one device runs in a tick: the tasks of every kind of stage, for the shapes it has."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from toolkit.parallel.pipeline.partition import Partition, partition
from toolkit.parallel.pipeline.rows import Rows
from toolkit.parallel.pipeline.stores import Stores

Tree = Any


class Context(NamedTuple):
    """What a stage may read beside its weights and its input.

    Attributes:
        data: its microbatch, such as tokens, targets and document numbers.
        shared: the parameters that all devices have.
        stage: its number, counted from 0.

    Example:
        >>> Context(data={"tokens": jnp.zeros((2, 8), int)}, shared=None, stage=0).stage
        0
    """

    data: Any
    shared: Any
    stage: Any


class Kind(NamedTuple):
    """Stages that run the same code on weights of the same structure."""

    function: Callable[..., Any]  # (weights, x, context) -> x
    recompute: bool  # whether the forward pass is run again within the backward pass
    structure: int  # the number of the weights' structure among those of `Rows`


class Tasks:
    """The tasks of every kind of stage.

    Attributes:
        rows, first, last: as of `Pipeline`.
        x: shapes of an activation, `leaves` those of its arrays and `tree` its structure.
        carry: shapes of what a slice passes on to the next, `carry_tree` their structure.
        loss: shape of the loss.
        shared: the arrays of the shared parameters, `shared_tree` their structure.
        used: for each kind of stage the numbers of the shared arrays that it reads.
        cut: for each kind of stage its tasks.
        kept, split: where what waits between them is stored.
    """

    def __init__(
        self, kinds: Sequence[Kind], stores: Sequence[int], rows: Rows, first: Callable[..., Any],
        last: Callable[..., Any], weights: Tree, shared: Tree, data: Tree,
        carried: Callable[..., Any] | None = None,
    ):  # fmt: skip
        self.rows, self.first, self.last = rows, first, last
        self.x = jax.eval_shape(first, shared, data)
        self.leaves, self.tree = jax.tree.flatten(self.x)
        for leaf in self.leaves:
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ValueError(f"first returns {leaf.dtype}; activations must be floating")
        self.carried = carried
        start = () if carried is None else jax.eval_shape(carried, shared, data)
        self.carry, self.carry_tree = jax.tree.flatten(start)
        self.loss = jax.eval_shape(last, shared, self.x, data)
        if getattr(self.loss, "shape", None) != ():
            raise ValueError(
                f"last returns {self.loss}; wanted a scalar, summed over the microbatch"
            )
        self.shared, self.shared_tree = jax.tree.flatten(shared)
        row = [jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in jax.tree.leaves(weights)]
        self.used: list[list[int]] = []
        self.cut: list[Partition] = []
        for kind in kinds:
            used, cut = self._cut(kind, row, data)
            self.used.append(used)
            self.cut.append(cut)
        self.kept = Stores(stores, [cut.kept for cut in self.cut])
        self.split = Stores(stores, [cut.split for cut in self.cut])

    def arguments(self, kind: int, row: list[Any], data: Tree, stage: Any) -> tuple[list, list]:
        """What a task of a kind of stage gets: weights with a gradient, and the rest."""
        used = self.used[kind]
        others = [leaf for at, leaf in enumerate(self.shared) if at not in used]
        return [*row, *(self.shared[at] for at in used)], [stage, *jax.tree.leaves(data), *others]

    def _cut(self, kind: Kind, row: list[Any], data: Tree) -> tuple[list[int], Partition]:
        data_leaves, data_tree = jax.tree.flatten(data)
        every = [jax.ShapeDtypeStruct((), jnp.int32), *data_leaves]

        def run(used: Sequence[int], weights: list[Any], x: list[Any], rest: list[Any]):
            own, mine = weights[: len(row)], iter(weights[len(row) :])
            stage, *rest = rest
            others = iter(rest[len(data_leaves) :])
            shared = [next(mine if at in used else others) for at in range(len(self.shared))]
            context = Context(
                data_tree.unflatten(rest[: len(data_leaves)]),
                self.shared_tree.unflatten(shared),
                stage,
            )
            weights = self.rows.unpack(kind.structure, own)
            x, carry = x[: len(self.leaves)], x[len(self.leaves) :]
            given = self.tree.unflatten(x)
            if self.carried is not None:
                given = given, self.carry_tree.unflatten(carry)
            y = kind.function(weights, given, context)
            if self.carried is not None:
                y, carry = y[0], jax.tree.leaves(y[1])
                if _shapes(carry) != _shapes(self.carry):
                    raise ValueError(
                        f"a stage carries {_shapes(carry)}; wanted {_shapes(self.carry)}"
                    )
            y, tree = jax.tree.flatten(y)
            if tree != self.tree or _shapes(y) != _shapes(x):
                raise ValueError(
                    f"a stage returns {_shapes(y)} for {_shapes(x)}; wanted the same shapes"
                )
            return [*y, *carry]

        # Shared parameters that these stages do not read get no gradients from them.
        everything = functools.partial(run, range(len(self.shared)))
        inner = [*self.leaves, *self.carry]
        traced = jax.make_jaxpr(everything)([*row, *self.shared], inner, every).jaxpr
        read = {id(v) for eqn in traced.eqns for v in eqn.invars}
        inputs = traced.invars[len(row) : len(row) + len(self.shared)]
        used = [at for at, v in enumerate(inputs) if id(v) in read]
        others = [leaf for at, leaf in enumerate(self.shared) if at not in used]
        weights = [*row, *(self.shared[at] for at in used)]
        cut = partition(
            functools.partial(run, used), weights, inner, [*every, *others],
            recompute=kind.recompute,
        )  # fmt: skip
        return used, cut


def _shapes(leaves: Sequence[Any]) -> str:
    return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
