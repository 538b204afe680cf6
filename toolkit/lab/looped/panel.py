"""A text in a looped model, loop by loop: influences on a prediction, and the prediction.

Rows of the plots fill the axes for any number of loops: y runs from 0, the top, to 1.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit.figures import ACCENT, INK, WEIGHTS
from toolkit.figures.axes import set_limits
from toolkit.lab.kit.controls import Choice, Number, Words
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Drag, Plot
from toolkit.lab.looped.models import PATTERNS
from toolkit.lab.looped.reader import MAX_LOOPS, MAX_TOKENS
from toolkit.lab.looped.view import BEST, LoopView, look

SMALLEST_SHARE = 1e-6
NO_PATH = "#eceff2"
MONOSPACE = "DejaVu Sans Mono"


class RowPlot(Plot):
    """A row per loop with words in its middle; the base of four plots."""

    def __init__(self, axes: Axes, title: str, **settings: Any) -> None:
        super().__init__(axes, title=title, ylim=(1, 0), yticks=[], **settings)

    def words(self, **look: Any) -> list[Any]:
        """Words for as many rows as there may be."""
        return [self.text(va="center", **look) for _ in range(MAX_LOOPS)]

    def write(self, texts: list[Any], words: Sequence[str], x: Any) -> None:
        """Write each row's words at x; rows that are not there have none."""
        for row, text in enumerate(texts):
            is_there = row < len(words)
            text.set_text(words[row] if is_there else "")
            text.set_position((x[row] if is_there else 0, (row + 0.5) / len(words)))


class LoopMap(RowPlot):
    """A colour for each loop and byte, with the byte looked at marked; the base of two plots."""

    def __init__(
        self, axes: Axes, title: str, limits: tuple[float, float], ticks: dict[float, str]
    ) -> None:
        super().__init__(axes, title, grid="", facecolor=NO_PATH)
        axes.tick_params(axis="x", length=0, pad=2)
        colours = WEIGHTS.with_extremes(bad=NO_PATH)
        self.matrix = self.image((1, 1), colours, *limits, extent=(-0.5, 0.5, 1, 0))
        bar = self.scale_beside(self.matrix, 0.008, 0.008, ticks=list(ticks))
        bar.ax.set_yticklabels(ticks.values(), fontsize=8)
        bar.outline.set_visible(False)
        self.names = self.words(fontsize=9, ha="right", transform=axes.get_yaxis_transform())
        mark = axes.axvspan(0, 1, fill=False, edgecolor=ACCENT, linewidth=1.2, linestyle=":")
        self._mark = self.moving(mark)

    def values(self, view: LoopView) -> np.ndarray:
        """What is coloured, [loops, time]; NaN is left grey."""
        raise NotImplementedError

    def show(self, view: LoopView) -> None:
        self.name_places("x", view.words, fontsize=8.5, family=MONOSPACE)
        self.matrix.set_data(np.ma.masked_invalid(self.values(view)))
        self.matrix.set_extent((-0.5, len(view.words) - 0.5, 1, 0))
        self._mark.set_x(view.token - 0.5)
        names = [f"loop {n + 1}" for n in range(view.loops)]
        self.write(self.names, names, [-0.008] * view.loops)


class InfluencePlot(LoopMap):
    """The share of influence of each byte; how far a path can lead, and how far most of it does."""

    drag = Drag("token", "x", -1)

    def __init__(self, axes: Axes) -> None:
        super().__init__(
            axes, "What its prediction rests on (share of influence)",
            (np.log10(SMALLEST_SHARE), 0.0), {-6: "≤1e-6", -4: "1e-4", -2: "1%", 0: "all"},
        )  # fmt: skip
        self._most = self.line(color=INK, linewidth=1.6, dashes=(2, 1.2))
        self.edge = self.line(color=ACCENT, linewidth=2)
        self.edge_words = self.words(ha="right", fontsize=8.5, color=ACCENT)

    def values(self, view: LoopView) -> np.ndarray:
        share = np.where(view.share > 0, view.share, np.nan)
        return np.log10(np.maximum(share, SMALLEST_SHARE))

    def show(self, view: LoopView) -> None:
        super().show(view)
        steps = np.repeat(np.arange(view.loops + 1) / view.loops, 2)[1:-1]
        # The first byte within reach; the line ends where that is the first of the text.
        first = np.array([view.token + 1 - (reach or MAX_TOKENS) for reach in view.reach])
        is_inside = first > 0
        edge = np.repeat(np.where(is_inside, first - 0.5, np.nan), 2)
        if is_inside.any() and not is_inside.all():
            edge[2 * is_inside.sum()] = -0.5
        self.edge.set_data(edge, steps)
        words = [f"{r} " if is_in else "" for r, is_in in zip(view.reach, is_inside, strict=True)]
        self.write(self.edge_words, words, first - 0.5)
        most = [view.token - view.distance(loop) - 0.5 for loop in range(view.loops)]
        self._most.set_data(np.repeat(most, 2), steps)


