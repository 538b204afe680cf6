"""The handles by which a number of a panel is dragged where it is drawn."""

import math
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import traitlets

from toolkit.lab.kit.controls import Number

STYLE = """
.panel-drags { z-index: 1; }
.picture-drags { position: absolute; top: 2px; left: 2px; width: calc(100% - 4px);
  pointer-events: none; }
.picture-drags rect { fill: transparent; pointer-events: all; touch-action: none; }
.picture-drags rect:hover, .picture-drags rect:active { fill: #b3245b22; }
"""


class Drags(anywidget.AnyWidget):
    """The handles of a panel, over the picture that follows on the page.

    Attributes:
        places: name, axis, box of the plot (left, right, top, bottom) and place of each, in pixels.
        size: of the picture, in pixels, and how high it is shown.
    """

    _esm = Path(__file__).with_name("drags.js")
    _css = STYLE
    places = traitlets.List().tag(sync=True)
    size = traitlets.List().tag(sync=True)

    def __init__(self, panel: Any, plots: list[Any], height: int) -> None:
        flat = {"height": "0", "width": "100%", "overflow": "visible", "margin": "0"}
        super().__init__(size=[*panel.pixels, height], layout=flat)
        self.add_class("panel-drags")
        self._panel, self._plots = panel, plots
        self.on_msg(self._dragged)

    def follow(self) -> None:
        """Put the handles where the numbers are drawn now."""
        wide, high, _ = self.size
        found = []
        for plot in self._plots:
            # As it was last drawn: `get_position` applies the aspect anew, and all is drawn again.
            drag, figure = plot.drag, plot.axes.figure
            box = plot.axes.bbox.transformed(figure.transFigure.inverted())
            value = self._panel.state[drag.control] + drag.offset
            point = (value, 0) if drag.axis == "x" else (0, value)
            share = plot.axes.transLimits.transform(plot.axes.transScale.transform(point))
            along = float(np.clip(share[int(drag.axis == "y")], 0, 1))
            edges = [wide * box.x0, wide * box.x1, high * (1 - box.y1), high * (1 - box.y0)]
            at = (
                edges[0] + along * (edges[1] - edges[0]) if drag.axis == "x"
                else edges[3] - along * (edges[3] - edges[2])
            )  # fmt: skip
            name = self._panel.controls[drag.control].label
            found.append({"name": name, "axis": drag.axis, "box": edges, "at": at})
        self.places = found

    def _dragged(self, _: Any, content: Any, __: Any) -> None:
        if isinstance(content, dict) and {"place", "share"} <= content.keys():
            plot, share = self._plots[int(content["place"])], float(content["share"])
            inverse = plot.axes.transLimits.inverted() + plot.axes.transScale.inverted()
            drawn = inverse.transform((share, share))[int(plot.drag.axis == "y")]
            control = self._panel.controls[plot.drag.control]
            value = nearest(control, float(drawn) - plot.drag.offset, self._panel.view)
            if value != self._panel.state[control.name]:
                self._panel.attempt(self._panel.change, **{control.name: value})


def nearest(control: Number, value: float, view: Any) -> float:
    """The nearest value at which the control's slider stops."""
    high = control.high if control.maximum is None else control.maximum(view)
    value = min(max(value, control.low), high)
    if control.powers_of_two:
        return control.check(min(2 ** round(math.log2(value)), high))
    steps = round((value - control.low) / control.step)
    return control.check(min(control.low + steps * control.step, high))
