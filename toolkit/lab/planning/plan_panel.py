"""Which strategy is fastest, why, and how far off the model was."""

from typing import Any

from matplotlib.figure import Figure

from toolkit.lab.kit.controls import Choice
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.planning.memory_panel import CHIP
from toolkit.lab.planning.plan_plots import GradePlot, TablePlot
from toolkit.lab.planning.plan_view import PlanView, planned
from toolkit.planning.models import DENSE


def _menu(label: str, default: int, *values: int) -> Choice:
    return Choice(label, default, {f"{one:,}": one for one in values})


class PlanPanel(Panel):
    """The planner's strategies with reasons, and its model against compiled programs.

    Menus only: a search takes about a second.

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

    def compute(self, **state: Any) -> PlanView:
        return planned(**state)

    def plots(self, figure: Figure) -> list[Plot]:
        return [
            TablePlot(figure.add_axes((0.02, 0.14, 0.66, 0.83))),
            GradePlot(figure.add_axes((0.76, 0.26, 0.225, 0.6))),
        ]
