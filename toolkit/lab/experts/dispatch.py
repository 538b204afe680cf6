"""Bytes that a device sends for a layer of experts, by way of dispatch and number of devices."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from toolkit.figures import ACCENT, INK, Look, log_axes, look
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Data, View
from toolkit.measure import in_words
from toolkit.parallel.experts import Traffic, dispatch_traffic

DEGREES = (2, 4, 8, 16, 32, 64)
ITEMSIZE = 2  # bfloat16


class Sizes(NamedTuple):
    """The sizes of one published model that bytes depend on."""

    title: str
    width: int
    experts: int
    chosen: int


MODELS = {
    "mixtral": Sizes("Mixtral-8x7B", 4096, 8, 2),
    "qwen3": Sizes("Qwen3-30B-A3B", 2048, 128, 8),
    "gpt-oss": Sizes("gpt-oss-120b", 2880, 128, 4),
    "deepseek": Sizes("DeepSeek-V3", 7168, 256, 8),
}
"""Their published configurations."""

WAYS: dict[str, dict[str, Any]] = {
    "capacity": {"dispatch": "all_to_all"},
    "no drops": {"dispatch": "all_to_all"},
    "gather": {"dispatch": "gather"},
    "ragged, even": {"dispatch": "ragged"},
}
"""Arguments of `dispatch_traffic`; "capacity" gets the chosen one."""


@dataclass(frozen=True)
class DispatchView(View):
    """Every way at one setting, and its bytes at every degree."""

    model: str
    tokens: int
    devices: int  # shards of the experts, at most one per expert
    capacity: float
    traffic: dict[str, list[Traffic]]  # way -> collectives of the forward pass
    # Way -> bytes per token at every degree of `DEGREES`; NaN beyond a device per expert
    along: dict[str, list[float]]

    @property
    def sizes(self) -> Sizes:
        """The model's."""
        return MODELS[self.model]

    @property
    def sent(self) -> dict[str, int]:
        """Way -> bytes that a device sends, forward."""
        return {way: sent_by(found) for way, found in self.traffic.items()}

    def data(self) -> Data:
        return {
            "way": [*self.traffic],
            "sent per device and layer (bytes)": [*self.sent.values()],
            "of the gather (share)": [sent / self.sent["gather"] for sent in self.sent.values()],
            "collectives": [kinds_of(found) for found in self.traffic.values()],
            "drops": ["yes" if way == "capacity" else "no" for way in self.traffic],
        }

    def sentence(self) -> str:
        sizes, sent = self.sizes, self.sent
        # Of 2 (n - 1) t D numbers of a gather, half are float32 sums: 6 bytes against 4 k c / n.
        limit = 2 / 3 * sizes.chosen * self.capacity
        which = "less" if sent["gather"] < sent["capacity"] else "more"
        return (
            f"{sizes.title}, {self.devices} devices with {self.tokens:,} tokens each (modelled): "
            f"with capacity {self.capacity:g} a device sends "
            f"{in_words(sent['capacity'], 'bytes')} for a layer, forward, and without drops "
            f"{in_words(sent['no drops'], 'bytes')}. A gather sends "
            f"{in_words(sent['gather'], 'bytes')}, {which} than with capacity: it pays for fewer "
            f"devices than two thirds of experts per token times capacity, here {limit:.3g}."
        )

    def footnote(self) -> str:
        return (
            "Modelled: bytes in bfloat16 by the formulas of dispatch_traffic, which equal those "
            "of compiled programs.\nThe gradient sends them once more."
        )


def sent_by(found: list[Traffic]) -> int:
    """Bytes of all collectives."""
    return sum(collective.count * collective.bytes_sent for collective in found)


def kinds_of(found: list[Traffic]) -> str:
    """Collectives in words."""
    counts: dict[str, int] = {}
    for collective in found:
        counts[collective.kind] = counts.get(collective.kind, 0) + collective.count
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def dispatch_view(*, model: str, tokens: int, devices: int, capacity: float) -> DispatchView:
    """All ways; `devices` is limited to the experts."""
    sizes = MODELS[model]

    def of(way: str, degree: int) -> list[Traffic]:
        how: dict[str, Any] = WAYS[way] | ({"capacity": capacity} if way == "capacity" else {})
        numbers = tokens, sizes.width, sizes.experts, sizes.chosen, degree
        return dispatch_traffic(*numbers, itemsize=ITEMSIZE, **how)

    along = {
        way: [
            sent_by(of(way, degree)) / tokens if degree <= sizes.experts else float("nan")
            for degree in DEGREES
        ]
        for way in WAYS
    }
    devices = min(devices, sizes.experts)
    traffic = {way: of(way, devices) for way in WAYS}
    return DispatchView(model, tokens, devices, capacity, traffic, along)


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
        flat = {"is_flat": True, "color": colours, "edgecolor": INK, "linewidth": 0.6}
        self.bars = self.bars_at(range(len(WAYS)), 0.36, **flat)
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

    compute = staticmethod(dispatch_view)
    places = (
        (WaysPlot, (0.125, 0.16, 0.36, 0.74)),
        (DegreesPlot, (0.58, 0.26, 0.4, 0.64)),
    )
