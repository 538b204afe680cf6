"""The loop: call the train step, log metrics, evaluate, checkpoint, stop and resume.

A call of the train step ends where an evaluation, a checkpoint or the run ends; these boundaries
are functions of the absolute step, so a resumed run logs the same rows as an unbroken one.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from toolkit._checks import check_fields, checked
from toolkit.parallel.gradients.resized import resized
from toolkit.parallel.hosts.meeting import meet
from toolkit.parallel.hosts.signals import remembered_signals
from toolkit.parallel.updates import TrainState
from toolkit.training.averages import evaluation_params
from toolkit.training.checkpoints.checkpoint import Checkpoints
from toolkit.training.data.adaptive import AdaptiveBatches, Choices
from toolkit.training.data.host_batches import HostBatches
from toolkit.training.forms import ProgramForm
from toolkit.training.metrics import MetricsLog
from toolkit.training.profile import StepTrace
from toolkit.training.step import TrainStep

_REASONS = ("request", "SIGINT", "SIGTERM")


class DivergedError(ArithmeticError):
    """The loss or the gradient stopped being a finite number."""


@dataclass(frozen=True)
class FitOptions:
    """Options of `fit`; all counts are in updates.

    Attributes:
        total_steps: updates after which the run is complete.
        log_every: longest interval between metrics rows; at most the train step's `most_steps`.
        eval_every: evaluate at multiples of this, and at the end.
        checkpoint_every: save at multiples of this, and at the end.
        checkpoint_minutes: also save when this number of minutes has passed since the last save.
        keep: number of checkpoints kept.
        tokens_per_step: batch * time, for the tokens per second of the progress bar.
        is_progress_shown: whether to draw the progress bar.
        profile: (first, last): trace the updates after step `first` up to step `last`, into the
            folder `profile` of the run's directory.

    Example:
        >>> FitOptions(total_steps=1000, log_every=10).checkpoint_every
        100
    """

    total_steps: int
    log_every: int = 10
    eval_every: int = 100
    checkpoint_every: int = 100
    checkpoint_minutes: float | None = None
    keep: int = 3
    tokens_per_step: int | None = None
    is_progress_shown: bool = True
    profile: tuple[int, int] | None = None

    def __post_init__(self):
        check_fields(self)
        for name in ("total_steps", "log_every", "eval_every", "checkpoint_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.checkpoint_minutes is not None and self.checkpoint_minutes <= 0:
            raise ValueError(f"checkpoint_minutes must be positive, got {self.checkpoint_minutes}")
        if self.profile is not None and not 0 <= self.profile[0] < self.profile[1]:
            raise ValueError(f"profile: got {self.profile}, wanted 0 <= first < last")


@dataclass(frozen=True)
class FitResult:
    """The result of a run; printed, it is a line.

    Attributes:
        state: the last train state.
        history: metrics rows since step 0, including those before a resume.
        stopped_by: None if the run is complete, otherwise the cause of the stop.

    Example:
        >>> step = make_train_step(lambda w, data: (w - data) ** 2, adamw(0.1))
        >>> state = TrainState.create(jnp.float32(1), adamw(0.1))
        >>> result = fit(state, step, jnp.float32(3), FitOptions(5, log_every=1))
        >>> [row["step"] for row in result.history], result.stopped_by
        ([1, 2, 3, 4, 5], None)
    """

    state: TrainState
    history: list[dict[str, Any]]
    stopped_by: str | None

    def __repr__(self) -> str:
        last = self.history[-1] if self.history else {}
        numbers = [f"{name} {x:.4g}" for name, x in last.items() if isinstance(x, int | float)]
        ended = f"stopped by {self.stopped_by}" if self.stopped_by else "complete"
        return f"{type(self).__name__}: {ended}; {', '.join(numbers)}"


@checked
def fit(
    state: TrainState, train_step: TrainStep, data: Any, options: FitOptions, *,
    directory: str | os.PathLike | None = None, configuration: dict[str, Any] | None = None,
    former: Sequence[dict[str, Any]] = (),
    evaluate: Callable[..., float | dict[str, float]] | None = None,
    stop: Callable[[], bool] | None = None,
    callback: Callable[[dict[str, Any]], None] | None = None,
    form: ProgramForm | None = None,
) -> FitResult:  # fmt: skip
    """Train until `total_steps`, from the newest checkpoint in `directory` if there is one.

    A run that is killed at any moment and called again with the same arguments ends with the same
    bits as an uninterrupted one. SIGTERM and Ctrl-C (or a notebook's stop button) finish the
    current call, save and return; a second Ctrl-C interrupts at once.

    Args:
        state: the state to start from; consumed (its arrays are donated).
        train_step: made by `make_train_step`.
        data: passed to the train step, for instance the training tokens on the device; or
            `HostBatches`, of which every call of the train step is passed its own part, or
            `AdaptiveBatches`, which choose those.
        options: length and intervals.
        directory: for checkpoints and `metrics.jsonl`; None keeps everything in memory.
        configuration: JSON-able description of the run (model, corpus digest, optimiser, seed...);
            a checkpoint with another one is refused.
        former: configurations of shorter runs that this one extends, whose checkpoints it continues
            too.
        evaluate: params -> held-out loss, for instance from `make_evaluation`, of (params,
            model_state) if the state has one; or a dict for the metrics row, including
            "evaluation_loss". The params are those of `evaluation_params`.
        stop: called after every call of the train step; True saves and returns.
        callback: called with every metrics row, for live plots.
        form: of the state, if checkpoints are to hold another: see `ProgramForm`.

    Raises:
        CheckpointError: when the directory belongs to another run, cannot be written or has no
            room.
        DivergedError: when the loss or the gradient norm is not finite; nothing is saved after
            that.

    Cost: One host synchronisation per call of the train step; saves overlap with training.

    Example:
        >>> step = make_train_step(lambda w, data: (w - data) ** 2, adamw(0.1))
        >>> state = TrainState.create(jnp.float32(1), adamw(0.1))
        >>> result = fit(state, step, jnp.float32(3), FitOptions(5, log_every=1), directory="run")
        >>> [row["step"] for row in result.history], result.stopped_by
        ([1, 2, 3, 4, 5], None)
    """
    if options.log_every > train_step.most_steps:
        raise ValueError(
            f"log_every={options.log_every} exceeds the train step's most_steps="
            f"{train_step.most_steps}: set log_every={train_step.most_steps}, or build the step "
            f"with `sample` and most_steps={options.log_every}"
        )
    if isinstance(data, HostBatches | AdaptiveBatches) and not train_step.is_sampled:
        raise ValueError(
            f"data: got {type(data).__name__} and a train step without `sample`, wanted one built "
            "with sample=HostBatches.sample"
        )
    run = {"configuration": configuration or {}}
    with ExitStack() as stack:
        also = [{"configuration": shorter} for shorter in former]
        saved = state if form is None or directory is None else form.saved(state)
        plan = train_step.exchange
        resize = None if plan is None else partial(resized, plan)
        checkpoints, restored = restore(stack, directory, options, saved, run, also, resize)
        if restored is not None:
            state = restored[0] if form is None else form.restored(restored[0], state)
        step = int(state.step)
        if checkpoints is not None and step < options.total_steps:
            checkpoints.require_free_space(state)  # before minutes of training are lost
        log = open_log(stack, directory, step)
        read = _reader(stack, data, directory, step, train_step.most_steps)
        bar = stack.enter_context(progress_bar(options, step))
        signals = stack.enter_context(remembered_signals())
        trace = stack.enter_context(closing(StepTrace(options.profile, directory)))
        stopped_by, is_late, saved_at = None, False, time.monotonic()
        while step < options.total_steps and stopped_by is None:
            started = time.perf_counter()
            steps = _next_boundary(step, options, data) - step
            trace.before(step)
            state, metrics = train_step(state, read(state, step, steps), steps)
            step += steps
            row = {"step": step, **_summary(metrics)}
            trace.after(step)
            _require_finite(row, checkpoints)
            row["seconds"] = time.perf_counter() - started
            is_last = step == options.total_steps
            if evaluate is not None and (is_last or step % options.eval_every == 0):
                own = () if state.model_state is None else (state.model_state,)
                row |= evaluation_row(evaluate(evaluation_params(state), *own))
            log.append(row)
            advance(bar, row, steps, options)
            if callback is not None:
                callback(row)
            if not is_last:
                stopped_by, is_late = agreed(
                    reason_to_stop(signals, stop), is_time_to_save(saved_at, options)
                )
            is_due = is_last or stopped_by is not None or step % options.checkpoint_every == 0
            if checkpoints is not None and (is_due or is_late):
                checkpoints.save(step, state if form is None else form.saved(state), run)
                saved_at = time.monotonic()
    say_if_stopped(stopped_by, f"step {step} of {options.total_steps}", directory)
    return FitResult(state, log.rows, stopped_by)


def restore(
    stack: ExitStack, directory: str | os.PathLike | None, options: FitOptions, state: TrainState,
    run: dict[str, Any], also: Sequence[dict[str, Any]] = (),
    resize: Callable[[Any], Any] | None = None,
) -> tuple[Checkpoints | None, tuple[TrainState, dict[str, Any]] | None]:  # fmt: skip
    """The checkpoints of a folder, if given, and the content of the newest one of this run."""
    if directory is None:
        return None, None
    checkpoints = stack.enter_context(Checkpoints(Path(directory) / "checkpoints", options.keep))
    return checkpoints, checkpoints.restore_latest(state, run, also, resize)


def open_log(stack: ExitStack, directory: str | os.PathLike | None, step: int) -> MetricsLog:
    """The metrics of a folder, if given, up to a step; the first process writes them."""
    path = None if directory is None or jax.process_index() else Path(directory) / "metrics.jsonl"
    return stack.enter_context(closing(MetricsLog(path, step)))


def say_if_stopped(stopped_by: str | None, where: str, directory: str | os.PathLike | None) -> None:
    """Report on stderr what stopped a run and how to resume, after all processes have saved."""
    if stopped_by is None:
        return
    meet("save")
    if jax.process_index():
        return
    saved = f"saved in {directory}; to go on, run the same again"
    if directory is None:
        saved = "nothing was saved, for lack of a directory"
    print(f"stopped by {stopped_by} at {where}: {saved}", file=sys.stderr)


def evaluation_row(evaluated: float | dict[str, float]) -> dict[str, float]:
    """The part of a metrics row from an evaluation."""
    return evaluated if isinstance(evaluated, dict) else {"evaluation_loss": evaluated}


def _reader(
    stack: ExitStack, data: Any, directory: str | os.PathLike | None, step: int, most_steps: int
) -> Callable[[TrainState, int, int], Any]:
    """(state, step, steps) -> what the train step is passed for the next `steps` steps."""
    if isinstance(data, AdaptiveBatches):
        choices = stack.enter_context(closing(Choices(data, directory, step)))
        return lambda state, step, steps: choices.at(state, step).block(step, steps, most_steps)
    if isinstance(data, HostBatches):
        return lambda state, step, steps: data.block(step, steps, most_steps)
    return lambda state, step, steps: data


def _next_boundary(step: int, options: FitOptions, data: Any) -> int:
    intervals = [options.log_every, options.eval_every, options.checkpoint_every]
    intervals += [data.every] if isinstance(data, AdaptiveBatches) else []
    boundaries = [(step // interval + 1) * interval for interval in intervals]
    boundaries += [at for at in options.profile or () if at > step]
    return min(*boundaries, options.total_steps)


def _summary(metrics: dict[str, Any]) -> dict[str, float]:
    """One row per call: the mean loss, and everything else from the last update."""
    rows = jax.device_get(metrics)
    return {name: float(row.mean() if name == "loss" else row[-1]) for name, row in rows.items()}


def _require_finite(row: dict[str, Any], checkpoints: Checkpoints | None) -> None:
    scale = row.get("loss_scale", 1.0)
    if scale >= 1 and all(math.isfinite(value) for value in row.values()):
        return
    saved = checkpoints.steps() if checkpoints is not None else []
    last = f"the newest checkpoint is step {saved[-1]}" if saved else "there is no checkpoint"
    raise DivergedError(
        f"training diverged by step {row['step']} (loss {row['loss']}, gradient norm "
        f"{row['gradient_norm']}{f', loss scale {scale}' * (scale < 1)}); {last}.\n"
        "Lower the learning rate, lengthen the warm-up or clip the gradient."
    )


def is_time_to_save(saved_at: float, options: FitOptions) -> bool:
    """Whether the minutes between checkpoints have passed."""
    minutes = options.checkpoint_minutes
    return minutes is not None and time.monotonic() - saved_at >= 60 * minutes


def reason_to_stop(signals: list[str], stop: Callable[[], bool] | None) -> str | None:
    """The first signal, or "request" if `stop` returns True."""
    if signals:
        return signals[0]
    return "request" if stop is not None and stop() else None


def agreed(stopped_by: str | None, is_late: bool) -> tuple[str | None, bool]:
    """The first reason to stop in any process: all must stop and save at the same step."""
    if jax.process_count() == 1:
        return stopped_by, is_late
    asked = [stopped_by == reason for reason in _REASONS]
    votes = multihost_utils.process_allgather(np.array([*asked, is_late]))
    *asked, is_late = votes.any(axis=0).tolist()
    return next((why for why, is_why in zip(_REASONS, asked, strict=True) if is_why), None), is_late


def progress_bar(options: FitOptions, step: int) -> Any:
    """A progress bar over all steps, unless hidden."""
    from tqdm import tqdm

    return tqdm(
        total=options.total_steps,
        initial=step,
        unit="step",
        dynamic_ncols=True,
        disable=not options.is_progress_shown or jax.process_index() > 0,
    )


def advance(bar: Any, row: dict[str, Any], steps: int, options: FitOptions) -> None:
    """Advance the bar and show loss and speed."""
    text = f"loss {row['loss']:.4f}"
    if options.tokens_per_step is not None:
        text += f", {steps * options.tokens_per_step / row['seconds']:,.0f} tokens/s"
    bar.set_postfix_str(text, refresh=False)
    bar.update(steps)
