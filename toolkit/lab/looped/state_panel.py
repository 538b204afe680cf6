"""What a looped model carries from loop to loop, and what a loop costs: six small plots."""

from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from toolkit.figures import FAINT, INK, look, short
from toolkit.lab.kit.controls import Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.looped.panel import (
    LOOPS,
    OUTPUT_GATE,
    PATTERN,
    RESIDUAL_GATE,
    TEXT_CONTROL,
    TOKEN,
    WINDOW,
    LoopPanel,
)
from toolkit.lab.looped.reader import MAX_LOOPS
from toolkit.lab.looped.state_view import StateView, look_inside

GATED, PLAIN = look("gdn"), look("full")
LAYER_MARKERS = {1: "o", 2: "s"}
# Loops that no model was trained with lie on grey.
TRAINED_LOOPS = 4
UNTRAINED = "#f1f3f5"
FOLLOWED = ("text", "token", "loops", "pattern", "window", "output_gate", "residual_gate")


class LoopStatePanel(Panel):
    """Hidden state, recurrent state, residual gate, attention sink and cost, loop by loop.

    Attributes:
        text, token, loops, window, pattern, output_gate, residual_gate: as in `LoopPanel`.
        context_length: tokens the two cost plots are for.
    """

    title = "What a loop changes, carries and costs"
    figure_size = (9.6, 5.4)

    text = TEXT_CONTROL
    token = TOKEN
    loops = LOOPS
    window = WINDOW
    pattern = PATTERN
    output_gate = OUTPUT_GATE
    residual_gate = RESIDUAL_GATE
    context_length = Number(
        "Context (tokens)", 16384, low=64, high=1 << 20, powers_of_two=True, is_continuous=False,
        explanation="Of the two plots of cost; the slider doubles, the box takes any number",
    )  # fmt: skip

    def follow(self, panel: LoopPanel) -> "LoopStatePanel":
        """Show what another panel shows, now and whenever it changes there.

        Args:
            panel: whose text, byte, loops, layers, window and gates to follow.

        Returns:
            This panel.

        Cost:
            One redraw now, and one with every change there.
        """

        def take_over(_: Any = None) -> None:
            wanted = {name: getattr(panel, name) for name in FOLLOWED}
            if any(getattr(self, name) != value for name, value in wanted.items()):
                self.change(**wanted)

        for name in FOLLOWED:
            panel._control_widgets[name].inputs[0].observe(take_over, names="value")
        take_over()
        return self

    def compute(
        self, *, output_gate: bool, residual_gate: bool, context_length: int, **state: Any
    ) -> StateView:
        return look_inside(
            has_output_gate=output_gate,
            has_residual_gate=residual_gate,
            context=context_length,
            **state,
        )

    def data(self) -> dict[str, Any]:
        """The numbers now shown, by the names of `StateView`."""
        return {name: value for name, value in vars(self.view).items() if name != "here"}

    def build(self, figure: Figure) -> list[Artist]:
        figure.subplots_adjust(
            left=0.07, right=0.985, top=0.925, bottom=0.125, wspace=0.37, hspace=0.5
        )
        hidden, state, rho, sink, operations, cache = figure.subplots(2, 3).flat
        for axes, title in (
            (hidden, "Hidden state: size, change"),
            (state, "Size of the recurrent state"),
            (rho, "Residual gate rho"),
            (sink, "Attention to the first byte"),
            (operations, "Operations a token"),
            (cache, "Bytes kept a sequence"),
        ):
            axes.set_title(title)
            axes.set(xlim=(0.6, MAX_LOOPS + 0.4), xticks=range(1, MAX_LOOPS + 1))
            axes.set_xlabel("loop", labelpad=1)
            axes.axvspan(TRAINED_LOOPS + 0.5, MAX_LOOPS + 0.4, color=UNTRAINED)
        self._size = self._line(hidden, INK, "o", "-", "size")
        self._change = self._line(hidden, PLAIN.colour, "s", PLAIN.dashes, "change", (0, (5, 2)))
        hidden.set_yscale("log")
        hidden.legend(loc="upper left")
        self._states = [
            self._line(state, GATED.colour, marker, "-", f"layer {layer}")
            for layer, marker in LAYER_MARKERS.items()
        ]
        self._no_state = state.text(
            0.5, 0.5, "no recurrent layer", ha="center", va="center", color=FAINT,
            transform=state.transAxes,
        )  # fmt: skip
        self._rho = self._line(rho, INK, "o", "-", "mean")
        self._spread = [self._line(rho, FAINT, "", "-", "") for _ in range(MAX_LOOPS)]
        self._sink = {
            (gate, layer): self._line(
                sink, (GATED if gate else PLAIN).colour, marker,
                GATED.dashes if gate else "-",
                f"{'gate' if gate else 'no gate'}, layer {layer}",
            )
            for gate in (False, True)
            for layer, marker in LAYER_MARKERS.items()
        }  # fmt: skip
        self._even = sink.axhline(0, color=FAINT, linewidth=1.4, dashes=(4, 3))
        self._even_words = sink.text(
            MAX_LOOPS + 0.3, 0, "even share", ha="right", va="bottom", fontsize=8.5, color=FAINT
        )
        sink.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g}%"))
        sink.legend(loc="upper left", fontsize=7.8, ncols=2, handlelength=1.5, columnspacing=0.7)
        self._costs = {}
        for name, axes, unit in (("operations", operations, "FLOP"), ("cache", cache, "bytes")):
            own = self._line(axes, INK, "o", "-", "these layers")
            reference = self._line(axes, FAINT, "s", (0, (5, 2)), "full attention twice")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _, unit=unit: short(v, unit)))
            axes.legend(loc="upper left", fontsize=8.5)
            self._costs[name] = (own, reference)
        self._axes = {"hidden": hidden, "state": state, "rho": rho, "sink": sink}
        self._axes |= {"operations": operations, "cache": cache}
        figure.text(
            0.07, 0.014,
"Measured here, at the byte looked at; the plots of cost are modelled. Bars at rho: one "
            "deviation over channels. Grey: untrained loops.", fontsize=9,
        )  # fmt: skip
        return [
            self._even, self._even_words, *self._spread, self._rho, self._size, self._change,
            self._no_state, *self._states, *self._sink.values(),
            *(line for pair in self._costs.values() for line in pair),
        ]  # fmt: skip

    @staticmethod
    def _line(axes: Axes, colour, marker, dashes, name, line_dashes=None) -> Line2D:
        (line,) = axes.plot(
            [], [], color=colour, marker=marker, linestyle=line_dashes or dashes, label=name,
            linewidth=1.8, markersize=5,
        )  # fmt: skip
        return line

    def draw(self, view: StateView) -> None:
        loops = np.arange(1, view.loops + 1)

        def show(line: Line2D, values: np.ndarray | None) -> None:
            line.set_data(*(([], []) if values is None else (loops, values[: view.loops])))

        show(self._size, view.size[1:])
        show(self._change, view.change)
        self._no_state.set_visible(not view.state)
        for line, layer in zip(self._states, LAYER_MARKERS, strict=True):
            show(line, view.state.get(f"layer {layer}"))
        show(self._rho, view.rho)
        for loop, line in enumerate(self._spread):
            line.set_visible(loop < view.loops)
            half = view.rho_spread[loop]
            line.set_data([loop + 1] * 2, [view.rho[loop] - half, view.rho[loop] + half])
        for key, line in self._sink.items():
            show(line, view.sink.get(key))
        self._even.set_ydata([view.even] * 2)
        self._even_words.set_y(view.even)
        for name, (own, reference) in self._costs.items():
            show(own, getattr(view, name))
            show(reference, getattr(view, f"reference_{name}"))
        self._make_room(view)

    def _make_room(self, view: StateView) -> None:
        """Limits that hold what is drawn, in coarse steps: a moved limit draws everything anew."""
        shares = [0.01, view.even, *(first.max() for first in view.sink.values())]
        state = max((norms.max() for norms in view.state.values()), default=1.0)
        spread = max(0.05, np.abs(view.rho).max() + view.rho_spread.max())
        smallest = min(view.change.min(), view.size[1:].min())
        limits = {
            "hidden": (
                10 ** np.floor(np.log10(smallest)),
                10 ** np.ceil(np.log10(view.size.max())),
            ),
            "state": (0, coarse(state)),
            "rho": (-coarse(spread), coarse(spread)),
            "sink": (0, coarse(1.45 * max(shares))),  # room for the legend
            "operations": (
                0,
                coarse(1.3 * max(view.operations[-1], view.reference_operations[-1])),
            ),
            "cache": (0, binary(1.1 * max(view.cache[-1], view.reference_cache[-1]))),
        }
        for name, wanted in limits.items():
            if not np.allclose(self._axes[name].get_ylim(), wanted):
                self._axes[name].set_ylim(*wanted)
                if name == "cache":  # ticks at whole numbers of a binary unit
                    self._axes[name].set_yticks(np.linspace(0, wanted[1], 5))
                self.picture.forget_background()

    def adjust(self, view: StateView) -> None:
        self._control_widgets["token"].set_maximum(view.count)


def coarse(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... times a power of ten."""
    power = 10 ** np.floor(np.log10(value))
    return float(power * next(step for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9)))


def binary(value: float) -> float:
    """The next of 2, 3, 4, 6, 8, 12, ...: its quarters are whole numbers of a binary unit."""
    power = 2 ** np.floor(np.log2(value))
    return float(power * next(step for step in (1, 1.5, 2) if step * power >= value))
