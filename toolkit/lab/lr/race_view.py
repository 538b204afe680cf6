"""A schedule drawn by hand against the others: what each trains with, and where it ends."""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from toolkit.lab.kit.curve import Points, heights_at
from toolkit.lab.kit.view import Data, Progress, View
from toolkit.lab.lr.known_schedules import SHAPES, best_known, follow, peaks, run_peak, tuned
from toolkit.lab.lr.search_problems import NetworkProblem, problem
from toolkit.lab.lr.search_rounds import Search, Settings, begin, next_round

RACERS = {
    "yours": "yours",
    "best": "best there is",
    "linear": "linear, tuned",
    "cosine": "cosine, tuned",
    "wsd": "WSD, tuned",
    "probe": "probe, then decay",
    "robust": "AutoLRS, robust",
}
"""Name -> title, in the order shown."""

SEARCHED = {"probe": 7, "robust": 10}
"""Racers that find their schedule within the budget -> candidates."""

MOST_POINTS = 1000
SMOOTHED = 0.02  # of a run: losses of single batches hide everything else


@dataclasses.dataclass(frozen=True, eq=False)
class Lane:
    """One racer; arrays have an entry for each step of training that was kept."""

    name: str  # a key of `RACERS`
    spent: np.ndarray  # evaluations spent before the step, candidates included
    rates: np.ndarray
    losses: np.ndarray  # before the step
    loss: float  # at the end
    searched: int = 0  # evaluations that went into candidates


@dataclasses.dataclass(frozen=True)
class RaceView(View):
    """All racers of one race."""

    problem: str  # a value of `PROBLEMS`
    steps: int  # gradient evaluations that each may spend
    rates: np.ndarray  # of the schedule drawn
    lanes: tuple[Lane, ...]  # those that have run, in the order of `RACERS`
    missing: tuple[str, ...]  # names of those that have not
    is_exact: bool  # whether losses are closed forms
    reference: str  # what others are divided by: the best there is, or tuned linear decay

    @property
    def provenance(self) -> str:
        """Where the losses come from."""
        return "closed form" if self.is_exact else "measured here"

    def lane(self, name: str) -> Lane | None:
        """A racer that has run."""
        return next((lane for lane in self.lanes if lane.name == name), None)

    def ratio(self, lane: Lane) -> float | None:
        """Its loss over the reference's; None while that has not run."""
        reference = self.lane(self.reference)
        return None if reference is None else lane.loss / reference.loss

    def sentence(self) -> str:
        mine = self.lane("yours")
        if mine is None:
            return (
                f"Your schedule, with a highest rate of {self.rates.max():.3g}, has not run yet: "
                "press Race. "
            )
        words = f"After {self.steps:,} gradient evaluations yours ends at {mine.loss:.4g}"
        ratio = self.ratio(mine)
        if ratio is not None:
            words += f", {ratio:.3g} times {_reference_in_words(self.reference)}"
        finite = [lane for lane in self.lanes if np.isfinite(lane.loss)]
        others = [lane for lane in finite if lane.name not in ("yours", "best")]
        if others:
            first = min(others, key=lambda lane: lane.loss)
            words += f". Best of the others: {RACERS[first.name]}, {first.loss:.4g}"
        return f"{words}. Losses: {self.provenance}."

    def footnote(self) -> str:
        if self.is_exact:
            return (
                "Losses: closed form. The rates of the best were found beforehand. Tuning is not "
                "charged, searching is."
            )
        return (
            "Measured here, one seed. Curves: training, averaged over 2 % of the run. Final "
            "losses: on rows never trained on.\nTuning is not charged, searching is."
        )

    def data(self) -> Data:
        """A row per racer, those that have run first."""
        lanes, missing = self.lanes, [None] * len(self.missing)
        names = [*(lane.name for lane in lanes), *self.missing]
        return {
            "racer": [RACERS[name] for name in names],
            "highest rate": [lane.rates.max(initial=0.0) for lane in lanes] + missing,
            "evaluations, search": [lane.searched for lane in lanes] + missing,
            "evaluations, training": [len(lane.rates) for lane in lanes] + missing,
            f"final loss, {self.provenance}": [
                *(lane.loss for lane in lanes), *("not run yet" for _ in missing),
            ],
            f"over {RACERS[self.reference]}": [self.ratio(lane) for lane in lanes] + missing,
        }  # fmt: skip


def drawn_rates(name: str, steps: int, points: Points) -> np.ndarray:
    """The schedule that a hand drew, [steps]: rate(t) = largest * height(t / steps)."""
    return problem(name).lr_range[1] * heights_at(points, np.arange(steps) / steps)


def racers(name: str) -> tuple[str, ...]:
    """Those that can race on a problem: the best schedule of a network is not known."""
    return tuple(one for one in RACERS if one != "best" or name != "network")


