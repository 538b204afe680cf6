"""Probe, then decay: find the peak by short annealed runs, then make the long run.

A probe rises and decays to zero like the run, in a fortieth of its length. Rates are compared by
their losses after the decay, which removes the noise of a high rate; a comparison at constant rates
includes that noise. The best peak is then scaled to the run's length.

    probes of n steps, on a grid of rates      -> where to look
    probes of 6 n steps, around it             -> the peak
    probes of 6 n steps, of other shapes       -> whether one of them is surely better
    the run:  peak * (max(6 n, saturation) / steps)^exponent * shape
"""

from dataclasses import dataclass, replace

import numpy as np

from toolkit._checks import check_fields
from toolkit.lr.fits.peak import PeakRate, peak_at, surely_better, tail_scores
from toolkit.lr.probes import (
    AROUND_PEAK,
    GRID,
    PLANNED,
    SHAPE,
    ProbeController,
    find_stage_peak,
    is_inconclusive,
    loss_at_start,
    rows_of,
)
from toolkit.lr.protocol import FORWARD_COST, Request, one_candidate, require, steps_left, with_rows
from toolkit.lr.shapes import SHAPES, resampled, shape_rates

LONGER = 6  # length of the second probes relative to the first
AROUND = 3  # rates of the second probes
AROUND_RATIO = 4.0  # ratio between them: closer ones differ by less than the noise of a few steps
PROBE_WARMUP = 0.2  # fraction of a probe; a run's is shorter
RUN_WARMUP = 0.05
PIECES = 20  # pieces of the run: one is lost when it diverges
BACKOFF = 0.7  # factor on the rest of the schedule after divergence
BLOWN_UP = 3.0  # times the loss at the start
LARGEST_VALIDATION = 0.25  # of the search
MOST_MOVES = 3  # of the second probes, within the range
EXTENSION = {GRID: 2, AROUND_PEAK: 1}  # rates beyond the edge


