"""One round of a search as numbers to draw: curves, posterior, schedule, ledger. No widgets."""

import dataclasses
import functools

import numpy as np

from toolkit.lab.kit.view import Table
from toolkit.lab.lr.known_schedules import best_known, tuned
from toolkit.lab.lr.search_landscape import Landscape, landscape
from toolkit.lab.lr.search_problems import PROBLEMS, problem
from toolkit.lab.lr.search_rounds import METHODS, Round, Search, Settings
from toolkit.lr import AutoLRS, forecast_loss, published_forecast

OUTLOOK_POINTS = 4
GONE = "diverged"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A rate that was tried.

    Attributes:
        rate: its highest.
        losses: [steps], before each step.
        expected: the forecast at the stage's end, or the score of an annealed probe; infinity
            where it diverged.
        deviation: of that, one standard deviation.
        is_new: whether it was tried in the round looked at.
    """

    rate: float
    losses: np.ndarray
    expected: float
    deviation: float
    is_new: bool


@dataclasses.dataclass(frozen=True)
class Outlook:
    """How one candidate's loss is expected to go on.

    Attributes:
        steps: [points], from the stage's start.
        mean: [points].
        deviation: [points], one standard deviation.
    """

    steps: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray


@dataclasses.dataclass(frozen=True)
class SearchView:
    """A round of a search, and all that led to it.

    Attributes:
        settings: of the search.
        round: the one looked at, from 1.
        rounds: taken so far.
        is_over: whether the budget was spent in this round.
        kind: of its request: "probe", "train", "decay".
        stage: of the search, from 1.
        horizon: steps of the stage, at whose end forecasts are made; 0 where there are none.
        candidates: of this stage, up to this round.
        outlook: of the newest, best or chosen candidate; None where nothing is forecast.
        trained: losses of the training that is kept: of this stage where it has candidates with
            forecasts, otherwise from the first step on.
        landscape: loss against rate.
        spent: evaluations at which each kept step was made, [kept steps].
        rates: of these steps.
        searched: (first, last) evaluation of each round of candidates, and their rates.
        planned: evaluations and rates of the steps to come, as far as they are decided.
        best: the best schedule, [budget], or tuned linear decay where the best is not known.
        search_evaluations, training_evaluations: spent so far.
        depth: sequential steps, if candidates asked together run together.
        loss: of what the search has reached.
        start_loss: before the first step.
        best_loss: of the best schedule; None where it is not known.
        linear_loss: of linear decay with a tuned peak, tuning not charged.
    """

    settings: Settings
    round: int
    rounds: int
    is_over: bool
    kind: str
    stage: int
    horizon: int
    candidates: tuple[Candidate, ...]
    outlook: Outlook | None
    trained: np.ndarray
    landscape: Landscape
    spent: np.ndarray
    rates: np.ndarray
    searched: tuple[tuple[int, int, np.ndarray], ...]
    planned: tuple[np.ndarray, np.ndarray]
    best: np.ndarray
    search_evaluations: int
    training_evaluations: int
    depth: int
    loss: float
    start_loss: float
    best_loss: float | None
    linear_loss: float

    @property
    def provenance(self) -> str:
        """Where the losses come from."""
        return "closed form" if problem(self.settings.problem).is_exact else "measured here"

    @property
    def unspent(self) -> int:
        """Evaluations left of the budget."""
        return self.settings.budget - self.search_evaluations - self.training_evaluations

    def sentence(self) -> str:
        of = f"Round {self.round}: {_name(METHODS, self.settings.method)}, on the "
        of += f"{_name(PROBLEMS, self.settings.problem).removesuffix(', measured here')}, "
        spent = (
            f"Of {self.settings.budget:,} gradient evaluations {self.search_evaluations:,} went "
            f"into candidates, {self.training_evaluations:,} into training. "
        )
        loss = f"The loss is {self.loss:.3g} ({self.provenance})"
        if self.best_loss is not None:
            loss += f"; the best schedule ends at {self.best_loss:.3g}"
        return f"{of}{self._what()} {spent}{loss}; tuned linear decay at {self.linear_loss:.3g}."

    def _what(self) -> str:
        if self.kind == "train" and self.horizon:
            return f"trains stage {self.stage} at rate {self.rates[-1]:.3g}."
        if self.kind != "probe":
            return f"trains on, at rate {self.rates[-1]:.3g} now."
        new = [one for one in self.candidates if one.is_new]
        if len(new) > 1:
            return f"tries {len(new)} rates side by side in stage {self.stage}."
        (one,) = new
        tried = f"tries rate {one.rate:.3g} in stage {self.stage}"
        if not np.isfinite(one.expected):
            return f"{tried}; it diverged."
        what = "forecast" if self.horizon else "score"
        return f"{tried}; {what} {one.expected:.3g}."

    def table(self) -> Table:
        source = self.provenance
        rows = [
            (f"candidate, rate {one.rate:.4g}", _number(one.losses[-1]), "last loss, " + source)
            for one in self.candidates
        ]
        what = "forecast" if self.horizon else "score"
        rows += [
            (f"candidate, rate {one.rate:.4g}", _with_error(one), f"{what}, from its losses")
            for one in self.candidates
        ]
        rows += [
            ("evaluations, search", f"{self.search_evaluations:,}", "counted"),
            ("evaluations, training", f"{self.training_evaluations:,}", "counted"),
            ("evaluations, unspent", f"{self.unspent:,}", "counted"),
            ("sequential depth, steps", f"{self.depth:,}", "counted"),
            ("rate now", _number(self.rates[-1]) if len(self.rates) else "none yet", "kept"),
            ("loss now", _number(self.loss), source),
        ]
        if self.best_loss is not None:
            rows.append(("loss, best schedule", _number(self.best_loss), source))
        rows.append(("loss, tuned linear decay", _number(self.linear_loss), source))
        return Table(("what", "value", "from"), rows)


def view_round(search: Search, number: int) -> SearchView:
    """What a search knew, asked and was told in one of its rounds.

    Args:
        search: with at least one round.
        number: of the round, from 1; a later one than the last is taken for the last.

    Returns:
        A `SearchView`.

    Raises:
        ValueError: the search has no such round.

    Cost:
        The first look at a round fits a Gaussian process and makes a few forecasts: 100 ms.
    """
    if number < 1 or not search.rounds:
        raise ValueError(f"round: got {number}, wanted one of 1 to {len(search.rounds)}")
    number = min(number, len(search.rounds))
    taken, settings = search.rounds[:number], search.settings
    now = taken[-1]
    stage = int(now.before.stage)
    # Training that follows candidates of its own stage is shown beside their forecasts.
    mates = tuple(
        one for one in taken if int(one.before.stage) == stage and one.request.kind == "probe"
    )
    has_forecasts = bool(mates) and isinstance(search.searcher, AutoLRS)
    kept = [one for one in taken if one.is_kept]
    trained = [one for one in kept if one is now] if mates else kept
    best = best_known(settings.problem, settings.budget)
    linear = tuned(settings.problem, "linear", settings.budget)
    ledger = now.after.ledger
    return SearchView(
        settings=settings,
        round=number,
        rounds=len(search.rounds),
        is_over=search.next_request is None and number == len(search.rounds),
        kind=now.request.kind,
        stage=stage + 1,
        horizon=int(now.before.stage_steps) if has_forecasts else 0,
        candidates=_candidates(mates, now),
        outlook=_outlook(mates, now) if has_forecasts else None,
        trained=_joined([one.losses[0] for one in trained]),
        landscape=landscape(search, number),
        spent=_joined([one.spent[0] + np.arange(one.request.rates.shape[1]) for one in kept]),
        rates=_joined([one.request.rates[0] for one in kept]),
        searched=tuple(
            (*one.spent, one.request.rates.max(1)) for one in taken if one.request.kind == "probe"
        ),
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
        count = len(one.losses)
        table = {name: column[-count:] for name, column in one.after.table.items()}
        for row in range(count):
            found.append(
                Candidate(
                    rate=float(one.request.rates[row].max()),
                    losses=one.losses[row],
                    expected=float(table["forecast"][row]),
                    deviation=float(np.sqrt(table["variance"][row])),
                    is_new=one is now,
                )
            )
    return tuple(found)


def _outlook(mates: tuple[Round, ...], now: Round) -> Outlook | None:
    """Of the newest candidate; where several are new, or training follows, of the best."""
    candidates = _candidates(mates, now)
    new = [index for index, one in enumerate(candidates) if one.is_new]
    best = int(np.argmin([one.expected for one in candidates]))
    chosen = new[0] if len(new) == 1 else best
    if not np.isfinite(candidates[chosen].expected):
        return None
    flat = [(one, row) for one in mates for row in range(len(one.losses))]
    taken, row = flat[chosen]
    return _forecasts(taken, row)


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
    if not len(rates):
        after = search.rounds[number].request if number < len(search.rounds) else None
        after = search.next_request if number == len(search.rounds) else after
        if after is not None and after.kind != "probe":
            rates = after.rates[0]
    return now.spent[1] + np.arange(len(rates)), np.asarray(rates, np.float64)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *parts])


def _name(menu: dict[str, str], value: str) -> str:
    return next(shown for shown, one in menu.items() if one == value)


def _number(value: float) -> str:
    return f"{value:.4g}" if np.isfinite(value) else GONE


def _with_error(one: Candidate) -> str:
    return (
        f"{_number(one.expected)} ± {one.deviation:.1g}" if one.deviation else _number(one.expected)
    )
