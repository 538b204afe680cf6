"""The six plots of `LoopStatePanel`: columns of its view's data against the loop."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from toolkit.figures import FAINT, INK, look, short
from toolkit.figures.axes import set_limits
from toolkit.lab.kit.plot import Plot
from toolkit.lab.looped.reader import MAX_LOOPS
from toolkit.lab.looped.state_view import StateView, sink_heading

Limits = tuple[float, float]
GATED, PLAIN = look("gdn"), look("full")
LAYER_MARKERS = {1: "o", 2: "s"}
DASHED = (0, (5, 2))
# Loops that no model was trained with lie on grey.
TRAINED_LOOPS = 4
UNTRAINED = "#f1f3f5"


class LoopPlot(Plot):
    """Lines over the loops, each a column of the data; empty where the view has no such column."""

    def __init__(
        self,
        axes: Axes,
        title: str,
        lines: dict[str, tuple[str, str, str, Any]],  # heading -> label, colour, marker, dashes
        limits: Callable[[StateView], Limits],
        *,
        spread: str = "",  # heading of bars around the last line
        unit: str = "",
        **legend: Any,
    ) -> None:
        super().__init__(axes)
        self._limits, self._unit, self._spread = limits, unit, spread
        axes.set_title(title)
        axes.set(xlim=(0.6, MAX_LOOPS + 0.4), xticks=range(1, MAX_LOOPS + 1))
        axes.set_xlabel("loop", labelpad=1)
        axes.axvspan(TRAINED_LOOPS + 0.5, MAX_LOOPS + 0.4, color=UNTRAINED)
        self.nothing = self.text(
            0.5, 0.5, ha="center", va="center", color=FAINT, transform=axes.transAxes
        )
        bars = LineCollection([], colors=FAINT, linewidths=1.8)
        self._bars = self.moving(axes.add_collection(bars))
        self.lines = {
            heading: self.line(
                label=label, color=colour, marker=marker, linestyle=dashes, linewidth=1.8,
                markersize=5,
            )
            for heading, (label, colour, marker, dashes) in lines.items()
        }  # fmt: skip
        if unit:
            axes.yaxis.set_major_formatter(
                lambda value, _: f"{100 * value:.3g}%" if unit == "%" else short(value, unit)
            )
        if legend:
            axes.legend(loc="upper left", **legend)

    def show(self, view: StateView) -> None:
        data = view.data()
        for heading, line in self.lines.items():
            line.set_data(*((data["loop"], data[heading]) if heading in data else ([], [])))
        is_empty = not any(heading in data for heading in self.lines)
        self.nothing.set_text("no recurrent layer" if is_empty else "")
        if self._spread:
            middle = data[[*self.lines][-1]]
            bars = zip(data["loop"], middle, data[self._spread], strict=True)
            self._bars.set_segments([[(at, y - d), (at, y + d)] for at, y, d in bars])
        limits = self._limits(view)
        # Ticks at whole numbers of a binary unit.
        if set_limits(self.axes, y=limits) and self._unit == "bytes":
            self.axes.set_yticks(np.linspace(*limits, 5))


def loop_plots(six: Iterable[Axes]) -> list[LoopPlot]:
    """The plots, in the order of the axes."""
    hidden, state, rho, sink, operations, cache = six
    hidden.set_yscale("log")
    sinks = {
        sink_heading(gate, layer): (
            f"{'gate' if gate else 'no gate'}, layer {layer}",
            (GATED if gate else PLAIN).colour, marker, GATED.dashes if gate else "-",
        )
        for gate in (False, True)
        for layer, marker in LAYER_MARKERS.items()
    }  # fmt: skip
    costs = [
        {
            f"{what} ({unit})": ("these layers", INK, "o", "-"),
            f"{what}, full attention twice ({unit})": ("full attention twice", FAINT, "s", DASHED),
        }
        for what, unit in (("operations per token", "FLOP"), ("cache", "bytes"))
    ]
    return [
        LoopPlot(
            hidden, "Hidden state: size, change",
            {
                "size of h": ("size", INK, "o", "-"),
                "change of h": ("change", PLAIN.colour, "s", DASHED),
            },
            _hidden_limits, fontsize=9.5,
        ),
        LoopPlot(
            state, "Size of the recurrent state",
            {f"state, layer {n}": ("", GATED.colour, m, "-") for n, m in LAYER_MARKERS.items()},
            lambda view: (0, coarse(max((n.max() for n in view.state.values()), default=1.0))),
        ),
        LoopPlot(
            rho, "Residual gate rho", {"rho, mean": ("mean", INK, "o", "-")}, _rho_limits,
            spread="rho, spread",
        ),
        LoopPlot(
            sink, "Attention to the first byte",
            {"first byte, even share": ("even share", FAINT, "", (0, (4, 3))), **sinks},
            _sink_limits, unit="%", fontsize=7.8, ncols=2, handlelength=1.5, columnspacing=0.7,
        ),
        LoopPlot(
            operations, "Operations per token", costs[0],
            lambda view: (0, coarse(1.3 * max(view.operations[-1], view.reference_operations[-1]))),
            unit="FLOP", fontsize=8.5,
        ),
        LoopPlot(
            cache, "Bytes kept per sequence", costs[1],
            lambda view: (0, binary(1.1 * max(view.cache[-1], view.reference_cache[-1]))),
            unit="bytes", fontsize=8.5,
        ),
    ]  # fmt: skip


# Limits that hold what is drawn, in coarse steps: a moved limit draws everything anew.


def _hidden_limits(view: StateView) -> Limits:
    smallest = min(view.change.min(), view.size[1:].min())
    return 10 ** np.floor(np.log10(smallest)), 10 ** np.ceil(np.log10(view.size.max()))


def _rho_limits(view: StateView) -> Limits:
    most = coarse(max(0.05, np.abs(view.rho).max() + view.rho_spread.max()))
    return -most, most


def _sink_limits(view: StateView) -> Limits:
    shares = [0.01, view.even, *(first.max() for first in view.sink.values())]
    return 0, coarse(1.6 * max(shares))  # room for the legend


def coarse(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... times a power of ten."""
    power = 10 ** np.floor(np.log10(value))
    return float(power * next(step for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9)))


def binary(value: float) -> float:
    """The next of 2, 3, 4, 6, 8, 12, ...: its quarters are whole numbers of a binary unit."""
    power = 2 ** np.floor(np.log2(value))
    return float(power * next(step for step in (1, 1.5, 2) if step * power >= value))
