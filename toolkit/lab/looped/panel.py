"""A text in a looped model, loop by loop: influences on a prediction, and the prediction.

The reading of a text is cached, so that moving the token or the number of loops computes nothing
anew. Rows of the plots fill the axes for any number of loops: y runs from 0, the top, to 1.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit.figures import ACCENT, INK, WEIGHTS
from toolkit.figures.axes import set_limits
from toolkit.lab.kit.plot import Drag, Plot
from toolkit.lab.kit.text import MOST, TextView, back_to_most
from toolkit.lab.kit.view import Data
from toolkit.lab.looped import reader
from toolkit.looped import tokens_reached
from toolkit.measure.words import counted

BEST = 3
"""Likeliest bytes shown for each loop."""


@dataclasses.dataclass(frozen=True)
class LoopView(TextView):
    """The influences on one byte's prediction. Arrays have a row per displayed loop."""

    unit = "byte"
    reading: reader.Reading
    share: np.ndarray  # of the influence on the prediction, [loops, time]; 0 where no path leads
    reach: tuple[int | None, ...]  # bytes a path can lead from, itself included; None: all

    @property
    def loops(self) -> int:
        """Loops shown."""
        return len(self.reach)

    @property
    def held_out_loss(self) -> float:
        """Recorded after training: nats per byte on unseen text."""
        return self.reading.small.record["result"]["held_out_loss"]

    @functools.cached_property
    def losses(self) -> np.ndarray:
        """Nats of each byte but the first, [loops, time - 1]."""
        known, following = self.reading.log_probabilities, self.reading.raw[1:]
        return -known[: self.loops, np.arange(len(following)), [*following]]

    @property
    def loss(self) -> np.ndarray:
        """Mean over the text, nats per byte."""
        return self.losses.mean(axis=1)

    @property
    def chances(self) -> np.ndarray:
        """The probability of each byte given those before it, [loops, time]; NaN for the first."""
        return np.pad(np.exp(-self.losses), ((0, 0), (1, 0)), constant_values=np.nan)

    @functools.cached_property
    def best(self) -> list[list[tuple[str, float]]]:
        """The likeliest next bytes with their probabilities, the likeliest first."""
        rows = np.exp(self.reading.log_probabilities[: self.loops, self.token])
        best = np.argsort(-rows, axis=-1)[:, :BEST]
        return [
            [(reader.visible(int(byte)), float(row[byte])) for byte in bytes_]
            for row, bytes_ in zip(rows, best, strict=True)
        ]

    def distance(self, loop: int) -> int:
        """Bytes back within which `MOST` of the influence lies; 0 is the byte itself."""
        return back_to_most(self.share[loop], self.token)

    def data(self) -> Data:
        """A column per loop; a row per number of the loop, then one per byte of the text."""
        loops, ranks = range(self.loops), enumerate(("likeliest", "second", "third"))
        rows = [
            ("loss of the text, nats per byte", "", self.loss),
            ("reach in bytes, modelled", "", [reach or "all" for reach in self.reach]),
            (f"bytes back to {MOST:.0%} of influence", "", [self.distance(n) for n in loops]),
            *(
                (what, "", [row[n][part] for row in self.best])
                for n, rank in ranks
                for part, what in enumerate((f"{rank} next byte", "its chance"))
            ),
        ]
        for what, values in (("share of influence", self.share), ("chance it had", self.chances)):
            named = (f"{at} {byte}" for at, byte in enumerate(self.words, 1))
            rows += zip([what] * len(self.words), named, values.T, strict=True)
        what, byte, values = zip(*rows, strict=True)
        columns = {f"loop {n + 1}": [row[n] for row in values] for n in loops}
        return {"what": what, "byte": byte, **columns}

    def footnote(self) -> str:
        return (
            "Red line: as far as a path can lead (modelled), in bytes; grey beyond it. Dashed: "
            f"{MOST:.0%} of the influence lies to its right. Measured here."
        )

    def sentence(self) -> str:
        reach, small = self.reach[-1], self.reading.small
        can = f"{counted(reach, 'byte')}, itself included" if reach else "every byte before it"
        byte, chance = self.best[-1][0]
        caption = (
            f"{self.place_in_words}, after {counted(self.loops, 'loop')} of "
            f"“{small.config.pattern}”: the prediction can rest on {can}; {MOST:.0%} of the "
            f"influence comes from it and the {counted(self.distance(-1), 'byte')} before it. It "
            f"would write “{byte}” ({chance:.0%}). Mean loss of the text after each loop: "
            f"{', '.join(f'{loss:.2f}' for loss in self.loss)} nats per byte. Measured here; the "
            f"reach is modelled. Recorded after training: {self.held_out_loss:.2f} on unseen text."
        )
        if self.loops > small.config.loops:
            caption += f" Trained with {counted(small.config.loops, 'loop')}: more is new to it."
        return caption + self.left_out_in_words


def look(text: str, *, token: int, loops: int, **model: Any) -> LoopView:
    """Read a text as `read` does, and look back from byte `token`, from 1."""
    reading, given = reader.read(text, **model), reader.byte_looked_at(text, token)
    places = jnp.asarray(given["token"]), jnp.asarray(loops)
    moved = reader.influence(reading.small.model, reading.seen, *places, reading.switches)
    share = np.asarray(moved)[:loops, : len(reading.raw)]
    share = share / share.sum(1, keepdims=True)
    reach = (tokens_reached(dataclasses.replace(reading.config, loops=n + 1)) for n in range(loops))
    return LoopView(**given, reading=reading, share=share, reach=tuple(reach))


SMALLEST_SHARE = 1e-6
NO_PATH = "#eceff2"
MONOSPACE = "DejaVu Sans Mono"


class RowPlot(Plot):
    """A row per loop with words in its middle; the base of four plots."""

    def __init__(self, axes: Axes, title: str, **settings: Any) -> None:
        super().__init__(axes, title=title, ylim=(1, 0), yticks=[], **settings)

    def words(self, **look: Any) -> list[Any]:
        """Words for as many rows as there may be."""
        return [self.text(va="center", **look) for _ in range(reader.MAX_LOOPS)]

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
        first = np.array([view.token + 1 - (reach or reader.MAX_TOKENS) for reach in view.reach])
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


class LoopPanel(reader.TextPanel):
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
    opening_seconds = 13

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
    for pattern in reader.PATTERNS.values():
        look(
            reader.TEXT, token=1, loops=1, pattern=pattern, window=8, output_gate=False,
            residual_gate=True,
        )  # fmt: skip
