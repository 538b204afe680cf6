"""The four plots of `LoopPanel`, each with a row per loop, the first on top.

Rows fill an axes whatever their number: y runs from 0, the top, to 1.
"""

from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from toolkit.figures import ACCENT, INK, WEIGHTS
from toolkit.figures.axes import set_limits
from toolkit.lab.kit.plot import Plot
from toolkit.lab.looped.reader import MAX_LOOPS, MAX_TOKENS
from toolkit.lab.looped.view import BEST, LoopView, visible

SMALLEST_SHARE = 1e-6
NO_PATH = "#eceff2"
MONOSPACE = "DejaVu Sans Mono"


def middles(loops: int) -> np.ndarray:
    """Where the rows' middles lie, [loops]."""
    return (np.arange(loops) + 0.5) / loops


def show_words(texts: list[Text], words: Iterable[str | None], x: Iterable[float]) -> None:
    """Write a row's words at x in its middle; None hides them, as do rows that are not there."""
    rows = list(zip(words, x, strict=True))
    for text in texts:
        text.set_visible(False)
    for text, (word, at), y in zip(texts, rows, middles(len(rows)), strict=False):
        if word is not None:
            text.set_visible(True)
            text.set_text(word)
            text.set_position((at, y))


class LoopMap(Plot):
    """A colour for each loop and byte, with the byte looked at marked; the base of two plots."""

    def __init__(
        self,
        figure: Figure,
        place: tuple[float, float],
        title: str,
        limits: tuple[float, float],
        ticks: dict[float, str],
    ) -> None:
        super().__init__(figure.add_axes((0.07, place[0], 0.605, place[1])))
        axes = self.axes
        axes.set_title(title)
        axes.set(xlim=(-0.5, MAX_TOKENS - 0.5), ylim=(1, 0), yticks=[])
        axes.grid(False)
        axes.set_facecolor(NO_PATH)
        axes.tick_params(axis="x", length=0, pad=2)
        colours = WEIGHTS.with_extremes(bad=NO_PATH)
        self.matrix = self.image((1, 1), colours, *limits, extent=(-0.5, 0.5, 1, 0))
        scale = figure.add_axes((0.683, place[0], 0.008, place[1]))
        bar = figure.colorbar(self.matrix, cax=scale, ticks=list(ticks))
        bar.ax.set_yticklabels(ticks.values(), fontsize=8)
        bar.outline.set_visible(False)
        beside = {"ha": "right", "va": "center", "transform": axes.get_yaxis_transform()}
        self.names = [self.text(fontsize=9, **beside) for _ in range(MAX_LOOPS)]
        mark = axes.axvspan(0, 1, fill=False, edgecolor=ACCENT, linewidth=1.2, linestyle=":")
        self._mark, self._raw = self.moving(mark), b""

    def values(self, view: LoopView) -> np.ndarray:
        """What is coloured, [loops, time]; NaN is left grey."""
        raise NotImplementedError

    def show(self, view: LoopView) -> None:
        if view.raw != self._raw:
            self._name_bytes(view.raw)
        self.matrix.set_data(np.ma.masked_invalid(self.values(view)))
        self.matrix.set_extent((-0.5, len(view.raw) - 0.5, 1, 0))
        self._mark.set_x(view.token - 0.5)
        show_words(self.names, (f"loop {n + 1}" for n in range(view.loops)), [-0.008] * view.loops)

    def _name_bytes(self, raw: bytes) -> None:
        self._raw = raw
        self._mark.set_width(1)
        names = [visible(byte) for byte in raw]
        self.axes.set_xlim(-0.5, len(raw) - 0.5)
        self.axes.set_xticks(range(len(raw)), names, fontsize=8.5, family=MONOSPACE)


class InfluencePlot(LoopMap):
    """The share of influence of each byte; how far a path can lead, and how far most of it does."""

    def __init__(self, figure: Figure, place: tuple[float, float]) -> None:
        super().__init__(
            figure, place, "What its prediction rests on (share of influence)",
            (np.log10(SMALLEST_SHARE), 0.0), {-6: "≤1e-6", -4: "1e-4", -2: "1%", 0: "all"},
        )  # fmt: skip
        self._most = self.line(color=INK, linewidth=1.6, dashes=(2, 1.2))
        self.edge = self.line(color=ACCENT, linewidth=2)
        look = {"ha": "right", "va": "center", "fontsize": 8.5, "color": ACCENT}
        self.edge_words = [self.text(**look) for _ in range(MAX_LOOPS)]

    def values(self, view: LoopView) -> np.ndarray:
        share = np.where(view.share > 0, view.share, np.nan)
        return np.log10(np.maximum(share, SMALLEST_SHARE))

    def show(self, view: LoopView) -> None:
        super().show(view)
        steps = np.repeat(np.arange(view.loops + 1) / view.loops, 2)[1:-1]
        # Bytes before the first within reach; none where it is the first of the text.
        before = [view.token + 1 - reach if reach else 0 for reach in view.reach]
        ends = [b - 0.5 if b > 0 else np.nan for b in before]
        self.edge.set_data(np.repeat(ends, 2), steps)
        words = [f"{r} " if b > 0 else None for r, b in zip(view.reach, before, strict=True)]
        show_words(self.edge_words, words, ends)
        most = [view.token - view.distance(loop) - 0.5 for loop in range(view.loops)]
        self._most.set_data(np.repeat(most, 2), steps)


class ChancePlot(LoopMap):
    """The probability that each byte had, given those before it."""

    def __init__(self, figure: Figure, place: tuple[float, float]) -> None:
        title = "How likely each byte was, given those before it"
        super().__init__(figure, place, title, (0.0, 1.0), {0: "0", 0.5: "½", 1: "1"})

    def values(self, view: LoopView) -> np.ndarray:
        return np.pad(view.right, ((0, 0), (1, 0)), constant_values=np.nan)


class BestPlot(Plot):
    """The likeliest next bytes with their chances."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_title("Likeliest next bytes")
        axes.set(xlim=(-0.5, BEST - 0.5), ylim=(1, 0), yticks=[], xticks=[])
        axes.grid(False)
        # Up to 2, so that no chance is too dark for the words on it.
        self._chances = self.image((1, BEST), WEIGHTS, 0, 2, extent=(-0.5, BEST - 0.5, 1, 0))
        look = {"ha": "center", "va": "center", "fontsize": 8.8, "family": MONOSPACE}
        self._words = [self.text(**look) for _ in range(MAX_LOOPS)]

    def show(self, view: LoopView) -> None:
        self._chances.set_data(np.array([[chance for _, chance in row] for row in view.best]))
        cells = ([f"{byte} {chance:.0%}" for byte, chance in row] for row in view.best)
        words = ["".join(f"{cell:^9}" for cell in row) for row in cells]
        show_words(self._words, words, [(BEST - 1) / 2] * view.loops)


class LossPlot(Plot):
    """The mean loss of the text."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_title("Loss, nats per byte")
        axes.set(xlim=(0, 4), ylim=(1, 0), yticks=[])
        self._line = self.line(color=INK, marker="o", linewidth=1.4)
        self._words = [self.text(va="center", fontsize=9) for _ in range(MAX_LOOPS)]

    def show(self, view: LoopView) -> None:
        self._line.set_data(view.loss, middles(view.loops))
        show_words(self._words, [f"  {loss:.2f}" for loss in view.loss], view.loss)
        # The loss of a text that surprises the model has to fit too.
        set_limits(self.axes, x=(0, max(2.0, float(np.ceil(1.3 * view.loss.max())))))
