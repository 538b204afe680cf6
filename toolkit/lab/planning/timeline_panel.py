"""One compiled step in time: compute and collectives in lanes, on slower links."""

from typing import Any

from matplotlib.figure import Figure

from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.planning.stored_timelines import STRATEGIES
from toolkit.lab.planning.timeline_plots import LanesPlot, SpeedsPlot
from toolkit.lab.planning.timeline_view import SPEEDS, TimelineView, speed_in_words, timeline_of


class TimelinePanel(Panel):
    """A step compiled for TPUs, laid out in time: what would slower links or a slow chip cost?

    Example:
        >>> panel = TimelinePanel(layout="FSDP 16", speed=0.5)
        >>> panel.view.now.step_seconds > panel.view.usual_seconds
        True
    """

    title = "What does the link cost?"
    figure_size = (9.6, 5.0)

    layout = Choice("Layout", "FSDP 16", {name: name for name in STRATEGIES})
    speed = Choice(
        "Links", 1.0, {speed_in_words(speed): speed for speed in SPEEDS},
        explanation="Speed of the links, as a share of the published one",
    )  # fmt: skip
    straggler = Number(
        "Straggler", 1.0, low=1.0, high=3.0, step=0.1, is_continuous=False,
        explanation="How many times as long one chip computes",
    )  # fmt: skip
    part = Number(
        "Close view", 20.0, low=0.0, high=100.0, step=1.0,
        explanation="Where it begins, in percent of the step",
    )  # fmt: skip

    def compute(self, **state: Any) -> TimelineView:
        return timeline_of(**state)

    def plots(self, figure: Figure) -> list[Plot]:
        return [
            LanesPlot(figure.add_axes((0.085, 0.66, 0.9, 0.24)), is_close=False),
            LanesPlot(figure.add_axes((0.085, 0.33, 0.9, 0.24)), is_close=True),
            SpeedsPlot(figure.add_axes((0.115, 0.065, 0.87, 0.175))),
        ]
