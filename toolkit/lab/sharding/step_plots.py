"""The plots of `StepPanel`: collectives by kind, the step as two lanes, and a cause in words."""

import textwrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from toolkit.figures import ACCENT, FAINT, INK, look
from toolkit.lab.kit.plot import Plot
from toolkit.lab.sharding.lanes import PASSES
from toolkit.lab.sharding.step_view import KINDS, StepView
from toolkit.measure import in_words
from toolkit.measure.words import counted

LANES = ("compute", "collectives")
MOST_COLLECTIVES = 8
_LETTERS = 128  # in a line of words


class KindsPlot(Plot):
    """Bytes that a device sends and the runs, by kind: compiled above, textbook below."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Sent by each device in one step", grid="")
        self.name_rows(KINDS)
        # Shares of the longest: limits that stay make a redraw cheap.
        axes.set(xticks=[], xlim=(0, 1.3), ylim=(len(KINDS) - 0.4, -0.6))
        axes.spines["bottom"].set_visible(False)
        compiled: dict[str, Any] = {"color": look("full").colour, "label": "compiled"}
        book: dict[str, Any] = {
            "color": "white",
            "edgecolor": INK,
            "hatch": "//",
            "label": "textbook (modelled)",
        }
        self.bars = []
        for offset, style in ((-0.21, compiled), (0.21, book)):
            bars = axes.barh([at + offset for at in range(len(KINDS))], 0, 0.36, **style)
            self.bars.append(list(map(self.moving, bars)))
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2)
        self._words = [
            [self.text(0, at + offset, fontsize=9, va="center") for at in range(len(KINDS))]
            for offset in (-0.21, 0.21)
        ]

    def show(self, view: StepView) -> None:
        found = [list(map(of, KINDS)) for of in (view.compiled_of, view.expected_of)]
        most = max(1.0, *(sent for side in found for _, sent in side))
        for side, bars, words in zip(found, self.bars, self._words, strict=True):
            for (count, sent), bar, word in zip(side, bars, words, strict=True):
                bar.set_width(sent / most)
                label = f"{counted(count, 'run')}, {in_words(sent, 'bytes')}" if count else "none"
                word.set(text=label, x=sent / most + 0.01)


class LanesPlot(Plot):
    """Compute and collectives one after the other; the chosen collective is framed."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="The step in time (modelled, nothing overlaps)", grid="")
        self.name_rows(LANES)
        axes.set(xticks=[], xlim=(0, 1), ylim=(len(LANES) - 0.5, -0.5))
        axes.set_xlabel("time", loc="right", fontsize=9)
        self.boxes = [
            self.moving(axes.add_patch(Rectangle((0, 0), 1, 0.7)))
            for _ in range(len(PASSES) + MOST_COLLECTIVES)
        ]
        look = {"fontsize": 9, "ha": "center", "va": "center"}
        self._words = [self.text(**look) for _ in self.boxes]

    def show(self, view: StepView) -> None:
        total = sum(span.length for span in view.spans)
        for artist in (*self.boxes, *self._words):
            artist.set_visible(False)
        for box, words, span in zip(self.boxes, self._words, view.spans, strict=False):
            row, is_chosen = LANES.index(span.lane), span.name == str(view.chosen + 1)
            start, length = span.start / total, span.length / total
            box.set_bounds(start, row - 0.35, length, 0.7)
            is_compute = span.lane == "compute"
            box.set(
                visible=True, facecolor="#eef1f4" if is_compute else "#a8cfe8",
                edgecolor=ACCENT if is_chosen else FAINT, linewidth=2.2 if is_chosen else 0.8,
                zorder=2 if is_chosen else 1,
            )  # fmt: skip
            # What is too short for its number has it above, and only when it is the chosen one.
            is_short = length < 0.02
            words.set(
                visible=is_chosen or not is_short, text=span.name, x=start + length / 2,
                y=row - (0.47 if is_short else 0), fontweight="bold" if is_chosen else "normal",
            )  # fmt: skip


class CausePlot(Plot):
    """The chosen collective in words: what it is, its cause, its blame."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_axis_off()
        look = {"va": "top", "transform": axes.transAxes}
        self._head = self.text(0, 1.0, fontweight="bold", fontsize=10.5, **look)
        self._body = self.text(0, 0.72, fontsize=9, linespacing=1.35, **look)

    def show(self, view: StepView) -> None:
        head, *others = view.description()
        self._head.set_text(head)
        lines = [line for words in others for line in textwrap.wrap(words, _LETTERS)]
        self._body.set_text("\n".join(lines))
