"""Messages and time as data: what a player plays, and what a still picture shows.

scene = Scene(
    end=3.0, words="A message from 0 to 1.",
    nodes=(Node("0", 0, 0.5), Node("1", 1, 0.5)), edges=((0, 1),),
    messages=(Message(0, 1, start=1.0, end=2.0, label="chunk"),),
)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from toolkit.figures import ACCENT, FAINT, INK, new_figure, style

Steps = tuple[Sequence[float], Sequence[float]]
"""Times in their order, and the value from each of them on."""


class Node(NamedTuple):
    """A device, a switch, a stage.

    Attributes:
        name: short.
        x, y: where, from 0 to 1, y downwards.
    """

    name: str
    x: float
    y: float


class Message(NamedTuple):
    """Something that travels from a node to another.

    Attributes:
        source, target: numbers of nodes.
        start, end: when, in the scene's unit.
        label: short, such as the number of a chunk.
        kind: number of its kind.
    """

    source: int
    target: int
    start: float
    end: float
    label: str = ""
    kind: int = 0


class Bar(NamedTuple):
    """Something that a lane does for a while.

    Attributes:
        lane: number of the lane.
        start, end: when, in the scene's unit.
        label: short; where it does not fit its first word stands alone, and the whole on hovering.
        kind: number of its kind.
    """

    lane: int
    start: float
    end: float
    label: str = ""
    kind: int = 0


class Kind(NamedTuple):
    """A kind of bars and messages: its name in the legend, and its colour."""

    name: str
    colour: str

    @property
    def is_dark(self) -> bool:
        """Whether words on it are white."""
        return float(np.dot(to_rgb(self.colour), (0.3, 0.59, 0.11))) < 0.5


@dataclass(frozen=True)
class Scene:
    """Nodes between which messages travel, and lanes of bars, over one stretch of time.

    Either may be missing. With as many lanes as nodes, lane i is what node i does: the node shows
    its bar, and a message is also drawn from lane to lane.

    Attributes:
        end: time runs from 0 to it.
        words: what is shown, for readers who do not see it.
        unit: of time, in words.
        nodes, edges: the upper picture; an edge is a pair of nodes.
        tall: its height, over the width.
        messages: in any order.
        lanes: names of the lanes.
        bars: in any order; those of a lane do not overlap.
        kinds: what the numbers of kinds mean.
        levels: for each node how full it is, from 0 to 1, over time; empty: not shown.

    Example:
        >>> scene = Scene(end=2.0, words="One task.", lanes=("0",), bars=(Bar(0, 0, 2, "F0"),))
        >>> scene.as_json()["bars"]["label"]
        ['F0']
    """

    end: float
    words: str
    unit: str = ""
    nodes: tuple[Node, ...] = ()
    edges: tuple[tuple[int, int], ...] = ()
    tall: float = 0.14
    messages: tuple[Message, ...] = ()
    lanes: tuple[str, ...] = ()
    bars: tuple[Bar, ...] = ()
    kinds: tuple[Kind, ...] = (Kind("message", "#a8cfe8"),)
    levels: tuple[Steps, ...] = ()

    def __post_init__(self) -> None:
        if not self.end > 0:
            raise ValueError(f"end: got {self.end}, wanted a time above 0")
        for name, numbers, count in (
            ("messages", {n for m in self.messages for n in m[:2]}, len(self.nodes)),
            ("edges", {n for edge in self.edges for n in edge}, len(self.nodes)),
            ("bars", {bar.lane for bar in self.bars}, len(self.lanes)),
            ("kinds", {item.kind for item in (*self.bars, *self.messages)}, len(self.kinds)),
        ):
            if wrong := [number for number in numbers if not 0 <= number < count]:
                raise ValueError(f"{name}: got number {wrong[0]}, wanted 0 to {count - 1}")
        if self.levels and len(self.levels) != len(self.nodes):
            raise ValueError(f"levels: got {len(self.levels)} for {len(self.nodes)} nodes")

    def as_json(self) -> dict[str, Any]:
        """What the player takes: bars and messages column by column, messages by their start."""
        messages = sorted(self.messages, key=lambda message: message.start)
        return {
            **{name: getattr(self, name) for name in ("end", "words", "unit", "tall")},
            "nodes": [node._asdict() for node in self.nodes],
            "edges": [list(edge) for edge in self.edges],
            "messages": _columns(Message, messages),
            "lanes": list(self.lanes),
            "bars": _columns(Bar, self.bars),
            "kinds": [kind._asdict() | {"is_dark": kind.is_dark} for kind in self.kinds],
            "levels": [[list(times), list(values)] for times, values in self.levels],
        }


def _columns(kind: Any, rows: Sequence[Any]) -> dict[str, list[Any]]:
    columns = zip(*rows, strict=True) if rows else ((),) * len(kind._fields)
    return {name: list(column) for name, column in zip(kind._fields, columns, strict=True)}


def still(scene: Scene, time: float | None = None, width: float = 9.6) -> Figure:
    """The scene as a figure, for readers without a kernel: at `time`, or when something is on its
    way, near the middle."""
    middles = [scene.end / 2, *((item.start + item.end) / 2 for item in scene.messages)]
    near = min(middles[1:] or middles, key=lambda middle: abs(middle - middles[0]))
    at = near if time is None else time
    lane = min(max(3.6 / max(len(scene.lanes), 1), 0.05), 0.26)
    heights = (max(scene.tall * width, 1.0) if scene.nodes else 0, lane * len(scene.lanes))
    legend, axis = 0.3, 0.32 if scene.lanes else 0
    height = sum(heights) + legend + axis
    with style():
        figure = new_figure(width, height)
        if scene.nodes:
            box = (0.005, 1 - (legend + heights[0]) / height, 0.99, heights[0] / height)
            _draw_space(figure.add_axes(box), scene, at, heights[0])
        if scene.lanes:
            box = (0.09, axis / height, 0.895, heights[1] / height)
            _draw_lanes(figure.add_axes(box), scene, at, lane)
        handles = [Patch(facecolor=kind.colour, label=kind.name) for kind in scene.kinds]
        figure.legend(handles=handles, loc="upper left", ncols=len(handles), borderpad=0.1)
    return figure


def _draw_space(axes: Axes, scene: Scene, time: float, inches: float) -> None:
    margin = min(0.32 / inches, 0.45) / (1 - 2 * min(0.32 / inches, 0.45))
    axes.set(xlim=(-0.04, 1.04), ylim=(1 + margin, -margin), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.grid(False)
    places = np.array([node[1:] for node in scene.nodes], float)
    edges = [places[list(edge)] for edge in scene.edges]
    axes.add_collection(LineCollection(edges, colors=FAINT, linewidths=1.2))
    is_small = len(scene.nodes) > 24
    face = np.ones((len(places), 3))
    for bar in scene.bars if len(scene.lanes) == len(scene.nodes) else ():
        if bar.start <= time < bar.end:
            face[bar.lane] = to_rgb(scene.kinds[bar.kind].colour)
            if not is_small:
                ink = "white" if scene.kinds[bar.kind].is_dark else INK
                axes.annotate(
                    bar.label.split(" ")[0],
                    places[bar.lane],
                    ha="center",
                    va="center",
                    fontsize=8.5,
                    color=ink,
                )
    for number, (times, values) in enumerate(scene.levels):
        if not scene.lanes:  # a node that does nothing of its own is as blue as it is full
            part = ([0.0, *values])[int(np.searchsorted(times, time, "right"))]
            face[number] = 1 - part * (1 - np.array(to_rgb("#2f7fb8")))
    size = 60 if is_small else 420
    axes.scatter(*places.T, s=size, c=face, marker="s", edgecolors=INK, linewidths=1, zorder=2)
    for node, place in zip(scene.nodes, places, strict=True):
        if not is_small:
            # A node that does nothing of its own has room for its name.
            below = {"xytext": (0, -17 if scene.lanes else 0), "textcoords": "offset points"}
            axes.annotate(node.name, place, ha="center", va="center", fontsize=8.5, **below)
    for message in scene.messages:
        if message.start <= time < message.end:
            part = (time - message.start) / (message.end - message.start)
            place = places[message.source] * (1 - part) + places[message.target] * part
            colour = scene.kinds[message.kind].colour
            axes.plot(*place, "o", color=colour, markeredgecolor=ACCENT, markersize=7, zorder=3)
            if not is_small:
                above = {"xytext": (0, 9), "textcoords": "offset points", "fontsize": 8}
                axes.annotate(message.label, place, ha="center", va="center", **above)


def _draw_lanes(axes: Axes, scene: Scene, time: float, inches: float) -> None:
    axes.set(xlim=(0, scene.end), ylim=(len(scene.lanes) - 0.5, -0.5))
    every = max(1, round(0.13 / inches))
    axes.set_yticks(range(0, len(scene.lanes), every), scene.lanes[::every])
    axes.tick_params(axis="y", length=0)
    first = f" {scene.unit}".rstrip()  # the unit stands at zero
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,g}{'' if x else first}")
    axes.grid(False)
    axes.spines[:].set_visible(False)
    for number, kind in enumerate(scene.kinds):
        corners = [
            [(start, lane - 0.44), (end, lane - 0.44), (end, lane + 0.44), (start, lane + 0.44)]
            for lane, start, end, _, other in scene.bars
            if other == number
        ]
        edges = "white" if len(scene.bars) < 1500 else "none"
        axes.add_collection(
            PolyCollection(corners, facecolors=kind.colour, edgecolors=edges, linewidths=0.5)
        )
    for bar in scene.bars:
        wide = (bar.end - bar.start) / scene.end * 8.6  # inches
        fits = [
            item for item in (bar.label, bar.label.split(" ")[0]) if wide > 0.03 + 0.075 * len(item)
        ]
        if inches > 0.13 and fits:
            ink = "white" if scene.kinds[bar.kind].is_dark else INK
            axes.text(
                (bar.start + bar.end) / 2, bar.lane, fits[0], ha="center", va="center",
                fontsize=7.5, color=ink,
            )  # fmt: skip
    axes.axvline(time, color=ACCENT, linewidth=1.3)
