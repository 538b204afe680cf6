"""Lines of a panel's picture that can be clicked, or chosen by the keyboard.

class CablesPanel(PointedPanel):
    def spots(self, view): ...                 # names and lines, in pixels of the picture
    def pointed(self, spot, is_second): ...    # what a click does
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anywidget
import numpy as np
import traitlets
from matplotlib.axes import Axes

from toolkit.lab.kit.panel import Panel

STYLE = """
.panel-spots { z-index: 1; }
.picture-spots { position: absolute; top: 2px; left: 2px; width: calc(100% - 4px);
  pointer-events: none; }
.picture-spots path { fill: none; stroke: transparent; stroke-width: 22; cursor: pointer;
  pointer-events: stroke; stroke-linecap: round; }
.picture-spots path:hover { stroke: #b3245b33; }
.picture-spots path:focus { outline: none; }
.picture-spots path:focus-visible { stroke: #b3245b55; }
"""


class Spot(NamedTuple):
    """A line that can be clicked.

    Attributes:
        name: for the keyboard's reader.
        points: its parts, each a list of (x, y) in shares of the picture, y upwards.
    """

    name: str
    points: Sequence[Sequence[tuple[float, float]]]


class Spots(anywidget.AnyWidget):
    """The lines, over the picture that follows on the page.

    A click, Enter or Space on a line is its first action; Shift and a click, or Delete, the second.

    Attributes:
        spots: name and points of each, in pixels.
        chosen: number of the chosen one, or -1.
        size: of the picture, in pixels.
        words: what the lines are.
    """

    _esm = Path(__file__).with_name("spots.js")
    _css = STYLE
    spots = traitlets.List().tag(sync=True)
    chosen = traitlets.Int(-1).tag(sync=True)
    size = traitlets.List().tag(sync=True)
    words = traitlets.Unicode().tag(sync=True)


class PointedPanel(Panel):
    """A panel with lines in its picture that can be clicked."""

    def spots(self, view: Any) -> tuple[str, list[Spot], int]:
        """What the lines are, the lines, and the number of the chosen one, or -1."""
        raise NotImplementedError

    def pointed(self, spot: int, is_second: bool) -> None:
        """A line was clicked."""
        raise NotImplementedError

    def widgets_above(self) -> list[Spots]:
        spots = Spots(layout={"height": "0", "width": "100%", "overflow": "visible", "margin": "0"})
        spots.add_class("panel-spots")
        spots.on_msg(self._clicked)
        return [spots]

    def adjust(self, view: Any) -> None:
        words, found, chosen = self.spots(view)
        wide, high = self.pixels
        listed = [
            {
                "name": spot.name,
                "points": [[[round(wide * x, 1), round(high * (1 - y), 1)] for x, y in part]
                           for part in spot.points],
            }
            for spot in found
        ]  # fmt: skip
        shown = self.page.above[0]
        with shown.hold_sync():
            shown.size, shown.words = [wide, high], words
            shown.spots, shown.chosen = listed, chosen

    def _clicked(self, _: Any, content: Any, __: Any) -> None:
        if isinstance(content, dict) and {"spot", "second"} <= content.keys():
            self.attempt(self.pointed, spot=int(content["spot"]), is_second=bool(content["second"]))


def in_picture(axes: Axes, path: np.ndarray) -> list[list[tuple[float, float]]]:
    """A line of axes, parted where it has NaN, in shares of the picture."""
    parts = np.split(path, np.flatnonzero(np.isnan(path[:, 0])))
    to_figure = axes.transData + axes.figure.transFigure.inverted()
    kept = (part[~np.isnan(part[:, 0])] for part in parts)
    return [[(float(x), float(y)) for x, y in to_figure.transform(part)] for part in kept]
