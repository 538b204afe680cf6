"""Bytes by scheme against dense, loads of the owners of rows, loss against bytes."""

import functools
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from toolkit.figures import ACCENT, INK, look
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Data, View
from toolkit.measure import in_words, published_peak
from toolkit.measure.stored import stored_folder
from toolkit.parallel.gradients import COMPRESSORS, Exchange, RowOwners
from toolkit.parallel.gradients.peers import Along
from toolkit.parallel.gradients.rows.row_bytes import row_bytes

ROWS, WIDTH = 65_536, 512  # of the table; its numbers are the gradient of all other schemes
LINKS = {
    "NVLink": ("H100", 0),
    "InfiniBand": ("H100", 1),
    "Ethernet": ("A10G", 1),
    "ICI": ("TPU v5e", 0),
}
SCHEMES = {
    "dense": "float32:dense", "bfloat16": "bfloat16:scatter_gather", "int8": "int8:scatter_gather",
    "int4": "int4:scatter_gather", "ternary": "ternary:scatter_gather",
    "sign": "scaled_sign:scatter_gather", "largest, gathered": "top_k:gather",
    "shared places": "random_k:all_reduce",
}  # fmt: skip
BLOCKED = ("int8", "int4", "ternary")


@dataclass(frozen=True)
class SentView(View):
    """Bytes that a device sends, the loads of owners, and losses of stored runs."""

    replicas: int  # devices D
    density: float  # share of rows, or of numbers, that a replica sends
    block: int  # numbers that share a scale
    link: str  # that the bytes go over
    zipf: float  # exponent of the rows' frequencies
    sent: dict[str, float]  # scheme -> bytes per device and step
    # ranges, permuted: [D], rows that each owner adds, over the mean
    ranges: np.ndarray
    permuted: np.ndarray
    # Of the record, (setting, bytes per step, mean loss)
    runs: tuple[tuple[str, float, float], ...]

    def seconds(self, scheme: str) -> float:
        """On the link alone, without delays and encoding."""
        chip, place = LINKS[self.link]
        peak = published_peak(chip)
        assert peak is not None
        return self.sent[scheme] / peak.links[place].bytes_per_second

    def data(self) -> Data:
        dense = self.sent["dense"]
        return {
            "scheme": [*self.sent],
            "sent (bytes)": [*self.sent.values()],
            "of dense (share)": [sent / dense for sent in self.sent.values()],
            f"on {self.link} (seconds)": [self.seconds(name) for name in self.sent],
        }

    def sentence(self) -> str:
        least = min(self.sent, key=lambda name: self.sent[name])
        more = [name for name in self.sent if self.sent[name] > self.sent["dense"]]
        beyond = f" {' and '.join(more)} send more than dense." if more else ""
        return (
            f"Of {ROWS * WIDTH / 1e6:.1f} million gradients over {self.replicas} replicas a dense "
            f"sum sends {in_words(self.sent['dense'], 'bytes')} per device, "
            f"{in_words(self.seconds('dense'), 'seconds')} on {self.link}; least is "
            f"{least}, {in_words(self.sent[least], 'bytes')}.{beyond} Owners by range add up to "
            f"{self.ranges.max():.1f} times the mean, by a permutation {self.permuted.max():.2f}."
        )

    def footnote(self) -> str:
        return (
            "Modelled: bytes that programs send, over published rates, without delays and "
            "encoding. Right: recorded, means of five seeds."
        )


