"""One round of a search as numbers to draw: curves, posterior, schedule, ledger. No widgets."""

import dataclasses
import functools
from typing import Any

import numpy as np

from toolkit.lab.kit.view import Data, View
from toolkit.lab.lr.known_schedules import best_known, tuned
from toolkit.lab.lr.search_landscape import Landscape, landscape
from toolkit.lab.lr.search_problems import PROBLEMS, problem
from toolkit.lab.lr.search_rounds import METHODS, Round, Search, Settings
from toolkit.lr import AutoLRS, forecast_loss, published_forecast

OUTLOOK_POINTS = 4


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A rate that was tried."""

    rate: float  # its highest
    losses: np.ndarray  # [steps], before each step
    expected: float  # forecast for the stage's end, or score of a probe; infinite if it diverged
    deviation: float  # of that, one standard deviation
    is_new: bool  # tried in the round looked at


@dataclasses.dataclass(frozen=True)
class Outlook:
    """How one candidate's loss is expected to go on, [points]."""

    steps: np.ndarray  # from the stage's start
    mean: np.ndarray
    deviation: np.ndarray  # one standard deviation


@dataclasses.dataclass(frozen=True)
class SearchView(View):
    """A round of a search, and all that led to it."""

    settings: Settings
    round: int  # the one looked at, from 1
    rounds: int  # taken so far
    is_over: bool  # whether the budget was spent in this round
    kind: str  # of its request: "probe", "train", "decay"
    stage: int  # of the search, from 1
    horizon: int  # steps of the stage, at whose end forecasts are made; 0 where there are none
    candidates: tuple[Candidate, ...]  # of this stage, up to this round
    outlook: Outlook | None  # of the newest, best or chosen one; None where nothing is forecast
    trained: np.ndarray  # losses of training kept: of this stage if it has forecasts, else of all
    landscape: Landscape  # loss against rate
    spent: np.ndarray  # evaluations at which each kept step was made
    rates: np.ndarray  # of these steps
    searched: tuple[tuple[int, int, np.ndarray], ...]  # evaluations and rates of every probe round
    planned: tuple[np.ndarray, np.ndarray]  # evaluations, rates of the steps that are decided
    best: np.ndarray  # the best schedule, or tuned linear decay where the best is not known
    search_evaluations: int  # spent so far
    training_evaluations: int
    depth: int  # sequential steps, if candidates asked together run together
    loss: float  # of what the search has reached
    start_loss: float
    best_loss: float | None  # of the best schedule, where it is known
    linear_loss: float  # of linear decay with a tuned peak, tuning not charged

    @property
    def provenance(self) -> str:
        """Where the losses come from."""
        return "closed form" if problem(self.settings.problem).is_exact else "measured here"

    @property
    def unspent(self) -> int:
        """Evaluations left of the budget."""
        return self.settings.budget - self.search_evaluations - self.training_evaluations

    def sentence(self) -> str:
        loss = f"The loss is {self.loss:.3g} ({self.provenance})"
        if self.best_loss is not None:
            loss += f"; the best schedule ends at {self.best_loss:.3g}"
        return (
            f"Round {self.round}: {_name(METHODS, self.settings.method)}, on the "
            f"{_name(PROBLEMS, self.settings.problem).removesuffix(', measured here')}, "
            f"{self._what()} Of {self.settings.budget:,} gradient evaluations "
            f"{self.search_evaluations:,} went into candidates, {self.training_evaluations:,} into "
            f"training. {loss}; tuned linear decay at {self.linear_loss:.3g}."
        )

    def _what(self) -> str:
        if self.kind == "train" and self.horizon:
            return f"trains stage {self.stage} at rate {self.rates[-1]:.3g}."
        if self.kind != "probe":
            return f"trains on, at rate {self.rates[-1]:.3g} now."
        new = [one for one in self.candidates if one.is_new]
        if len(new) > 1:
            return f"tries {len(new)} rates side by side in stage {self.stage}."
        tried = f"tries rate {new[0].rate:.3g} in stage {self.stage}"
        if not np.isfinite(new[0].expected):
            return f"{tried}; it diverged."
        return f"{tried}; {self._expectation} {new[0].expected:.3g}."

    @property
    def _expectation(self) -> str:
        return "forecast" if self.horizon else "score"

    def footnote(self) -> str:
        return (
            f"Losses: {self.provenance}. Known schedules: found beforehand. Red: new in this "
            "round.\nBars and bands: two standard deviations. On an edge: beyond the plot."
        )

    def data(self) -> Data:
        source, expectation = self.provenance, f"{self._expectation}, from its losses"
        rows: list[tuple[str, Any, str]] = []
        for one in self.candidates:
            expected = (one.expected, one.deviation) if one.deviation else one.expected
            rows.append((f"candidate, rate {one.rate:.4g}", one.losses[-1], f"last loss, {source}"))
            rows.append((f"candidate, rate {one.rate:.4g}", expected, expectation))
        rows += [
            ("evaluations, search", self.search_evaluations, "counted"),
            ("evaluations, training", self.training_evaluations, "counted"),
            ("evaluations, unspent", self.unspent, "counted"),
            ("sequential depth, steps", self.depth, "counted"),
            ("rate now", self.rates[-1] if len(self.rates) else "none yet", "kept"),
            ("loss now", self.loss, source),
            ("loss, best schedule", self.best_loss, source),
            ("loss, tuned linear decay", self.linear_loss, source),
        ]
        known = [row for row in rows if row[1] is not None]
        what, values, sources = zip(*known, strict=True)
        return {"what": what, "value": values, "from": sources}


