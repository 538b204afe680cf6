"""Two memories read one sentence: the map of softmax beside the state of the delta rule."""

from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from toolkit.figures import ACCENT, SIGNED, WEIGHTS, look
from toolkit.lab.attention.reading_view import (
    KEY_SIZE,
    MAX_TOKENS,
    VALUE_SIZE,
    Reading,
    read_sentence,
)
from toolkit.lab.kit.controls import Number, Words
from toolkit.lab.kit.panel import Panel

SENTENCE = "the cat sat on the mat because the mat was warm and the cat was tired"
# Entries of the state rarely pass this; a fixed scale lets one see the state fade.
STATE_SCALE = 1.5


class ReadingPanel(Panel):
    """Attention map and recurrent state side by side, token by token.

    Attributes:
        text: the sentence.
        token: how many tokens have been read.
        window: how far softmax attention looks back.
        write_strength: beta of the gated delta net.
        keep: alpha of the gated delta net: what stays of the state at each token.
    """

    title = "Two memories read one sentence"
    figure_size = (9.6, 6.2)

    text = Words("Sentence", SENTENCE, "Up to 24 words; press Enter")
    token = Number(
        "Tokens read", 12, low=1, high=MAX_TOKENS, explanation="Move through the sentence"
    )
    window = Number(
        "Window", MAX_TOKENS, low=1, high=MAX_TOKENS, explanation="Tokens softmax may look back to"
    )
    write_strength = Number(
        "Write (beta)",
        1.0,
        low=0.0,
        high=1.0,
        step=0.05,
        explanation="1 replaces, 0 writes nothing",
    )
    keep = Number("Keep (alpha)", 0.95, low=0.5, high=1.0, step=0.01, explanation="1 never fades")

    def compute(self, *, text: str, token: int, window: int, **rates: float) -> Reading:
        return read_sentence(text, token=token, window=window, **rates)

    def build(self, figure: Figure) -> list[Artist]:
        grid = figure.add_gridspec(
            2, 2, height_ratios=(3.1, 1), left=0.085, right=0.925, top=0.93, bottom=0.135,
            wspace=0.2, hspace=0.2,
        )  # fmt: skip
        self._map, self._state_axes = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
        self._weights, self._recall = figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1])
        self._map.set_title("Softmax: a weight for every earlier token")
        self._state_axes.set_title(f"Gated delta net: one {KEY_SIZE} × {VALUE_SIZE} state")
        empty = np.zeros((MAX_TOKENS, MAX_TOKENS))
        picture: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}
        self._map_image = self._map.imshow(empty, cmap=WEIGHTS, vmin=0, vmax=1, **picture)
        self._state_image = self._state_axes.imshow(
            np.zeros((KEY_SIZE, VALUE_SIZE)), cmap=SIGNED, vmin=-STATE_SCALE, vmax=STATE_SCALE,
            **picture,
        )  # fmt: skip
        self._state_axes.set(xlabel="value channel", ylabel="key channel")
        for axes in (self._map, self._state_axes):
            axes.grid(False)
            axes.set_xticks([])
        self._state_axes.set_yticks([])
        for image, axes in ((self._map_image, self._map), (self._state_image, self._state_axes)):
            box = axes.get_position()
            bar = figure.add_axes((box.x1 + 0.008, box.y0, 0.01, box.height))
            figure.colorbar(image, cax=bar).ax.tick_params(labelsize=8, length=2)
        self._row_mark = Rectangle((0, 0), 1, 1, fill=False, edgecolor=ACCENT, linewidth=2)
        self._map.add_patch(self._row_mark)
        (self._pointer,) = self._map.plot(
            [-0.5], [0], marker=">", color=ACCENT, markersize=9, clip_on=False, linestyle="none"
        )
        self._weight_bars = self._bars(self._weights, "full", "weight in\nmarked row")
        self._recall_bars = self._bars(self._recall, "gdn", "returned\nby the state")
        self._words: tuple[str, ...] = ()
        images = [self._map_image, self._state_image]
        return [*images, self._row_mark, self._pointer, *self._weight_bars, *self._recall_bars]

    def _bars(self, axes: Axes, name: str, label: str) -> Any:
        axes.set(ylim=(0, 1.05), yticks=(0, 0.5, 1), ylabel=label)
        axes.grid(axis="x", visible=False)
        positions = np.arange(MAX_TOKENS)
        return axes.bar(
            positions, np.zeros(MAX_TOKENS), width=0.78, color=look(name).colour
        )  # fmt: skip

    def draw(self, view: Reading) -> None:
        # Blank is "not allowed to look"; a zero weight inside the window stays white too.
        self._map_image.set_data(view.weights)
        self._state_image.set_data(view.states[view.token])
        self._row_mark.set_bounds(-0.5, view.token - 0.5, view.token + 1, 1)
        self._pointer.set_ydata([view.token])
        heights = (
            (self._weight_bars, view.weights[view.token]),
            (self._recall_bars, np.clip(view.recall[view.token], 0, 1.05)),
        )
        for bars, row in heights:
            for position, bar in enumerate(bars):
                bar.set_height(row[position])
                bar.set_visible(position <= view.token)
        if view.words != self._words:
            self._name_tokens(view.words)

    def _name_tokens(self, words: tuple[str, ...]) -> None:
        self._words = words
        self.picture.forget_background()
        names = [word if len(word) <= 9 else word[:8] + "…" for word in words]
        limits = (-0.5, len(words) - 0.5)
        self._map.set(xlim=limits, ylim=limits[::-1])
        self._map.set_yticks(range(len(words)), names, fontsize=8.5)
        for axes in (self._weights, self._recall):
            axes.set_xlim(limits)
            axes.set_xticks(range(len(words)), names, fontsize=8.5, rotation=60, ha="right",
                            rotation_mode="anchor")  # fmt: skip

    def adjust(self, view: Reading) -> None:
        self._control_widgets["token"].set_maximum(len(view.words))
