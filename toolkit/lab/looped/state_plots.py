"""The six plots of `LoopStatePanel`: columns of its view's data against the loop."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from toolkit.figures import FAINT, INK, look, short
from toolkit.figures.axes import round_up, set_limits
from toolkit.lab.kit.plot import Plot
from toolkit.lab.looped.reader import MAX_LOOPS
from toolkit.lab.looped.state_view import EVEN, StateView, sink_heading

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
        limits: Callable[[np.ndarray], tuple[float, float]],  # of all that may be drawn
        *,
        spread: str = "",  # heading of bars around the last line
        unit: str = "",
        **legend: Any,
    ) -> None:
        ticks = range(1, MAX_LOOPS + 1)
        super().__init__(axes, title=title, xlim=(0.6, MAX_LOOPS + 0.4), xticks=ticks)
        self._limits, self._unit, self._spread = limits, unit, spread
        axes.set_xlabel("loop", labelpad=1)
        axes.axvspan(TRAINED_LOOPS + 0.5, MAX_LOOPS + 0.4, color=UNTRAINED)
        self.nothing = self.text(
            0.5, 0.5, ha="center", va="center", color=FAINT, transform=axes.transAxes
        )
        self._bars = self.segments(colors=FAINT, linewidths=1.8)
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
            axes.tick_params(axis="y", labelsize=8.8)
        if legend:
            axes.legend(loc="upper left", **legend)

    def show(self, view: StateView) -> None:
        data = view.data()
        shown = [heading for heading in self.lines if heading in data]
        for heading, line in self.lines.items():
            line.set_data(*((data["loop"], data[heading]) if heading in data else ([], [])))
        self.nothing.set_text("" if shown else "no recurrent layer")
        # Of all loops and bytes: a moved limit draws everything anew.
        values = [(view.columns | view.everywhere)[name].ravel() for name in shown]
        if self._spread:
            middle, spread = view.columns[shown[-1]], view.columns[self._spread]
            values += [middle - spread, middle + spread]
            bars = zip(data["loop"], *values[-2:], strict=False)
            self._bars.set_segments([[(at, low), (at, high)] for at, low, high in bars])
        limits = self._limits(np.concatenate(values) if values else np.ones(1))
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
            decades, fontsize=9.5,
        ),
        LoopPlot(
            state, "Size of the recurrent state",
            {f"state, layer {n}": ("", GATED.colour, m, "-") for n, m in LAYER_MARKERS.items()},
            lambda values: (0, round_up(values.max())),
        ),
        LoopPlot(
            rho, "Residual gate rho", {"rho, mean": ("mean", INK, "o", "-")},
            lambda values: (-(most := round_up(max(0.05, np.abs(values).max()))), most),
            spread="rho, spread",
        ),
        LoopPlot(
            sink, "Attention to the first byte",
            {EVEN: ("even share", FAINT, "", (0, (4, 3))), **sinks},
            lambda values: (0, round_up(1.6 * max(0.01, values.max()))),  # room for the legend
            unit="%", fontsize=7.6, ncols=2, handlelength=1.5, columnspacing=1.1,
        ),
        LoopPlot(
            operations, "Operations per token", costs[0],
            lambda values: (0, round_up(1.3 * values.max())), unit="FLOP", fontsize=8.5,
        ),
        LoopPlot(
            cache, "Bytes kept per sequence", costs[1],
            lambda values: (0, round_up(1.1 * values.max(), (1, 1.5, 2), 2)),
            unit="bytes", fontsize=8.5,
        ),
    ]  # fmt: skip


def decades(values: np.ndarray) -> tuple[float, float]:
    """The powers of ten around all values."""
    return 10 ** np.floor(np.log10(values.min())), 10 ** np.ceil(np.log10(values.max()))