def view_round(search: Search, number: int) -> SearchView:
    """What a search knew, asked and was told in one of its rounds, from 1; at most the last.

    The first look at a round fits a Gaussian process and makes a few forecasts: 100 ms.
    """
    if number < 1 or not search.rounds:
        raise ValueError(f"round: got {number}, wanted one of 1 to {len(search.rounds)}")
    number = min(number, len(search.rounds))
    taken, settings = search.rounds[:number], search.settings
    now = taken[-1]
    stage = int(now.before.stage)
    # Training that follows candidates of its own stage is shown beside their forecasts.
    probes = [one for one in taken if one.request.kind == "probe"]
    mates = tuple(one for one in probes if int(one.before.stage) == stage)
    has_forecasts = bool(mates) and isinstance(search.searcher, AutoLRS)
    kept = [one for one in taken if one.is_kept]
    trained = [one for one in kept if one is now] if mates else kept
    best = best_known(settings.problem, settings.budget)
    linear = tuned(settings.problem, "linear", settings.budget)
    ledger = now.after.ledger
    candidates = _candidates(mates, now)
    return SearchView(
        settings=settings,
        round=number,
        rounds=len(search.rounds),
        is_over=search.next_request is None and number == len(search.rounds),
        kind=now.request.kind,
        stage=stage + 1,
        horizon=int(now.before.stage_steps) if has_forecasts else 0,
        candidates=candidates,
        outlook=_outlook(mates, candidates) if has_forecasts else None,
        trained=_joined([one.losses[0] for one in trained]),
        landscape=landscape(search, number),
        spent=_joined([one.spent[0] + np.arange(one.request.rates.shape[1]) for one in kept]),
        rates=_joined([one.request.rates[0] for one in kept]),
        searched=tuple((*one.spent, one.request.rates.max(1)) for one in probes),
        planned=_planned(search, now, number),
        best=(best or linear).rates,
        search_evaluations=ledger.gradient_evaluations - ledger.kept_steps,
        training_evaluations=ledger.kept_steps,
        depth=ledger.sequential_depth,
        loss=now.loss,
        start_loss=search.start_loss,
        best_loss=best.loss if best else None,
        linear_loss=linear.loss,
    )


def _candidates(mates: tuple[Round, ...], now: Round) -> tuple[Candidate, ...]:
    found = []
    for one in mates:
        table = {name: column[-len(one.losses) :] for name, column in one.after.table.items()}
        found += [
            Candidate(
                rate=float(one.request.rates[row].max()),
                losses=losses,
                expected=float(table["forecast"][row]),
                deviation=float(np.sqrt(table["variance"][row])),
                is_new=one is now,
            )
            for row, losses in enumerate(one.losses)
        ]
    return tuple(found)


def _outlook(mates: tuple[Round, ...], candidates: tuple[Candidate, ...]) -> Outlook | None:
    """Of the newest candidate; where several are new, or training follows, of the best."""
    new = [index for index, one in enumerate(candidates) if one.is_new]
    best = int(np.argmin([one.expected for one in candidates]))
    chosen = new[0] if len(new) == 1 else best
    if not np.isfinite(candidates[chosen].expected):
        return None
    return _forecasts(*[(one, row) for one in mates for row in range(len(one.losses))][chosen])


@functools.lru_cache(maxsize=512)
def _forecasts(taken: Round, row: int) -> Outlook:
    curve = taken.losses[row]
    end = int(taken.before.stage_steps)
    steps = np.unique(np.geomspace(len(curve), end, OUTLOOK_POINTS).round())
    # The published forecast claims to be exact, and says so in the table.
    is_robust = taken.after.table["variance"][-len(taken.losses) :].any()
    make = forecast_loss if is_robust else published_forecast
    made = [make(curve, step) for step in steps]
    means, variances = (np.array([getattr(f, name) for f in made]) for name in ("mean", "variance"))
    return Outlook(steps, means, np.sqrt(variances))


def _planned(search: Search, now: Round, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The plan of a search that makes one; otherwise what is trained next, if that is next."""
    rates = getattr(now.after, "plan", np.zeros(0))
    after = search.request_after(number)
    if not len(rates) and after is not None and after.kind != "probe":
        rates = after.rates[0]
    return now.spent[1] + np.arange(len(rates)), np.asarray(rates, np.float64)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *parts])


def _name(menu: dict[str, str], value: str) -> str:
    return next(shown for shown, one in menu.items() if one == value)
