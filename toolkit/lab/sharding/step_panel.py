"""The collectives of the compiled step and of the textbook, with their causes."""

from typing import Any

from matplotlib.figure import Figure

from toolkit.lab.kit.controls import Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.sharding.mesh_panel import MESH, SCHEME
from toolkit.lab.sharding.step_plots import MOST_COLLECTIVES, CausePlot, KindsPlot, LanesPlot
from toolkit.lab.sharding.step_view import StepView, step_of


class StepPanel(Panel):
    """The communication of one block's compiled step, with time and cause, and that of the
    textbook.

    Example:
        >>> panel = StepPanel(mesh="1x8", scheme="tensor")
        >>> panel.view.compiled_of("all-reduce") == panel.view.expected_of("all-reduce")
        True
    """

    title = "What does the compiled step send?"
    figure_size = (9.6, 5.0)

    mesh = MESH
    scheme = SCHEME
    collective = Number(
        "Collective", 1, low=1, high=MOST_COLLECTIVES, explanation="Told in words below the lanes",
        maximum=lambda view: max(len(view.collectives), 1),
    )  # fmt: skip

    def compute(self, **state: Any) -> StepView:
        return step_of(**state)

    def plots(self, figure: Figure) -> list[Plot]:
        return [
            KindsPlot(figure.add_axes((0.125, 0.62, 0.855, 0.29))),
            LanesPlot(figure.add_axes((0.125, 0.36, 0.855, 0.155))),
            CausePlot(figure.add_axes((0.02, 0.08, 0.96, 0.22))),
        ]
