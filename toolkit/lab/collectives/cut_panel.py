"""A network with its loads, the cut that limits it, and a cable that is slowed or cut."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.text import Text

from toolkit.figures import ACCENT, FAINT, INK, look
from toolkit.lab.collectives.cut_view import SCHEDULES, SPEEDS, CutView, cut_view
from toolkit.lab.collectives.networks import MOST_CABLES, NETWORKS, Drawing
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.spots import PointedPanel, Spot, in_picture

BLUE = look("full").colour
_APART = 0.012  # of the two ways of a cable


class NodesPlot(Plot):
    """Nodes of a network at their places: ranks with their numbers, and switches.

    They belong to the background, which is drawn anew when they change.
    """

    def __init__(self, axes: Axes, title: str) -> None:
        super().__init__(axes, title=title, grid="")
        axes.set(xlim=(-0.17, 1.17), ylim=(-0.17, 1.17), xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        self.links = LineCollection([], colors=FAINT, linewidths=1, zorder=1)
        axes.add_collection(self.links)
        dots: dict[str, Any] = {"markersize": 15, "markeredgewidth": 1.3, "markeredgecolor": INK}
        dots |= {"linestyle": "none", "zorder": 3}
        self.outside, self.inside, self.switches = (
            axes.plot([], [], marker, color=colour, **dots)[0]
            for colour, marker in (("white", "o"), ("#f0b8c8", "o"), ("#d9d4cb", "s"))
        )
        self.numbers: list[Text] = []
        self._shown: Any = None

    def show_nodes(self, drawing: Drawing, inside: set[int]) -> None:
        """Move nodes and numbers, if they changed."""
        if (drawing, inside) == self._shown:
            return
        self._shown = drawing, inside
        compute, places = drawing.topology.compute, drawing.places
        nodes = np.arange(len(places))
        is_in = np.isin(nodes, list(inside))
        for dots, chosen in (
            (self.outside, (nodes < compute) & ~is_in),
            (self.inside, (nodes < compute) & is_in),
            (self.switches, nodes >= compute),
        ):
            dots.set_data(*places[chosen].T)
        for number in self.numbers:
            number.remove()
        look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8.5, "zorder": 4}
        self.numbers = [
            self.axes.text(x, y - 0.004, str(rank), **look)
            for rank, (x, y) in enumerate(places[:compute])
        ]

    def line_of(self, drawing: Drawing, link: tuple[int, int]) -> np.ndarray:
        """The points of one way of a cable, a little to the right of it."""
        path = drawing.path(*link)
        along = path[1] - path[0]
        return path + _APART * np.array([along[1], -along[0]]) / np.hypot(*along)


class CutPlot(NodesPlot):
    """Links as wide as what they carry; those that leave the cut in red."""

    def __init__(self, axes: Axes, title: str) -> None:
        super().__init__(axes, title)
        self.chosen = axes.plot([], color=INK, linestyle=":", linewidth=11, alpha=0.35, zorder=2)[0]

    def show(self, view: CutView) -> None:
        most = max(view.moved.values())
        self.links.set_segments([self.line_of(view.drawing, link) for link in view.moved])
        self.links.set(linewidths=[0.5 + 5 * moved / most for moved in view.moved.values()])
        self.links.set_color([ACCENT if link in view.crossing else BLUE for link in view.moved])
        cable = view.drawing.cables[view.cable - 1] if view.cable else None
        self.chosen.set_data(*(view.drawing.path(*cable).T if cable else ([], [])))
        self.show_nodes(view.drawing, set(view.best.cut))


class SpeedPlot(Plot):
    """GB/s at best and of rings, by the speed of the cable."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="If the cable were slower or faster", xlabel="times its rate")
        axes.set(xlim=(-0.05, 2.05), xticks=(0, 0.5, 1, 1.5, 2), ylabel="GB/s")
        self.lines = {
            name: self.line(label=words, marker=look.marker, markersize=5, **look.line)
            for (name, words), look in zip(
                SCHEDULES.items(), map(look, ("full", "window")), strict=True
            )
        }
        self.now = self.marks(ACCENT, "o", markersize=11, markerfacecolor="none", markeredgewidth=2)
        axes.legend(loc="lower right", fontsize=9)

    def show(self, view: CutView) -> None:
        for line, rates in zip(self.lines.values(), zip(*view.curve, strict=True), strict=True):
            line.set_data(SPEEDS, rates)
        top = 1.1 * max(map(max, view.curve))
        if self.axes.get_ylim() != (0, top):  # new limits draw the figure anew
            self.axes.set_ylim(0, top)
        rates = [float(rate) for rate in view.rates.values()]
        self.now.set_data([view.speed if view.cable else 1.0] * 2, rates)


class CutPanel(PointedPanel):
    """A network, the load of every link, and the cut that allows no more.

    A click on a cable slows it to half its rate, Shift and a click cuts it, and the same again
    restores it.

    Example:
        >>> panel = CutPanel(network="ring:8", cable=1, speed=0.5)
        >>> panel.view.best.rate
        Fraction(12, 7)
    """

    title = "Collectives: which links hold all others up?"
    figure_size = (9.6, 5.0)
    has_palette = True

    network = Choice("Network", "mesh:3x3", {words: name for name, words in NETWORKS.items()})
    collective = Choice(
        "Collective", "all-gather",
        {name: name for name in ("all-gather", "all-reduce")},
        explanation="An all-reduce is a reduce-scatter, then an all-gather, whose cut is shown",
    )  # fmt: skip
    schedule = Choice("Shown", "trees", {words: name for name, words in SCHEDULES.items()})
    cable = Number(
        "Cable", 3, low=0, high=MOST_CABLES, is_continuous=False,
        explanation="The dotted one; 0 is none",
        maximum=lambda view: len(view.drawing.cables),
    )  # fmt: skip
    speed = Number(
        "Its speed", 0.5, low=0, high=2, step=0.25, is_continuous=False,
        explanation="Times its rate as built; 0 cuts the cable",
    )  # fmt: skip

    def spots(self, view: CutView) -> tuple[str, list[Spot], int]:
        axes, drawing = self._plots[0].axes, view.drawing
        found = [
            Spot(
                f"cable {at}: {view.cable_in_words(at)}",
                in_picture(axes, drawing.path(*drawing.cables[at - 1])),
            )
            for at in range(1, len(drawing.cables) + 1)
        ]
        return "Cables: a click slows one, Shift and a click cuts it", found, view.cable - 1

    def pointed(self, spot: int, is_second: bool) -> None:
        speed = 0.0 if is_second else 0.5
        is_again = self.state["cable"] == spot + 1 and self.state["speed"] == speed
        self.change(cable=spot + 1, speed=1.0 if is_again else speed)

    def compute(self, **state: Any) -> CutView:
        return cut_view(**state)

    def plots(self, figure: Figure) -> list[Plot]:
        return [
            CutPlot(figure.add_axes((0.01, 0.1, 0.56, 0.82)), "The network"),
            SpeedPlot(figure.add_axes((0.66, 0.24, 0.33, 0.68))),
        ]