@functools.lru_cache(maxsize=64)
def drawn_lane(name: str, steps: int, points: Points) -> Lane:
    """The run along a drawn schedule, the lane of "yours"; remembered."""
    known = follow(problem(name), drawn_rates(name, steps, points))
    return Lane("yours", np.arange(steps), known.rates, known.losses, known.loss)


@functools.cache
def fixed_lane(name: str, steps: int, racer: str) -> Lane:
    """The run of a known or tuned schedule, "best" or one of `SHAPES`; remembered."""
    known = best_known(name, steps) if racer == "best" else tuned(name, racer, steps)
    if known is None:
        raise ValueError(f"racer: got {racer!r}, not available for {name!r}")
    return Lane(racer, np.arange(steps), known.rates, known.losses, known.loss)


def searched_lane(search: Search, racer: str) -> Lane:
    """The run of a search that is over."""
    kept = [one for one in search.rounds if one.is_kept]
    ledger = search.controller.ledger
    none = np.zeros(0)
    return Lane(
        racer,
        np.concatenate([none, *(one.spent[0] + np.arange(one.losses.shape[1]) for one in kept)]),
        np.concatenate([none, *(one.request.rates[0] for one in kept)]),
        np.concatenate([none, *(one.losses[0] for one in kept)]),
        search.rounds[-1].loss,
        ledger.gradient_evaluations - ledger.kept_steps,
    )


def race_pieces(
    name: str, steps: int, points: Points, finished: dict[str, Lane], searches: dict[str, Search]
) -> Iterator[Progress]:
    """Runs every racer that has not run, piece by piece; stopped, it can be taken up again.

    Lanes in `finished` are not run again, and what is run is put there; in the same manner
    `searches` under way. On the network there are 13 runs for each tuned shape, and one for every
    other racer.
    """
    task = problem(name)
    tries = [float(peak) for peak in peaks(task)] if isinstance(task, NetworkProblem) else [0.0]
    waiting = [one for one in racers(name) if one == "yours" or one not in finished]
    shapes = [one for one in waiting if one in SHAPES]
    total = len(waiting) + (len(tries) - 1) * len(shapes)
    done = 0
    for racer in waiting:
        if racer in SEARCHED:
            search = searches.get(racer) or begin(settings_of(racer, name, steps))
            while (further := next_round(search)) is not search:
                search = searches[racer] = further
                yield done, total, f"{RACERS[racer]}, round {len(search.rounds)}"
            finished[racer] = searched_lane(search, racer)
        elif racer == "yours":
            finished[racer] = drawn_lane(name, steps, points)
        else:
            for peak in tries[:-1] if racer in SHAPES else []:
                run_peak(name, racer, steps, peak)  # remembered, so that tuning finds it done
                done += 1
                yield done, total, f"{RACERS[racer]}, peak {peak:.2g}"
            finished[racer] = fixed_lane(name, steps, racer)
        done += 1
        yield done, total, RACERS[racer]


def settings_of(racer: str, name: str, steps: int) -> Settings:
    """The search by which a racer finds its schedule, with the constants it comes with."""
    return Settings(name, steps, racer, SEARCHED[racer], 1000.0, "together")


def race_view(name: str, steps: int, points: Points, finished: dict[str, Lane]) -> RaceView:
    """A race as far as it has been run; a lane of another drawing is not shown."""
    rates = drawn_rates(name, steps, points)
    lanes = [finished[one] for one in racers(name) if one in finished]
    lanes = [lane for lane in lanes if lane.name != "yours" or np.array_equal(lane.rates, rates)]
    names = [lane.name for lane in lanes]
    task = problem(name)
    return RaceView(
        problem=name,
        steps=steps,
        rates=rates,
        lanes=tuple(lanes),
        missing=tuple(one for one in racers(name) if one not in names),
        is_exact=task.is_exact,
        reference="best" if "best" in racers(name) else "linear",
    )


def plotted(lane: Lane, is_exact: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Evaluations, rates and losses that are drawn of a lane, [points] each.

    Fewer points, losses of batches averaged, gaps where it searched.
    """
    losses = lane.losses
    window = max(int(SMOOTHED * len(losses)), 1)
    if not is_exact and window > 1:
        padded = np.pad(losses, (window // 2, window - 1 - window // 2), mode="edge")
        losses = np.convolve(padded, np.full(window, 1 / window), mode="valid")
    every = -(-len(losses) // MOST_POINTS) if len(losses) else 1
    gaps = np.flatnonzero(np.diff(lane.spent) > 1) + 1
    kept = np.union1d(np.arange(0, len(losses), every), np.concatenate([gaps, gaps - 1]))
    kept = np.union1d(kept, [len(losses) - 1]).astype(int) if len(losses) else kept.astype(int)
    breaks = np.searchsorted(kept, gaps)
    spent, rates, losses = (
        np.insert(column[kept].astype(np.float64), breaks, np.nan)
        for column in (lane.spent, lane.rates, losses)
    )
    return spent, rates, losses


def _reference_in_words(reference: str) -> str:
    return "the best there is" if reference == "best" else "tuned linear decay"
