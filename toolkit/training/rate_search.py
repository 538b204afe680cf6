"""A learning-rate search as a training run: sharded, checkpointed, resumed bit for bit.

Arrays go into the checkpoint as in any run; the search's state, whose arrays grow, goes into its
record as bytes.
"""

import base64
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
from jax.tree_util import keystr, tree_leaves_with_path
from jaxtyping import Array, Float, Int

from toolkit import lr
from toolkit._checks import checked
from toolkit.parallel.hosts.signals import remembered_signals
from toolkit.parallel.updates import Batch, Params, TrainState
from toolkit.training.checkpoints.checkpoint import CheckpointError
from toolkit.training.loop import (
    FitOptions,
    FitResult,
    advance,
    evaluation_row,
    is_time_to_save,
    open_log,
    progress_bar,
    reason_to_stop,
    restore,
    say_if_stopped,
)
from toolkit.training.step import sharded_sample


@dataclass(frozen=True, repr=False)
class RateSearch(FitResult):
    """The result of a search in training: the trained state, its history, and the search.

    Attributes:
        result: the schedule, the ledger, the table.

    Example:
        >>> import optax
        >>> state, options = TrainState.create(jnp.float32(1), optax.sgd(1.0)), FitOptions(300)
        >>> found = search_rate(lambda w, batch: (w - 3) ** 2, optax.sgd(1.0), state, None, options,
        ...                     sample=lambda data, step: None)
        >>> found.state.step == found.result.ledger.kept_steps
        Array(True, dtype=bool)
    """

    result: lr.SearchResult


