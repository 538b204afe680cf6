"""A search one round at a time, with its history.

A round is one `ask` and one `tell`. A search is immutable: the next round makes a new one, so that
a stopped search resumes exactly.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from toolkit._checks import check_choice
from toolkit.lab.lr.small_problems import Run, problem
from toolkit.lr.autolrs import AutoLRS
from toolkit.lr.probe_then_decay import ProbeThenDecay
from toolkit.lr.protocol import Request, Searcher, ask, init, tell

METHODS = {  # menu entry -> name of a method
    "AutoLRS, as published": "autolrs",
    "AutoLRS, robust forecasts": "robust",
    "probe, then decay": "probe",
}
PROPOSALS = {"one by one": "sequential", "all together": "together"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a search."""

    problem: str  # a value of `PROBLEMS`
    budget: int  # gradient evaluations in all
    method: str  # a value of `METHODS`
    candidates: int  # rates tried in a stage
    kappa: float  # optimism of the confidence bound; AutoLRS only
    proposals: str  # a value of `PROPOSALS`; AutoLRS only

    def build(self) -> Searcher:
        """The searcher; AutoLRS with stages made for this budget."""
        check_choice("method", self.method, METHODS.values())
        lr_range = problem(self.problem).lr_range
        if self.method == "probe":
            return ProbeThenDecay(lr_range, self.budget, candidates=self.candidates)
        names = "candidates", "kappa", "proposals"
        own: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.method == "autolrs":
            longest = 2 * self.budget // 5  # eight times the first, as in the paper
            own |= {"forecast": "published", "final_decay": 0.0, "longest_stage": longest}
        return AutoLRS.scaled(lr_range, self.budget, **own)


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A rate that was tried."""

    taken: "Round"  # when
    rate: float  # its highest
    losses: np.ndarray  # [steps], before each step
    expected: float  # forecast for the stage's end, or score of a probe; infinite if it diverged
    deviation: float  # of that, one standard deviation


@dataclasses.dataclass(frozen=True, eq=False)
class Round:
    """One request of the search and its answer."""

    before: Any  # the controller that asked; each searcher has its own kind
    request: Request
    losses: np.ndarray  # [candidates, steps]
    is_kept: bool  # whether training went on from there
    after: Any  # the controller that was told
    loss: float  # of the state that the search has reached after this round

    @property
    def spent(self) -> tuple[int, int]:
        """Gradient evaluations before and after."""
        ledgers = self.before.ledger, self.after.ledger
        return ledgers[0].gradient_evaluations, ledgers[1].gradient_evaluations

    @functools.cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """The candidates of the round; empty if it was training."""
        if self.request.kind != "probe":
            return ()
        columns = {name: rows[-len(self.losses) :] for name, rows in self.after.table.items()}
        deviations = np.sqrt(columns["variance"])
        rows = zip(columns["rate"], self.losses, columns["forecast"], deviations, strict=True)
        return tuple(Candidate(self, *row) for row in rows)


def kept(rounds: tuple[Round, ...]) -> Run:
    """The training that was kept in the first rounds of a search."""
    columns = [
        (turn.spent[0] + np.arange(turn.losses.shape[1]), turn.request.rates[0], turn.losses[0])
        for turn in rounds
        if turn.is_kept
    ]
    spent, rates, losses = np.concatenate([np.zeros((3, 0)), *columns], axis=1)
    ledger = rounds[-1].after.ledger
    searched = ledger.gradient_evaluations - ledger.kept_steps
    return Run(spent, rates, losses, rounds[-1].loss, searched)


def with_gaps(x: np.ndarray, *columns: np.ndarray) -> list[np.ndarray]:
    """NaN where x leaps over what was spent on candidates: no line is drawn across it."""
    gaps = np.flatnonzero(np.diff(x) > 1) + 1
    return [np.insert(column.astype(float), gaps, np.nan) for column in (x, *columns)]


@dataclasses.dataclass(frozen=True, eq=False)
class Search:
    """A search so far."""

    settings: Settings
    searcher: Searcher  # with its constants
    controller: Any  # what it knows; a pytree
    state: Any  # what training has reached; a pytree
    rounds: tuple[Round, ...]
    start_loss: float  # before the first step

    @functools.cached_property
    def next_request(self) -> Request | None:
        """The next request; None when the search is over."""
        return ask(self.searcher, self.controller)

    def request_after(self, number: int) -> Request | None:
        """The request after this round; None when the search was over."""
        return self.rounds[number].request if number < len(self.rounds) else self.next_request

    def arrays(self) -> dict[str, np.ndarray]:
        """Settings, losses told and state as `np.savez` stores them, for `from_arrays`."""
        leaves = enumerate(jax.tree.leaves(self.state))
        return {
            "settings": np.array(json.dumps(dataclasses.asdict(self.settings))),
            "loss": np.array([taken.loss for taken in self.rounds]),
            **{f"losses_{number}": taken.losses for number, taken in enumerate(self.rounds)},
            **{f"state_{number}": np.asarray(leaf) for number, leaf in leaves},
        }


def begin(settings: Settings) -> Search:
    """A search before its first round."""
    task, searcher = problem(settings.problem), settings.build()
    state = task.start()
    return Search(settings, searcher, init(searcher), state, (), task.loss(state))


def further_rounds(search: Search) -> Iterator[Search]:
    """The search after each of the rounds that are left: asks, trains, tells; then asks again."""
    task = problem(search.settings.problem)
    while (request := search.next_request) is not None:
        reached, losses = task.run(search.state, request)
        answered = _told(search, losses, None)
        state = reached if answered.rounds[-1].is_kept else search.state
        last = dataclasses.replace(answered.rounds[-1], loss=task.loss(state))
        search = dataclasses.replace(answered, state=state, rounds=(*search.rounds, last))
        yield search


def next_round(search: Search) -> Search:
    """The search after one more round. The same one when it is over."""
    return next(further_rounds(search), search)


def from_arrays(arrays: Mapping[str, np.ndarray]) -> Search:
    """The search with these `arrays`, reconstructed from its losses."""
    search = begin(Settings(**json.loads(str(arrays["settings"]))))
    for number, loss in enumerate(arrays["loss"]):
        search = _told(search, arrays[f"losses_{number}"], float(loss))
    leaves, structure = jax.tree.flatten(search.state)
    state = [arrays[f"state_{number}"] for number in range(len(leaves))]
    return dataclasses.replace(search, state=jax.tree.unflatten(structure, state))


def _told(search: Search, losses: np.ndarray, loss: Any) -> Search:
    request: Any = search.next_request
    controller, is_kept = tell(search.searcher, search.controller, request, losses)
    taken = Round(search.controller, request, losses, is_kept, controller, loss)
    return dataclasses.replace(search, controller=controller, rounds=(*search.rounds, taken))
