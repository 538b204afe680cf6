"""A network with its loads, the cut that limits it, and a cable that is slowed or cut."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.text import Text

from toolkit.figures import ACCENT, FAINT, INK, look
from toolkit.lab.collectives import networks
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.spots import PointedPanel, Spot, in_picture
from toolkit.lab.kit.view import Data, View
from toolkit.schedules.collectives import Optimum

SPEEDS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
SCHEDULES = {"trees": "the best trees", "rings": "rings"}


@dataclass(frozen=True)
class CutView(View):
    """What the links carry, and which of them limit it."""

    name: str  # of the network
    collective: str  # which one
    schedule: str  # "trees" or "rings"
    cable: int  # counted from 1; 0 for none
    speed: float  # of that cable, times its rate
    drawing: networks.Drawing  # places and cables of the network
    best: Optimum  # the optimum with its cut
    rates: dict[str, Fraction]  # GB/s of "trees" and "rings"
    busy: dict[tuple[int, int], float]  # link -> share of the time in which it is busy
    moved: dict[tuple[int, int], float]  # link -> GB/s that it carries
    curve: tuple[tuple[float, float], ...]  # for each of `SPEEDS` GB/s of trees and of rings

    @property
    def crossing(self) -> set[tuple[int, int]]:
        """The links that leave the cut."""
        inside = set(self.best.cut)
        return {(a, b) for a, b in self.busy if a in inside and b not in inside}

    def cable_in_words(self, cable: int) -> str:
        """Its two ends."""
        labels = self.drawing.topology.labels
        return " – ".join(labels[node] for node in self.drawing.cables[cable - 1])

    def data(self) -> Data:
        cables = self.drawing.cables
        whole = self.drawing.topology.links
        times = [self.speed if at == self.cable else 1.0 for at in range(1, len(cables) + 1)]
        return {
            "cable": [str(at) for at in range(1, len(cables) + 1)],
            "between": [self.cable_in_words(at) for at in range(1, len(cables) + 1)],
            "GB/s each way": [
                float(whole[ends]) * part for ends, part in zip(cables, times, strict=True)
            ],
            "busy there (share)": [self.busy.get((a, b), 0.0) for a, b in cables],
            "busy back (share)": [self.busy.get((b, a), 0.0) for a, b in cables],
            "leaves the cut": [
                "yes" if {(a, b), (b, a)} & self.crossing else "" for a, b in cables
            ],
        }

    def sentence(self) -> str:
        compute = self.drawing.topology.compute
        inside = sum(node < compute for node in self.best.cut)
        how = "with all cables as built"
        if self.cable and self.speed != 1:
            way = "cut" if not self.speed else f"at {self.speed:g} times its rate"
            how = f"with cable {self.cable} ({self.cable_in_words(self.cable)}) {way}"
        rate, rings = (float(self.rates[name]) for name in SCHEDULES)
        shown = "Its trees are shown." if self.schedule == "trees" else "The rings are shown."
        return (
            f"{networks.NETWORKS[self.name]}, {how}: at best an {self.collective} moves {rate:.4g} "
            f"GB/s = {self.rates['trees']}, because the data of {inside} of {compute} ranks must "
            f"leave them over links of {float(self.best.cut_rate):.4g} GB/s together (the red "
            f"links). Rings reach {rings:.4g} GB/s, {rings / rate:.0%} of it. {shown}"
        )

    def footnote(self) -> str:
        return (
            "Modelled, without delays. Width: GB/s on a link, on its right-hand side. Filled: "
            "inside the cut. Rings go around a cut cable, but not around a slow one."
        )


def cut_view(*, network: str, collective: str, schedule: str, cable: int, speed: float) -> CutView:
    """The view; a cable beyond the last is the last, and a cut that parts the ranks raises."""
    drawing = networks.drawing_of(network)
    cable = min(cable, len(drawing.cables))
    forests = {
        name: networks.trees_of(network, collective, name, cable, speed if cable else 1.0)
        for name in SCHEDULES
    }
    shown = forests[schedule]
    links = networks.changed(network, cable, speed if cable else 1.0).links
    moved = {link: float(shown.loads.get(link, 0) * shown.rate) for link in links}
    curve = tuple(_rates(network, collective, cable, each) for each in SPEEDS)
    return CutView(
        network, collective, schedule, cable, speed, drawing,
        networks.best_of(network, collective, cable, speed if cable else 1.0),
        {name: forest.rate for name, forest in forests.items()},
        {link: moved[link] / float(links[link]) for link in links}, moved, curve,
    )  # fmt: skip


def _rates(network: str, collective: str, cable: int, speed: float) -> tuple[float, float]:
    """GB/s at best and of rings; 0 where the cut parts the ranks."""
    try:
        best = networks.best_of(network, collective, cable, speed if cable else 1.0)
    except ValueError:
        return 0.0, 0.0
    rings = networks.trees_of(network, collective, "rings", cable, speed if cable else 1.0)
    return float(best.rate), float(rings.rate)


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

    def show_nodes(self, drawing: networks.Drawing, inside: set[int]) -> None:
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

    def line_of(self, drawing: networks.Drawing, link: tuple[int, int]) -> np.ndarray:
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

    network = Choice(
        "Network", "mesh:3x3", {words: name for name, words in networks.NETWORKS.items()}
    )
    collective = Choice(
        "Collective", "all-gather",
        {name: name for name in ("all-gather", "all-reduce")},
        explanation="An all-reduce is a reduce-scatter, then an all-gather, whose cut is shown",
    )  # fmt: skip
    schedule = Choice("Shown", "trees", {words: name for name, words in SCHEDULES.items()})
    cable = Number(
        "Cable", 3, low=0, high=networks.MOST_CABLES, is_continuous=False,
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

    compute = staticmethod(cut_view)
    places = (
        (CutPlot, (0.01, 0.1, 0.56, 0.82), "The network"),
        (SpeedPlot, (0.66, 0.24, 0.33, 0.68)),
    )
