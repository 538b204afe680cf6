"""Bytes that a device sends for a layer of experts, by way of dispatch and number of devices."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit.figures import ACCENT, INK, Look, log_axes, look
from toolkit.lab.experts.dispatch_view import (
    DEGREES,
    MODELS,
    WAYS,
    DispatchView,
    dispatch_view,
    kinds_of,
)
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.measure import in_words

_LOOKS: dict[str, Look] = dict(
    zip(WAYS, map(look, ("full", "fourth", "gdn", "window")), strict=True)
)
_BYTES = (4e3, 1.5e8)


class WaysPlot(Plot):
    """A bar per way at the chosen setting, its bytes and collectives in words."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Sent by a device, one layer", grid="")
        axes.set(xlim=(0, 1), ylim=(len(WAYS) - 0.4, -0.5), xticks=[])
        self.name_rows([*WAYS])
        axes.spines["bottom"].set_visible(False)
        colours = [_LOOKS[way].colour for way in WAYS]
        bars = axes.barh(range(len(WAYS)), 0, 0.36, color=colours, edgecolor=INK, linewidth=0.6)
        self.bars = list(map(self.moving, bars))
        self._words = [self.text(0, row, va="center", fontsize=9) for row in range(len(WAYS))]
        self._below = [
            self.text(0.01, row + 0.34, va="center", fontsize=8) for row in range(len(WAYS))
        ]

    def show(self, view: DispatchView) -> None:
        most = max(view.sent.values()) / 0.72  # the words need the rest
        rows = zip(self.bars, self._words, self._below, WAYS, strict=True)
        for bar, words, below, way in rows:
            share = view.sent[way] / most
            bar.set_width(share)
            words.set(text=in_words(view.sent[way], "bytes"), x=share + 0.015)
            below.set_text(kinds_of(view.traffic[way]))


class DegreesPlot(Plot):
    """Bytes per token of every way against the number of devices."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Per token, by number of devices")
        log_axes(axes, x_unit="", y_unit="bytes")
        axes.set(xlim=(DEGREES[0] / 1.15, DEGREES[-1] * 1.15), ylim=_BYTES)
        axes.set_xticks(DEGREES, map(str, DEGREES))
        axes.set_xlabel("devices that share the experts")
        self._now = self.line(color=ACCENT, linewidth=1.2)
        self.lines = {
            way: self.line(label=way, marker=_LOOKS[way].marker, markersize=5, **_LOOKS[way].line)
            for way in WAYS
        }
        axes.legend(loc="upper left", ncols=2, fontsize=9)

    def show(self, view: DispatchView) -> None:
        for way, line in self.lines.items():
            line.set_data(DEGREES, view.along[way])
        self._now.set_data([view.devices] * 2, _BYTES)


class DispatchPanel(Panel):
    """Bytes that a device sends for a layer of experts, by way of dispatch.

    Example:
        >>> panel = DispatchPanel(model="mixtral", devices=2, capacity=1.25)
        >>> panel.view.sent["gather"] < panel.view.sent["no drops"]
        True
    """

    title = "Sending tokens to experts: which way sends how much?"
    figure_size = (9.6, 4.4)
    has_palette = True

    model = Choice("Model", "qwen3", {sizes.title: name for name, sizes in MODELS.items()})
    devices = Choice("Devices", 8, {str(n): n for n in DEGREES}, explanation="At most the experts")
    tokens = Number(
        "Tokens", 2048, low=8, high=65536, powers_of_two=True, explanation="On every device"
    )
    capacity = Number("Capacity", 1.25, low=0.5, high=4.0, step=0.25)

    def compute(self, **state: Any) -> DispatchView:
        return dispatch_view(**state)

    def plots(self, figure: Figure) -> list[Plot]:
        return [
            WaysPlot(figure.add_axes((0.125, 0.16, 0.36, 0.74))),
            DegreesPlot(figure.add_axes((0.58, 0.26, 0.4, 0.64))),
        ]
