"""The state that a looped model carries between loops, and the cost of a loop."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit.figures import FAINT, INK, look, short
from toolkit.figures.axes import round_up, set_limits
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.text import TextView
from toolkit.lab.kit.view import Data
from toolkit.lab.looped import reader
from toolkit.looped import LoopedConfig, cache_bytes_per_sequence
from toolkit.looped.parameters import token_flops
from toolkit.measure.words import counted, in_words

SETTLED = 8
"""Bytes at the start of a text that are left out of the mean attention to the first: they have
few others to attend to."""

REFERENCE = "full full"
EVEN = "first byte, even share (share)"


@dataclasses.dataclass(frozen=True)
class StateView(TextView):
    """Values of all `MAX_LOOPS` loops, of which the first `loops` are shown."""

    loops: int
    pattern: str
    context: int  # tokens the costs are for
    columns: Data  # heading -> numbers of each loop
    everywhere: dict[str, np.ndarray]  # those that depend on the byte, of all bytes: [loops, time]

    def data(self) -> Data:
        return {heading: values[: self.loops] for heading, values in self.columns.items()}

    def footnote(self) -> str:
        return (
            "Measured here, at the byte looked at; cost is modelled. Bars at rho: one deviation "
            "over channels. Dotted: where the loops of training end."
        )

    def sentence(self) -> str:
        data, last = self.data(), {name: cells[-1] for name, cells in self.cells().items()}
        share = in_words(data["change of h"][-1] / data["size of h"][-1], "share")
        here, sink = self.words[self.token], "The windows have moved past the first byte."
        if data[EVEN][-1]:
            without, with_gate = (
                in_words(max(data[name].max() for name in data if name.endswith(end)), "share")
                for end in (" without gate (share)", " with gate (share)")
            )
            sink = (
                f"The first byte gets at most {without} of the attention without output gate and "
                f"{with_gate} with it; an even share is {last['first byte, even share']}."
            )
        return (
            f"At “{here}”, loop {self.loops} of “{self.pattern}” changes the hidden state by "
            f"{last['change of h']}, {share} of the norm of {last['size of h']} that it then has; "
            f"its residual gate has mean {last['rho, mean']}, spread {last['rho, spread']}. {sink} "
            f"Measured here. Modelled at {self.context:,} tokens: {counted(self.loops, 'loop')} "
            f"take {last['operations per token']} per token and keep {last['cache']}; with full "
            f"attention twice {last['operations per token, full attention twice']} and "
            f"{last['cache, full attention twice']}."
        )


def sink_heading(has_gate: bool, layer: int) -> str:
    """The heading of the attention to the first byte in a layer."""
    return f"first byte, layer {layer}, {'with' if has_gate else 'without'} gate (share)"


def look_inside(
    text: str, *, token: int, loops: int, output_gate: bool, context_length: int, **model: Any
) -> StateView:
    """Read a text as `read` does with a model and its twin with or without output gate.

    `output_gate` says which of the two is looked into, `context_length` how many tokens to cost.
    """
    both = {gate: reader.read(text, output_gate=gate, **model) for gate in (False, True)}
    reading = both[output_gate]
    config, pattern, count = reading.config, reading.config.pattern, len(reading.raw)
    given = reader.byte_looked_at(text, token)
    at = given["token"]
    hidden = np.asarray(reading.seen.hidden)[:, :count]
    rho = np.asarray(reader.loop_gates(reading.small.model, reading.switches.has_residual_gate))
    everywhere = {
        "size of h": np.linalg.norm(hidden[1:], axis=-1),
        "change of h": np.linalg.norm(np.diff(hidden, axis=0), axis=-1),
    }
    states = np.asarray(reading.seen.inside.state)[:, :, :count]
    for layer in range(len(config.layers)):
        if not np.isnan(states[:, layer]).any():
            everywhere[f"state, layer {layer + 1}"] = states[:, layer]
    columns = {"loop": np.arange(reader.MAX_LOOPS) + 1}
    columns |= {heading: values[:, at] for heading, values in everywhere.items()}
    columns |= {"rho, mean": rho.mean(axis=-1), "rho, spread": rho.std(axis=-1)}
    for gate, seen in both.items():
        for layer, first in enumerate(first_byte(seen), 1):
            if not np.isnan(first).any():
                columns[sink_heading(gate, layer)] = first
    even = _even_share(count, None if "full" in config.layers else config.window.sliding_window)
    columns[EVEN] = np.full(reader.MAX_LOOPS, even)
    for layers, what in ((pattern, ""), (REFERENCE, ", full attention twice")):
        operations, cache = _costs(dataclasses.replace(config, pattern=layers), context_length)
        columns |= {f"operations per token{what} (FLOP)": operations, f"cache{what} (bytes)": cache}
    shown = {"loops": loops, "pattern": pattern, "context": context_length}
    return StateView(**given, **shown, columns=columns, everywhere=everywhere)


def first_byte(reading: reader.Reading) -> np.ndarray:
    """Mean attention to the first byte after the first `SETTLED`: [layers, loops], NaN for none."""
    count = len(reading.raw)
    start = min(SETTLED, count - 1)
    return np.asarray(reading.seen.inside.first)[:, :, start:count].mean(axis=-1).T


def _even_share(count: int, window: int | None) -> float:
    """The same if every layer weighed all it sees alike; windows move past the first byte."""
    seen = np.arange(min(SETTLED, count - 1), count) + 1
    return float(np.mean(np.where(seen > (window or count), 0.0, 1 / seen)))


@functools.lru_cache(maxsize=64)
def _costs(config: LoopedConfig, context: int) -> np.ndarray:
    """FLOPs of one more token and bytes of the cache with 1, 2, ... loops: [2, MAX_LOOPS]."""
    every = (dataclasses.replace(config, loops=loop + 1) for loop in range(reader.MAX_LOOPS))
    both = token_flops, cache_bytes_per_sequence
    return np.array([[cost(word, context) for cost in both] for word in every]).T


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
        # Of all loops and bytes.
        values = [(view.columns | view.everywhere)[name].ravel() for name in shown]
        if self._spread:
            middle, spread = view.columns[shown[-1]], view.columns[self._spread]
            values += [middle - spread, middle + spread]
            bars = zip(data["loop"], *values[-2:], strict=False)
            self._bars.set_segments([[(at, low), (at, high)] for at, low, high in bars])
        limits = self._limits(np.concatenate(values) if values else np.ones(1))
        # Two widths alone: a moved limit draws everything anew.
        widest = TRAINED_LOOPS if view.loops <= TRAINED_LOOPS else reader.MAX_LOOPS
        if set_limits(self.axes, x=(0.6, widest + 0.4)):
            self.axes.set_xticks(range(1, widest + 1))
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
        self.bars = self.bars_at((0, 1), 0.4, is_flat=True, color=PLAIN.colour)
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


class LoopStatePanel(reader.TextPanel):
    """Hidden state, recurrent state, residual gate, attention sink and cost, loop by loop.

    Example:
        >>> panel = LoopStatePanel(pattern="gdn full", loops=3)
        >>> panel.context_length = 4096
        >>> [len(column) for column in panel.data().values()][:2]
        [3, 3]
    """

    title = "What a loop changes, carries and costs"
    figure_size = (9.6, 5.4)

    pattern = Choice("Layers", "gdn full", reader.PATTERNS, explanation="A model trained for each")
    context_length = Number(
        "Context (tokens)", 16384, low=64, high=1 << 20, powers_of_two=True, is_continuous=False,
        explanation="Of the two plots of cost; the slider doubles, the box takes any number",
    )  # fmt: skip

    compute = staticmethod(look_inside)

    def plots(self, figure: Figure) -> list[Plot]:
        boxes = ((0.06, 0.6, 0.4, 0.31), (0.57, 0.6, 0.4, 0.31), (0.06, 0.16, 0.25, 0.27),
                 (0.385, 0.16, 0.265, 0.27), (0.77, 0.16, 0.22, 0.27))  # fmt: skip
        return loop_plots(map(figure.add_axes, boxes))
