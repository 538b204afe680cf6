"""A schedule drawn by hand and others: their rates and final losses."""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from toolkit.lab.kit.view import Data, Points, Progress, View, heights_at, in_cell
from toolkit.lab.lr.known_schedules import SHAPES, best_known, peaks, run_peak, tuned
from toolkit.lab.lr.search_problems import Run, follow, problem
from toolkit.lab.lr.search_rounds import Search, Settings, begin, further_rounds, kept, with_gaps

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

SMOOTHED = 0.02  # share of a run to average over, because losses of single batches are noisy


@dataclasses.dataclass(frozen=True)
class RaceView(View):
    """All racers of one race."""

    problem: str  # a value of `PROBLEMS`
    steps: int  # gradient evaluations that each may spend
    rates: np.ndarray  # of the schedule drawn
    runs: dict[str, Run]  # of those that have run, in the order of `RACERS`

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of those that have not run."""
        return tuple(name for name in racers(self.problem) if name not in self.runs)

    @property
    def reference(self) -> str:
        """The reference loss: that of the best schedule, or of tuned linear decay."""
        return "best" if "best" in racers(self.problem) else "linear"

    def ratio(self, name: str) -> float | None:
        """A racer's loss over the reference's; None until both have run."""
        if name not in self.runs or self.reference not in self.runs:
            return None
        return self.runs[name].loss / self.runs[self.reference].loss

    @functools.cached_property
    def curves(self) -> dict[str, list[np.ndarray]]:
        """Racer -> evaluations, rates and losses that are drawn; yours before it has run."""
        yours = [np.arange(self.steps), self.rates, np.full(self.steps, np.nan)]
        drawn = {
            name: plotted(run, problem(self.problem).is_exact) for name, run in self.runs.items()
        }
        return {"yours": yours} | drawn

    def sentence(self) -> str:
        if "yours" not in self.runs:
            highest = in_cell(self.rates.max())
            return f"Your schedule, with a highest rate of {highest}, has not run yet: press Race."
        names, *_, losses, ratios = self.cells().values()
        words = f"After {self.steps:,} gradient evaluations yours ends at {losses[0]}"
        if self.reference in self.runs:
            reference = "tuned linear decay" if self.reference == "linear" else "the best there is"
            words += f", {ratios[0]} times {reference}"
        runs = [*self.runs.values()]
        others = [n for n, name in enumerate(self.runs) if name not in ("yours", "best")]
        if others := [n for n in others if np.isfinite(runs[n].loss)]:
            first = min(others, key=lambda n: runs[n].loss)
            words += f". Best of the others: {names[first]}, {losses[first]}"
        return f"{words}. Losses: {problem(self.problem).provenance}."

    def footnote(self) -> str:
        if problem(self.problem).is_exact:
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
        runs, missing = self.runs.values(), [None] * len(self.missing)
        names = [*self.runs, *self.missing]
        return {
            "racer": [RACERS[name] for name in names],
            "highest rate": [run.rates.max(initial=0.0) for run in runs] + missing,
            "evaluations, search": [run.searched for run in runs] + missing,
            "evaluations, training": [len(run.rates) for run in runs] + missing,
            f"final loss, {problem(self.problem).provenance}": [
                *(run.loss for run in runs), *("not run yet" for _ in missing),
            ],
            f"over {RACERS[self.reference]}": [self.ratio(name) for name in names],
        }  # fmt: skip


def plotted(run: Run, is_exact: bool) -> list[np.ndarray]:
    """What is drawn of a run: evaluations, rates and losses, with gaps where it searched.

    Losses of batches are averaged.
    """
    losses, window = run.losses, max(int(SMOOTHED * len(run.losses)), 1)
    if not is_exact:
        padded = np.pad(losses, (window // 2, window - 1 - window // 2), mode="edge")
        losses = np.convolve(padded, np.full(window, 1 / window), mode="valid")
    return with_gaps(run.spent, run.rates, losses)


def racers(name: str) -> tuple[str, ...]:
    """Those that can race on a problem: the best schedule of a network is not known."""
    return tuple(racer for racer in RACERS if racer != "best" or name != "network")


def drawn_rates(name: str, steps: int, points: Points) -> np.ndarray:
    """The schedule that a hand drew, [steps]: rate(t) = largest * height(t / steps)."""
    return problem(name).lr_range[1] * heights_at(points, np.arange(steps) / steps)


@functools.lru_cache(maxsize=64)
def drawn_run(name: str, steps: int, points: Points) -> Run:
    """The run along a drawn schedule; remembered."""
    return follow(problem(name), drawn_rates(name, steps, points))


def settings_of(racer: str, name: str, steps: int) -> Settings:
    """The search by which a racer finds its schedule, with the constants it comes with."""
    return Settings(name, steps, racer, SEARCHED[racer], 1000.0, "together")


@dataclasses.dataclass
class Race:
    """All racers of one problem and budget; it can be stopped and resumed anywhere."""

    problem: str  # a value of `PROBLEMS`
    steps: int
    runs: dict[str, Run] = dataclasses.field(default_factory=dict)
    searches: dict[str, Search] = dataclasses.field(default_factory=dict)  # those under way

    def pieces(self, points: Points) -> Iterator[Progress]:
        """Run every racer that has not run: on the network each of 13 peaks of a tuned shape."""
        tries = peaks(self.problem) if self.problem == "network" else []
        waiting = [
            racer for racer in racers(self.problem) if racer == "yours" or racer not in self.runs
        ]
        every = [
            (racer, at) for racer in waiting for at in [*(tries if racer in SHAPES else []), None]
        ]
        for done, (racer, peak) in enumerate(every, 1):
            title = RACERS[racer]
            if peak is not None:
                run_peak(self.problem, racer, self.steps, peak)  # so that tuning finds it done
                title += f", peak {peak:.2g}"
            elif racer in SEARCHED:
                settings = settings_of(racer, self.problem, self.steps)
                search = self.searches.get(racer) or begin(settings)
                for further in further_rounds(search):
                    self.searches[racer] = search = further
                    yield done - 1, len(every), f"{title}, round {len(search.rounds)}"
                self.runs[racer] = kept(search.rounds)
            elif racer == "yours":
                self.runs[racer] = drawn_run(self.problem, self.steps, points)
            elif racer in SHAPES:
                self.runs[racer] = tuned(self.problem, racer, self.steps)
            elif (best := best_known(self.problem, self.steps)) is not None:
                self.runs[racer] = best
            yield done, len(every), title

    def view(self, points: Points) -> RaceView:
        """As far as it has been run; a run along another drawing is not shown."""
        rates = drawn_rates(self.problem, self.steps, points)
        runs = {racer: self.runs[racer] for racer in racers(self.problem) if racer in self.runs}
        if "yours" in runs and not np.array_equal(runs["yours"].rates, rates):
            del runs["yours"]
        return RaceView(self.problem, self.steps, rates, runs)
