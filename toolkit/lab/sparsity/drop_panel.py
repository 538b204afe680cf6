"""Sparse decoding of a long text: tokens read, tokens missed, and the cost."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit.experiments.sparse.model import HEADS, LAYERS
from toolkit.figures import ACCENT, FAINT, INK, SIGNED, WEIGHTS
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.sparsity.drop_view import LISTED, TILES, DropView, Missed, drop_view
from toolkit.lab.sparsity.reading import CONTEXTS, QUESTIONS, SYSTEMS
from toolkit.measure.words import in_words

_ROWS = [f"layer {n + 1}, head {h + 1}" for n in range(LAYERS) for h in range(HEADS)]
_NUMBERS = [str(n + 1) for n in range(QUESTIONS)]
_READ = 0.12  # a tile whose heaviest token was read is never quite white
_PARTS = {"index": "#b3245b", "keys and values": "#2f7fb8"}


class TilePlot(Plot):
    """All tokens of the text as tiles, a row per question: blue if read, red if missed."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, grid="")
        axes.set_ylabel("question", fontsize=9)
        axes.set_yticks(range(QUESTIONS), _NUMBERS, fontsize=8)
        axes.tick_params(length=0)
        axes.set_xticks(np.linspace(-0.5, TILES - 0.5, 5))
        self.image_of = self.image((QUESTIONS, TILES), SIGNED, -1, 1)
        self.answers = self.marks(INK, "o", fillstyle="none", markersize=8, markeredgewidth=1.1)
        self._row = self.line(color=ACCENT, linewidth=1.4, clip_on=False)
        self._context = 0

    def show(self, view: DropView) -> None:
        tiles = view.tiles()
        strength = np.sqrt(np.abs(tiles))
        # The map of signed numbers is blue below zero.
        shown = np.where(tiles > 0, -(_READ + (1 - _READ) * strength), strength)
        self.image_of.set_data(shown)
        size = view.context // TILES
        self.answers.set_data(view.text.places // size, range(QUESTIONS))
        top, bottom, left, right = (view.question - 0.5, view.question + 0.5, -0.5, TILES - 0.5)
        self._row.set_data([left, right, right, left, left], [top, top, bottom, bottom, top])
        if self._context != view.context:  # new words on the axes draw the whole figure anew
            self._context = view.context
            self.axes.set_title(
                f"Read (blue) or missed (red): the heaviest token of every {size} tokens; "
                "circles: the answers", fontsize=10.5,
            )  # fmt: skip
            words = [f"{round(view.context * part / 4):,}" for part in range(5)]
            self.axes.set_xticklabels(words, fontsize=8)


class MissedPlot(Plot):
    """The tokens missed most, with the share of each; the answer is marked."""

    def __init__(self, axes: Axes, title: str, by: str) -> None:
        super().__init__(axes)
        self._by = by
        axes.set_title(title, fontsize=10)
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.set(xlim=(0, 1), ylim=(LISTED - 0.5, -0.5), xticks=[], yticks=[])
        # One line for all bars and one text per row: every artist more takes a part of an update.
        width = 0.72 * 72 * axes.get_window_extent().height / axes.figure.dpi / LISTED
        self.bars = self.line(color="#f4b183", linewidth=width, solid_capstyle="butt")
        style: dict[str, Any] = {"fontsize": 8, "va": "center", "ha": "right"}
        self._labels = [self.text(-0.02, row, **style) for row in range(LISTED)]

    def show(self, view: DropView) -> None:
        listed: list[Missed] = getattr(view, self._by)
        shares = [max(token.mass if self._by == "by_mass" else token.error, 0) for token in listed]
        ends = np.array(shares) / max([*shares, 1e-9])
        rows = np.arange(len(shares))
        x = np.stack([0 * ends, ends, np.full(len(ends), np.nan)], axis=1)
        self.bars.set_data(x.ravel(), np.repeat(rows, 3))
        answer = view.text.places[view.question]
        for row, label in enumerate(self._labels):
            is_there = row < len(listed)
            words = is_there and f"{view.name(listed[row].token)}: {in_words(shares[row], 'share')}"
            label.set_text(words or "")
            is_answer = is_there and listed[row].token == answer
            label.set_fontweight("bold" if is_answer else "normal")


class MapPlot(Plot):
    """A share by layer, head and question, as colour and as height; the chosen one is framed."""

    def __init__(self, axes: Axes, title: str, of: str) -> None:
        super().__init__(axes)
        self._of = of
        axes.set_title(title, fontsize=10)
        axes.grid(False)
        axes.tick_params(length=0)
        axes.set_xticks(range(QUESTIONS), _NUMBERS, fontsize=8)
        axes.set_yticks(range(len(_ROWS)), _ROWS if of == "kept" else [], fontsize=8)
        self.image_of = self.image((len(_ROWS), QUESTIONS), WEIGHTS, 0, 1)
        # The number once more, as a height: a text per cell would take half of an update.
        self.levels = self.line(color="#e07b39", linewidth=1.6)
        self._frame = self.line(color=ACCENT, linewidth=1.6)

    def show(self, view: DropView) -> None:
        shares = np.minimum(getattr(view, self._of), 1)
        self.image_of.set_data(shares)
        rows, columns = np.indices(shares.shape)
        x = np.stack([columns - 0.3, columns + 0.3, np.full(shares.shape, np.nan)], axis=-1)
        self.levels.set_data(x.ravel(), np.repeat((rows + 0.42 - 0.84 * shares).ravel(), 3))
        x, y = view.question, HEADS * view.layer + view.head
        self._frame.set_data(
            x + np.array([-0.5, 0.5, 0.5, -0.5, -0.5]), y + np.array([-0.5, -0.5, 0.5, 0.5, -0.5])
        )


class BytesPlot(Plot):
    """Bytes of a step against reading everything, those of the index with them."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, grid="", xlim=(0, 1), ylim=(1.6, -0.6), xticks=[])
        axes.spines[:].set_visible(False)
        axes.set_title("Bytes read per head and step", fontsize=10)
        axes.set_yticks((0, 1), ("everything", "this system"), fontsize=8)
        axes.tick_params(length=0)
        axes.barh(0, 1, 0.7, color="#cfd6dc", edgecolor=FAINT)
        self.bars = {
            name: self.moving(
                axes.barh(1, 0, 0.7, color=colour, edgecolor=FAINT, label=name, hatch=hatch)[0]
            )
            for (name, colour), hatch in zip(_PARTS.items(), ("//", ""), strict=True)
        }
        self._full = self.text(0.01, 0, fontsize=8.5, va="center")
        self._read = self.text(0, 1, fontsize=8.5, va="center")
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.02), ncols=2, fontsize=8)

    def show(self, view: DropView) -> None:
        bytes_of = view.bytes_of
        full, left = bytes_of["full"], 0.0
        for name, bar in self.bars.items():
            bar.set(x=left, width=bytes_of[name] / full)
            left += bytes_of[name] / full
        self._full.set_text(in_words(full, "bytes"))
        parts = " + ".join(in_words(bytes_of[name], "bytes") for name in _PARTS)
        is_wide = left > 0.6
        self._read.set(
            text=f"{parts} = {in_words(left, 'share')}", x=0.01 if is_wide else left + 0.01,
            color="white" if is_wide else INK,
        )  # fmt: skip


class DropPanel(Panel):
    """Sparse decoding of a long text with needles: tokens read and missed.

    Example:
        >>> panel = DropPanel(system="quest", budget=64, context=1024)
        >>> int(panel.view.chosen.is_read[0, 0].sum())
        64
    """

    title = "Sparse decoding: what is read, what is missed, and what does it cost?"
    figure_size = (9.6, 7.0)
    has_palette = True

    system = Choice("System", "quest", {name: name for name in SYSTEMS})
    budget = Number(
        "Budget", 128, low=64, high=8192, powers_of_two=True,
        explanation="Tokens per head and step, sinks and recent ones counted",
    )  # fmt: skip
    context = Choice("Context", 4096, {f"{n:,} tokens": n for n in CONTEXTS})
    layer = Number("Layer", 1, low=1, high=LAYERS)
    head = Number("Head", 1, low=1, high=HEADS)
    question = Number("Question", 1, low=1, high=QUESTIONS)

    def compute(self, **state: Any) -> DropView:
        return drop_view(**state)

    def plots(self, figure: Figure) -> list[Plot]:
        return [
            TilePlot(figure.add_axes((0.065, 0.765, 0.9, 0.175))),
            MissedPlot(figure.add_axes((0.215, 0.455, 0.265, 0.225)), "Missed most", "by_mass"),
            MissedPlot(figure.add_axes((0.7, 0.455, 0.265, 0.225)), "Most wrong", "by_error"),
            MapPlot(figure.add_axes((0.125, 0.26, 0.38, 0.13)), "Softmax kept, 0 to 100%", "kept"),
            MapPlot(figure.add_axes((0.585, 0.26, 0.38, 0.13)), "Error, 0 to 100%", "errors"),
            BytesPlot(figure.add_axes((0.125, 0.1, 0.84, 0.065))),
        ]
