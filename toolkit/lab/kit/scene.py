"""Messages, cells and time as data: what a player plays, and what a still picture shows.

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
from jaxtyping import Float
from matplotlib.colors import to_rgb

LANES_PIXELS, BELOW_NODES = 250, 104  # of all lanes together, where they are many
LATER = 999  # the number of what is still to come, in JSON
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


class Grid(NamedTuple):
    """Cells that change with time: a matrix, the tokens of a cache, the chunks of devices.

    Attributes:
        name: its heading.
        box: left, top, width and height in the upper picture, shares of it, names included.
        rows, columns: names of them; empty ones are not written.
        times: when the values change, in order.
        values: from -1 to 1, from each time on; NaN: what is gone; inf: what is still to come.
        labels: words of the cells, row by row; without any, a cell shows the size of its value.
    """

    name: str
    box: tuple[float, float, float, float]
    rows: Sequence[str]
    columns: Sequence[str]
    times: Sequence[float]
    values: Float[np.ndarray, "moments rows columns"]
    labels: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """Values in whole hundredths, which keeps pages small."""
        hundredths = np.minimum(np.round(100 * self.values), LATER).reshape(len(self.times), -1)
        values = [[None if np.isnan(x) else int(x) for x in row] for row in hundredths]
        place = dict(zip(("x", "y", "wide", "high"), self.box, strict=True))
        listed = {name: [*getattr(self, name)] for name in ("rows", "columns", "times", "labels")}
        return {"name": self.name, **place, **listed, "values": values}


@dataclass(frozen=True)
class Scene:
    """Nodes between which messages travel, cells, and lanes of bars, over one stretch of time.

    Any may be missing. With as many lanes as nodes, lane i is what node i does: the node shows
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
        grids: cells, in the upper picture.
        picks: for each bar what selecting it sets the panel's `bar_control` to; -1: nothing.
        notes: (time, what happens from then on), in order; read aloud as time is stepped.

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
    grids: tuple[Grid, ...] = ()
    picks: tuple[int, ...] = ()
    notes: tuple[tuple[float, str], ...] = ()

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
        for grid in self.grids:
            wanted = len(grid.times), len(grid.rows), len(grid.columns)
            if grid.values.shape != wanted:
                raise ValueError(f"grids: {grid.name!r} has {grid.values.shape}, wanted {wanted}")
            if np.nanmax(np.abs(grid.values[~np.isinf(grid.values)]), initial=0.0) > 1:
                raise ValueError(f"grids: {grid.name!r} has values above 1, wanted -1 to 1")

    @property
    def moment(self) -> float:
        """What a still shows, and a player without lanes before it is played: a message on its way
        near the middle, or the end if nothing is sent."""
        middles = [(item.start + item.end) / 2 for item in self.messages]
        return min(middles, key=lambda middle: abs(middle - self.end / 2), default=self.end)

    @property
    def lane_pixels(self) -> int:
        """The height of a lane."""
        every = BELOW_NODES if self.nodes else LANES_PIXELS
        return min(max(every // max(len(self.lanes), 1), 5), 26)

    def pixels(self, width: int) -> int:
        """The height in which the player draws it on a page this wide."""
        upper = min(max(self.tall * width, 86), 460) if self.nodes or self.grids else 20
        return round(upper) + (self.lane_pixels * len(self.lanes) + 22 if self.lanes else 0)

    def as_json(self) -> dict[str, Any]:
        """What the player takes: bars and messages column by column, messages by their start."""
        messages = sorted(self.messages, key=lambda message: message.start)
        return {
            **{name: getattr(self, name) for name in ("end", "words", "unit", "tall")},
            "moment": self.end if self.lanes else self.moment,
            "nodes": [node._asdict() for node in self.nodes],
            "edges": [list(edge) for edge in self.edges],
            "messages": _columns(Message, messages),
            "lanes": list(self.lanes),
            "lane_pixels": self.lane_pixels,
            "bars": _columns(Bar, self.bars),
            "kinds": [kind._asdict() | {"is_dark": kind.is_dark} for kind in self.kinds],
            "levels": [[list(times), list(values)] for times, values in self.levels],
            "grids": [grid.as_json() for grid in self.grids],
            "picks": list(self.picks),
            "notes": [list(note) for note in self.notes],
        }


def _columns(kind: Any, rows: Sequence[Any]) -> dict[str, list[Any]]:
    columns = zip(*rows, strict=True) if rows else ((),) * len(kind._fields)
    return {name: list(column) for name, column in zip(kind._fields, columns, strict=True)}