@dataclass(frozen=True)
class ProbeThenDecay:
    """Annealed probes of about an eighth of the budget, then one run that decays to zero.

    Attributes:
        lr_range: lowest and highest rate of the first probes.
        budget: total steps, including candidates.
        candidates: rates on the first grid.
        search_fraction: of the budget, for the probes; extensions come on top.
        shapes: shapes of the run; the first unless another is significantly better in the longer
            probes.
        extensions: how often the range may be extended when the best rate is at its edge.
        shortest_probe: steps; nothing is probed if the budget allows less per candidate.
        training_steps: steps of the run; None for the rest of the budget.
        validation_batches: batches per validation loss; 0 for none.

    Source: none published; short probes against the horizon, Wu et al. (arXiv:1803.02021).

    Example:
        >>> searcher = ProbeThenDecay((1e-4, 1e-1), budget=400)
        >>> request = ask(searcher, init(searcher))
        >>> request.kind, request.rates.shape
        ('probe', (5, 9))
    """

    lr_range: tuple[float, float]
    budget: int
    candidates: int = 5
    search_fraction: float = 0.12
    shapes: tuple[str, ...] = ("trapezoid",)
    extensions: int = 2
    shortest_probe: int = 3
    training_steps: int | None = None
    validation_batches: int = 0

    def __post_init__(self):
        check_fields(self)
        low, high = self.lr_range
        run = self.training_steps
        checks = {
            "lr_range": (0 < low < high < np.inf, "0 < low < high, both finite"),
            "budget": (self.budget >= 1, "at least 1"),
            "candidates": (self.candidates >= 3, "at least 3"),
            "shortest_probe": (self.shortest_probe >= 1, "at least 1"),
            "search_fraction": (0 <= self.search_fraction < 1, "in [0, 1)"),
            "shapes": (
                bool(self.shapes) and {*self.shapes} <= {*SHAPES},
                f"some of {', '.join(SHAPES)}",
            ),
            "extensions": (self.extensions >= 0, "0 or more"),
            "training_steps": (run is None or 1 <= run <= self.budget, "in 1..budget"),
        }
        require(self, checks)

    @property
    def is_by_validation(self) -> bool:
        """Whether probes go by a validation loss: not where they would use up the search's
        budget.
        """
        forward = FORWARD_COST * self.validation_batches * (self.candidates + AROUND)
        return 0 < forward <= LARGEST_VALIDATION * self.search_fraction * self.budget

    @property
    def is_in_two_lengths(self) -> bool:
        """Whether the budget allows the second, longer probes."""
        return self._steps_of_probes(LONGER) >= self.shortest_probe

    @property
    def probe_steps(self) -> int:
        """Steps of the first probes; 0 if the budget allows none."""
        steps = self._steps_of_probes(LONGER if self.is_in_two_lengths else 0)
        return steps if steps >= self.shortest_probe else 0

    def _steps_of_probes(self, longer: int) -> int:
        others = len(self.shapes) if len(self.shapes) > 1 else 0
        candidates = self.candidates + AROUND
        forward = FORWARD_COST * self.validation_batches * candidates * self.is_by_validation
        units = self.candidates + longer * (AROUND + others)
        return int((self.search_fraction * self.budget - forward) / units + 1e-9)

    def init(self) -> ProbeController:
        """A controller before the first step."""
        controller = ProbeController()
        return controller if self.probe_steps else _planned(self, controller, self.shapes[0])

    def ask(self, controller: ProbeController) -> Request | None:
        """Probes until the run is planned; then a piece of it."""
        if controller.stage < PLANNED:
            return _probes(self, controller)
        if not len(controller.plan):
            return None
        whole = controller.ledger.kept_steps + len(controller.plan)
        piece = max(-(-whole // PIECES), 1)
        return one_candidate("train", controller.plan[:piece])

    def keeps(self, controller: ProbeController, request: Request, losses: np.ndarray) -> bool:
        """Whether the losses are finite and have not blown up, as they may long before infinity."""
        if not np.isfinite(losses).all():
            return False
        end = tail_scores(losses)[0][0]
        return bool(end <= BLOWN_UP * loss_at_start(controller, losses) or end <= 0)

    def tell(
        self, controller: ProbeController, request: Request, losses: np.ndarray, is_kept: bool
    ) -> ProbeController:
        """Record candidates; plan the run once nothing is left to probe; lower its rates when it
        diverges.
        """
        if request.kind == "probe":
            return _after_probes(self, controller, request, losses)
        if is_kept:
            plan = controller.plan[request.rates.shape[1] :]
            return replace(controller, plan=plan, first_loss=loss_at_start(controller, losses))
        left = min(steps_left(self, controller), len(controller.plan))
        plan = BACKOFF * resampled(controller.plan, left) if left else controller.plan[:0]
        return replace(controller, plan=plan.astype(np.float32))


def _probes(searcher: ProbeThenDecay, controller: ProbeController) -> Request:
    stage = int(controller.stage)  # which a checkpoint may return as an array
    shape, steps = searcher.shapes[0], searcher.probe_steps * (1 if stage == GRID else LONGER)
    if stage == SHAPE:
        peak = find_stage_peak(controller, AROUND_PEAK)
        rates = np.full(len(searcher.shapes), np.exp(peak.log_rate))
        return replace(_annealed(searcher, searcher.shapes, rates, steps), validate_every=0)
    ratio = _spacing(searcher, stage)
    if rows_of(controller, stage).any():
        peak = find_stage_peak(controller, stage)
        beyond = peak.edge * np.arange(1, EXTENSION[stage] + 1)
        rates = np.exp(peak.log_rate) * ratio**beyond
    elif stage == GRID:
        rates = np.geomspace(*searcher.lr_range, searcher.candidates)
    else:
        centre = np.exp(_grid_peak(searcher, controller).log_rate)
        if not searcher.extensions:
            centre = np.clip(centre, searcher.lr_range[0] * ratio, searcher.lr_range[1] / ratio)
        rates = centre * ratio ** np.arange(-1, AROUND - 1)
    return _annealed(searcher, (shape,) * len(rates), rates, steps)


def _annealed(
    searcher: ProbeThenDecay, shapes: tuple[str, ...], rates: np.ndarray, steps: int
) -> Request:
    warmup = round(PROBE_WARMUP * steps) if steps > 2 else 0
    rows = [
        rate * shape_rates(shape, steps, warmup) for shape, rate in zip(shapes, rates, strict=True)
    ]
    return Request("probe", np.array(rows, np.float32), steps * searcher.is_by_validation)


def _after_probes(
    searcher: ProbeThenDecay, controller: ProbeController, request: Request, losses: np.ndarray
) -> ProbeController:
    stage = controller.stage
    scores, variances = tail_scores(losses)
    shapes = searcher.shapes if stage == SHAPE else searcher.shapes[:1]
    rates, first_loss = request.rates.max(1), controller.first_loss
    low, high = searcher.lr_range
    is_beyond = rates.max() > high * (1 + 1e-6) or rates.min() < low * (1 - 1e-6)
    is_extension = is_beyond and rows_of(controller, stage).any()
    if not request.validate_every and np.isfinite(losses[0, 0]):
        first_loss = loss_at_start(controller, losses)
    table = with_rows(
        controller.table,
        stage=stage,
        steps=request.rates.shape[1],
        shape=np.resize([SHAPES.index(shape) for shape in shapes], len(scores)),
        rate=rates,
        forecast=scores,
        variance=variances,
    )
    extended = controller.extended + int(is_extension)
    controller = replace(controller, table=table, first_loss=first_loss, extended=extended)
    if stage == SHAPE:
        return _planned(searcher, controller, searcher.shapes[surely_better(losses, 0)])
    if _is_to_go_on(searcher, controller):
        return controller
    controller = replace(controller, stage=stage + 1)
    is_last = controller.stage == SHAPE and len(searcher.shapes) == 1
    if is_last or not searcher.is_in_two_lengths:
        return _planned(searcher, controller, searcher.shapes[0])
    return controller


def _is_to_go_on(searcher: ProbeThenDecay, controller: ProbeController) -> bool:
    """Whether the best is at an edge, and extensions and budget allow looking beyond."""
    stage = controller.stage
    peak = find_stage_peak(controller, stage)
    longest = searcher.probe_steps * LONGER * AROUND
    can_pay = steps_left(searcher, controller) > searcher.budget // 2 + longest
    is_unsure = is_inconclusive(controller, stage, peak)
    if not (peak.edge and can_pay) or (is_unsure and stage == GRID):
        return False
    beyond = np.exp(peak.log_rate) * _spacing(searcher, stage) ** peak.edge
    low, high = searcher.lr_range
    is_inside = low * (1 - 1e-6) <= beyond <= high * (1 + 1e-6)
    if not is_inside:
        return controller.extended < searcher.extensions and not is_unsure
    return rows_of(controller, stage).sum() - AROUND < MOST_MOVES


def _grid_peak(searcher: ProbeThenDecay, controller: ProbeController) -> PeakRate:
    """The peak of the first probes, or the middle of the range if they are inconclusive."""
    peak = find_stage_peak(controller, GRID)
    if is_inconclusive(controller, GRID, peak):
        return PeakRate(float(np.log(np.prod(searcher.lr_range)) / 2), 0)
    return peak


def _spacing(searcher: ProbeThenDecay, stage: int) -> float:
    low, high = searcher.lr_range
    ratio = (high / low) ** (1 / (searcher.candidates - 1))
    return ratio if stage == GRID else min(ratio, AROUND_RATIO)


def _planned(searcher: ProbeThenDecay, controller: ProbeController, shape: str) -> ProbeController:
    """The run: the peak of the longer probes moved to its length, times the shape."""
    steps = steps_left(searcher, controller)
    if searcher.training_steps is not None:
        steps = min(steps, searcher.training_steps)
    if rows_of(controller, AROUND_PEAK).any():
        long = find_stage_peak(controller, AROUND_PEAK)
        peak = peak_at(steps, long, LONGER * searcher.probe_steps)
    elif rows_of(controller, GRID).any():
        peak = peak_at(steps, _grid_peak(searcher, controller), searcher.probe_steps)
    else:  # no information: the middle
        peak = np.sqrt(np.prod(searcher.lr_range))
    warmup = min(round(RUN_WARMUP * steps), steps - 1)
    plan = (peak * shape_rates(shape, steps, warmup)).astype(np.float32)
    return replace(controller, plan=plan, stage=PLANNED)
