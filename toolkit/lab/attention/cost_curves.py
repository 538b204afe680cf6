"""Axes on which mixers are compared as the context grows."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit.figures import ACCENT, Look, log_axes, look
from toolkit.lab.attention.view import SHORT_NAMES, TOKENS, CostView, Counted
from toolkit.lab.kit.plot import Drag, Plot

# Nested, so that markers on the same spot all stay visible.
MARKER_SIZES = (12.5, 9.5, 7.5)
LOOKS = {name: look(name) for name in SHORT_NAMES}
BEHIND_WORDS = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.85}


class CostCurves(Plot):
    """One line per mixer on logarithmic axes, the chosen context marked, its values above."""

    drag = Drag("context_length", "x")

    def __init__(
        self,
        figure: Figure,
        axes: Axes,
        plot: str,  # of the view's
        counted: Counted,
        *,
        columns: int = 1,
        looks: Mapping[str, Look] = LOOKS,  # line -> look
        name_inches: float = 0.65,
        value_inches: float = 1.9,
    ) -> None:
        super().__init__(axes)
        _, self._unit, title, limits = counted
        self._plot, self._has_fixed_limits = plot, limits is not None
        log_axes(axes, x_unit="tokens", y_unit=self._unit)
        axes.set(xlim=(TOKENS[0], TOKENS[-1]), ylim=limits, xlabel="context length (tokens)")
        self._mark = self.moving(axes.axvline(TOKENS[0], color=ACCENT, linewidth=1, alpha=0.7))
        box = axes.get_position()
        inch = 1 / (box.width * figure.get_figwidth()), 1 / (box.height * figure.get_figheight())
        rows = -(-len(looks) // columns)
        axes.set_title(title, y=1 + (0.21 * rows + 0.07) * inch[1])
        self._lines, self._points, self._dots, self._titles, self._values = ({} for _ in range(5))
        for place, (name, seen) in enumerate(looks.items()):
            self._lines[name] = self.line(**seen.line)
            self._points[name] = self.marks(
                seen.colour, seen.marker, markersize=MARKER_SIZES[place], markeredgecolor="white",
                markeredgewidth=1.2, zorder=4,
            )  # fmt: skip
            self._dots[name] = self.marks(ACCENT, "o", markersize=5, clip_on=False)
            row, column = divmod(place, columns)
            left, height = column / columns, 1 + 0.21 * (rows - row - 0.3) * inch[1]
            above: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False}
            sample = [left, left + (name_inches - 0.1) * inch[0]], [height, height]
            axes.plot(*sample, **seen.line, **above)
            above |= {"y": height, "va": "center"}
            self._titles[name] = axes.text(left + name_inches * inch[0], s="", **above)
            self._values[name] = self.text(
                left + value_inches * inch[0], fontweight="bold", **above
            )
        self._mark_name = self.text(
            TOKENS[0], 0.02, color=ACCENT, fontsize=9, bbox=BEHIND_WORDS,
            transform=axes.get_xaxis_transform(),
        )  # fmt: skip

    def show(self, view: CostView) -> None:
        curves = view.curves[self._plot]
        measured = [point for point in view.measured if point.phase == self._plot]
        self._mark.set_xdata([view.chosen, view.chosen])
        self._mark_name.set_x(view.chosen)
        # Near an end the label is on the inner side of the mark.
        side = np.searchsorted((TOKENS[0] * 32, TOKENS[-1] // 32), view.chosen, side="right")
        self._mark_name.set_horizontalalignment(("left", "center", "right")[side])
        self._mark_name.set_text(f"{view.chosen:,} tokens")
        for name, line in self._lines.items():
            line.set_data(view.tokens, curves[name])
            self._dots[name].set_data([view.chosen], [view.cost(self._plot, name)])
            self._titles[name].set_text(view.names[name])
            self._values[name].set_text(view.cell_of(self._plot, name))
            own = [point for point in measured if point.mixer == name]
            self._points[name].set_data([p.tokens for p in own], [p.seconds for p in own])
        if not self._has_fixed_limits:
            seconds = np.array([point.seconds for point in measured])
            self._set_limits(
                np.concatenate([*curves.values(), seconds]), view.counted[self._plot].unit
            )

    def _set_limits(self, values: np.ndarray, unit: str) -> None:
        # Whole steps, so that the axis does not move with every slider position.
        base = 16.0 if unit == "bytes" else 10.0
        low, high = np.log([values.min(), values.max()]) / np.log(base)
        limits = (base ** np.floor(low - 0.1), base ** np.ceil(high + 0.1))
        if unit != self._unit or not np.allclose(np.log(self.axes.get_ylim()), np.log(limits)):
            self._unit = unit
            log_axes(self.axes, x_unit="tokens", y_unit=unit)
            self.axes.set_ylim(*limits)