class ChancePlot(LoopMap):
    """The probability that each byte had, given those before it."""

    def __init__(self, axes: Axes) -> None:
        title = "How likely each byte was, given those before it"
        super().__init__(axes, title, (0.0, 1.0), {0: "0", 0.5: "½", 1: "1"})

    def values(self, view: LoopView) -> np.ndarray:
        return view.chances


class BestPlot(RowPlot):
    """The likeliest next bytes with their chances."""

    def __init__(self, axes: Axes) -> None:
        limits = (-0.5, BEST - 0.5)
        super().__init__(axes, "Likeliest next bytes", grid="", xlim=limits, xticks=[])
        # Up to 2, so that no chance is too dark for the words on it.
        self._chances = self.image((1, BEST), WEIGHTS, 0, 2, extent=(*limits, 1, 0))
        self.bytes = self.words(ha="center", fontsize=8.8, family=MONOSPACE)

    def show(self, view: LoopView) -> None:
        self._chances.set_data(np.array([[chance for _, chance in row] for row in view.best]))
        cells = ([f"{byte} {chance:.0%}" for byte, chance in row] for row in view.best)
        words = ["".join(f"{cell:^9}" for cell in row) for row in cells]
        self.write(self.bytes, words, [(BEST - 1) / 2] * view.loops)


class LossPlot(RowPlot):
    """The mean loss of the text."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, "Loss, nats per byte")
        self._line = self.line(color=INK, marker="o", linewidth=1.4)
        self.losses = self.words(fontsize=9)

    def show(self, view: LoopView) -> None:
        self._line.set_data(view.loss, (np.arange(view.loops) + 0.5) / view.loops)
        self.write(self.losses, [f"  {loss:.2f}" for loss in view.loss], view.loss)
        # The loss of a text that surprises the model has to fit too.
        set_limits(self.axes, x=(0, max(2.0, float(np.ceil(1.3 * view.loss.max())))))


TEXT = "The class statement defines a class object. The class"
ON_OFF = {"on": True, "off": False}


class TextPanel(Panel):
    """The controls of both panels: a text, a byte of it, and the model that reads it."""

    text = Words("Text", TEXT, f"Up to {MAX_TOKENS} bytes; press Enter")
    token = Number(
        "Byte", MAX_TOKENS, low=1, high=MAX_TOKENS, maximum=lambda view: len(view.words),
        explanation="Whose prediction is traced",
    )  # fmt: skip
    loops = Number(
        "Loops", 4, low=1, high=MAX_LOOPS, is_continuous=False,
        explanation="How often the layers run; trained with 4",
    )  # fmt: skip
    window = Number(
        "Window (bytes)", 8, low=1, high=MAX_TOKENS,
        explanation="What a window layer sees, itself included; trained with 8",
    )  # fmt: skip
    pattern = Choice("Layers", "window window", PATTERNS, explanation="A model trained for each")
    output_gate = Choice(
        "Output gate", False, ON_OFF, explanation="The model trained with it, or the one without"
    )
    residual_gate = Choice(
        "Residual gate", True, ON_OFF, explanation="rho as trained, or switched off in that model"
    )


class LoopPanel(TextPanel):
    """The influences on a byte's prediction, and the prediction, after each loop of a trained
    model.

    Example:
        >>> panel = LoopPanel(pattern="window window", window=4)
        >>> panel.loops = 2
        >>> panel.view.reach
        (7, 13)
    """

    title = "What one byte sees, loop by loop"
    figure_size = (9.6, 5.6)

    def __init__(self, **values: Any) -> None:
        # Compiles for each kind of layer, so that no menu waits later.
        compile_ahead()
        super().__init__(**values)

    compute = staticmethod(look)

    def plots(self, figure: Figure) -> list[Plot]:
        places = {"left": 0.07, "right": 0.982, "top": 0.93, "bottom": 0.125}
        grid = figure.add_gridspec(
            2, 2, **places, width_ratios=(0.605, 0.217), height_ratios=(0.385, 0.3),
            wspace=0.22, hspace=0.35,
        )  # fmt: skip
        plots = (InfluencePlot, BestPlot, ChancePlot, LossPlot)
        return [plot(figure.add_subplot(grid[place])) for place, plot in enumerate(plots)]


@functools.cache
def compile_ahead() -> None:
    """Read one text with every model, so that no menu waits for a compiler later: 10 s, once."""
    for pattern in PATTERNS.values():
        look(
            TEXT, token=1, loops=1, pattern=pattern, window=8, output_gate=False,
            residual_gate=True,
        )  # fmt: skip
