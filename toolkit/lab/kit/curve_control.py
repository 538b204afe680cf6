"""A curve as a control: drawn by hand, moved by sliders, or set as a list of points.

class MyPanel(Panel):
    points = Curve("Rate", ((0, 1), (1, 0)))

panel.points = [(0, 0.5), (1, 0)]        # what the hand would draw
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets as widgets
import numpy as np
import traitlets

from toolkit.lab.kit.controls import Control, ControlWidgets, Number
from toolkit.lab.kit.view import Points, heights_at

KNOTS = 8
"""Sliders of a curve, evenly spaced from its start to its end."""

MOST_POINTS = 64
STYLE = """
.curve-editor { width: 100%; max-width: 860px; touch-action: none; cursor: crosshair; }
.curve-editor text { font-size: 12px; fill: var(--jp-ui-font-color1, #1f2933); }
.curve-editor .grid { stroke: var(--jp-border-color2, #d3d9de); stroke-width: 1; }
.curve-editor .curve { fill: none; stroke: #b3245b; stroke-width: 2.5; }
.curve-editor circle { fill: var(--jp-layout-color0, white); stroke: #b3245b; stroke-width: 2.5;
  cursor: grab; }
.curve-editor circle:focus { outline: none; fill: #b3245b; stroke-width: 4; }
"""


class CurveEditor(anywidget.AnyWidget):
    """The curve as a drawing: drag a point, or draw where there is none.

    Keys on a point: arrows move it, Enter adds one after it, Delete removes it.

    Attributes:
        points: [x, y] pairs in [0, 1], the first at x = 0 and the last at x = 1.
        top: the value of y = 1.
    """

    _esm = Path(__file__).with_name("curve_editor.js")
    _css = STYLE
    points = traitlets.List().tag(sync=True)
    top = traitlets.Float(1.0).tag(sync=True)


class Curve(Control):
    """A curve from (0, y) to (1, y) through points, straight between them."""

    def check(self, value: Any) -> Points:
        try:
            points = np.asarray(value, np.float64)
        except (TypeError, ValueError):
            points = np.zeros(0)
        # An empty list fails here as well: it is one-dimensional.
        if points.ndim != 2 or points.size != 2 * len(points) or len(points) > MOST_POINTS:
            raise self.refuse(value, f"up to {MOST_POINTS} pairs (x, y)")
        if not ((points >= 0) & (points <= 1)).all():
            raise self.refuse(value, "x and y from 0 to 1")
        points = points[np.argsort(points[:, 0], kind="stable")]
        if (np.diff(points[:, 0]) <= 0).any():
            raise self.refuse(value, "no x twice")
        # Before the first and after the last point the curve is level.
        (first, start), (last, end) = points[0], points[-1]
        before = [[0.0, start]] if first > 0 else np.zeros((0, 2))
        after = [[1.0, end]] if last < 1 else np.zeros((0, 2))
        whole = np.concatenate([before, points, after])
        return tuple((float(x), float(y)) for x, y in whole)

    def widgets(self, on_change: Callable[[Any], None]) -> "CurveWidgets":
        return CurveWidgets(self, on_change)


class CurveWidgets(ControlWidgets):
    """An editor and, below it, the same curve as sliders with boxes."""

    def __init__(self, control: Curve, on_change: Callable[[Any], None]) -> None:
        self._points: Points = control.check(control.default)
        self.editor = CurveEditor(points=_as_lists(self._points))
        self.editor.add_class(f"curve-{control.name}")
        self._knots = []
        for index, x in enumerate(np.linspace(0, 1, KNOTS)):
            knot = Number(
                f"at {x:.0%}", 0.0, low=0.0, high=1.0, step=0.01,
                explanation=f"{control.label} after {x:.0%} of the run, as a share of the largest",
            )  # fmt: skip
            knot.name = f"{control.name}-{index}"
            moved = functools.partial(self._knot_moved, index)
            self._knots.append(knot.widgets(moved))
        sliders = widgets.Box(
            [knot.box for knot in self._knots],
            layout=widgets.Layout(display="flex", flex_flow="row wrap"),
        )
        below = widgets.Accordion([sliders], titles=("The same by sliders and numbers",))
        label = widgets.HTML(f"<b>{control.label}</b>")
        box = widgets.VBox(
            [label, self.editor, below], layout=widgets.Layout(width="880px", max_width="100%")
        )
        super().__init__(box, (self.editor,), on_change, "points")
        self.show(self._points)

    def show(self, value: Points) -> None:
        self._points = value
        super().show(_as_lists(value))
        for knot, height in zip(self._knots, at_knots(value), strict=True):
            # In whole steps: the page would round other values and report a move.
            knot.show(round(float(height), 2))

    def _knot_moved(self, index: int, value: float) -> None:
        heights = at_knots(self._points)
        heights[index] = value
        self.on_change(list(zip(np.linspace(0, 1, KNOTS), heights, strict=True)))


def at_knots(points: Points) -> np.ndarray:
    """The curve's heights at the sliders, [KNOTS]."""
    return heights_at(points, np.linspace(0, 1, KNOTS))


def _as_lists(points: Points) -> list[list[float]]:
    return [list(point) for point in points]
