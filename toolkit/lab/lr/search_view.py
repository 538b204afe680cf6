"""One round of a search as numbers to draw: curves, posterior, schedule, ledger. No widgets."""

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from toolkit.lab.kit.view import Data, View
from toolkit.lab.lr.search_rounds import METHODS, Candidate, Round, Search, Settings, kept
from toolkit.lab.lr.small_problems import PROBLEMS, Run, best_known, problem, tuned
from toolkit.lr import AutoLRS
from toolkit.lr.autolrs import forecast_candidate, posterior
from toolkit.lr.fits.gaussian_process import finite_values

POINTS = 161
CLIFF = 8  # times the rise on the other side
NONE = np.zeros(0)


class Landscape(NamedTuple):
    """A search's view of the rates tried so far: points, and possibly a curve."""

    title: str
    pins: tuple[tuple[Candidate, ...], ...]  # comparable ones together, the shortest runs first
    next_rates: np.ndarray = NONE  # to be tried next
    chosen_rate: float | None = None  # trained with next or now; None while that is open
    rates: np.ndarray = NONE  # of the curve
    mean: np.ndarray = NONE
    deviation: np.ndarray = NONE  # one standard deviation of the posterior; none of a parabola
    bound: np.ndarray = NONE  # mean - kappa deviation, where something goes by it


def landscape(search: Search, number: int) -> Landscape:
    """The landscape of a search in one of its rounds, counted from 1."""
    taken, after, next_rates = search.rounds[:number], search.request_after(number), NONE
    if after is not None and after.kind == "probe":
        next_rates = after.rates.max(1)
    if isinstance(search.searcher, AutoLRS):
        return _posterior(search.searcher, taken, next_rates)
    return _scores(taken, next_rates)


def _posterior(searcher: AutoLRS, taken: tuple[Round, ...], next_rates: np.ndarray) -> Landscape:
    now, probes = taken[-1], [took for took in taken if took.candidates]
    if not probes:
        return Landscape("No search yet", ())
    # A stage that was not searched goes by the last one that was.
    last = probes[-1]
    pins = sum((took.candidates for took in probes if took.before.stage == last.before.stage), ())
    if now is not last:  # after training a new stage begins, in which these pins have no say
        next_rates, chosen = NONE, float(now.request.rates[0, 0])
    else:
        chosen = None if len(next_rates) else min(pins, key=lambda pin: pin.expected).rate
    mean, deviation = _process(searcher, last)
    goes_by_bound = searcher.proposals == "sequential" and len(next_rates)
    return Landscape(
        "Gaussian process: loss at stage's end", (pins,), next_rates, chosen,
        np.geomspace(*searcher.lr_range, POINTS), mean, deviation,
        mean - searcher.kappa * deviation if goes_by_bound else NONE,
    )  # fmt: skip


@functools.lru_cache(maxsize=512)
def _process(searcher: AutoLRS, last: Round) -> tuple[np.ndarray, np.ndarray]:
    return posterior(searcher, last.after).predict(np.linspace(0.0, 1.0, POINTS))


def _scores(taken: tuple[Round, ...], next_rates: np.ndarray) -> Landscape:
    # Scores of runs of another length are no values of the same curve.
    tried = [candidate for took in taken for candidate in took.candidates]
    lengths = sorted({len(candidate.losses) for candidate in tried})
    pins = tuple(
        tuple(candidate for candidate in tried if len(candidate.losses) == steps)
        for steps in lengths
    )
    plan = [*taken[-1].after.plan, *(took.request.rates.max() for took in taken if took.is_kept)]
    chosen = float(max(plan)) if plan else None
    if not pins:
        return Landscape("No probes", (), next_rates, chosen)
    rates, expected, _ = columns(pins[-1])
    curve = parabola(rates, finite_values(expected))
    return Landscape("Loss after each annealed probe", pins, next_rates, chosen, *curve)


def columns(pins: tuple[Candidate, ...]) -> np.ndarray:
    """Rates, what is expected of them, and its deviations: [3, pins]."""
    return np.array([(pin.rate, pin.expected, pin.deviation) for pin in pins]).reshape(-1, 3).T


