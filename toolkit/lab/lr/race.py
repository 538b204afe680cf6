"""A schedule drawn by hand, and others: their rates and final losses."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit.figures import ACCENT, FAINT, INK, LOOKS, Look
from toolkit.figures.axes import count_ticks, few_log_ticks, set_limits
from toolkit.lab.kit.controls import Choice
from toolkit.lab.kit.curve_control import Curve
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Data, Points, Progress, View, heights_at, in_cell
from toolkit.lab.lr import small_problems as problems
from toolkit.lab.lr.search_rounds import Search, Settings, begin, further_rounds, kept, with_gaps

# Name -> title, in the order shown.
RACERS = {
    "yours": "yours", "best": "best there is", "linear": "linear, tuned", "cosine": "cosine, tuned",
    "wsd": "WSD, tuned", "probe": "probe, then decay", "robust": "AutoLRS, robust",
}  # fmt: skip
SEARCHED = {"probe": 7, "robust": 10}  # those that search within the budget -> candidates
SMOOTHED = 0.02  # share of a run to average over, because losses of single batches are noisy


@dataclasses.dataclass(frozen=True)
class RaceView(View):
    """All racers of one race."""

    problem: str  # a value of `PROBLEMS`
    steps: int  # gradient evaluations that each may spend
    rates: np.ndarray  # of the schedule drawn
    runs: dict[str, problems.Run]  # of those that have run, in the order of `RACERS`

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
        is_exact = problems.problem(self.problem).is_exact
        return {"yours": yours} | {n: plotted(run, is_exact) for n, run in self.runs.items()}

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
        return f"{words}. Losses: {problems.problem(self.problem).provenance}."

    def footnote(self) -> str:
        if problems.problem(self.problem).is_exact:
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
            f"final loss, {problems.problem(self.problem).provenance}": [
                *(run.loss for run in runs), *("not run yet" for _ in missing),
            ],
            f"over {RACERS[self.reference]}": [self.ratio(name) for name in names],
        }  # fmt: skip


def plotted(run: problems.Run, is_exact: bool) -> list[np.ndarray]:
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
    return problems.problem(name).lr_range[1] * heights_at(points, np.arange(steps) / steps)


@functools.lru_cache(maxsize=64)
def drawn_run(name: str, steps: int, points: Points) -> problems.Run:
    """The run along a drawn schedule; remembered."""
    return problems.follow(problems.problem(name), drawn_rates(name, steps, points))


def settings_of(racer: str, name: str, steps: int) -> Settings:
    """The search by which a racer finds its schedule, with the constants it comes with."""
    return Settings(name, steps, racer, SEARCHED[racer], 1000.0, "together")


@dataclasses.dataclass
class Race:
    """All racers of one problem and budget; it can be stopped and resumed anywhere."""

    problem: str  # a value of `PROBLEMS`
    steps: int
    runs: dict[str, problems.Run] = dataclasses.field(default_factory=dict)
    searches: dict[str, Search] = dataclasses.field(default_factory=dict)  # those under way

    def pieces(self, points: Points) -> Iterator[Progress]:
        """Run every racer that has not run: on the network each of 13 peaks of a tuned shape."""
        tries = problems.peaks(self.problem) if self.problem == "network" else []
        every = [
            (racer, at)
            for racer in racers(self.problem)
            if racer == "yours" or racer not in self.runs
            for at in [*(tries if racer in problems.SHAPES else []), None]
        ]
        for done, (racer, peak) in enumerate(every, 1):
            title = RACERS[racer]
            if peak is not None:
                # Tuning will find it done.
                problems.run_peak(self.problem, racer, self.steps, peak)
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
            elif racer in problems.SHAPES:
                self.runs[racer] = problems.tuned(self.problem, racer, self.steps)
            elif (best := problems.best_known(self.problem, self.steps)) is not None:
                self.runs[racer] = best
            yield done, len(every), title

    def view(self, points: Points) -> RaceView:
        """As far as it has been run; a run along another drawing is not shown."""
        rates = drawn_rates(self.problem, self.steps, points)
        runs = {racer: self.runs[racer] for racer in racers(self.problem) if racer in self.runs}
        if "yours" in runs and not np.array_equal(runs["yours"].rates, rates):
            del runs["yours"]
        return RaceView(self.problem, self.steps, rates, runs)


START = ((0.0, 0.5), (1.0, 0.0))
RACER_LOOKS = {
    "yours": Look(ACCENT, "-", "P", ""),
    "best": Look(INK, (0, (1, 1.2)), "*", ""),
    **dict(zip(("linear", "cosine", "wsd", "probe", "robust"), LOOKS.values(), strict=True)),
}


class RacePanel(Panel):
    """A learning-rate schedule drawn by hand, against others with the same budget.

    On the quadratics all racers run immediately. On the network a run takes longer: press Race, or
    call `race()`.

    Example:
        >>> panel = RacePanel(problem="quadratic 1d", budget=500)
        >>> panel.points = [(0, 1), (1, 0)]
        >>> panel.view.ratio("best")
        1.0
    """

    title = "Draw a schedule and race it"
    figure_size = (9.6, 5.2)
    extra_rows = 6  # the curve is as high as seven rows of controls
    has_palette = True
    button = "Race"

    problem = Choice("Problem", "quadratic 10", problems.PROBLEMS)
    budget = Choice(
        "Budget", 1000, {f"{steps:,}": steps for steps in problems.BUDGETS},
        explanation="Gradient evaluations that each racer may spend",
    )  # fmt: skip
    points = Curve("Your schedule: drag a point, or draw", START, "(part of the run, share)")

    def __init__(self, **values: Any) -> None:
        self._races: dict[tuple[str, int], Race] = {}
        super().__init__(**values)

    def race(self) -> None:
        """Run all racers that have not run, as the button does; results are kept."""
        self.finish()

    def compute(self, *, problem: str, budget: int, points: Points) -> RaceView:
        race = self._races.setdefault((problem, budget), Race(problem, budget))
        if problems.problem(problem).is_exact:  # quick enough to follow the hand
            for _ in race.pieces(points):
                pass
        return race.view(points)

    def plots(self, figure: Figure) -> list[Plot]:
        grid = figure.add_gridspec(
            2, 2, left=0.08, right=0.955, top=0.93, bottom=0.165, hspace=0.14, wspace=0.46,
            width_ratios=(1.5, 1), height_ratios=(1, 1.25),
        )  # fmt: skip
        rates = figure.add_subplot(grid[0, 0])
        losses = figure.add_subplot(grid[1, 0], sharex=rates)
        return [RatePlot(rates), LossPlot(losses), EndPlot(figure.add_subplot(grid[:, 1]))]

    def adjust(self, view: RaceView) -> None:
        curve: Any = self.page.controls["points"]
        curve.editor.top = problems.problem(view.problem).lr_range[1]

    def pieces(self) -> Iterator[Progress]:
        yield from self._races[self.problem, self.budget].pieces(self.points)


class RacerPlot(Plot):
    """A line for each racer, the hand's last, above all others; the base of three plots."""

    def __init__(self, axes: Axes, **settings: Any) -> None:
        super().__init__(axes, **settings)
        self.lines = {
            name: self.line(
                color=RACER_LOOKS[name].colour, linestyle=RACER_LOOKS[name].dashes,
                linewidth=2.8 if name == "yours" else 1.6,
            )
            for name in sorted(RACERS, key=lambda name: name == "yours")
        }  # fmt: skip

    def show_curves(self, view: RaceView, row: int) -> None:
        """Rates (row 1) or losses (row 2) over the evaluations."""
        for name, line in self.lines.items():
            curve = view.curves.get(name, [[], [], []])
            line.set_data(curve[0], curve[row])


