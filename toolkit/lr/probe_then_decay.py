"""Probe, then decay: find the peak by short annealed runs, then make the long run.

A probe rises and decays to zero like the run, in about a thirtieth of its length, but at least
twenty steps. Rates are compared by their losses after the decay, on the same batches; a comparison
at constant rates would include the noise of a high rate.

    probes at the middle of the range and beside it
    one more beyond the best, until it lies between two others
    the run:  peak * (max(n, saturation) / steps)^exponent * shape

`toolkit experiment peaks` reads the same probes in other ways on development problems: by a
Gaussian process, and by their best alone, whatever the noise, the rates are worse.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np

from toolkit._annotations import AtLeast
from toolkit._checks import check_fields
from toolkit._pytrees import register_dataclass
from toolkit.lr.fits.overfitting import overfits_since
from toolkit.lr.fits.peak import (
    PeakRate,
    curve_ends,
    find_peak,
    peak_at,
    tail_scores,
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
from toolkit.lr.shapes import SHAPES, resampled, shape_rates

PROBING, PLANNED = range(2)  # stages
TINY = 1e-37  # and its inverse are in float32
EVIDENCE = 20  # steps; shorter probes see the harm of large steps, but not yet the benefit
RATIO = 10 ** (2 / 3)  # between rates: closer ones differ by less than the noise of a few steps
EXPECTED = 4  # probes, of which the budget of the search pays
MOST_MOVES = 3  # beyond the best, within the range
PROBE_WARMUP = 0.2  # fraction of a probe; a run's is shorter
PROBE_TAIL = 1 / 3  # by which probes are compared: more would see the noise of rates not yet fallen
RUN_WARMUP = 0.05
PIECES = 20  # pieces of the run: one is lost when it diverges or breaks down
LEAST_STEPS = 4  # of a piece
BACKOFF = 0.7  # factor on the rest of the schedule after that
BLOWN_UP = 3.0  # times the highest loss at the start
BROKEN_DOWN = 0.05  # of what was learnt: a rise within a piece
LEAST_QUARTER = 8  # steps, to tell such a rise from noise
SURE_RISE = 4.0  # standard deviations: every piece is looked at
EARLY = 0.2  # of a run, in which losses may rise to the noise of its peak; as much at its end
LARGEST_SEARCH = 0.25  # of the budget, for the first probes, however short they are
LARGEST_VALIDATION = 0.25  # of the search
LARGEST_WATCHING = 0.05  # of the budget, for validation losses along the run


@register_dataclass
@dataclass(frozen=True)
class ProbeController(Controller):
    """The state of `ProbeThenDecay`, in addition to the `Controller`."""

    # [remaining steps] float32, the rates of the run; empty before it is planned
    plan: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    stage: int = PROBING
    extended: int = 0  # how often the search has gone beyond its range
    # Before training: the highest of the candidate that rose least, as batches may differ much.
    start_loss: float = np.inf
    lost_at: int = -1  # steps kept before the last piece lost; past the run: rises are ignored
    # [candidates for the peak, points], the ends of their curves on the same batches
    ends: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))


@dataclass(frozen=True)
class ProbeThenDecay:
    """Annealed probes of about an eighth of the budget, then one run that decays to zero.

    Attributes:
        lr_range: lowest and highest rate of the first probes.
        budget: total steps, including candidates.
        candidates: rates of the first probes, around the middle of the range.
        search_fraction: of the budget, for four probes, unless they would be shorter than twenty
            steps; further ones come on top.
        shape: of the probes and the run, a name in `SHAPES`.
        extensions: how often the range may be extended when the best rate is at its edge.
        shortest_probe: steps; nothing is probed if the budget allows less per candidate.
        validation_batches: batches per validation loss; 0 for none.

    Source: none published; short probes against the horizon, Wu et al. (arXiv:1803.02021).

    Example:
        >>> searcher = ProbeThenDecay((1e-4, 1e-1), budget=400)
        >>> request = ask(searcher, init(searcher))
        >>> request.kind, request.rates.shape
        ('probe', (3, 20))
    """

    lr_range: tuple[float, float]
    budget: Annotated[int, AtLeast(1)]
    candidates: Annotated[int, AtLeast(3)] = 3
    search_fraction: float = 0.12
    shape: str = "trapezoid"
    extensions: Annotated[int, AtLeast(0)] = 2
    shortest_probe: Annotated[int, AtLeast(1)] = 3
    validation_batches: int = 0

    def __post_init__(self):
        check_fields(self)
        low, high = self.lr_range
        checks = {
            "lr_range": (TINY < low < high < 1 / TINY, "0 < low < high, within float32"),
            "search_fraction": (0 <= self.search_fraction < 1, "in [0, 1)"),
            "shape": (self.shape in SHAPES, f"one of {', '.join(SHAPES)}"),
        }
        require(self, checks)

    @property
    def middle(self) -> float:
        """Of the range of rates, for where nothing is known."""
        return float(np.sqrt(np.prod(self.lr_range)))

    @property
    def is_by_validation(self) -> bool:
        """Whether probes go by a validation loss: not where that takes too much of the search."""
        return (
            0
            < self._validating(self.candidates + 1)
            <= LARGEST_VALIDATION * self.search_fraction * self.budget
        )

    @property
    def is_watched(self) -> bool:
        """Whether every piece of the run ends with a validation loss, which the budget bears."""
        return 0 < self._validating(PIECES) <= LARGEST_WATCHING * self.budget

    def _validating(self, losses: int) -> float:
        """The cost of so many validation losses, in steps."""
        return FORWARD_COST * self.validation_batches * losses

    @property
    def probe_steps(self) -> int:
        """Steps of a probe; 0 if the budget allows none."""
        first = max(self.candidates, EXPECTED)
        forward = self._validating(self.candidates + 1) * self.is_by_validation
        steps = max((self.search_fraction * self.budget - forward) / first, EVIDENCE)
        most = (LARGEST_SEARCH * self.budget - forward) / self.candidates
        steps = int(min(steps, most) + 1e-9) if self.search_fraction else 0
        return steps if steps >= self.shortest_probe else 0

    def init(self) -> ProbeController:
        """A controller before the first step."""
        controller = ProbeController()
        return controller if self.probe_steps else _planned(self, controller)

    def ask(self, controller: ProbeController) -> Request | None:
        """Probes until the run is planned; then a piece of it."""
        if controller.stage == PROBING:
            return _probes(self, controller)
        if not len(controller.plan):
            return None
        whole = controller.ledger.kept_steps + len(controller.plan)
        piece = max(-(-whole // PIECES), LEAST_STEPS)
        request = one_candidate("train", controller.plan[:piece])
        return replace(request, is_checked=self.is_watched)

    def keeps(self, controller: ProbeController, request: Request, losses: np.ndarray) -> bool:
        """Whether the losses are finite, and have neither blown up nor broken down."""
        if not np.isfinite(losses).all():
            return False
        start_loss = _start_loss(controller, losses)
        if curve_ends(losses).mean() > max(BLOWN_UP * start_loss, 0):
            return False
        kept = controller.ledger.kept_steps
        is_between = EARLY <= kept / (kept + len(controller.plan)) < 1 - EARLY
        is_tested = is_between and controller.lost_at < kept
        return not (is_tested and _breaks_down(losses[0], start_loss))

    def tell(
        self, controller: ProbeController, request: Request, losses: np.ndarray, is_kept: bool
    ) -> ProbeController:
        """Record candidates; plan the run after the last; lower its rates when it diverges."""
        if request.kind == "probe":
            return _after_probes(self, controller, request, losses)
        if is_kept:
            plan = controller.plan[request.rates.shape[1] :]
            if len(plan) and overfits_since(controller.checks) is not None:
                plan = _early_end(plan, request)
            start_loss, lost_at = _start_loss(controller, losses), controller.lost_at
            if lost_at + losses.shape[1] == controller.ledger.kept_steps:
                # If losses rise at lower rates, too, the batches may do that.
                lost_at += self.budget * _breaks_down(losses[0], start_loss)
            return replace(controller, plan=plan, start_loss=start_loss, lost_at=lost_at)
        left = min(_run_steps(self, controller), len(controller.plan))
        plan = BACKOFF * resampled(controller.plan, left) if left else controller.plan[:0]
        is_risen = np.isfinite(losses).all() and _breaks_down(losses[0], controller.start_loss)
        lost_at = max(controller.lost_at, controller.ledger.kept_steps if is_risen else -1)
        return replace(controller, plan=plan.astype(np.float32), lost_at=lost_at)


def _probes(searcher: ProbeThenDecay, controller: ProbeController) -> Request:
    if len(controller.ends):
        rates = np.array([_beyond(searcher, best_peak(searcher, controller))])
    else:
        low, high = searcher.lr_range
        places = np.arange(searcher.candidates) - (searcher.candidates - 1) / 2
        ratio = min(RATIO, (high / low) ** (1 / (searcher.candidates - 1)))
        rates = searcher.middle * ratio**places
    steps = searcher.probe_steps
    warmup = round(PROBE_WARMUP * steps) if steps > 2 else 0
    rows = np.multiply.outer(rates, shape_rates(searcher.shape, steps, warmup))
    return Request("probe", rows.astype(np.float32), steps * searcher.is_by_validation)


def _after_probes(
    searcher: ProbeThenDecay, controller: ProbeController, request: Request, losses: np.ndarray
) -> ProbeController:
    ends = curve_ends(losses, PROBE_TAIL)
    scores, variances = tail_scores(ends)
    rates, start_loss = request.rates.max(1), controller.start_loss
    low, high = searcher.lr_range
    is_beyond = rates.max() > high * (1 + 1e-6) or rates.min() < low * (1 - 1e-6)
    if not request.validate_every:
        highest = np.where(np.isfinite(losses), losses, np.inf).max(1)
        start_loss = min(start_loss, float(highest.min()))
    table = with_rows(
        controller.table,
        stage=PROBING,
        steps=request.rates.shape[1],
        rate=rates,
        forecast=scores,
        variance=variances,
    )
    extended = controller.extended + int(is_beyond)
    ends = np.concatenate([controller.ends, ends]) if len(controller.ends) else ends
    controller = replace(
        controller, table=table, start_loss=start_loss, extended=extended, ends=ends
    )
    return controller if _is_to_go_on(searcher, controller) else _planned(searcher, controller)


def _is_to_go_on(searcher: ProbeThenDecay, controller: ProbeController) -> bool:
    """Whether the best is at an edge, and extensions and budget allow looking beyond."""
    peak = best_peak(searcher, controller)
    can_pay = steps_left(searcher, controller) > searcher.budget // 2 + searcher.probe_steps
    if not (peak.edge and can_pay):
        return False
    low, high = searcher.lr_range
    if not low * (1 - 1e-6) <= _beyond(searcher, peak) <= high * (1 + 1e-6):
        return controller.extended < searcher.extensions
    return len(controller.ends) - searcher.candidates < MOST_MOVES


def _beyond(searcher: ProbeThenDecay, peak: PeakRate) -> float:
    """The next rate: at the end of the range before any beyond it."""
    rate = np.exp(peak.log_rate) * RATIO**peak.edge
    end = searcher.lr_range[peak.edge > 0]
    until_end = peak.edge * (np.log(end) - peak.log_rate) / np.log(RATIO)
    return float(end if 0.25 < until_end < 1 else rate)


def _start_loss(controller: ProbeController, losses: np.ndarray) -> float:
    """The highest at the start: of the probes, or else of the first quarter of the first piece."""
    known, first = controller.start_loss, max(-(-losses.shape[1] // 4), LEAST_STEPS)
    return known if np.isfinite(known) else float(losses[0, :first].max())


def _breaks_down(losses: np.ndarray, start_loss: float) -> bool:
    """Whether a piece that had learnt surely rises from its first quarter to its last."""
    quarter = len(losses) // 4
    first, last = losses[:quarter], losses[-quarter:]
    if quarter < LEAST_QUARTER or first.mean() >= start_loss:
        return False
    noise = np.sqrt((first.var(ddof=1) + last.var(ddof=1)) / quarter)
    least = max(SURE_RISE * noise, BROKEN_DOWN * (start_loss - first.mean()))
    return bool(last.mean() - first.mean() > least)


def best_peak(searcher: ProbeThenDecay, controller: ProbeController) -> PeakRate:
    """The peak of the probes; the lowest rate if all diverged, the middle if short ones like it."""
    rates, middle = controller.table["rate"], float(np.log(searcher.middle))
    peak = find_peak(rates, controller.ends, middle)
    if peak is None:
        return PeakRate(float(np.log(rates.min())), -1)
    is_short = controller.table["steps"][0] < EVIDENCE and np.isfinite(controller.ends).all()
    return PeakRate(middle, 0, is_open=True) if is_short and peak.edge == -1 else peak


def _early_end(plan: np.ndarray, request: Request) -> np.ndarray:
    """A fall to zero within two pieces, in place of the rest of a run that overfits."""
    steps = min(2 * request.rates.shape[1], len(plan))
    fall = plan[0] * shape_rates("linear", steps)
    return np.minimum(fall, plan[:steps]).astype(np.float32)


def _run_steps(searcher: ProbeThenDecay, controller: ProbeController) -> int:
    """What is left of the budget, without the validation losses of the pieces to come."""
    left = steps_left(searcher, controller)
    pieces = int(np.ceil(PIECES * left / max(left + controller.ledger.kept_steps, 1)))
    return max(left - int(np.ceil(searcher.is_watched * searcher._validating(pieces))), 0)


def _planned(searcher: ProbeThenDecay, controller: ProbeController) -> ProbeController:
    """The run: the peak of the probes moved to its length, times the shape."""
    steps = max(_run_steps(searcher, controller), 1)
    rate = searcher.middle
    if len(controller.ends):
        rate = peak_at(steps, best_peak(searcher, controller), searcher.probe_steps)
    warmup = min(round(RUN_WARMUP * steps), steps - 1)
    plan = (rate * shape_rates(searcher.shape, steps, warmup)).astype(np.float32)
    return replace(controller, plan=plan, stage=PLANNED)
