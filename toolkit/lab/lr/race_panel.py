"""Draw a schedule by hand and race it against the tuned, the searched and the best."""

from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure

from toolkit.lab.kit.controls import Choice
from toolkit.lab.kit.curve import Points
from toolkit.lab.kit.curve_control import Curve, CurveWidgets
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Progress
from toolkit.lab.lr.race_plots import EndPlot, LossPlot, RatePlot
from toolkit.lab.lr.race_view import Race, RaceView
from toolkit.lab.lr.search_problems import BUDGETS, PROBLEMS
from toolkit.lab.lr.search_problems import problem as task

START = ((0.0, 0.5), (1.0, 0.0))


class RacePanel(Panel):
    """A learning-rate schedule drawn by hand, against others with the same budget.

    On the quadratics every racer runs at once, and yours follows the hand. On the network a run
    takes its time: press Race, or call `race()`.

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
        """Run all that have not run, what the button does; results are kept."""
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
        return [
            RatePlot(rates),
            LossPlot(figure.add_subplot(grid[1, 0], sharex=rates)),
            EndPlot(figure.add_subplot(grid[:, 1])),
        ]

    def adjust(self, view: RaceView) -> None:
        curve = self._control_widgets["points"]
        assert isinstance(curve, CurveWidgets)
        curve.editor.top = task(view.problem).lr_range[1]

    def pieces(self) -> Iterator[Progress]:
        yield from self._races[self.problem, self.budget].pieces(self.points)
