"""A text in a looped model: what a byte's prediction rests on, and what it is, loop by loop."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.text import Text

from toolkit.figures import ACCENT, INK, WEIGHTS
from toolkit.lab.kit.controls import Choice, Number, Words
from toolkit.lab.kit.panel import Panel
from toolkit.lab.looped.models import PATTERNS
from toolkit.lab.looped.reader import MAX_LOOPS, MAX_TOKENS
from toolkit.lab.looped.view import BEST, MOST, LoopView, look, visible

TEXT = "The class statement defines a class object. The class"
ON_OFF = {"on": True, "off": False}
SMALLEST_SHARE = 1e-6
NO_PATH = "#eceff2"
# Bottom and height of the two rows of plots, parts of the figure.
UPPER, LOWER = (0.545, 0.385), (0.125, 0.3)
MONOSPACE = "DejaVu Sans Mono"

TEXT_CONTROL = Words("Text", TEXT, f"Up to {MAX_TOKENS} bytes; press Enter")
TOKEN = Number("Byte", MAX_TOKENS, low=1, high=MAX_TOKENS, explanation="Whose prediction is traced")
LOOPS = Number(
    "Loops", 4, low=1, high=MAX_LOOPS, is_continuous=False,
    explanation="How often the layers run; trained with 4",
)  # fmt: skip
PATTERN = Choice("Layers", "window window", PATTERNS, explanation="A model trained for each")
WINDOW = Number(
    "Window (bytes)", 8, low=1, high=MAX_TOKENS,
    explanation="What a window layer sees, itself included; trained with 8",
)  # fmt: skip
OUTPUT_GATE = Choice(
    "Output gate", False, ON_OFF, explanation="The model trained with it, or the one without"
)
RESIDUAL_GATE = Choice(
    "Residual gate", True, ON_OFF, explanation="rho as trained, or switched off in that model"
)


@dataclass
class Rows:
    """One plot with a row a loop, the first on top; rows fill it whatever their number.

    Attributes:
        axes: y from 0, the top, to 1.
        names: "loop 1" and so on, beside the rows; empty for none.
    """

    axes: Axes
    names: list[Text]

    def place(self, loops: int) -> None:
        """Put the names beside the rows."""
        for loop, name in enumerate(self.names):
            name.set_visible(loop < loops)
            name.set_y((loop + 0.5) / loops)


class LoopPanel(Panel):
    """What a byte's prediction rests on and what it says, after each loop of a trained model.

    Attributes:
        text: what the model reads.
        token: the byte looked at, from 1.
        loops: how often the layers run.
        pattern: the layers, a value of `PATTERNS`.
        window: bytes a "window" layer sees.
        output_gate: the model trained with output gates, or the one without.
        residual_gate: rho as trained, or zero.
    """

    title = "What one byte sees, loop by loop"
    figure_size = (9.6, 5.6)

    text = TEXT_CONTROL
    token = TOKEN
    loops = LOOPS
    window = WINDOW
    pattern = PATTERN
    output_gate = OUTPUT_GATE
    residual_gate = RESIDUAL_GATE

    def __init__(self, **values: Any) -> None:
        # A program for each kind of layers: no menu waits for a compiler later.
        compile_ahead()
        super().__init__(**values)

    def compute(self, *, output_gate: bool, residual_gate: bool, **state: Any) -> LoopView:
        return look(has_output_gate=output_gate, has_residual_gate=residual_gate, **state)

    def data(self) -> dict[str, Any]:
        """The numbers now shown: share, reach, right, best and loss, a row a loop."""
        view = self.view
        return {name: getattr(view, name) for name in ("share", "reach", "right", "best", "loss")}

    def build(self, figure: Figure) -> list[Artist]:
        self._raw = b""
        self._reach, self._share = self._build_map(
            figure, UPPER, "What its prediction rests on (share of influence)",
            (np.log10(SMALLEST_SHARE), 0.0),
            ([-6, -4, -2, 0], ["≤1e-6", "1e-4", "1%", "all"]),
        )  # fmt: skip
        self._lens, self._right = self._build_map(
            figure, LOWER, "How likely each byte was, given those before it",
            (0.0, 1.0), ([0, 0.5, 1], ["0", "½", "1"]),
        )  # fmt: skip
        (self._edge,) = self._reach.axes.plot([], [], color=ACCENT, linewidth=2)
        (self._most,) = self._reach.axes.plot([], [], color=INK, linewidth=1.6, dashes=(2, 1.2))
        self._edges = [
            self._reach.axes.text(0, 0, "", ha="right", va="center", fontsize=8.5, color=ACCENT)
            for _ in range(MAX_LOOPS)
        ]
        self._marks = [
            rows.axes.axvspan(0, 1, fill=False, edgecolor=ACCENT, linewidth=1.2, linestyle=":")
            for rows in (self._reach, self._lens)
        ]
        self._build_best(figure.add_axes((0.765, UPPER[0], 0.225, UPPER[1])))
        self._build_loss(figure.add_axes((0.765, LOWER[0], 0.225, LOWER[1])))
        figure.text(
            0.07, 0.014,
            f"Red line: as far as a path can lead (modelled), in bytes; grey beyond it. Dashed: "
            f"{MOST:.0%} of the influence lies to its right. Measured here.", fontsize=9,
        )  # fmt: skip
        return [
            self._share, self._right, *self._marks, self._most, self._edge, *self._edges,
            self._best, *self._best_words, self._loss, *self._loss_words,
            *self._reach.names, *self._lens.names,
        ]  # fmt: skip

    def _build_map(self, figure, place, title, limits, ticks) -> tuple[Rows, AxesImage]:
        axes = figure.add_axes((0.07, place[0], 0.605, place[1]))
        axes.set_title(title)
        axes.set(xlim=(-0.5, MAX_TOKENS - 0.5), ylim=(1, 0), yticks=[])
        axes.grid(False)
        axes.set_facecolor(NO_PATH)
        axes.tick_params(axis="x", length=0, pad=2)
        colours = WEIGHTS.with_extremes(bad=NO_PATH)
        image = axes.imshow(
            np.zeros((1, 1)), cmap=colours, vmin=limits[0], vmax=limits[1], aspect="auto",
            interpolation="nearest", extent=(-0.5, 0.5, 1, 0),
        )  # fmt: skip
        bar = figure.colorbar(
            image, cax=figure.add_axes((0.683, place[0], 0.008, place[1])), ticks=ticks[0]
        )
        bar.ax.set_yticklabels(ticks[1], fontsize=8)
        bar.outline.set_visible(False)
        names = [
            axes.text(
                -0.008, 0.5, f"loop {loop + 1}", ha="right", va="center", fontsize=9,
                transform=axes.get_yaxis_transform(),
            )
            for loop in range(MAX_LOOPS)
        ]  # fmt: skip
        return Rows(axes, names), image

    def _build_best(self, axes: Axes) -> None:
        axes.set_title("Likeliest next bytes")
        axes.set(xlim=(-0.5, BEST - 0.5), ylim=(1, 0), yticks=[], xticks=[])
        axes.grid(False)
        # Up to 2, so that no chance is too dark for the words on it.
        self._best = axes.imshow(
            np.zeros((1, BEST)), cmap=WEIGHTS, vmin=0, vmax=2, aspect="auto",
            interpolation="nearest", extent=(-0.5, BEST - 0.5, 1, 0),
        )  # fmt: skip
        middle = (BEST - 1) / 2
        self._best_words = [
            axes.text(middle, 0, "", ha="center", va="center", fontsize=8.8, family=MONOSPACE)
            for _ in range(MAX_LOOPS)
        ]

    def _build_loss(self, axes: Axes) -> None:
        self._losses = axes
        axes.set_title("Mean loss, nats a byte")
        axes.set(xlim=(0, 4), ylim=(1, 0), yticks=[])
        (self._loss,) = axes.plot([], [], color=INK, marker="o", linewidth=1.4)
        self._loss_words = [axes.text(0, 0, "", va="center", fontsize=9) for _ in range(MAX_LOOPS)]

    def draw(self, view: LoopView) -> None:
        if view.raw != self._raw:
            self._name_bytes(view.raw)
        self._make_room(view)
        loops, count = view.loops, len(view.raw)
        middle = (np.arange(loops) + 0.5) / loops
        for rows in (self._reach, self._lens):
            rows.place(loops)
        with np.errstate(divide="ignore"):
            share = np.log10(view.share)
        share[np.isneginf(share)] = np.nan
        self._show(self._share, np.maximum(share, np.log10(SMALLEST_SHARE)), count)
        before = np.full((loops, 1), np.nan)
        self._show(self._right, np.concatenate([before, view.right], axis=1), count)
        for mark in self._marks:
            mark.set_x(view.token - 0.5)
        self._draw_reach(view, middle)
        self._draw_best(view, middle)
        self._loss.set_data(view.loss, middle)
        for loop, words in enumerate(self._loss_words):
            words.set_visible(loop < loops)
            if loop < loops:
                words.set_text(f"  {view.loss[loop]:.2f}")
                words.set_position((view.loss[loop], middle[loop]))

    @staticmethod
    def _show(image: AxesImage, values: np.ndarray, count: int) -> None:
        image.set_data(np.ma.masked_invalid(values))
        image.set_extent((-0.5, count - 0.5, 1, 0))

    def _draw_reach(self, view: LoopView, middle: np.ndarray) -> None:
        top = np.arange(view.loops + 1) / view.loops
        start = [view.token + 1 - reach if reach else 0 for reach in view.reach]
        seen = [max(s, 0) - 0.5 for s in start]
        is_inside = [s > 0 for s in start]
        edge_x = [x if inside else np.nan for x, inside in zip(seen, is_inside, strict=True)]
        self._edge.set_data(np.repeat(edge_x, 2), np.repeat(top, 2)[1:-1])
        for loop, words in enumerate(self._edges):
            is_shown = loop < view.loops and is_inside[loop]
            words.set_visible(is_shown)
            if is_shown:
                words.set_text(f"{view.reach[loop]} ")
                words.set_position((seen[loop], middle[loop]))
        most = [view.token - view.distance(loop) - 0.5 for loop in range(view.loops)]
        self._most.set_data(np.repeat(most, 2), np.repeat(top, 2)[1:-1])

    def _draw_best(self, view: LoopView, middle: np.ndarray) -> None:
        chances = np.array([[chance for _, chance in row] for row in view.best])
        self._best.set_data(chances)
        for loop, words in enumerate(self._best_words):
            words.set_visible(loop < view.loops)
            if loop < view.loops:
                cells = (f"{byte} {chance:.0%}" for byte, chance in view.best[loop])
                words.set_text("".join(f"{cell:^9}" for cell in cells))
                words.set_y(middle[loop])

    def _name_bytes(self, raw: bytes) -> None:
        self._raw = raw
        self.picture.forget_background()
        for rows in (self._reach, self._lens):
            rows.axes.set_xlim(-0.5, len(raw) - 0.5)
            rows.axes.set_xticks(
                range(len(raw)), [visible(byte) for byte in raw], fontsize=8.5, family=MONOSPACE
            )
        for mark in self._marks:
            mark.set_width(1)

    def _make_room(self, view: LoopView) -> None:
        """The loss of a text that surprises the model has to fit too."""
        right = max(2.0, float(np.ceil(1.3 * view.loss.max())))
        if self._losses.get_xlim()[1] != right:
            self._losses.set_xlim(0, right)
            self.picture.forget_background()

    def adjust(self, view: LoopView) -> None:
        self._control_widgets["token"].set_maximum(len(view.raw))


@functools.cache
def compile_ahead() -> None:
    """Read one text with every model, so that no menu waits for a compiler later.

    Cost:
        Two programs for each of two kinds of models: 10 seconds, once a process.
    """
    for pattern in PATTERNS.values():
        look(
            TEXT, token=1, loops=1, pattern=pattern, window=8, has_output_gate=False,
            has_residual_gate=True,
        )  # fmt: skip