@checked
def search_rate(
    loss_fn: Callable[[Params, Batch], Float[Array, ""]], optimizer: optax.GradientTransformation,
    state: TrainState, data: Any, options: FitOptions, *,
    sample: Callable[[Any, Int[Array, ""]], Batch], lr_range: tuple[float, float] = lr.LR_RANGE,
    searcher: Callable[[tuple[float, float], int], lr.Searcher] = lr.ProbeThenDecay,
    validation: Callable[[Params], Float[Array, ""]] | None = None, validation_batches: int = 1,
    evaluation: str = "loop", batch_sharding: jax.sharding.Sharding | None = None,
    directory: str | os.PathLike | None = None, configuration: dict[str, Any] | None = None,
    evaluate: Callable[[Params], float | dict[str, float]] | None = None,
    stop: Callable[[], bool] | None = None,
    callback: Callable[[dict[str, Any]], None] | None = None,
) -> RateSearch:  # fmt: skip
    """`fit` without a learning rate: `lr.search` finds one within the same number of gradients.

        params <- params + rate * optimizer(grad loss(params, sample(data, step)))

    `options.total_steps` includes candidates, so that fewer updates are kept. The history has a row
    for each kept stretch of training. A killed search resumes bit for bit. To train again along the
    schedule, pass `optax.chain(optimizer, optax.scale_by_schedule(result.schedule))` to
    `make_train_step`.

    Args:
        loss_fn: (params, batch) -> scalar loss, as for `make_train_step`.
        optimizer: an optax transformation with learning rate 1; parameter groups keep their ratios.
        state: initial state, from `TrainState.create`; not consumed.
        data: passed to `sample`, for instance the training tokens on the device.
        options: as for `fit`, counted in gradient evaluations; `log_every` is not used.
        sample: (data, step) -> batch, traceable.
        lr_range: lowest and highest rate.
        searcher: (lr_range, budget) -> its constants, as for `lr.search`.
        validation: params -> scalar loss on fixed batches of a split kept for choosing.
        validation_batches: number of these batches.
        evaluation: how to run candidates proposed together, as for `lr.search`.
        batch_sharding: sharding of every array of a batch, for instance over the axis "data".
        directory: for checkpoints and `metrics.jsonl`; None keeps everything in memory.
        configuration: JSON-able description of the run; a checkpoint with another one is refused.
        evaluate: as in `fit`, for the history; the search does not use it.
        stop: called after every request of the search; True saves and returns.
        callback: called with every metrics row.

    Raises:
        CheckpointError: when the directory belongs to another run, cannot be written or has no
            room.

    Cost: As `lr.search`; a checkpoint is one copy of the state to the host, then written in the
        background.

    Example:
        >>> import optax
        >>> state, options = TrainState.create(jnp.float32(1), optax.sgd(1.0)), FitOptions(100)
        >>> found = search_rate(lambda w, batch: (w - 3) ** 2, optax.sgd(1.0), state, None, options,
        ...                     sample=lambda data, step: None)
        >>> found.result.ledger.gradient_evaluations
        100
    """
    if jax.process_count() > 1:
        raise ValueError(
            f"search_rate: runs in one process, and this job has {jax.process_count()}; "
            "train with the schedule that it finds there"
        )
    if options.profile is not None:
        raise ValueError("profile: a search has no steps of its own to trace; trace a run without")
    budget = options.total_steps
    constants: Any = searcher(lr_range, budget)
    if validation is not None:
        constants = replace(constants, validation_batches=validation_batches)
    run = {"configuration": configuration or {}, "search": repr(constants)}
    start = lr.SearchProgress(lr.init(constants), state, constants)
    with ExitStack() as stack:
        checkpoints, restored = restore(stack, directory, options, state, run)
        if restored is not None:
            state, record = restored
            controller = decoded(record["controller"], start.controller)
            prints = {name: np.array(row, np.uint8) for name, row in record["fingerprints"].items()}
            start = lr.SearchProgress(controller, state, constants, prints)
        log = open_log(stack, directory, int(state.step))
        ledger = start.controller.ledger
        bar = stack.enter_context(progress_bar(options, ledger.gradient_evaluations))
        signals = stack.enter_context(remembered_signals())
        saved_at = time.monotonic()
        saved, stopped_by, started = ledger.gradient_evaluations, None, time.perf_counter()

        def after_request(
            progress: lr.SearchProgress, request: lr.Request, losses: np.ndarray
        ) -> bool:
            nonlocal ledger, saved, saved_at, stopped_by, started
            before, ledger = ledger, progress.controller.ledger
            steps, spent = request.rates.size, ledger.gradient_evaluations
            is_last = lr.ask(constants, progress.controller) is None
            row = {"step": ledger.kept_steps, "loss": float(np.mean(losses))}
            row["learning_rate"] = float(request.rates[-1, -1])
            row["seconds"], started = time.perf_counter() - started, time.perf_counter()
            if ledger.kept_steps > before.kept_steps:
                is_due = spent // options.eval_every > (spent - steps) // options.eval_every
                if evaluate is not None and (is_last or is_due):
                    row |= evaluation_row(evaluate(progress.state.params))
                log.append(row)
                if callback is not None:
                    callback(row)
            advance(bar, row, steps, options)
            if not is_last:
                stopped_by = reason_to_stop(signals, stop)
            is_due = is_last or stopped_by is not None or spent >= saved + options.checkpoint_every
            if checkpoints is not None and (is_due or is_time_to_save(saved_at, options)):
                prints = {name: row.tolist() for name, row in progress.fingerprints.items()}
                record = {"controller": encoded(progress.controller), "fingerprints": prints}
                checkpoints.save(spent, progress.state, {**run, **record})
                saved, saved_at = spent, time.monotonic()
            return stopped_by is not None

        result = lr.search(
            loss_fn,
            state.params,
            data,
            lr_range=lr_range,
            budget=budget,
            searcher=searcher,
            optimizer=optimizer,
            validation=validation,
            validation_batches=validation_batches,
            sample=sharded_sample(sample, batch_sharding),
            evaluation=evaluation,
            start=start,
            callback=after_request,
        )
    where = f"{ledger.gradient_evaluations} of {budget} gradient evaluations"
    say_if_stopped(stopped_by, where, directory)
    return RateSearch(result.progress.state, log.rows, stopped_by, result)


def encoded(tree: Any) -> dict[str, dict[str, Any]]:
    """The leaves of a pytree of numbers and NumPy arrays by name, exactly, as JSON."""

    def written(leaf: Any) -> dict[str, Any]:
        array = np.asarray(leaf)
        content = base64.b64encode(array.tobytes()).decode()
        return {"dtype": str(array.dtype), "shape": list(array.shape), "bytes": content}

    return {keystr(path): written(leaf) for path, leaf in tree_leaves_with_path(tree)}


def decoded(leaves: Any, template: Any) -> Any:
    """The encoded pytree; numbers have the types of the template.

    Raises `CheckpointError` where the names are not those of the template.
    """

    def read(leaf: dict[str, Any], like: Any) -> Any:
        array = np.frombuffer(base64.b64decode(leaf["bytes"]), leaf["dtype"])
        array = array.reshape(leaf["shape"])
        return array.copy() if isinstance(like, np.ndarray) else array.item()

    likes = {keystr(path): like for path, like in tree_leaves_with_path(template)}
    if not isinstance(leaves, dict) or leaves.keys() != likes.keys():
        raise CheckpointError(
            "directory: another version of toolkit wrote the search in it; search again in another"
        )
    read_leaves = [read(leaves[name], like) for name, like in likes.items()]
    return jax.tree.unflatten(jax.tree.structure(template), read_leaves)
