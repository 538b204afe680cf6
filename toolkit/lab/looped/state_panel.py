"""What a looped model carries from loop to loop, and what a loop costs: six small plots."""

from typing import Any

from matplotlib.figure import Figure

from toolkit.lab.kit.controls import Number
from toolkit.lab.kit.panel import Plot
from toolkit.lab.looped.panel import TextPanel
from toolkit.lab.looped.state_plots import loop_plots
from toolkit.lab.looped.state_view import StateView, look_inside


class LoopStatePanel(TextPanel):
    """Hidden state, recurrent state, residual gate, attention sink and cost, loop by loop.

    Example:
        >>> panel = LoopStatePanel(pattern="gdn full", loops=3)
        >>> panel.context_length = 4096
        >>> [len(column) for column in panel.data().values()][:2]
        [3, 3]
    """

    title = "What a loop changes, carries and costs"
    figure_size = (9.6, 5.4)

    context_length = Number(
        "Context (tokens)", 16384, low=64, high=1 << 20, powers_of_two=True, is_continuous=False,
        explanation="Of the two plots of cost; the slider doubles, the box takes any number",
    )  # fmt: skip

    def compute(self, **state: Any) -> StateView:
        return look_inside(**state)

    def plots(self, figure: Figure) -> list[Plot]:
        figure.subplots_adjust(
            left=0.07, right=0.985, top=0.925, bottom=0.125, wspace=0.37, hspace=0.5
        )
        return [*loop_plots(figure.subplots(2, 3).flat)]
