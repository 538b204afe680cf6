"""Draw a schedule by hand and compare it with tuned, searched and best ones."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit.figures import ACCENT, FAINT, INK, LOOKS, Look
from toolkit.figures.axes import count_ticks, few_log_ticks, set_limits
from toolkit.lab.kit.controls import Choice
from toolkit.lab.kit.curve_control import Curve, CurveWidgets
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Points, Progress
from toolkit.lab.lr.race_view import RACERS, Race, RaceView, racers
from toolkit.lab.lr.search_problems import BUDGETS, PROBLEMS
from toolkit.lab.lr.search_problems import problem as task

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
    has_palette = True
    button = "Race"

    problem = Choice("Problem", "quadratic 10", PROBLEMS)
    budget = Choice(
        "Budget", 1000, {f"{steps:,}": steps for steps in BUDGETS},
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
        if task(problem).is_exact:  # quick enough to follow the hand
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
        curve = self.page.controls["points"]
        assert isinstance(curve, CurveWidgets)
        curve.editor.top = task(view.problem).lr_range[1]

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
        set_limits(self.axes, x=(0, view.steps), y=(0, 1.06 * task(view.problem).lr_range[1]))


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
