"""One sentence in two memories: the weights of softmax attention and the state of the delta
rule."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit.figures import ACCENT, SIGNED, WEIGHTS, look
from toolkit.figures.axes import set_limits
from toolkit.lab.attention.reading_view import (
    KEY_SIZE,
    MAX_TOKENS,
    RETURNED,
    VALUE_SIZE,
    WEIGHT,
    Reading,
    read_sentence,
)
from toolkit.lab.kit.controls import Number, Words
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot

SENTENCE = "the cat sat on the mat because the mat was warm and the cat was tired"
# Entries of the state rarely exceed this; a fixed scale shows the decay.
STATE_SCALE = 1.5


class ReadingPanel(Panel):
    """Attention map and recurrent state side by side, token by token.

    Example:
        >>> panel = ReadingPanel(text="the cat sat on the mat", token=5)
        >>> panel.keep = 0.8
        >>> panel.data()["word"]
        ('the', 'cat', 'sat', 'on', 'the')
    """

    title = "Two memories read one sentence"
    figure_size = (9.6, 6.2)

    text = Words("Sentence", SENTENCE, "Up to 24 words; press Enter")
    token = Number(
        "Tokens read", 12, low=1, high=MAX_TOKENS, explanation="Move through the sentence",
        maximum=lambda view: len(view.words),
    )  # fmt: skip
    window = Number(
        "Window", MAX_TOKENS, low=1, high=MAX_TOKENS, explanation="Tokens softmax may look back to"
    )
    write_strength = Number(
        "Write (beta)", 1.0, low=0.0, high=1.0, step=0.05,
        explanation="1 replaces, 0 writes nothing",
    )  # fmt: skip
    keep = Number("Keep (alpha)", 0.95, low=0.5, high=1.0, step=0.01, explanation="1 never forgets")

    def compute(self, *, text: str, token: int, window: int, **rates: float) -> Reading:
        return read_sentence(text, token=token, window=window, **rates)

    def plots(self, figure: Figure) -> list[Plot]:
        grid = figure.add_gridspec(
            2, 2, height_ratios=(3.1, 1), left=0.085, right=0.925, top=0.93, bottom=0.135,
            wspace=0.2, hspace=0.2,
        )  # fmt: skip
        weights, state, weight, recall = (figure.add_subplot(place) for place in grid)
        return [
            WeightMap(weights),
            StateMap(state),
            BarPlot(weight, WEIGHT, "full", "weight in\nmarked row"),
            BarPlot(recall, RETURNED, "gdn", "returned\nby the state"),
        ]


class MatrixPlot(Plot):
    """A matrix with a scale of colours beside it; the base of two plots."""

    def __init__(self, axes: Axes, matrix: tuple[Any, ...], **settings: Any) -> None:
        super().__init__(axes, grid="", xticks=[], yticks=[], **settings)
        self.matrix = self.image(*matrix)
        self.scale_beside(self.matrix, 0.008, 0.01).ax.tick_params(labelsize=8, length=2)


class WeightMap(MatrixPlot):
    """The softmax weights of every token, the row of the one now read marked."""

    def __init__(self, axes: Axes) -> None:
        title, shape = "Softmax: a weight for every earlier token", (MAX_TOKENS, MAX_TOKENS)
        super().__init__(axes, (shape, WEIGHTS, 0, 1), title=title)
        self._row = self.frame(0, 0, 1, 1, linewidth=2)
        self._pointer = self.marks(ACCENT, ">", markersize=9, clip_on=False)

    def show(self, view: Reading) -> None:
        # Blank is "not allowed to look"; a zero weight inside the window stays white too.
        self.matrix.set_data(view.weights)
        self._row.set_bounds(-0.5, view.token - 0.5, view.token + 1, 1)
        self._pointer.set_data([-0.5], [view.token])
        self.name_places("y", view.words, fontsize=8.5)
        set_limits(self.axes, x=(-0.5, len(view.words) - 0.5))


class StateMap(MatrixPlot):
    """The state of the gated delta net after the token now read."""

    def __init__(self, axes: Axes) -> None:
        title = f"Gated delta net: one {KEY_SIZE} × {VALUE_SIZE} state"
        matrix = (KEY_SIZE, VALUE_SIZE), SIGNED, -STATE_SCALE, STATE_SCALE
        labels = {"xlabel": "value channel", "ylabel": "key channel"}
        super().__init__(axes, matrix, title=title, **labels)

    def show(self, view: Reading) -> None:
        self.matrix.set_data(view.states[view.token])


class BarPlot(Plot):
    """One column of the data, a bar per token."""

    def __init__(self, axes: Axes, column: str, name: str, label: str) -> None:
        super().__init__(axes, grid="y", ylim=(0, 1.05), yticks=(0, 0.5, 1), ylabel=label)
        self._column = column
        bars = axes.bar(range(MAX_TOKENS), 0, width=0.78, color=look(name).colour)
        self._bars = [*map(self.moving, bars)]

    def show(self, view: Reading) -> None:
        heights = np.zeros(MAX_TOKENS)
        heights[: view.token + 1] = np.clip(view.data()[self._column], 0, 1.05)
        for bar, height in zip(self._bars, heights, strict=True):
            bar.set_height(height)
        self.name_places(
            "x", view.words, fontsize=8.5, rotation=60, ha="right", rotation_mode="anchor"
        )
