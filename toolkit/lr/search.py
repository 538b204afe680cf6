"""The search in one call: it trains, tries candidates from a snapshot, and returns the schedule."""

import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from toolkit._checks import check_choice, checked
from toolkit._pytrees import register_dataclass
from toolkit.lr.probe_then_decay import ProbeThenDecay
from toolkit.lr.protocol import Controller, Ledger, Request, Searcher, ask, init, tell
from toolkit.lr.reasons import reason_of
from toolkit.lr.running.arguments import (
    check_loss,
    check_start,
    check_validation,
    warn_of_own_rate,
)
from toolkit.lr.running.candidates import MODES, CandidateRunner
from toolkit.lr.running.files import described, read_search, require_same, write_search
from toolkit.lr.running.fingerprints import FINGERPRINTS, fingerprints, require_same_fingerprints
from toolkit.lr.schedules import tabulated_schedule
from toolkit.parallel.updates import TrainState

LR_RANGE = (1e-5, 1.0)  # spans the usual rates of Adam and its variants
DEFAULT_OPTIMIZER = optax.adamw(1.0)


@register_dataclass
@dataclass(frozen=True)
class SearchProgress:
    """A search at some point, ready for a checkpoint: a pytree of arrays and numbers.

    `save` writes it to a safetensors file, from which `search(..., start=path)` resumes.

    Attributes:
        controller: the state of the search.
        state: the state of training.
        searcher: its constants.
        fingerprints: of its batches and functions; empty before the start.

    Example:
        >>> data = jnp.linspace(0, 1, 32).reshape(8, 4)
        >>> found = search(lambda w, batch: jnp.mean((w - batch) ** 2), 5.0, data, budget=300)
        >>> int(found.progress.state.step) == found.ledger.kept_steps
        True
    """

    controller: Controller
    state: TrainState
    searcher: Searcher = field(metadata={"static": True})
    fingerprints: dict[str, np.ndarray] = field(default_factory=dict)

    def save(self, path: str | os.PathLike) -> None:
        """Write arrays by name and the constants to a safetensors file, atomically."""
        write_search(path, self)


@dataclass(frozen=True)
class SearchResult:
    """The result of a search; printed, it is a few lines.

    Attributes:
        schedule: step -> rate, as trained; its last rate stays. The lowest rate of the range if
            no step of training was kept.
        ledger: its cost.
        table: one row per candidate; see `Controller`.
        params: trained by the search itself along that schedule.
        reason: why these rates, in one line, with warnings if all candidates diverged, the budget
            was too small, or a better rate may lie beyond the range.
        progress: to resume from, if the search was stopped.

    Example:
        >>> data = jnp.linspace(0, 1, 32).reshape(8, 4)
        >>> found = search(lambda w, batch: jnp.mean((w - batch) ** 2), 5.0, data, budget=300)
        >>> float(found.schedule(0)) > 0, sorted(found.table)
        (True, ['forecast', 'rate', 'stage', 'steps', 'variance'])
    """

    schedule: optax.Schedule
    ledger: Ledger
    table: dict[str, np.ndarray]
    params: Any
    reason: str
    progress: SearchProgress

    def __repr__(self) -> str:
        rates, spent = self.progress.controller.rates, self.ledger
        kept = f"{len(rates)} steps"
        if len(rates):
            kept += f", from {rates[0]:.3g} through {max(rates):.3g} to {rates[-1]:.3g}"
        return (
            f"SearchResult: {self.reason}\n"
            f"  trained     {kept}\n"
            f"  candidates  {len(self.table['rate'])}\n"
            f"  budget      {spent.spent:.0f} gradient evaluations spent, "
            f"{spent.gradient_evaluations - spent.kept_steps} of them thrown away"
        )


