"""The fastest strategy, the reason, and the errors of the model."""

from typing import Any

import ipywidgets as widgets
from matplotlib.figure import Figure

from toolkit._compat import tooltip
from toolkit.lab.kit.controls import Choice
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.planning.memory_panel import CHIP
from toolkit.lab.planning.plan_plots import GradePlot, TablePlot
from toolkit.lab.planning.plan_view import PlanView, planned
from toolkit.planning.models import DENSE


def _menu(label: str, default: int, *values: int) -> Choice:
    return Choice(label, default, {f"{number:,}": number for number in values})


class PlanPanel(Panel):
    """The planner's strategies with reasons, and its model against compiled programs.

    Menus only: a new setting is searched for half a second, which a bar shows.

    Example:
        >>> panel = PlanPanel(model="llama-3.2-1b", chips=8)
        >>> panel.view.plan.best.fits
        True
    """

    title = "Which strategy, and why?"
    figure_size = (9.6, 4.8)

    model = Choice("Model", "llama-3-8b", {name: name for name in DENSE})
    chip = CHIP
    chips = _menu("Chips", 64, 8, 16, 32, 64, 128)
    sequences = _menu("Sequences per chip", 2, 1, 2, 4, 8)
    context = _menu("Context length", 4096, 2048, 4096, 8192)

    def __init__(self, **values: Any) -> None:
        # Hidden between searches, yet as high, so that the page does not move.
        self._bar = widgets.IntProgress(
            description="Search", layout={"visibility": "hidden"}, **tooltip("Cuts weighed")
        )
        super().__init__(**values)

    def compute(self, **state: Any) -> PlanView:
        try:
            return planned(**state, tell=self._tell)
        finally:
            self._bar.layout.visibility = "hidden"

    def extra_widgets(self) -> list[Any]:
        return [self._bar]

    def _tell(self, done: int, total: int) -> None:
        if done == 1:
            self._bar.value, self._bar.max = 0, total
        if done in (1, total) or done % 16 == 0:  # a message to the page each
            self._bar.value = done
            self._bar.layout.visibility = "visible"

    def plots(self, figure: Figure) -> list[Plot]:
        return [
            TablePlot(figure.add_axes((0.02, 0.14, 0.66, 0.83))),
            GradePlot(figure.add_axes((0.76, 0.26, 0.225, 0.6))),
        ]
