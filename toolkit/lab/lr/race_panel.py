"""Draw a schedule by hand and race it against the tuned, the searched and the best."""

from collections.abc import Iterator
from typing import Any

import ipywidgets as widgets
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from toolkit.figures import ACCENT, FAINT, INK, LOOKS, Look
from toolkit.lab.kit.controls import Choice
from toolkit.lab.kit.curve import Points
from toolkit.lab.kit.curve_control import Curve, CurveWidgets
from toolkit.lab.kit.job import Job
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.view import Progress
from toolkit.lab.lr.race_view import (
    RACERS,
    Lane,
    RaceView,
    drawn_lane,
    plotted,
    race_pieces,
    race_view,
    racers,
)
from toolkit.lab.lr.search_problems import BUDGETS, PROBLEMS, problem
from toolkit.lab.lr.search_rounds import Search

START = ((0.0, 0.5), (1.0, 0.0))
RACER_LOOKS = {
    "yours": Look(ACCENT, "-", "P", ""),
    "best": Look(INK, (0, (1, 1.2)), "*", ""),
    **dict(zip(("linear", "cosine", "wsd", "probe", "robust"), LOOKS.values(), strict=True)),
}


class RacePanel(Panel):
    """A learning-rate schedule drawn by hand, against others with the same budget.

    On the quadratics every racer runs at once, and yours follows the hand. On the network a run
    takes its time: press Race, or call `race()`.

    Attributes:
        problem: what is trained, a value of `PROBLEMS`.
        budget: gradient evaluations that each may spend.
        points: of the schedule, (part of the run, share of the problem's largest rate).
    """

    title = "Draw a schedule and race it"
    figure_size = (9.6, 5.2)
    has_palette = True

    problem = Choice("Problem", "quadratic 10", PROBLEMS)
    budget = Choice(
        "Budget", 1000, {f"{steps:,}": steps for steps in BUDGETS},
        explanation="Gradient evaluations that each racer may spend",
    )  # fmt: skip
    points = Curve("Your schedule: drag a point, or draw", START)

    def __init__(self, **values: Any) -> None:
        self._finished: dict[tuple[str, int], dict[str, Lane]] = {}
        self._searches: dict[tuple[str, int], dict[str, Search]] = {}
        self._job = Job("Race", self._pieces, after_piece=self.refresh, on_error=self.show_error)
        super().__init__(**values)

    def race(self) -> None:
        """Run all that have not run, what the button does; results are kept."""
        for _ in self._pieces():
            pass
        self.refresh()

    def data(self) -> dict[str, Any]:
        """Racer -> {"rates", "losses", "loss", "ratio"} of those that have run."""
        return {
            lane.name: {
                "rates": lane.rates,
                "losses": lane.losses,
                "loss": lane.loss,
                "ratio": self.view.ratio(lane),
            }
            for lane in self.view.lanes
        }

    def compute(self, *, problem: str, budget: int, points: Points) -> RaceView:
        finished = self._of(self._finished, problem, budget)
        if _is_quick(problem):
            if len(finished) < len(racers(problem)):
                searches = self._of(self._searches, problem, budget)
                for _ in race_pieces(problem, budget, points, finished, searches):
                    pass
            finished["yours"] = drawn_lane(problem, budget, points)
        return race_view(problem, budget, points, finished)

    def build(self, figure: Figure) -> list[Artist]:
        grid = figure.add_gridspec(
            2, 2, left=0.08, right=0.955, top=0.93, bottom=0.165, hspace=0.14, wspace=0.46,
            width_ratios=(1.5, 1), height_ratios=(1, 1.25),
        )  # fmt: skip
        self._rates = figure.add_subplot(grid[0, 0])
        self._losses = figure.add_subplot(grid[1, 0], sharex=self._rates)
        self._ends = figure.add_subplot(grid[:, 1])
        self._rates.set_title("Learning rate")
        self._rates.tick_params(axis="x", labelbottom=False)
        self._losses.set(yscale="log")
        self._losses.set_xlabel("gradient evaluations, candidates included", labelpad=2)
        self._losses.set_ylabel("loss")
        self._losses.xaxis.set_major_locator(MaxNLocator(6))
        self._losses.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        self._plain_log(self._losses, "y", (1, 2, 5))
        self._build_ends()
        self._note = figure.text(0.08, 0.02, "", fontsize=9)
        self._waiting = self._losses.text(
            0.5, 0.5, "", ha="center", va="center", color=FAINT, transform=self._losses.transAxes
        )
        self._race: Any = None
        # The hand's line last, above all others.
        order = [*(name for name in RACERS if name != "yours"), "yours"]
        self._lines = {name: self._line(self._rates, name) for name in order}
        self._curves = {name: self._line(self._losses, name) for name in order}
        return [
            *self._lines.values(), *self._curves.values(), *self._stems.values(),
            *self._dots.values(), *self._words.values(), self._waiting, self._note,
        ]  # fmt: skip

    def _build_ends(self) -> None:
        axes = self._ends
        axes.set(xscale="log", ylim=(len(RACERS) - 0.4, -0.6))
        axes.set_yticks(range(len(RACERS)), list(RACERS.values()))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        self._plain_log(axes, "x", (1, 2, 5))
        self._stems, self._dots = {}, {}
        self._words: dict[str, Text] = {}
        for row, name in enumerate(RACERS):
            self._stems[name] = self._line(axes, name)
            self._dots[name] = axes.plot(
                [], [], color=RACER_LOOKS[name].colour, marker=RACER_LOOKS[name].marker,
                markersize=9, linestyle="none",
            )[0]  # fmt: skip
            self._words[name] = axes.text(1, row - 0.18, "", fontsize=9, va="bottom", ha="right")

    @staticmethod
    def _plain_log(axes: Axes, which: str, parts: tuple[int, ...]) -> None:
        axis = axes.xaxis if which == "x" else axes.yaxis
        axis.set_major_locator(LogLocator(subs=parts, numticks=5))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(lambda value, _: f"{value:g}")

    @staticmethod
    def _line(axes: Axes, name: str) -> Line2D:
        look = RACER_LOOKS[name]
        width = 2.8 if name == "yours" else 1.6
        return axes.plot([], [], color=look.colour, linestyle=look.dashes, linewidth=width)[0]

    def draw(self, view: RaceView) -> None:
        self._show_lanes(view)
        self._show_ends(view)
        now = (view.problem, view.steps, self._losses.get_ylim(), self._ends.get_xlim())
        if now != self._race:
            self._race = now
            self.picture.forget_background()

    def _show_lanes(self, view: RaceView) -> None:
        top = problem(view.problem).lr_range[1]
        self._rates.set(xlim=(0, view.steps), ylim=(0, 1.06 * top))
        for name in RACERS:
            lane = view.lane(name)
            spent, rates, losses = (
                (np.zeros(0),) * 3 if lane is None else plotted(lane, view.is_exact)
            )
            if name == "yours" and lane is None:  # drawn, not run
                spent, rates, losses = (
                    np.arange(view.steps),
                    view.rates,
                    np.full(view.steps, np.nan),
                )
            self._lines[name].set_data(spent, rates)
            self._curves[name].set_data(spent, losses)
        self._waiting.set_text("" if view.lanes else "Nothing has run yet: press Race")
        known = [lane for lane in view.lanes if lane.name != "yours"]
        drawn = [plotted(lane, view.is_exact)[2] for lane in known]
        drawn = [losses[np.isfinite(losses)] for losses in drawn]
        # Limits by the others: yours may diverge, and moves all the time.
        low = min([*(losses.min() for losses in drawn if len(losses))], default=0.1)
        high = max([*(losses.max() for losses in drawn if len(losses))], default=1.0)
        self._losses.set_ylim(low / 1.2, high * 1.2)

    def _show_ends(self, view: RaceView) -> None:
        ratios = {lane.name: view.ratio(lane) for lane in view.lanes}
        others = [r for name, r in ratios.items() if r is not None and name != "yours"]
        worst = max((r for r in others if np.isfinite(r)), default=2.0)
        least = min(others, default=1.0)
        limits = 0.9 * min(least, 1.0), max(1.25 * worst, 1.5)
        self._ends.set_xlim(limits)
        for row, name in enumerate(RACERS):
            ratio = ratios.get(name)
            value = None if ratio is None else float(np.clip(ratio, *limits))
            inside = value if value is not None and np.isfinite(value) else limits[1]
            shown = value is not None
            self._stems[name].set_data(*([limits[0], inside], [row, row]) if shown else ([], []))
            self._dots[name].set_data(*([inside], [row]) if shown else ([], []))
            self._words[name].set_position((limits[1], row - 0.18))
            self._words[name].set_text(self._end_in_words(view, name, ratio))
            self._words[name].set_color(INK if ratio is not None else FAINT)
        reference = RACERS[view.reference]
        self._ends.set_title(f"Final loss over {reference}")
        self._note.set_text(
            "Losses: closed form. The rates of the best were found beforehand. Tuning is not "
            "charged, searching is."
            if view.is_exact
            else "Measured here, one seed. Curves: training, averaged over 2 % of the run. Final "
            "losses: on rows never trained on.\nTuning is not charged, searching is."
        )

    @staticmethod
    def _end_in_words(view: RaceView, name: str, ratio: float | None) -> str:
        if name not in racers(view.problem):
            return "not known"
        lane = view.lane(name)
        if lane is None:
            return "not run yet"
        if not np.isfinite(lane.loss):
            return "diverged"
        return f"{lane.loss:.3g}" + ("" if ratio is None else f"   {ratio:.2f}×")

    def adjust(self, view: RaceView) -> None:
        curve = self._control_widgets["points"]
        assert isinstance(curve, CurveWidgets)
        curve.editor.top = problem(view.problem).lr_range[1]

    def extra_widgets(self) -> list[widgets.Widget]:
        return [self._job]

    def _pieces(self) -> Iterator[Progress]:
        name, budget, points = (self.state[part] for part in ("problem", "budget", "points"))
        finished = self._of(self._finished, name, budget)
        searches = self._of(self._searches, name, budget)
        yield from race_pieces(name, budget, points, finished, searches)

    @staticmethod
    def _of(kept: dict, name: str, budget: int) -> dict:
        return kept.setdefault((name, budget), {})


def _is_quick(name: str) -> bool:
    """Whether a run is short enough to follow the hand."""
    return problem(name).is_exact