def sent_view(*, replicas: int, density: float, block: int, link: str, zipf: float) -> SentView:
    """The view; the largest numbers and random places are as many as the density says."""
    along, sent = Along.over({"data": replicas}, replicas), {}
    for name, text in SCHEMES.items():
        compressor, _, pattern = text.partition(":")
        size = block if name in BLOCKED else density if compressor.endswith("_k") else None
        row = COMPRESSORS[compressor](*([] if size is None else [size]))
        how = Exchange(row, pattern).how
        sent[name] = float(sum(each for _, each in how.sends(row, along, ROWS * WIDTH // replicas)))
    own, every = _draw(zipf, density, replicas)
    ranges, permuted = _loads(own, replicas)
    share = len(own) / ROWS
    sent["sparse rows"] = row_bytes(
        "rows", replicas, ROWS, WIDTH, share,
        union=lambda _: len(every) / ROWS, push_skew=float(permuted.max()),
    )  # fmt: skip
    return SentView(replicas, density, block, link, zipf, sent, ranges, permuted, stored_runs())


@functools.lru_cache(maxsize=256)
def _draw(zipf: float, density: float, replicas: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows that one replica touches, drawn without repetition, and those that any touches."""
    rng = np.random.default_rng(0)
    weights = -zipf * np.log(np.arange(1, ROWS + 1))
    count = max(1, round(density * ROWS))

    def rows() -> np.ndarray:
        keys = weights + rng.gumbel(size=ROWS)
        return np.argpartition(keys, ROWS - count)[ROWS - count :]

    own = rows()
    others = [rows() for _ in range(min(replicas, 8) - 1)]  # more are slow, and touch few more
    return own, np.unique(np.concatenate([own, *others]))


def _loads(rows: np.ndarray, replicas: int) -> tuple[np.ndarray, np.ndarray]:
    each = ROWS // replicas
    found = []
    for places in (rows, _places()[rows]):
        counts = np.bincount(places // each, minlength=replicas)[:replicas]
        found.append(counts / counts.mean())
    return found[0], found[1]


@functools.cache
def _places() -> np.ndarray:
    return np.asarray(RowOwners.drawn(ROWS, 1).places)


@functools.cache
def stored_runs() -> tuple[tuple[str, float, float], ...]:
    """Of the record of the experiment "gradients": setting, bytes per step, mean loss."""
    path, found = stored_folder("experiments") / "gradients.jsonl", {}
    for line in path.read_text().splitlines():
        row: dict[str, Any] = json.loads(line)
        outcome = row.get("outcome", {})
        if "loss" in outcome:
            found.setdefault(row["label"], []).append((outcome["bytes per step"], outcome["loss"]))
    return tuple(
        (
            label,
            float(np.mean([sent for sent, _ in runs])),
            float(np.mean([loss for _, loss in runs])),
        )
        for label, runs in found.items()
    )


_NAMES = (*SCHEMES, "sparse rows")
_LOW, _HIGH = 1e4, 1e10
BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # above the line of dense
PLACES = {  # of words, in points from their mark
    "sign, feedback": (-52, -14), "top 1 %, feedback": (6, -11), "int4, feedback": (-72, -7),
    "DiLoCo": (7, -2), "DiLoCo, int4": (-32, 8), "ternary": (5, 7),
}  # fmt: skip
MOST_REPLICAS = 64


class BytesPlot(Plot):
    """A bar per scheme, and the line of a dense sum."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Sent per device and step", grid="x", xscale="log")
        axes.set(xlim=(_LOW, _HIGH), xlabel="bytes", ylim=(len(_NAMES) - 0.4, -0.6))
        self.name_rows(_NAMES, fontsize=9)
        flat = {"is_flat": True, "left": _LOW, "color": look("full").colour}
        self.bars = self.bars_at(range(len(_NAMES)), 0.68, **flat)
        self.dense = self.line(color=ACCENT, linestyle="--", linewidth=1.6)
        self.words = [
            self.text(y=at, va="center", fontsize=8.5, bbox=BOX) for at in range(len(_NAMES))
        ]

    def show(self, view: SentView) -> None:
        for bar, words, name in zip(self.bars, self.words, _NAMES, strict=True):
            bar.set_width(max(view.sent[name], _LOW) - _LOW)
            words.set_x(1.25 * view.sent[name])
            words.set_text(in_words(view.seconds(name), "seconds"))
        self.dense.set_data([view.sent["dense"]] * 2, [-0.6, len(_NAMES) - 0.4])


class LoadsPlot(Plot):
    """Rows that each owner adds, over the mean."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Rows per owner", xlabel="owner, the fullest first")
        axes.set(xlim=(0, 1), ylim=(0.02, 70), yscale="log", ylabel="over the mean", xticks=[])
        self.lines = [
            self.line(**look(name).line, marker=look(name).marker, markersize=4, label=label)
            for name, label in (("window", "ranges"), ("full", "permuted"))
        ]
        axes.axhline(1, color=INK, linewidth=1)
        axes.legend(loc="upper right", fontsize=9)

    def show(self, view: SentView) -> None:
        at = (np.arange(view.replicas) + 0.5) / view.replicas
        for line, loads in zip(self.lines, (view.ranges, view.permuted), strict=True):
            line.set_data(at, np.maximum(np.sort(loads)[::-1], 0.021))


class LossPlot(Plot):
    """Loss against bytes of the stored runs; they do not move."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Loss by bytes (recorded)", xscale="log")
        axes.set(xlabel="bytes per step", ylabel="loss, nats")
        self._is_drawn = False

    def show(self, view: SentView) -> None:
        if self._is_drawn:
            return
        self._is_drawn = True
        for label, sent, loss in view.runs:
            name = "full" if "feedback" in label else "gdn" if "DiLoCo" in label else "window"
            own = look(name)
            self.axes.plot([sent], [loss], own.marker, color=own.colour, markersize=6)
            self.axes.annotate(
                label, (sent, loss), xytext=PLACES.get(label, (5, 4)), textcoords="offset points",
                fontsize=7,
            )  # fmt: skip
        low, high = self.axes.get_xlim()
        self.axes.set_xlim(low / 1.5, high * 8)


class SentPanel(Panel):
    """What a device sends for a gradient, by scheme, density, block, replicas and link.

    Example:
        >>> panel = SentPanel(replicas=64, density=0.1)
        >>> panel.view.sent["largest, gathered"] > panel.view.sent["dense"]
        True
    """

    title = "Gradients: what is sent, who adds it, and what it costs in loss?"
    figure_size = (11.0, 4.6)
    has_palette = True

    replicas = Number("Replicas", 8, low=2, high=MOST_REPLICAS, powers_of_two=True)
    density = Number(
        "Sent share", 0.01, low=0.005, high=0.5, step=0.005,
        explanation="Of the numbers by the largest and by shared places, of the rows by rows",
    )  # fmt: skip
    block = Number("Block", 256, low=32, high=1024, powers_of_two=True)
    link = Choice("Link", "InfiniBand", {name: name for name in LINKS})
    zipf = Number("Zipf exponent", 1.1, low=0, high=2, step=0.1)

    compute = staticmethod(sent_view)
    places = (
        (BytesPlot, (0.12, 0.2, 0.33, 0.7)),
        (LoadsPlot, (0.51, 0.2, 0.17, 0.7)),
        (LossPlot, (0.74, 0.2, 0.25, 0.7)),
    )