def parabola(rates: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rates and values through the lowest value and its neighbours, over the logarithm of the rate.

    Empty where the lowest is at an edge, or where one neighbour is so much worse than the other
    that it is on its way to infinity.
    """
    order = np.argsort(rates)
    x, y = np.log(rates[order]), values[order]
    best = int(np.argmin(y))
    near = slice(best - 1, best + 2)
    if best in (0, len(x) - 1):
        return NONE, NONE
    rises = y[near][[0, 2]] - y[best]
    if rises.max() > CLIFF * rises.min():
        return NONE, NONE
    places = np.linspace(x[best - 1], x[best + 1], 41)
    return np.exp(places), np.polyval(np.polyfit(x[near] - x[best], y[near], 2), places - x[best])


OUTLOOK_POINTS = 4


class Outlook(NamedTuple):
    """The forecast of one candidate's loss, [points]."""

    steps: np.ndarray = NONE  # from the stage's start
    mean: np.ndarray = NONE
    deviation: np.ndarray = NONE  # one standard deviation


@dataclasses.dataclass(frozen=True)
class SearchView(View):
    """A round of a search, with its history."""

    search: Search
    round: int  # the one looked at, from 1
    horizon: int  # steps of the stage, at whose end forecasts are made; 0 where there are none
    candidates: tuple[Candidate, ...]  # of this stage, up to this round
    outlook: Outlook  # of the newest, best or chosen one; empty where nothing is forecast
    trained: np.ndarray  # losses of training kept: of this stage if it has forecasts, else of all
    landscape: Landscape  # loss against rate
    run: Run  # what was trained and kept
    planned: tuple[np.ndarray, np.ndarray]  # evaluations, rates of the steps that are decided
    best: Run | None  # where it is known
    linear: Run  # linear decay with a tuned peak, tuning not charged

    @property
    def settings(self) -> Settings:
        return self.search.settings

    @property
    def taken(self) -> tuple[Round, ...]:
        """The rounds up to the one looked at, which is the last of them."""
        return self.search.rounds[: self.round]

    @property
    def is_over(self) -> bool:
        """Whether the budget was spent in this round."""
        return self.search.request_after(self.round) is None

    @property
    def ledger(self) -> dict[str, int]:
        """Evaluations by purpose; their sum is the budget."""
        spent = {"search": self.run.searched, "training": len(self.run.rates)}
        return spent | {"unspent": self.settings.budget - sum(spent.values())}

    def is_new(self, candidate: Candidate) -> bool:
        """Whether it was tried in the round looked at."""
        return candidate.taken is self.taken[-1]

    def sentence(self) -> str:
        what, value, _ = self.cells().values()
        cell = dict(zip(what, value, strict=True))
        loss = f"The loss is {cell['loss now']} ({problem(self.settings.problem).provenance})"
        if self.best is not None:
            loss += f"; the best schedule ends at {cell['loss, best schedule']}"
        return (
            f"Round {self.round}: {_name(METHODS, self.settings.method)}, on the "
            f"{_name(PROBLEMS, self.settings.problem).removesuffix(', measured here')}, "
            f"{self._what()} Of {self.settings.budget:,} gradient evaluations "
            f"{cell['evaluations, search']} went into candidates, "
            f"{cell['evaluations, training']} into training. {loss}; "
            f"tuned linear decay at {cell['loss, tuned linear decay']}."
        )

    def _what(self) -> str:
        now, new = self.taken[-1], [*self.taken[-1].candidates]
        stage = f"stage {int(now.before.stage) + 1}"
        if now.request.kind == "train" and self.horizon:
            return f"trains {stage} at rate {self.run.rates[-1]:.3g}."
        if not new:
            return f"trains on, at rate {self.run.rates[-1]:.3g} now."
        if len(new) > 1:
            return f"tries {len(new)} rates side by side in {stage}."
        tried = f"tries rate {new[0].rate:.3g} in {stage}"
        if not np.isfinite(new[0].expected):
            return f"{tried}; it diverged."
        return f"{tried}; {self._expectation} {new[0].expected:.3g}."

    @property
    def _expectation(self) -> str:
        return "forecast" if self.horizon else "score"

    def footnote(self) -> str:
        source = problem(self.settings.problem).provenance
        return (
            f"Losses: {source}. Known schedules: found beforehand. Red: new in this "
            "round.\nBars and bands: two standard deviations. On an edge: beyond the plot."
        )

    def data(self) -> Data:
        source, now = problem(self.settings.problem).provenance, self.taken[-1].after.ledger
        rows: list[tuple[str, Any, str]] = []
        for candidate in self.candidates:
            what = f"candidate, rate {candidate.rate:.4g}"
            expected = candidate.expected
            if candidate.deviation:
                expected = expected, candidate.deviation
            rows += [
                (what, candidate.losses[-1], f"last loss, {source}"),
                (what, expected, f"{self._expectation}, from its losses"),
            ]
        rows += [
            *((f"evaluations, {what}", count, "counted") for what, count in self.ledger.items()),
            # If candidates asked together run together.
            ("sequential depth, steps", now.sequential_depth, "counted"),
            ("rate now", self.run.rates[-1] if len(self.run.rates) else "none yet", "kept"),
            ("loss now", self.run.loss, source),
            *([("loss, best schedule", self.best.loss, source)] if self.best else []),
            ("loss, tuned linear decay", self.linear.loss, source),
        ]
        return dict(zip(("what", "value", "from"), zip(*rows, strict=True), strict=True))


def view_round(search: Search, number: int) -> SearchView:
    """The view of a round, counted from 1; the first one takes 100 ms."""
    rounds = len(search.rounds)
    if not 1 <= number <= rounds:
        raise ValueError(f"round: got {number}, wanted 1 to {rounds}; step() takes another")
    taken = search.rounds[:number]
    now, run, settings = taken[-1], kept(taken), search.settings
    # Training that follows candidates of its own stage is shown beside their forecasts.
    mates = [mate for mate in taken if mate.before.stage == now.before.stage]
    candidates = sum((mate.candidates for mate in mates), ())
    has_forecasts = bool(candidates) and isinstance(search.searcher, AutoLRS)
    of_stage = now.losses[0] if now.is_kept else NONE
    return SearchView(
        search=search, round=number, horizon=int(now.before.stage_steps) if has_forecasts else 0,
        candidates=candidates,
        outlook=_outlook(search.searcher, candidates, now) if has_forecasts else Outlook(),
        trained=of_stage if candidates else run.losses, landscape=landscape(search, number),
        run=run, planned=_planned(search, number),
        best=best_known(settings.problem, settings.budget),
        linear=tuned(settings.problem, "linear", settings.budget),
    )  # fmt: skip


def _outlook(searcher: Any, candidates: tuple[Candidate, ...], now: Round) -> Outlook:
    """Of the newest candidate; where several are new, or training follows, of the best."""
    new = now.candidates
    chosen = new[0] if len(new) == 1 else min(candidates, key=lambda candidate: candidate.expected)
    return _forecasts(searcher, chosen) if np.isfinite(chosen.expected) else Outlook()


@functools.lru_cache(maxsize=512)
def _forecasts(searcher: AutoLRS, candidate: Candidate) -> Outlook:
    then, end = candidate.taken.before, int(candidate.taken.before.stage_steps)
    steps = np.unique(np.geomspace(len(candidate.losses), end, OUTLOOK_POINTS).round())
    made = [forecast_candidate(searcher, then, candidate.losses, step) for step in steps]
    means, variances = (np.array([getattr(f, name) for f in made]) for name in ("mean", "variance"))
    return Outlook(steps, means, np.sqrt(variances))


def _planned(search: Search, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The plan of a search that makes one; otherwise what is trained next, if that is next."""
    now, after = search.rounds[number - 1], search.request_after(number)
    rates = getattr(now.after, "plan", NONE)
    if not len(rates) and after is not None and after.kind != "probe":
        rates = after.rates[0]
    return now.spent[1] + np.arange(len(rates)), np.asarray(rates, np.float64)


def _name(menu: dict[str, str], value: str) -> str:
    return next(shown for shown, choice in menu.items() if choice == value)
