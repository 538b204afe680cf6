"""A search for the learning rate as a training run: sharded, checkpointed half-way, resumed to the
bit.

Arrays go into the checkpoint as in any run; what the search knows, whose arrays grow, goes into
its record as bytes.
"""

import base64
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from toolkit import lr
from toolkit.training.checkpoint import Checkpoints
from toolkit.training.step import Batch, Params, TrainState


@dataclass(frozen=True)
class RateSearch:
    """What a search in training left behind.

    Attributes:
        state: trained by the search, along the schedule it found.
        result: the schedule, the ledger, the table.
        is_complete: whether the budget is spent; False if it was stopped.
    """

    state: TrainState
    result: lr.SearchResult
    is_complete: bool


def search_rate(
    loss_fn: Callable[[Params, Batch], Float[Array, ""]],
    optimizer: optax.GradientTransformation,
    state: TrainState,
    data: Any,
    *,
    sample: Callable[[Any, Int[Array, ""]], Batch],
    interval: tuple[float, float],
    budget: int,
    method: Callable[[tuple[float, float], int], lr.Method] = lr.ProbeThenDecay,
    validation: Callable[[Params], Float[Array, ""]] | None = None,
    validation_batches: int = 1,
    evaluation: str = "loop",
    batch_sharding: jax.sharding.Sharding | None = None,
    directory: str | os.PathLike | None = None,
    checkpoint_every: int = 200,
    configuration: dict[str, Any] | None = None,
    stop: Callable[[lr.SearchProgress], bool] | None = None,
) -> RateSearch:
    """Trains at rates found on the way, from the newest checkpoint in `directory` if there is one.

        params <- params + rate * optimizer(grad loss(params, sample(data, step)))

    Killed at any moment and called again with the same arguments, it ends with the same bits. To
    train again along the schedule, give `optax.chain(optimizer,
    optax.scale_by_schedule(result.schedule))` to `make_train_step`.

    Args:
        loss_fn: (params, batch) -> scalar loss, as for `make_train_step`.
        optimizer: an optax transformation with learning rate 1; groups keep the ratio of theirs.
        state: where to start, made by `TrainState.create`; not consumed.
        data: passed to `sample`, for instance the training tokens on the device.
        sample: (data, step) -> batch, traceable.
        interval: lowest and highest rate.
        budget: gradient evaluations in all, those of candidates included.
        method: (interval, budget) -> constants, as for `lr.search`.
        validation: params -> scalar loss on fixed batches of a split kept for choosing.
        validation_batches: how many batches those are.
        evaluation: how to run candidates proposed together, as for `lr.search`.
        batch_sharding: how to lay out every array of a batch, for instance over the axis "data".
        directory: for checkpoints; None keeps everything in memory.
        checkpoint_every: gradient evaluations between two checkpoints, at least.
        configuration: JSON-able description of the run; a checkpoint made under another is
            refused.
        stop: asked after every request; True saves and returns.

    Returns:
        A `RateSearch`.

    Raises:
        ValueError: checkpoint_every is not positive, or as `lr.search`.
        CheckpointError: the directory belongs to another run, cannot be written or has no room.

    Cost:
        As `lr.search`; a checkpoint is one copy of the state to the host, then written in the
        background.
    """
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every must be at least 1, got {checkpoint_every}")
    constants: Any = method(interval, budget)
    if validation is not None:
        constants = replace(constants, validation_batches=validation_batches)
    run = {"configuration": configuration or {}, "search": repr(constants)}
    with ExitStack() as stack:
        checkpoints, start = None, lr.SearchProgress(lr.init(constants), _search_state(state), {})
        if directory is not None:
            path = Path(directory) / "checkpoints"
            checkpoints = stack.enter_context(Checkpoints(path))
            if (restored := checkpoints.restore_latest(state, run)) is not None:
                state, record = restored
                controller = decoded(record["controller"], start.controller)
                start = lr.SearchProgress(controller, _search_state(state), record["timings"])
        saved, is_stopped = start.controller.ledger.gradient_evaluations, False

        def after_request(progress: lr.SearchProgress) -> bool:
            nonlocal saved, is_stopped
            is_stopped = stop is not None and stop(progress)
            spent = progress.controller.ledger.gradient_evaluations
            is_last = lr.ask(constants, progress.controller) is None
            is_due = is_stopped or is_last or spent >= saved + checkpoint_every
            if checkpoints is not None and is_due:
                record = {"controller": encoded(progress.controller), "timings": progress.timings}
                checkpoints.save(spent, _train_state(progress.state, state), {**run, **record})
                saved = spent
            return is_stopped

        result = lr.search(
            loss_fn,
            state.params,
            data,
            interval=interval,
            budget=budget,
            method=method,
            optimizer=optimizer,
            validation=validation,
            validation_batches=validation_batches,
            sample=partial(_sharded_sample, sample, batch_sharding),
            evaluation=evaluation,
            start=start,
            callback=after_request,
        )
    is_complete = lr.ask(constants, result.progress.controller) is None
    return RateSearch(_train_state(result.progress.state, state), result, is_complete)


def encoded(tree: Any) -> list[dict[str, Any]]:
    """The leaves of a pytree of numbers and NumPy arrays, exactly, as JSON."""
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return [
        {
            "dtype": str(array.dtype),
            "shape": list(array.shape),
            "bytes": base64.b64encode(array.tobytes()).decode(),
        }
        for array in arrays
    ]


def decoded(leaves: list[dict[str, Any]], template: Any) -> Any:
    """The pytree that was encoded; numbers come back as the numbers that the template has."""

    def read(leaf: dict[str, Any], like: Any) -> Any:
        array = np.frombuffer(base64.b64decode(leaf["bytes"]), leaf["dtype"])
        array = array.reshape(leaf["shape"])
        return array.copy() if isinstance(like, np.ndarray) else array.item()

    likes, structure = jax.tree.flatten(template)
    read_leaves = [read(leaf, like) for leaf, like in zip(leaves, likes, strict=True)]
    return jax.tree.unflatten(structure, read_leaves)


def _search_state(state: TrainState) -> lr.SearchState:
    return lr.SearchState(state.params, state.optimizer_state, int(state.step))


def _train_state(state: lr.SearchState, like: TrainState) -> TrainState:
    step = jax.device_put(jnp.int32(state.cursor), like.step.sharding)
    return TrainState(step, state.params, state.optimizer_state)


def _sharded_sample(
    sample: Callable, sharding: jax.sharding.Sharding | None, data: Any, step: Array
) -> Batch:
    batch = sample(data, step)
    return batch if sharding is None else jax.lax.with_sharding_constraint(batch, sharding)