class RatePlot(RacerPlot):
    """The learning rates."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Learning rate")
        axes.tick_params(axis="x", labelbottom=False)

    def show(self, view: RaceView) -> None:
        self.show_curves(view, 1)
        set_limits(
            self.axes,
            x=(0, view.steps),
            y=(0, 1.06 * problems.problem(view.problem).lr_range[1]),
        )


class LossPlot(RacerPlot):
    """The losses on the way."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, yscale="log", ylabel="loss")
        axes.set_xlabel("gradient evaluations, candidates included", labelpad=2)
        count_ticks(axes.xaxis, 6)
        middle = {"ha": "center", "va": "center", "transform": axes.transAxes}
        self.waiting = self.text(0.5, 0.5, color=FAINT, **middle)

    def show(self, view: RaceView) -> None:
        self.waiting.set_text("" if view.runs else "Nothing has run yet: press Race")
        self.show_curves(view, 2)
        # Limits follow the others, because the drawn schedule may diverge.
        others = [losses for name, (_, _, losses) in view.curves.items() if name != "yours"]
        finite = np.concatenate([[], *others])
        finite = finite[np.isfinite(finite)]
        low, high = (finite.min(), finite.max()) if len(finite) else (0.1, 1.0)
        if set_limits(self.axes, y=(low / 1.2, high * 1.2)):
            few_log_ticks(self.axes.yaxis, low, high)


class EndPlot(RacerPlot):
    """Final losses over that of the reference."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, xscale="log", ylim=(len(RACERS) - 0.4, -0.6))
        self.name_rows([*RACERS.values()])
        axes.spines["left"].set_visible(False)
        self._dots, self._words = {}, {}
        for row, name in enumerate(RACERS):
            seen = RACER_LOOKS[name]
            self._dots[name] = self.marks(seen.colour, seen.marker, markersize=9, clip_on=False)
            self._words[name] = self.text(1, row - 0.18, fontsize=9, va="bottom", ha="right")

    def show(self, view: RaceView) -> None:
        ratios = {name: view.ratio(name) for name in view.runs}
        # A run that diverged ends at the edge.
        ends = {n: np.nan_to_num(r, nan=np.inf) for n, r in ratios.items() if r is not None}
        others = [end for name, end in ends.items() if np.isfinite(end) and name != "yours"]
        low, high = 0.9 * min(others, default=1.0), max(1.25 * max(others, default=2.0), 1.5)
        if set_limits(self.axes, x=(low, high)):
            few_log_ticks(self.axes.xaxis, low, high)
        for row, (name, words) in enumerate(self._words.items()):
            end = [np.clip(ends[name], low, high)] if name in ends else []
            self.lines[name].set_data([low, *end], [row] * (1 + len(end)))
            self._dots[name].set_data(end, [row] * len(end))
            words.set(x=high, text=_end_in_words(view, name), color=INK if end else FAINT)
        title = f"Final loss over {RACERS[view.reference]}"
        if self.axes.get_title(loc="left") != title:
            self.axes.set_title(title)


def _end_in_words(view: RaceView, name: str) -> str:
    if name not in racers(view.problem):
        return "not known"
    if name not in view.runs:
        return "not run yet"
    loss, ratio = view.runs[name].loss, view.ratio(name)
    if not np.isfinite(loss):
        return "diverged"
    return f"{loss:.3g}" + ("" if ratio is None else f"   {ratio:.2f}×")
