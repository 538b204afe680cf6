"""Training by a program that holds a model's parameters in a form of its own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from toolkit.parallel import Layout
from toolkit.parallel.gradients import ExchangePlan
from toolkit.parallel.updates import TrainState


@dataclass(frozen=True)
class ProgramForm:
    """A loss on parameters that are stacked and cut, as a plan says.

    Checkpoints hold the parameters and moments of the model. So a run that began under one plan
    goes on under any other, or under none.

    Attributes:
        loss: (parameters of the program, batch) -> mean loss.
        layout: the layout of these parameters.
        pack: parameters of the model -> those of the program.
        unpack: the reverse.
        is_model: whether a tree is the model's parameters, or of their structure.
        is_program: whether it is the program's.
        specs_of: state of the optimiser -> its specs.
        exchange: how the program's replicas agree on a gradient; None: they sum.

    Example:
        >>> names = ("loss", "layout", "pack", "unpack", "is_model", "is_program", "specs_of")
        >>> form = ProgramForm(**dict.fromkeys(names, lambda tree: tree))
        >>> form.mask(lambda params: {"w": True}, {"w": jnp.ones(2)})
        {'w': True}
    """

    loss: Callable[..., Any]
    layout: Layout
    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]
    is_model: Callable[[Any], bool]
    is_program: Callable[[Any], bool]
    specs_of: Callable[[Any], Any]
    exchange: ExchangePlan | None = None

    def mask(self, of_model: Callable[[Any], Any], params: Any) -> Any:
        """The program's tree of booleans for one of the model: a stack is as its layers are."""
        whole = jax.eval_shape(self.unpack, params)
        # Only shapes are known here: what decays goes through `pack` with another type.
        typed = jax.tree.map(
            lambda leaf, mark: jax.ShapeDtypeStruct(leaf.shape, "float32" if mark else "bfloat16"),
            whole,
            of_model(whole),
        )
        packed = jax.eval_shape(self.pack, typed)
        return jax.tree.map(lambda leaf: leaf.dtype == "float32", packed)

    def placed(self, state: TrainState) -> TrainState:
        """A state of the program on its devices, moments cut as the plan says."""
        specs = self.specs_of(state.optimizer_state)
        cut = jax.tree.map(
            lambda leaf, spec: jax.device_put(leaf, jax.NamedSharding(self.layout.mesh, spec)),
            state.optimizer_state,
            specs,
        )
        return replace(state, params=self.layout.apply(state.params), optimizer_state=cut)

    def saved(self, state: TrainState) -> TrainState:
        """The state as a checkpoint holds it: that of the model."""
        return jax.jit(lambda state: _each(self.unpack, self.is_program, state))(state)

    def restored(self, state: TrainState, like: TrainState) -> TrainState:
        """A saved state as the program takes it, placed as another."""
        packed = jax.jit(lambda state: _each(self.pack, self.is_model, state))(state)
        return jax.tree.map(lambda a, b: jax.device_put(a, b.sharding), packed, like)


def _each(change: Callable[[Any], Any], is_found: Callable[[Any], bool], tree: Any) -> Any:
    return jax.tree.map(lambda x: change(x) if is_found(x) else x, tree, is_leaf=is_found)
