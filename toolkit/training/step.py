"""The train step: several optimiser updates in one compiled program, the state donated."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from toolkit._checks import checked
from toolkit.parallel.gradients import ExchangePlan
from toolkit.parallel.hosts.meeting import Together
from toolkit.parallel.loss_scaling import loss_scale_of, where_finite
from toolkit.parallel.updates import (
    Batch,
    Metrics,
    Params,
    TrainState,
    layout_of,
    make_update,
    run_updates,
)


class TrainStep:
    """A compiled training step, made by `make_train_step`.

    Calling it with (state, data, steps=1) makes `steps` updates, consumes `state` and returns
    (new state, metrics); each metric has one row per update.

    Attributes:
        most_steps: the largest number of updates in one call.
        is_sampled: whether a batch is drawn from the data, which is the batch itself otherwise.
        exchange: how replicas agree on the gradient; None: the compiler sums.

    Example:
        >>> optimizer = adamw(1e-2)
        >>> step = make_train_step(lambda w, data: (w - data) ** 2, optimizer)
        >>> state, metrics = step(TrainState.create(jnp.float32(1), optimizer), jnp.float32(3))
        >>> int(state.step), metrics["loss"].tolist()
        (1, [4.0])
    """

    def __init__(
        self, update: Callable, most_steps: int, is_sampled: bool,
        exchange: ExchangePlan | None = None,
    ):  # fmt: skip
        self.most_steps = most_steps
        self.is_sampled = is_sampled
        self.exchange = exchange
        program = jax.jit(
            partial(run_updates, update, most_steps=most_steps),
            donate_argnames="state",
            static_argnames="layout",
        )
        self._run = Together(program, "the train step")

    def __call__(self, state: TrainState, data: Any, steps: int = 1) -> tuple[TrainState, Metrics]:
        if not 1 <= steps <= self.most_steps:
            raise ValueError(f"steps must lie in 1..{self.most_steps} (most_steps), got {steps}")
        state, metrics = self._run(state, data, jnp.int32(steps), layout=layout_of(state))
        return state, {name: rows[:steps] for name, rows in metrics.items()}

    def lower(self, state: TrainState, data: Any, steps: int = 1) -> jax.stages.Lowered:
        """The lowered program, for its collectives, FLOPs and memory; arguments as in a call."""
        program = self._run.program
        return program.lower(state, data, jnp.int32(steps), layout=layout_of(state))


@checked
def make_train_step(
    loss_fn: Callable[..., Any], optimizer: optax.GradientTransformation, *,
    sample: Callable[[Any, Int[Array, ""]], Batch] | None = None, most_steps: int = 1,
    compute_dtype: Any = None, batch_sharding: jax.sharding.Sharding | None = None,
    accumulate: int = 1, weigh: Callable[[Batch], Float[Array, ""]] | None = None,
    exchange: ExchangePlan | None = None,
) -> TrainStep:  # fmt: skip
    """Build the jitted update: draw a batch, differentiate, step the optimiser.

        params, optimizer_state <- optimizer(grad loss(params, sample(data, step)))

    With `sample`, batches are drawn on the device inside the program, so that many updates cost
    one Python call. For dropout, let `sample` put a key folded from `step` into the batch.

    With `compute_dtype`, the loss gets *matrices* in that type; the master copy, the optimiser and
    all vectors (norm scales, decay constants) keep theirs.

    Args:
        loss_fn: (params, batch) -> scalar loss, a mean over the batch; with a model state in the
            `TrainState`, (params, model_state, batch) -> (loss, model_state).
        optimizer: an optax transformation, for instance `adamw(...)`.
        sample: (data, step) -> batch, traceable, for instance a `functools.partial` of
            `sample_batch`; None means that `data` is the batch.
        most_steps: the most updates one call may make.
        compute_dtype: for instance jnp.bfloat16; None leaves the parameters as they are.
        batch_sharding: sharding of every array of a sampled batch, for instance over the mesh axis
            "data"; None leaves it to the compiler.
        accumulate: passes per update, each over an equal part of the rows of the batch; the mean of
            their gradients is that of the whole batch, and the memory of activations is that of a
            part.
        weigh: batch -> weight of its mean loss, if parts do not count alike: for packed documents
            the number of targets, `lambda batch: (batch[1] >= 0).sum()`. None: alike.
        exchange: how the replicas of a layout agree on the gradient; None leaves it to the
            compiler, which sums. The state must be made with it, and the loss knows no layout.

    Returns:
        A `TrainStep`: (state, data, steps=1) -> (state, metrics) with metrics "loss",
        "gradient_norm" (before clipping) and, if the optimiser's state tells it, "learning_rate",
        each [steps]. With loss scaling also "loss_scale" and the updates "skipped" so far, whose
        gradient norm is given as 0; with feedback in the exchange also "residual_norm".

    Cost: Per update, the loss's forward and backward passes; parameters and optimiser state are
        updated in place (donated). Under a mesh, the collectives that the layout of the parameters
        implies, for each pass.

    Example:
        >>> optimizer = adamw(1e-2)
        >>> step = make_train_step(lambda w, data: (w - data) ** 2, optimizer)
        >>> state, metrics = step(TrainState.create(jnp.float32(1), optimizer), jnp.float32(3))
        >>> int(state.step), metrics["loss"].tolist()
        (1, [4.0])
    """
    if most_steps < 1:
        raise ValueError(f"most_steps must be at least 1, got {most_steps}")
    if most_steps > 1 and sample is None:
        raise ValueError(f"most_steps={most_steps} needs `sample`: one batch serves one update")

    def loss_in_compute_dtype(params: Params, *parts: Any) -> Any:
        return loss_fn(_cast_matrices(params, compute_dtype), *parts)

    if accumulate < 1:
        raise ValueError(f"accumulate must be at least 1, got {accumulate}")
    draw = sharded_sample(sample or _whole, batch_sharding)
    how: dict[str, Any] = {"passes": accumulate, "weigh": weigh, "exchange": exchange}
    update = make_update(loss_in_compute_dtype, optimizer, draw, _metrics, **how)
    return TrainStep(update, most_steps, sample is not None, exchange)


@checked
def make_evaluation(
    loss_fn: Callable[..., Float[Array, ""]], batches: Batch, *, compute_dtype: Any = None
) -> Callable[..., float]:
    """Build params -> mean loss over fixed batches, for instance those of `evaluation_batches`.

    Args:
        loss_fn: (params, batch) -> scalar loss; with a model state, (params, model_state, batch).
        batches: pytree whose arrays carry a leading axis: [count, ...].
        compute_dtype: as in `make_train_step`.

    Returns:
        A function of the parameters, and of the model state if any, that returns a Python float.

    Example:
        >>> evaluate = make_evaluation(lambda w, batch: jnp.mean(w * batch), jnp.ones((5, 8)))
        >>> evaluate(jnp.float32(2))
        2.0
    """

    @jax.jit
    def mean_loss(parts: tuple[Any, ...], batches: Batch) -> Float[Array, ""]:
        params, *own = parts
        return jax.lax.map(
            partial(loss_fn, _cast_matrices(params, compute_dtype), *own), batches
        ).mean()

    run = Together(mean_loss, "the evaluation")
    return lambda *parts: float(run(parts, batches))


def sharded_sample(sample: Callable, sharding: jax.sharding.Sharding | None) -> Callable:
    """(data, step) -> a batch with this sharding; None leaves it to the compiler."""

    def draw(data: Any, step: Int[Array, ""]) -> Batch:
        batch = sample(data, step)
        return batch if sharding is None else jax.lax.with_sharding_constraint(batch, sharding)

    return draw


def _whole(data: Batch, step: Int[Array, ""]) -> Batch:
    return data


def _metrics(loss: Array, gradients: Params, optimizer_state: Any) -> Metrics:
    norm = optax.tree.norm(gradients)
    metrics = {"loss": loss, "gradient_norm": where_finite(optimizer_state, norm, 0 * loss)}
    if (scale := loss_scale_of(optimizer_state)) is not None:
        metrics |= {"loss_scale": scale, "skipped": optimizer_state.inner.total_notfinite}
    if (rate := _learning_rate(optimizer_state)) is not None:
        metrics["learning_rate"] = rate
    return metrics


PRECISE = {"router", "connections"}
"""Parts of models whose matrices are not rounded: a router in bfloat16 would send tokens elsewhere
than in float32, and residual streams are mixed by products of many small matrices."""


def _cast_matrices(params: Params, dtype: Any) -> Params:
    if dtype is None:
        return params

    def cast(path: tuple[Any, ...], leaf: Array) -> Array:
        names = {getattr(key, "key", getattr(key, "name", None)) for key in path}
        is_real_matrix = leaf.ndim >= 2 and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if is_real_matrix and not names & PRECISE else leaf

    return jax.tree_util.tree_map_with_path(cast, params)


def _learning_rate(optimizer_state: Any) -> Array | None:
    return optax.tree.get(
        optimizer_state,
        "learning_rate",
        default=None,
        filtering=lambda path, value: isinstance(value, jax.Array),
    )
