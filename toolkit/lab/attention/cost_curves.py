"""The cost of a mixer against context length, modelled from its row of `MIXERS`, and its plot.

A cost formula gives operations and bytes; a machine's two rates turn them into a time no program
on it can beat: seconds = max(operations / peak rate, bytes / memory bandwidth), the roofline of
Williams, Waterman, Patterson 2009.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit.attention import mixer
from toolkit.bench.mixers.layer_costs import DECODE, KEPT, PREFILL, Layer, Point
from toolkit.figures import ACCENT, Look, log_axes, look
from toolkit.lab.kit.plot import Drag, Plot
from toolkit.lab.kit.view import Data, View

SHORT_NAMES = {"full": "full softmax", "window": "sliding window", "gdn": "gated delta net"}
# Two points a doubling draw a smooth line on logarithmic axes.
TOKENS = np.unique(np.geomspace(128, 1 << 20, 27).round().astype(int))


class Counted(NamedTuple):
    """The quantity of a plot, in the names of `Layer.cost` or in seconds, with heading and
    limits."""

    what: str
    unit: str
    heading: str
    limits: tuple[float, float] | None = None


PHASES = {
    PREFILL: Counted(PREFILL, "seconds", "Prefill: reading the context"),
    DECODE: Counted(DECODE, "seconds", "Decode: one more token"),
}
MEMORY = Counted(KEPT, "bytes", "Memory between two tokens")


class Machine(NamedTuple):
    """The two rates that make a roofline."""

    name: str  # with where its rates come from
    flops_per_second: float  # of matrix products
    bytes_per_second: float  # of main memory
    bytes_per_number: int  # of keys and values in the precision the rates are for


@dataclass(frozen=True)
class CostView(View):
    """Curves against context length, one context chosen: a plot or more of several lines."""

    chosen: int  # one of `tokens`
    layer: Layer
    mixers: dict[str, str]  # line -> name in `MIXERS`
    counted: Mapping[str, Counted]  # by plot
    machine: Machine | None = None  # whose roofline, where the unit is seconds
    measured: tuple[Point, ...] = ()

    @functools.cached_property
    def names(self) -> dict[str, str]:
        """Line -> its name in words."""
        return {
            line: SHORT_NAMES.get(name, mixer(name).title) for line, name in self.mixers.items()
        }

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """The contexts of the curves, the chosen one and those measured among them."""
        return np.unique([*TOKENS, self.chosen, *(point.tokens for point in self.measured)])

    @functools.cached_property
    def curves(self) -> dict[str, dict[str, np.ndarray]]:
        """Plot -> line -> cost at `tokens`."""
        return {
            plot: {
                line: np.array([self._cost(name, counted, int(n)) for n in self.tokens])
                for line, name in self.mixers.items()
            }
            for plot, counted in self.counted.items()
        }

    def _cost(self, name: str, counted: Counted, tokens: int) -> float:
        what, unit, *_ = counted
        if self.machine is None:
            return self.layer.cost(name, what, unit, tokens)
        flop, moved = (self.layer.cost(name, what, unit, tokens) for unit in ("FLOP", "bytes"))
        return max(flop / self.machine.flops_per_second, moved / self.machine.bytes_per_second)

    def cost(self, plot: str, line: str) -> float:
        """The cost at the chosen context."""
        return float(self.curves[plot][line][self.row_of(self.chosen)])

    def row_of(self, tokens: int) -> int:
        """The row of one of `tokens` in the table."""
        return int(np.searchsorted(self.tokens, tokens))

    @property
    def last(self) -> str:
        """The line that the caption compares with softmax attention."""
        return [*self.names][-1]

    def heading(self, plot: str, line: str) -> str:
        """The heading of a curve in the table."""
        return f"{plot}, {self.names[line]}"

    def cell_of(self, plot: str, line: str) -> str:
        """The same as the table has it."""
        return self.row(self.row_of(self.chosen))[self.heading(plot, line)]

    def data(self) -> Data:
        """Modelled costs, then pairs (seconds, error) where there is a measured time."""
        columns: Data = {"tokens": self.tokens}
        for plot, lines in self.curves.items():
            for line, curve in lines.items():
                columns[f"{self.heading(plot, line)} ({self.counted[plot].unit})"] = curve
        found = {(p.phase, p.mixer, p.tokens): (p.seconds, p.spread / 2) for p in self.measured}
        for phase, name in dict.fromkeys((p.phase, p.mixer) for p in self.measured):
            heading = f"{self.heading(phase, name)}, measured (seconds)"
            columns[heading] = [found.get((phase, name, int(n))) for n in self.tokens]
        return columns


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