@checked
def search(
    loss_fn: Callable[..., Any], params: Any, batches: Any | Iterable, *,
    model_state: Any = None, lr_range: tuple[float, float] = LR_RANGE, budget: int = 4000,
    searcher: Callable[[tuple[float, float], int], Searcher] = ProbeThenDecay,
    optimizer: optax.GradientTransformation | optax.MultiSteps | None = None,
    validation: Callable[..., Float[Array, ""]] | None = None, validation_batches: int = 1,
    sample: Callable[[Any, Any], Any] | None = None, evaluation: str = "loop",
    start: TrainState | SearchProgress | str | os.PathLike | None = None,
    callback: Callable[[SearchProgress, Request, np.ndarray], Any] | None = None,
) -> SearchResult:  # fmt: skip
    """Train without a tuned learning rate: find the schedule, then follow it.

        params <- params + rate * optimizer(grad loss(params, batches(step)))

    The optimiser has learning rate 1, and its updates are multiplied by the searched rate. Rates of
    parameter groups keep their ratios, and the optimiser's state holds no stale rate.

        result = search(loss_fn, params, batches, budget=4000)
        optimizer = optax.adamw(result.schedule)

    Args:
        loss_fn: (params, batch) -> scalar loss, traceable; with `model_state`
            (params, model_state, batch) -> (loss, model_state).
        params: any pytree of arrays; not consumed. With a `TrainState` as `start`, its parameters
            or None.
        batches: (step int32) -> batch, traceable and always the same for the same step; a pytree
            of arrays, by default [batches, ...], repeated cyclically; or an iterator, data loader
            or list of tuples or dicts, at its first batch, whose batches are copied, and kept
            until no candidate needs them. Random keys, for dropout, are part of a batch, because
            candidates need the same ones.
        model_state: state that the loss itself changes, such as averages of batch normalisation;
            for an nnx model everything that `nnx.split` separates from the parameters.
        lr_range: lowest and highest rate of the first probes; the default spans the usual rates of
            Adam and its variants.
        budget: total gradient evaluations, including candidates; never exceeded.
        searcher: (lr_range, budget) -> its constants, for instance `AutoLRS.paper` or
            `functools.partial(ProbeThenDecay, shape="wsd")`.
        optimizer: an optax transformation with learning rate 1; None for `optax.adamw(1.0)`.
        validation: params (and model_state) -> scalar loss on a few fixed batches, traceable; None
            uses training losses. A run that overfits by it is ended early, and `reason` says so.
            Never pass test data, because the schedule is chosen by this loss.
        validation_batches: number of these batches; each costs a third of a step.
        sample: (batches, step) -> batch, traceable, where `batches` are arrays.
        evaluation: how to run candidates proposed together, a key of `MODES`.
        start: from the `progress` of a stopped search, or the file that it was saved to; all other
            arguments must be the same. Or a `TrainState` to fine-tune, whose moments are kept; the
            first batch is that of its step.
        callback: called after every request with a `SearchProgress`, the request and its losses
            [candidates, points]; returning True stops the search, as Ctrl-C does.

    Raises:
        ValueError: when the warm-up diverged, or when `start` was begun with other batches,
            functions or constants, or its file is damaged.

    Cost: `budget` gradient evaluations; memory of one candidate ("loop", "steps") or of all besides
        the snapshot. Two compilations ("loop": one), none if one of the last four searches was
        given the same functions.

    Example:
        >>> data = jnp.linspace(0, 1, 32).reshape(8, 4)
        >>> found = search(lambda w, batch: jnp.mean((w - batch) ** 2), 5.0, data, budget=300)
        >>> found.ledger.gradient_evaluations, abs(float(found.params) - 0.5) < 0.1
        (300, True)
    """
    check_choice("evaluation", evaluation, MODES)
    constants: Any = searcher(lr_range, budget)
    if not hasattr(constants, "__dataclass_fields__"):
        raise TypeError(f"searcher: must make a dataclass of constants; got {constants!r}")
    if params is None and not isinstance(start, TrainState):
        raise ValueError("params: got None, which only a TrainState as start makes up for")
    if validation is not None:
        constants = replace(constants, validation_batches=validation_batches)
    elif getattr(constants, "validation_batches", 0):
        raise ValueError("searcher: has validation_batches, but no validation was given")
    optimizer = DEFAULT_OPTIMIZER if optimizer is None else optimizer
    own: Any = optimizer
    if isinstance(optimizer, optax.MultiSteps):
        optimizer, own = optimizer.gradient_transformation(), optimizer.inner_opt
    runner = CandidateRunner(loss_fn, optimizer, batches, validation, sample)
    if isinstance(start, TrainState):
        check_start(start, optimizer, params, model_state)
        state, start = start, None
    else:
        state = TrainState.create(params, optimizer, model_state)
    state = jax.tree.map(_strong, state)
    progress = SearchProgress(init(constants), state, constants)
    if isinstance(start, SearchProgress):
        progress = start
    elif start is not None:
        blank = dict.fromkeys(FINGERPRINTS, np.zeros(0))
        progress = read_search(start, replace(progress, fingerprints=blank))
    require_same(described(progress.searcher), described(constants))
    state, source = progress.state, runner.source
    digest = source.digest(int(state.step), progress.fingerprints.get("batches"))
    data = source.data(state.step, 0, 1)
    batch = jax.eval_shape(source.draw, data, state.step)
    check_loss(loss_fn, state, batch)
    if validation is not None:
        check_validation(validation, state)
    found = fingerprints(loss_fn, optimizer, state, validation, batch, digest)
    if progress.fingerprints:
        require_same_fingerprints(progress.fingerprints, found)
    else:
        warn_of_own_rate(own, state.params)
        progress = replace(progress, fingerprints=found)
    stopped = ""
    try:
        while (request := ask(constants, progress.controller)) is not None:
            progress, losses = _after(request, progress, runner, evaluation)
            if callback is not None and callback(progress, request, losses) is True:
                break
    except KeyboardInterrupt:
        stopped = "; stopped by Ctrl-C"
    controller, params = progress.controller, progress.state.params
    reason = reason_of(constants, controller) + stopped
    if controller.ledger.gradient_evaluations and not len(controller.table["rate"]):
        warnings.warn(f"budget {budget} is too small for a search: {reason}.", stacklevel=3)
    rates = controller.rates if len(controller.rates) else np.array(lr_range[:1])
    schedule = tabulated_schedule(rates)
    return SearchResult(schedule, controller.ledger, controller.table, params, reason, progress)


def _strong(leaf: Any) -> Any:
    """Without a weak type, which no file holds and functions depend on."""
    return jnp.asarray(leaf, leaf.dtype) if getattr(leaf, "weak_type", False) else leaf


def _after(
    request: Request, progress: SearchProgress, runner: CandidateRunner, evaluation: str
) -> tuple[SearchProgress, np.ndarray]:
    """The search after one request, and its losses."""
    state = progress.state
    if len(request.rates) > 1:
        reached, losses = state, runner.run_together(state, request, evaluation)
    else:
        reached, losses = runner.run(state, request, evaluation)
    is_checked = request.is_checked and np.isfinite(losses).all()
    validation = runner.validation_loss(reached) if is_checked else None
    controller, is_kept = tell(
        progress.searcher, progress.controller, request, losses, validation=validation
    )
    state = reached if is_kept else state
    seen = {**progress.fingerprints, "batches": runner.source.digest(int(state.step))}
    return replace(progress, controller=controller, state=state, fingerprints=seen), losses
