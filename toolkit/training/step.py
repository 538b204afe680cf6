"""The train step: several optimiser updates in one compiled program, the state donated.

One program serves every number of updates, because the number is a traced bound of the loop and
not a shape. That is what makes resuming exact: however a run was cut into calls, each update is
the same machine code applied to the same numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

Params = Any
Batch = Any
Metrics = dict[str, Array]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "params", "optimizer_state"),
    meta_fields=(),
)
@dataclass(frozen=True)
class TrainState:
    """All that changes while training, and so all that a checkpoint must hold.

    Attributes:
        step: int32 scalar, the updates made so far; seeds every random choice of the next one.
        params: any pytree of arrays, for instance an `nnx.State`.
        optimizer_state: what the optax transformation keeps.
    """

    step: Int[Array, ""]
    params: Params
    optimizer_state: Any

    @classmethod
    def create(cls, params: Params, optimizer: optax.GradientTransformation) -> "TrainState":
        """Starts at step 0 with a copy of `params` (the train step donates its state, not yours).

        Optimiser state follows the sharding of the parameters; scalars are put on their mesh.

        Args:
            params: pytree of arrays, sharded or not.
            optimizer: the optax transformation that will be stepped.

        Returns:
            The state before the first update.

        Cost:
            One copy of the parameters, plus the optimiser's own state.
        """
        params = jax.tree.map(jnp.copy, params)
        state = cls(jnp.zeros((), jnp.int32), params, optimizer.init(params))
        mesh = _mesh_of(params)
        if mesh is None:
            return state
        replicated = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(
            lambda leaf: leaf if _is_on_mesh(leaf) else jax.device_put(leaf, replicated), state
        )


class TrainStep:
    """A compiled training step, made by `make_train_step`.

    Calling it with (state, data, steps=1) makes `steps` updates, consumes `state` and returns
    (new state, metrics); each metric has one row an update.

    Attributes:
        most_steps: the largest number of updates in one call.
    """

    def __init__(self, update: Callable, most_steps: int):
        self.most_steps = most_steps
        self._program = jax.jit(
            partial(_updates, update, most_steps),
            donate_argnames="state",
            static_argnames="shardings",
        )

    def __call__(self, state: TrainState, data: Any, steps: int = 1) -> tuple[TrainState, Metrics]:
        if not 1 <= steps <= self.most_steps:
            raise ValueError(f"steps must lie in 1..{self.most_steps} (most_steps), got {steps}")
        state, metrics = self._program(state, data, jnp.int32(steps), shardings=_layout(state))
        return state, {name: rows[:steps] for name, rows in metrics.items()}

    def lower(self, state: TrainState, data: Any, steps: int = 1) -> jax.stages.Lowered:
        """The program before compilation, to read its collectives, FLOPs and memory.

        Args:
            state: a train state; only shapes and shardings are used.
            data: as in a call.
            steps: as in a call; it does not change the program.

        Returns:
            The lowered program; `.compile()` gives the compiled one.

        Cost:
            One tracing; nothing is executed.
        """
        return self._program.lower(state, data, jnp.int32(steps), shardings=_layout(state))


def make_train_step(
    loss_fn: Callable[[Params, Batch], Float[Array, ""]],
    optimizer: optax.GradientTransformation,
    *,
    sample: Callable[[Any, Int[Array, ""]], Batch] | None = None,
    most_steps: int = 1,
    compute_dtype: Any = None,
    batch_sharding: jax.sharding.Sharding | None = None,
) -> TrainStep:
    """Builds the jitted update: draw a batch, differentiate, step the optimiser.

        params, optimizer_state <- optimizer(grad loss(params, sample(data, step)))

    With `sample`, batches are drawn on the device inside the program, so that many updates cost
    one Python call. Random choices of a model (dropout) belong there too: let `sample` put a key
    folded from `step` into the batch.

    Mixed precision is decided here, not in the model: with `compute_dtype` the loss sees its
    *matrices* cast to that type, while the master copy, the gradients' accumulation into it, the
    optimiser and all vectors (norm scales, decay constants) stay as they are.

    Args:
        loss_fn: (params, batch) -> scalar loss, a mean over the batch.
        optimizer: an optax transformation, for instance `adamw(...)`.
        sample: (data, step) -> batch, traceable, for instance a `functools.partial` of
            `sample_batch`; None means that `data` is the batch.
        most_steps: the most updates one call may make.
        compute_dtype: for instance jnp.bfloat16; None leaves the parameters as they are.
        batch_sharding: how to lay out every array of a sampled batch, for instance over the mesh
            axis "data"; None leaves that to the compiler.

    Returns:
        A `TrainStep`: (state, data, steps=1) -> (state, metrics) with metrics "loss",
        "gradient_norm" (before clipping) and, if the optimiser's state tells it, "learning_rate",
        each [steps].

    Raises:
        ValueError: most_steps is not positive, or more than 1 without `sample`.

    Cost:
        Per update, the loss's forward and backward passes; parameters and optimiser state are
        updated in place (donated). Under a mesh, the collectives that the layout of the
        parameters implies.
    """
    if most_steps < 1:
        raise ValueError(f"most_steps must be at least 1, got {most_steps}")
    if most_steps > 1 and sample is None:
        raise ValueError(f"most_steps={most_steps} needs `sample`: one batch serves one update")

    def loss_in_compute_dtype(params: Params, batch: Batch) -> Float[Array, ""]:
        return loss_fn(_cast_matrices(params, compute_dtype), batch)

    def update(state: TrainState, data: Any) -> tuple[TrainState, Metrics]:
        batch = data if sample is None else sample(data, state.step)
        if batch_sharding is not None:
            batch = jax.lax.with_sharding_constraint(batch, batch_sharding)
        loss, gradients = jax.value_and_grad(loss_in_compute_dtype)(state.params, batch)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}
        if (rate := _learning_rate(optimizer_state)) is not None:
            metrics["learning_rate"] = rate
        return TrainState(state.step + 1, params, optimizer_state), metrics

    return TrainStep(update, most_steps)


def make_evaluation(
    loss_fn: Callable[[Params, Batch], Float[Array, ""]],
    batches: Batch,
    *,
    compute_dtype: Any = None,
) -> Callable[[Params], float]:
    """Builds params -> mean loss over fixed batches, for instance those of `evaluation_batches`.

    Args:
        loss_fn: (params, batch) -> scalar loss.
        batches: pytree whose arrays carry a leading axis: [count, ...].
        compute_dtype: as in `make_train_step`.

    Returns:
        A function of the parameters that returns a Python float.

    Cost:
        `count` forward passes, one batch at a time in memory.
    """

    @jax.jit
    def mean_loss(params: Params, batches: Batch) -> Float[Array, ""]:
        params = _cast_matrices(params, compute_dtype)
        return jax.lax.map(partial(loss_fn, params), batches).mean()

    return lambda params: float(mean_loss(params, batches))


def _updates(
    update: Callable,
    most_steps: int,
    state: TrainState,
    data: Any,
    steps: Int[Array, ""],
    *,
    shardings: tuple,
) -> tuple[TrainState, Metrics]:
    """`steps` updates, keeping the layout the state came in: a compiler's other choice would make
    the second call another program than the first, and a restored run another than an unbroken
    one.
    """
    metrics = jax.tree.map(
        lambda row: jnp.zeros((most_steps, *row.shape), row.dtype),
        jax.eval_shape(update, state, data)[1],
    )

    def body(index: Int[Array, ""], carry: tuple) -> tuple[TrainState, Metrics]:
        state, metrics = carry
        state, row = update(state, data)
        state = _constrain(state, shardings)
        return state, {name: metrics[name].at[index].set(row[name]) for name in metrics}

    return jax.lax.fori_loop(0, steps, body, (state, metrics))


def _layout(state: TrainState) -> tuple:
    leaves = jax.tree.leaves(state)
    return tuple(leaf.sharding if _is_on_mesh(leaf) else None for leaf in leaves)


def _constrain(state: TrainState, shardings: tuple) -> TrainState:
    leaves, structure = jax.tree.flatten(state)
    constrained = [
        leaf if sharding is None else jax.lax.with_sharding_constraint(leaf, sharding)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    return jax.tree.unflatten(structure, constrained)


def _cast_matrices(params: Params, dtype: Any) -> Params:
    if dtype is None:
        return params

    def cast(leaf: Array) -> Array:
        is_real_matrix = leaf.ndim >= 2 and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if is_real_matrix else leaf

    return jax.tree.map(cast, params)


def _learning_rate(optimizer_state: Any) -> Array | None:
    return optax.tree.get(
        optimizer_state,
        "learning_rate",
        default=None,
        filtering=lambda path, value: isinstance(value, jax.Array),
    )


def _is_on_mesh(leaf: Any) -> bool:
    return isinstance(getattr(leaf, "sharding", None), NamedSharding)


def _mesh_of(tree: Any) -> jax.sharding.Mesh | None:
    shardings = (leaf.sharding for leaf in jax.tree.leaves(tree) if _is_on_mesh(leaf))
    return next((sharding.mesh for sharding in shardings), None)
