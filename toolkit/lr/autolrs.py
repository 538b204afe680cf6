"""AutoLRS: the choice of the next rate to try, of the rate to keep, and when to stop.

repeat: from the state reached, try k constant rates for tau' steps each, forecast each loss
        tau steps ahead, train tau steps at the rate of the lowest forecast, double tau
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

import numpy as np

from toolkit._annotations import AtLeast, Positive
from toolkit._checks import check_fields
from toolkit._pytrees import register_dataclass
from toolkit.lr.fits.forecast import Forecast, forecast_loss, published_forecast
from toolkit.lr.fits.gaussian_process import (
    GaussianProcess,
    finite_values,
    fit_gaussian_process,
    lowest_confidence_bound,
)
from toolkit.lr.protocol import (
    FORWARD_COST,
    Controller,
    Request,
    one_candidate,
    require,
    steps_left,
    with_rows,
)

Count = Annotated[int, AtLeast(1)]
Rate = Annotated[float, Positive()]


@register_dataclass
@dataclass(frozen=True)
class AutoLRSController(Controller):
    """The state of AutoLRS, in addition to the `Controller`."""

    stage: int = 0  # stages begun so far, the first being 0
    stage_steps: int = 0  # tau of this stage; 0 until the stage is planned
    probe_steps: int = 0  # tau' of this stage; 0 if the budget is too small for a search
    tried: int = 0  # candidates evaluated in this stage
    first_loss: float = np.inf  # the first loss seen by the first candidate; infinity before


@dataclass(frozen=True)
class AutoLRS:
    """The search as published; `paper` and `code` are its constants, `scaled` those for short runs.

    Steps are gradient evaluations: those of discarded candidates count.

    Attributes:
        lr_range: lowest and highest rate, searched on a logarithmic scale.
        budget: total steps, including candidates.
        candidates: rates tried in a stage (k).
        first_stage: steps of training in the first stage (tau).
        longest_stage: upper bound of tau, which doubles from stage to stage.
        probe_ratio: tau / tau', the ratio of a stage's steps to a candidate's.
        shortest_probe: shortest stage that is searched.
        kappa: optimism of the confidence bound, in standard deviations.
        proposals: "sequential", each based on those before; "together", k on a logarithmic grid,
            which may run in parallel.
        forecast: "published" or "robust" (whose variance the Gaussian process takes as noise).
        validation_delay: stages at the longest tau that still use the training loss.
        validation_points: validation losses per candidate.
        warmup_steps: steps of a linear rise before the first stage; not searched.
        warmup_rate: rate at its end.
        final_decay: last fraction of the budget, spent on a linear fall to zero.
        validation_batches: batches per validation loss; 0 for none.
        stale_rate: None to apply each rate at once. A rate is what the optimiser had before the
            search: then the first step after a restore is made at the rate saved with the state,
            as the published code does.
        seed: of the first candidate of each stage.

    Source: Jin et al., AutoLRS (arXiv:2105.10762), algorithm 1.

    Example:
        >>> searcher = AutoLRS.paper((1e-4, 1e-1), budget=100_000)
        >>> request = ask(searcher, init(searcher))
        >>> request.kind, request.rates.shape
        ('probe', (1, 100))
    """

    lr_range: tuple[float, float]
    budget: Count
    candidates: Count = 10
    first_stage: Count = 1000
    longest_stage: int = 8000
    probe_ratio: Count = 10
    shortest_probe: Count = 5
    kappa: float = 1000.0
    proposals: Literal["sequential", "together"] = "sequential"
    forecast: Literal["published", "robust"] = "published"
    validation_delay: Annotated[int, AtLeast(0)] = 0
    validation_points: Count = 16
    warmup_steps: int = 0
    warmup_rate: Rate | None = None
    final_decay: float = 0.0
    validation_batches: int = 0
    stale_rate: Rate | None = None
    seed: int = 0

    def __post_init__(self):
        check_fields(self)
        low, high = self.lr_range
        shortest = min(self.shortest_probe, self.first_stage // self.probe_ratio)
        ends = f"0 or more, and with the final decay ({self.decay_steps}) fit the budget"
        checks = {
            "lr_range": (0 < low < high < np.inf, "0 < low < high, both finite"),
            "longest_stage": (
                self.longest_stage >= self.first_stage,
                f"at least first_stage={self.first_stage}",
            ),
            "kappa": (self.kappa >= 0, "0 or more"),
            "stale_rate": (
                self.stale_rate is None or shortest > 1,
                "None, or with probes of at least 2 steps",
            ),
            "final_decay": (0 <= self.final_decay < 1, "in [0, 1)"),
            "warmup_steps": (0 <= self.warmup_steps <= self.budget - self.decay_steps, ends),
            "warmup_rate": (
                not self.warmup_steps or self.warmup_rate is not None,
                "positive with warmup_steps: the rise is not searched",
            ),
        }
        require(self, checks)

    @property
    def decay_steps(self) -> int:
        """Steps of the final decay."""
        return round(self.final_decay * self.budget)

    def tau(self, stage: int) -> int:
        """Steps of training in a full stage: min(first_stage * 2^stage, longest_stage)."""
        return min(self.first_stage * 2 ** min(stage, 62), self.longest_stage)

    def is_by_validation(self, stage: int) -> bool:
        """Whether a stage compares candidates by validation losses, as it does once tau has been at
        its longest for `validation_delay` stages.
        """
        earlier = stage - self.validation_delay
        return (
            self.validation_batches > 0 and earlier >= 0 and self.tau(earlier) == self.longest_stage
        )

    @classmethod
    def paper(cls, lr_range: tuple[float, float], budget: int, **changes: Any) -> Self:
        """As in the paper: kappa 1000, validation losses as soon as tau is at its longest.

        Source: Jin et al., AutoLRS (arXiv:2105.10762), sections 4 and 5.
        """
        return cls(lr_range, budget, **changes)

    @classmethod
    def code(cls, lr_range: tuple[float, float], budget: int, **changes: Any) -> Self:
        """As in the published code: kappa 1e6, validation losses one stage later.

        Source: the authors' repository, autolrs_server.py.
        """
        return cls(lr_range, budget, **{"kappa": 1e6, "validation_delay": 1, **changes})

    @classmethod
    def scaled(cls, lr_range: tuple[float, float], budget: int, **changes: Any) -> Self:
        """The paper's constants for short runs: tau from budget / 20 (at least 50) to four times
        that, robust forecasts, candidates on a grid (to which kappa 1000 amounts), and a final
        decay.

        Source: the paper's stages for 100 times as many steps.
        """
        first = max(budget // 20, 50)
        ours = {
            "first_stage": first,
            "longest_stage": 4 * first,
            "forecast": "robust",
            "proposals": "together",
            "final_decay": 0.2,
        }
        return cls(lr_range, budget, **{**ours, **changes})

    def init(self) -> AutoLRSController:
        """A controller before the first step."""
        controller = AutoLRSController()
        return controller if self.warmup_steps else _planned(self, controller)

    def ask(self, controller: AutoLRSController) -> Request:
        """A warm-up, a probe of one candidate or of all, a stage of training, or the last decay."""
        left = steps_left(self, controller)
        if not controller.stage_steps:
            rise = np.arange(1, self.warmup_steps + 1) / self.warmup_steps
            return one_candidate("warmup", rise * (self.warmup_rate or 0.0))
        if left <= self.decay_steps:
            fall = _last_rate(self, controller) * (1 - np.arange(left) / left)
            return one_candidate("decay", fall)
        if controller.probe_steps and controller.tried < self.candidates:
            rates = _proposals(self, controller)
            probes = rates[:, None] * np.ones(controller.probe_steps)
            if len(controller.table["rate"]):
                _begin_stale(self, controller, probes)
            points = self.is_by_validation(controller.stage) * self.validation_points
            every = max(controller.probe_steps // points, 1) if points else 0
            return Request("probe", probes.astype(np.float32), every)
        _, rate = _chosen(self, controller)
        rates = np.full((1, min(controller.stage_steps, left - self.decay_steps)), rate)
        if controller.tried:
            _begin_stale(self, controller, rates)
        return one_candidate("train", rates[0])

    def keeps(self, controller: AutoLRSController, request: Request, losses: np.ndarray) -> bool:
        """Whether all losses of the training are finite."""
        return bool(np.isfinite(losses).all())

    def tell(
        self, controller: AutoLRSController, request: Request, losses: np.ndarray, is_kept: bool
    ) -> AutoLRSController:
        """Forecast candidates; after a stage plan the next one; exclude a rate that diverged."""
        if request.kind == "probe":
            return _with_candidates(self, controller, request, losses)
        if is_kept:
            if request.kind == "train":
                controller = replace(controller, stage=controller.stage + 1, tried=0)
            return controller if request.kind == "decay" else _planned(self, controller)
        if request.kind == "warmup":
            raise ValueError(
                f"the loss is not finite in the warm-up to {self.warmup_rate}, which is not "
                "searched: lower warmup_rate or lengthen warmup_steps"
            )
        row, _ = _chosen(self, controller)
        if request.kind == "train" and row is not None:
            forecasts = controller.table["forecast"].copy()
            forecasts[row] = np.inf
            controller = replace(controller, table={**controller.table, "forecast": forecasts})
        return controller


def _begin_stale(searcher: AutoLRS, controller: AutoLRSController, rates: np.ndarray) -> None:
    """Give the first step the rate saved with the state, if `stale_rate` is set."""
    if searcher.stale_rate is not None:
        kept = controller.rates
        rates[:, 0] = kept[-1] if len(kept) else searcher.stale_rate


def _planned(searcher: AutoLRS, controller: AutoLRSController) -> AutoLRSController:
    """The lengths of the next stage, limited by the budget."""
    left = steps_left(searcher, controller) - searcher.decay_steps
    stage_steps = searcher.tau(controller.stage)
    probe_steps = max(stage_steps // searcher.probe_ratio, 1)
    forward = 0.0
    if searcher.is_by_validation(controller.stage):
        losses = searcher.candidates * 2 * searcher.validation_points  # fewer than that
        forward = FORWARD_COST * losses * searcher.validation_batches
    if searcher.candidates * probe_steps + forward + stage_steps > left:
        probe_steps = int((left - forward) / (searcher.candidates + searcher.probe_ratio))
        # A search too short to distinguish rates is worth less than further training.
        probe_steps = 0 if probe_steps < searcher.shortest_probe else probe_steps
        stage_steps = max(left - searcher.candidates * probe_steps, 1)
    return replace(controller, stage_steps=stage_steps, probe_steps=probe_steps)


def _proposals(searcher: AutoLRS, controller: AutoLRSController) -> np.ndarray:
    low, high = np.log(searcher.lr_range)
    if searcher.proposals == "together":
        grid = np.linspace(low, high, searcher.candidates)
        return np.exp(grid if searcher.candidates > 1 else np.array([(low + high) / 2]))
    if len(_rows_of_stage(controller)):
        place = lowest_confidence_bound(posterior(searcher, controller), searcher.kappa)
    else:
        place = np.random.default_rng([searcher.seed, int(controller.stage)]).uniform()
    return np.exp([low + place * (high - low)])


def posterior(searcher: AutoLRS, controller: AutoLRSController) -> GaussianProcess:
    """The posterior of the loss at the stage's end over log rate, with `lr_range` scaled to [0,
    1]."""
    low, high = np.log(searcher.lr_range)
    rows, table = _rows_of_stage(controller), controller.table
    return fit_gaussian_process(
        (np.log(table["rate"][rows]) - low) / (high - low),
        finite_values(table["forecast"][rows]),
        table["variance"][rows],
    )


def _with_candidates(
    searcher: AutoLRS, controller: AutoLRSController, request: Request, losses: np.ndarray
) -> AutoLRSController:
    first_loss = controller.first_loss
    if not len(controller.table["rate"]) and np.isfinite(losses[0, 0]):
        first_loss = float(losses[0, 0])
    every = request.validate_every
    horizon = controller.stage_steps / (every or 1)
    forecasts = [
        forecast_candidate(searcher, controller, curve, horizon, every > 0) for curve in losses
    ]
    table = with_rows(
        controller.table,
        stage=controller.stage,
        steps=request.rates.shape[1],
        rate=request.rates[:, -1],
        forecast=[forecast.mean for forecast in forecasts],
        variance=[forecast.variance for forecast in forecasts],
    )
    tried = controller.tried + len(losses)
    return replace(controller, table=table, tried=tried, first_loss=first_loss)


def forecast_candidate(
    searcher: AutoLRS,
    controller: AutoLRSController,
    curve: np.ndarray,
    horizon: float,
    is_validation: bool = False,
) -> Forecast:
    """Forecast a candidate's loss with the method in the constants."""
    if searcher.forecast == "published":
        return published_forecast(
            curve, int(horizon), is_validation=is_validation, ceiling=controller.first_loss
        )
    # The first training loss precedes any step, the first validation loss follows some.
    return forecast_loss(curve, max(horizon - 1, 0) if is_validation else horizon)


def _chosen(searcher: AutoLRS, controller: AutoLRSController) -> tuple[int | None, float]:
    """The row and the rate of the lowest forecast of this stage; row None for a rate that was not
    searched: the last one where there was no search, the lowest where everything diverged.
    """
    rows = _rows_of_stage(controller)
    if not len(rows):
        return None, _last_rate(searcher, controller)
    forecasts = controller.table["forecast"][rows]
    best = int(rows[np.argmin(forecasts)])
    if not np.isfinite(forecasts.min()):
        return None, searcher.lr_range[0]
    return best, float(controller.table["rate"][best])


def _last_rate(searcher: AutoLRS, controller: AutoLRSController) -> float:
    if len(controller.rates):
        return float(controller.rates[-1])
    return float(np.sqrt(searcher.lr_range[0] * searcher.lr_range[1]))


def _rows_of_stage(controller: AutoLRSController) -> np.ndarray:
    return np.flatnonzero(controller.table["stage"] == controller.stage)
