"""The collectives of the compiled step and of the textbook, with their causes."""

import textwrap
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from toolkit.figures import ACCENT, FAINT, INK, look
from toolkit.lab.kit.controls import Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Data, View
from toolkit.lab.sharding.lanes import PASSES, Span, lanes
from toolkit.lab.sharding.mesh import MESH, SCHEME
from toolkit.lab.sharding.stored_steps import StoredCollective, compiled_with, stored_step
from toolkit.lab.sharding.textbook import Expected, textbook
from toolkit.measure import in_words
from toolkit.measure.words import counted

KINDS = ("all-reduce", "all-gather", "reduce-scatter")  # no other is in a stored step


@dataclass(frozen=True)
class StepView(View):
    """The collectives of one step, as compiled and as in the textbook."""

    mesh: str
    scheme: str
    collectives: tuple[StoredCollective, ...]
    expected: tuple[Expected, ...]
    spans: tuple[Span, ...]
    chosen: int  # index among `collectives`

    def compiled_of(self, kind: str) -> tuple[int, float]:
        """How many collectives of a kind run in the compiled step, and the bytes a device sends."""
        made = [collective for collective in self.collectives if collective.kind == kind]
        return sum(collective.count for collective in made), sum(
            collective.bytes_sent for collective in made
        )

    def expected_of(self, kind: str) -> tuple[int, float]:
        """The same of the textbook's."""
        made = [collective for collective in self.expected if collective.kind == kind]
        return len(made), sum(collective.bytes_sent for collective in made)

    def verdict(self, collective: StoredCollective) -> str:
        """The blame for a collective."""
        if not collective.change:
            return "needed: no single change lessens it (modelled)"
        removed = "removed" if collective.is_removed else "not removed"
        then = in_words(collective.bytes_sent_then, "bytes")
        return f"tried: {collective.change}: {removed}, {then} sent in all (compiled)"

    def description(self) -> tuple[str, str, str]:
        """Of the chosen collective: what it is, its cause, its blame."""
        if not self.collectives:
            return "Nothing is sent.", "", ""
        collective = self.collectives[self.chosen]
        size = in_words(collective.bytes_sent, "bytes")
        over = f"{collective.kind} over {'+'.join(collective.axes)}"
        head = f"{self.chosen + 1}: {over}, {size}, at {collective.source}"
        return head, collective.cause, self.verdict(collective)

    def data(self) -> Data:
        made, book = self.collectives, self.expected
        return {
            "": [*("compiled" for _ in made), *("textbook, modelled" for _ in book)],
            "collective": [collective.kind for collective in (*made, *book)],
            "runs": [*(collective.count for collective in made), *(1 for _ in book)],
            "sent per device (bytes)": [collective.bytes_sent for collective in (*made, *book)],
            "line": [*(collective.source for collective in made), *("" for _ in book)],
            "why": [
                *(collective.cause for collective in made),
                *(collective.purpose for collective in book),
            ],
            "blame": [*map(self.verdict, made), *("" for _ in book)],
        }

    def sentence(self) -> str:
        def all_of(rows) -> str:
            sent = in_words(sum(collective.bytes_sent for collective in rows), "bytes")
            return f"{len(rows)} collectives and {sent} sent per device"

        return (
            f"Scheme {self.scheme!r} on {self.mesh}: the compiled step has "
            f"{all_of(self.collectives)}, the textbook {all_of(self.expected)} (modelled). "
            + ". ".join(words for words in self.description() if words)
        )

    def footnote(self) -> str:
        return (
            f"Compiled: {compiled_with()}; XLA for CPUs sums in one all-reduce where others "
            "scatter. Textbook: modelled."
        )


def step_of(*, mesh: str, scheme: str, collective: int) -> StepView:
    """The step of a menu entry; `collective` counts from 1, and the last stands for all beyond."""
    step = stored_step(mesh, scheme)
    chosen = max(min(collective, len(step.collectives)) - 1, 0)
    spans = tuple(lanes(step.collectives))
    return StepView(mesh, scheme, step.collectives, tuple(textbook(step)), spans, chosen)


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


class StepPanel(Panel):
    """The communication of one block's compiled step, with time and cause, and that of the
    textbook.

    Example:
        >>> panel = StepPanel(mesh="1x8", scheme="tensor")
        >>> panel.view.compiled_of("all-reduce") == panel.view.expected_of("all-reduce")
        True
    """

    title = "What does the compiled step send?"
    figure_size = (9.6, 5.0)

    mesh = MESH
    scheme = SCHEME
    collective = Number(
        "Collective", 1, low=1, high=MOST_COLLECTIVES, explanation="Told in words below the lanes",
        maximum=lambda view: max(len(view.collectives), 1),
    )  # fmt: skip

    def compute(self, **state: Any) -> StepView:
        return step_of(**state)

    def plots(self, figure: Figure) -> list[Plot]:
        return [
            KindsPlot(figure.add_axes((0.125, 0.62, 0.855, 0.29))),
            LanesPlot(figure.add_axes((0.125, 0.36, 0.855, 0.155))),
            CausePlot(figure.add_axes((0.02, 0.08, 0.96, 0.22))),
        ]
