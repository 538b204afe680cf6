"""AutoLRS, the decisions: which rate to try next, which to keep, when to stop. No training here.

    repeat: from the state reached, try k constant rates for tau' steps each, forecast each loss
            tau steps ahead, train tau steps at the rate of the lowest forecast, double tau

`init`, `ask` and `tell` are pure functions on a plain pytree of numbers, so that any loop can run
them and any checkpoint can hold them:

    controller = init(method)
    while (request := ask(method, controller)) is not None:
        new_state, losses = ...                    # train from `state` at request.rates
        controller, is_kept = tell(method, controller, request, losses)
        state = new_state if is_kept else state    # a candidate's state is thrown away
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from toolkit.lr.constants import AutoLRS
from toolkit.lr.forecast import Forecast, forecast_loss, published_forecast
from toolkit.lr.gaussian_process import (
    finite_values,
    fit_gaussian_process,
    lowest_confidence_bound,
)


def _register(data: tuple[str, ...]) -> Any:
    return partial(jax.tree_util.register_dataclass, data_fields=data, meta_fields=())


@_register(
    ("gradient_evaluations", "forward_evaluations", "sequential_depth", "kept_steps", "seconds")
)
@dataclass(frozen=True)
class Ledger:
    """What a search has cost so far.

    Attributes:
        gradient_evaluations: steps in all, discarded candidates included; the budget's unit.
        forward_evaluations: validation losses.
        sequential_depth: steps one after another, if candidates asked together run together.
        kept_steps: steps of training that were not thrown away.
        seconds: wall-clock inside the caller's training, compilation included.
    """

    gradient_evaluations: int = 0
    forward_evaluations: int = 0
    sequential_depth: int = 0
    kept_steps: int = 0
    seconds: float = 0.0


_ROWS = {"stage": np.int64, "rate": np.float64, "forecast": np.float64, "variance": np.float64}


@_register(
    ("ledger", "stage", "stage_steps", "probe_steps", "tried", "rates", "table", "first_loss")
)
@dataclass(frozen=True)
class Controller:
    """All that a search knows: numbers and NumPy arrays only, so any checkpoint can hold it.

    Attributes:
        ledger: the costs.
        stage: stages begun so far, the first being 0.
        stage_steps: tau of this stage; 0 until the stage is planned.
        probe_steps: tau' of this stage; 0 where the budget pays for no search.
        tried: candidates evaluated in this stage.
        rates: [kept_steps] float32, the rate of every step of training kept: the schedule.
        table: columns "stage", "rate", "forecast", "variance" [candidates evaluated]; a rate that
            diverged has forecast infinity.
        first_loss: the first loss seen by the first candidate; infinity before.
    """

    ledger: Ledger = field(default_factory=Ledger)
    stage: int = 0
    stage_steps: int = 0
    probe_steps: int = 0
    tried: int = 0
    rates: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    table: dict[str, np.ndarray] = field(
        default_factory=lambda: {name: np.zeros(0, dtype) for name, dtype in _ROWS.items()}
    )
    first_loss: float = np.inf


@dataclass(frozen=True)
class Request:
    """Steps to make from the state reached, all candidates on the same batches.

    Attributes:
        kind: "warmup", "probe", "train" or "decay"; only probes are thrown away.
        rates: [candidates, steps] float32, the rate of every step; one candidate unless a probe.
        validate_every: 0 for the training losses; otherwise a validation loss after so many steps.
    """

    kind: str
    rates: np.ndarray
    validate_every: int = 0


def init(method: AutoLRS) -> Controller:
    """A search before its first step.

    Args:
        method: the constants.

    Returns:
        The controller to ask and tell.

    Cost:
        Nothing.
    """
    controller = Controller()
    return controller if method.warmup_steps else _planned(method, controller)


def ask(method: AutoLRS, controller: Controller) -> Request | None:
    """What to run next, from the state reached by the training kept so far.

    Args:
        method: the constants.
        controller: of this search; asking again gives the same answer.

    Returns:
        A `Request`, or None when the budget is spent.

    Cost:
        One fit of a Gaussian process (some 20 ms) for a sequential candidate, otherwise nothing.

    Source: Jin et al., AutoLRS (arXiv:2105.10762), algorithm 1.
    """
    spent = controller.ledger.gradient_evaluations
    if spent >= method.budget:
        return None
    if not controller.stage_steps:
        rise = np.arange(1, method.warmup_steps + 1) / method.warmup_steps
        return Request("warmup", _row(rise * (method.warmup_rate or 0.0)))
    before_decay = method.budget - method.decay_steps - spent
    if before_decay <= 0:
        left = method.budget - spent
        return Request("decay", _row(_last_rate(method, controller) * (1 - np.arange(left) / left)))
    if controller.probe_steps and controller.tried < method.candidates:
        rates = _proposals(method, controller)
        steps = np.ones(controller.probe_steps)
        every = 0
        if method.is_by_validation(controller.stage):
            every = max(controller.probe_steps // method.validation_points, 1)
        return Request("probe", (rates[:, None] * steps).astype(np.float32), every)
    _, rate = _chosen(method, controller)
    return Request("train", _row(np.full(min(controller.stage_steps, before_decay), rate)))


def tell(
    method: AutoLRS, controller: Controller, request: Request, losses: Any, *, seconds: float = 0.0
) -> tuple[Controller, bool]:
    """Takes in the losses of a request, and says whether its state is to be kept.

    A candidate's state never is. Nor is that of training which diverged: the rate is struck out,
    and the next request is for the next best one, from the same state.

    Args:
        method: the constants.
        controller: the one that was asked.
        request: what was run.
        losses: [candidates, steps], each before its update; or [candidates, steps //
            validate_every] validation losses. Any that is not finite means that the run diverged.
        seconds: wall-clock it took, for the ledger.

    Returns:
        The new controller, and whether to go on from the state that the request led to.

    Raises:
        ValueError: losses has another shape; or the warm-up, which is not searched, diverged.

    Cost:
        One forecast a candidate, some 10 ms each.

    Source: Jin et al., AutoLRS (arXiv:2105.10762), algorithm 1.
    """
    losses = np.asarray(losses, np.float64)
    candidates, steps = request.rates.shape
    points = steps // request.validate_every if request.validate_every else steps
    if losses.shape != (candidates, points):
        raise ValueError(
            f"losses of this request must be [{candidates}, {points}], got {losses.shape}"
        )
    is_finite = bool(np.isfinite(losses).all())
    is_kept = request.kind != "probe" and is_finite
    ledger = controller.ledger
    ledger = Ledger(
        gradient_evaluations=ledger.gradient_evaluations + candidates * steps,
        forward_evaluations=ledger.forward_evaluations
        + (candidates * points if request.validate_every else 0),
        sequential_depth=ledger.sequential_depth + steps,
        kept_steps=ledger.kept_steps + (steps if is_kept else 0),
        seconds=ledger.seconds + seconds,
    )
    told = replace(controller, ledger=ledger)
    if request.kind == "probe":
        return _with_candidates(method, told, request, losses), False
    if is_kept:
        told = replace(told, rates=np.concatenate([told.rates, request.rates[0]]))
        if request.kind == "train":
            told = replace(told, stage=told.stage + 1, tried=0)
        return (told if request.kind == "decay" else _planned(method, told)), True
    if request.kind == "warmup":
        raise ValueError(
            f"the loss is not finite in the warm-up to {method.warmup_rate}, which is not "
            "searched: lower warmup_rate or lengthen warmup_steps"
        )
    row, _ = _chosen(method, controller)
    if request.kind == "train" and row is not None:
        forecasts = told.table["forecast"].copy()
        forecasts[row] = np.inf
        told = replace(told, table={**told.table, "forecast": forecasts})
    return told, False


def _planned(method: AutoLRS, controller: Controller) -> Controller:
    """The lengths of the stage that begins, shortened to what the budget can pay."""
    left = method.budget - method.decay_steps - controller.ledger.gradient_evaluations
    stage_steps = method.tau(controller.stage)
    probe_steps = max(stage_steps // method.probe_ratio, 1)
    if method.candidates * probe_steps + stage_steps > left:
        probe_steps = left // (method.candidates + method.probe_ratio)
        # A search too short to tell rates apart is worth less than training on.
        probe_steps = 0 if probe_steps < method.shortest_probe else probe_steps
        stage_steps = max(left - method.candidates * probe_steps, 1)
    return replace(controller, stage_steps=stage_steps, probe_steps=probe_steps)


def _proposals(method: AutoLRS, controller: Controller) -> np.ndarray:
    low, high = np.log(method.interval)
    if method.proposals == "together":
        grid = np.linspace(low, high, method.candidates)
        return np.exp(grid if method.candidates > 1 else np.array([(low + high) / 2]))
    rows = _rows_of_stage(controller)
    if not len(rows):
        place = np.random.default_rng([method.seed, int(controller.stage)]).uniform()
    else:
        table = controller.table
        process = fit_gaussian_process(
            (np.log(table["rate"][rows]) - low) / (high - low),
            finite_values(table["forecast"][rows]),
            table["variance"][rows],
        )
        resolution = max(1001, 4 * len(rows))
        place = lowest_confidence_bound(process, method.kappa, resolution=resolution)
    return np.exp([low + place * (high - low)])


def _with_candidates(
    method: AutoLRS, controller: Controller, request: Request, losses: np.ndarray
) -> Controller:
    first_loss = controller.first_loss
    if not len(controller.table["rate"]) and np.isfinite(losses[0, 0]):
        first_loss = float(losses[0, 0])
    forecasts = [_forecast(method, controller, request, curve) for curve in losses]
    new = {
        "stage": np.full(len(losses), controller.stage),
        "rate": request.rates[:, 0].astype(np.float64),
        "forecast": np.array([forecast.mean for forecast in forecasts]),
        "variance": np.array([forecast.variance for forecast in forecasts]),
    }
    table = {name: np.concatenate([column, new[name]]) for name, column in controller.table.items()}
    tried = controller.tried + len(losses)
    return replace(controller, table=table, tried=tried, first_loss=first_loss)


def _forecast(
    method: AutoLRS, controller: Controller, request: Request, curve: np.ndarray
) -> Forecast:
    every = request.validate_every
    horizon = controller.stage_steps / (every or 1)
    if method.forecast == "published":
        return published_forecast(
            curve, horizon, is_validation=every > 0, ceiling=controller.first_loss
        )
    # The first training loss is that before any step, the first validation loss after `every`.
    return forecast_loss(curve, max(horizon - 1, 0) if every else horizon)


def _chosen(method: AutoLRS, controller: Controller) -> tuple[int | None, float]:
    """The row and the rate of the lowest forecast of this stage; row None for a rate that was not
    searched: the last one where there was no search, the lowest where everything diverged.
    """
    rows = _rows_of_stage(controller)
    if not len(rows):
        return None, _last_rate(method, controller)
    forecasts = controller.table["forecast"][rows]
    best = int(rows[np.argmin(forecasts)])
    if not np.isfinite(forecasts.min()):
        return None, method.interval[0]
    return best, float(controller.table["rate"][best])


def _last_rate(method: AutoLRS, controller: Controller) -> float:
    if len(controller.rates):
        return float(controller.rates[-1])
    return float(np.sqrt(method.interval[0] * method.interval[1]))


def _rows_of_stage(controller: Controller) -> np.ndarray:
    return np.flatnonzero(controller.table["stage"] == controller.stage)


def _row(rates: np.ndarray) -> np.ndarray:
    return np.asarray(rates, np.float32)[None]
