"""The plots of `LoopStatePanel`: columns of its view's data against the loop, and the cost."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from toolkit.figures import FAINT, INK, look, short
from toolkit.figures.axes import round_up, set_limits
from toolkit.lab.kit.plot import Plot
from toolkit.lab.looped.state_view import EVEN, StateView, sink_heading

GATED, PLAIN = look("gdn"), look("full")
COSTS, FULL = {"operations per token": "FLOP", "cache": "bytes"}, ", full attention twice"
LAYER_MARKERS = {1: "o", 2: "s"}
DASHED = (0, (5, 2))
TRAINED_LOOPS = 4  # a dotted line stands behind them


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
        super().__init__(axes, title=title)
        self._limits, self._unit, self._spread = limits, unit, spread
        axes.set_xlabel("loop", labelpad=1)
        axes.axvline(TRAINED_LOOPS + 0.5, color=FAINT, linewidth=1, linestyle=(0, (1, 2)))
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
        if set_limits(self.axes, x=(0.6, view.loops + 0.4)):
            self.axes.set_xticks(range(1, view.loops + 1))
        set_limits(self.axes, y=limits)


class CostPlot(Plot):
    """Operations and bytes of all loops, as parts of those of full attention twice."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Cost (modelled)", grid="")
        axes.set(xlim=(0, 1.02), ylim=(2.3, -0.5), xticks=[])
        axes.set_yticks((0, 1), ("work per\ntoken", "kept per\nsequence"))
        axes.tick_params(axis="y", length=0)
        axes.spines["bottom"].set_visible(False)
        axes.barh((0, 1), 1, 0.4, color="white", edgecolor=FAINT, hatch="//")
        bars = axes.barh((0, 1), 0, 0.4, color=PLAIN.colour)
        self.bars = list(map(self.moving, bars))
        self._words = [self.text(0, row + 0.4, va="center", fontsize=8.5) for row in range(2)]
        axes.text(0, 2.05, "hatched: full attention twice", fontsize=9, va="center")

    def show(self, view: StateView) -> None:
        for row, (what, unit) in enumerate(COSTS.items()):
            own, full = (
                float(view.columns[f"{what}{whose} ({unit})"][view.loops - 1])
                for whose in ("", FULL)
            )
            self.bars[row].set_width(own / full)
            words = f"{short(own, unit)} of {short(full, unit)}"
            self._words[row].set_text(words)


def loop_plots(five: Iterable[Axes]) -> list[Plot]:
    """The plots, in the order of the axes."""
    hidden, state, rho, sink, cost = five
    hidden.set_yscale("log")
    sinks = {
        sink_heading(gate, layer): (
            f"{'gate' if gate else 'no gate'}, layer {layer}",
            (GATED if gate else PLAIN).colour, marker, GATED.dashes if gate else "-",
        )
        for gate in (False, True)
        for layer, marker in LAYER_MARKERS.items()
    }  # fmt: skip
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
        CostPlot(cost),
    ]  # fmt: skip


def decades(values: np.ndarray) -> tuple[float, float]:
    """The powers of ten around all values."""
    return 10 ** np.floor(np.log10(values.min())), 10 ** np.ceil(np.log10(values.max()))
