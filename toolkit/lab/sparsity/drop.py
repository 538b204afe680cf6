"""Sparse decoding of a long text: tokens read, tokens missed, and the cost."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.axes import Axes

from toolkit.experiments.sparse.model import HEADS, LAYERS
from toolkit.figures import ACCENT, FAINT, INK
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.played import PlayedPanel
from toolkit.lab.kit.plot import Drag, Plot
from toolkit.lab.kit.scene import Grid, Scene
from toolkit.lab.kit.view import Data, View
from toolkit.lab.sparsity import reading
from toolkit.measure.words import in_words

LISTED, TILES, ACROSS = 6, 256, 32


class Missed(NamedTuple):
    """A token that was not read, its share of the softmax, and its share of the output's error."""

    token: int
    mass: float
    error: float


def missed(layer: reading.Layer, question: int, head: int) -> tuple[list[Missed], list[Missed]]:
    """The tokens missed most, by mass and by error."""
    at = question, head
    tokens = np.flatnonzero(~layer.is_read[at])
    weights, parts = layer.weights[at][tokens], layer.parts[at][tokens]

    def first(order) -> list[Missed]:
        return [Missed(int(tokens[i]), float(weights[i]), float(parts[i])) for i in order]

    return first(reading.best(weights, LISTED)), first(reading.best(parts, LISTED))


@dataclass(frozen=True)
class DropView(View):
    """The tokens of a text that a system reads and misses."""

    system: str
    budget: int
    layer: int
    head: int
    question: int
    text: reading.Text
    chosen: reading.Layer
    # answers, dense: answers of the model that reads sparsely, and that reads everything
    answers: Int[np.ndarray, "questions"]
    dense: Int[np.ndarray, "questions"]
    # by_mass, by_error: tokens missed by the chosen head for the chosen question
    by_mass: list[Missed]
    by_error: list[Missed]
    kept: Float[np.ndarray, "questions"]  # recovered mass of the chosen layer and head [questions]

    @property
    def context(self) -> int:
        """Tokens of the text."""
        return len(self.text.tokens)

    @property
    def bytes_of(self) -> dict[str, int]:
        """Bytes that a head reads in one step, for the tokens of the chosen question."""
        row = 2 * self.chosen.out.shape[-1] * self.chosen.out.dtype.itemsize
        tokens = int(self.chosen.is_read[self.question, self.head].sum())
        full = row * (self.context + 1)
        return {"index": self.chosen.index_bytes, "keys and values": row * tokens, "full": full}

    def tiles(self) -> Float[np.ndarray, "questions tiles"]:
        """The heaviest token of each tile: its weight if it was read, minus that if not."""
        signs = np.where(self.chosen.is_read[:, self.head, :-1], 1.0, -1.0)
        signed = signs * self.chosen.weights[:, self.head, :-1]
        parts = signed.reshape(reading.QUESTIONS, TILES, -1)
        at = np.abs(parts).argmax(axis=-1)[..., None]
        return np.take_along_axis(parts, at, axis=-1)[..., 0]

    @property
    def finds(self) -> Bool[np.ndarray, "questions"]:
        """Whether the chosen head reads the answer, question by question."""
        at = np.arange(reading.QUESTIONS), self.head, self.text.places
        return self.chosen.is_read[at]

    def name(self, token: int) -> str:
        """A token's name and position."""
        return f"{reading.name_of(self.text.tokens[token])} at {token + 1:,}"

    def data(self) -> Data:
        none = ("–", float("nan"), float("nan"))
        columns = []
        for ranked in (self.by_mass, self.by_error):
            rows = [(self.name(token.token), token.mass, token.error) for token in ranked]
            columns += [*zip(*(rows + [none] * LISTED)[:LISTED], strict=True)]
        heads = "missed most", "mass (share)", "of the error (share)"
        others = "wrong most", "its mass (share)", "its part of the error (share)"
        return dict(zip((*heads, *others), columns, strict=True))

    def sentence(self) -> str:
        bytes_of, at = self.bytes_of, (self.question, self.head)
        read = bytes_of["index"] + bytes_of["keys and values"]
        right, dense = (int((x == self.text.answers).sum()) for x in (self.answers, self.dense))
        place = self.text.places[self.question]
        return (
            f"{self.system} reads {int(self.chosen.is_read[at].sum()):,} of {self.context + 1:,} "
            f"tokens and, with its index, {in_words(read / bytes_of['full'], 'share')} of the "
            f"bytes. Layer {self.layer + 1}, head {self.head + 1}, question {self.question + 1} "
            f"({reading.name_of(self.text.asked[self.question])}): it keeps "
            f"{in_words(float(self.chosen.mass[at]), 'share')} of the softmax, its output is off "
            f"by {in_words(float(self.chosen.error[at]), 'share')}, and the answer, "
            f"{self.name(place)}, is {'read' if self.finds[self.question] else 'missed'}. The "
            f"model finds {right} of {reading.QUESTIONS} needles; reading everything it finds "
            f"{dense}."
        )

    def footnote(self) -> str:
        documents = f"documents of {reading.DOCUMENT:,} tokens, each read densely on its own"
        return (
            f"Measured here on the retrieval model, in float32: {documents}; "
            "both layers decode sparsely."
        )


@reading.keeping_programs()
def drop_view(
    *, system: str, budget: int, context: int, layer: int, head: int, question: int
) -> DropView:
    """A system at a budget on a text; layer, head and question count from 1."""
    layers, answers = reading.read_sparsely(system, budget, context)
    dense = reading.dense_answers(context)
    layer, head, question = layer - 1, head - 1, question - 1
    by_mass, by_error = missed(layers[layer], question, head)
    return DropView(
        system, budget, layer, head, question, reading.read_text(context), layers[layer], answers,
        dense, by_mass, by_error, layers[layer].mass[:, head],
    )  # fmt: skip


_NUMBERS = [str(n + 1) for n in range(reading.QUESTIONS)]
_PARTS = {"index": "#b3245b", "keys and values": "#2f7fb8"}


class KeptPlot(Plot):
    """What the chosen head keeps of the softmax, question by question, and which answers."""

    drag = Drag("question", "x", -1)

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Softmax kept; o: the answer is read, x: missed", grid="y")
        axes.set(xlim=(-0.6, reading.QUESTIONS - 0.4), ylim=(0, 1.22), yticks=(0, 0.5, 1))
        axes.set(xticks=range(reading.QUESTIONS), xticklabels=_NUMBERS, yticklabels=("0", "½", "1"))
        axes.set_xlabel("question", labelpad=1, fontsize=9)
        self.bars = self.bars_at(range(reading.QUESTIONS), 0.7, color=_PARTS["keys and values"])
        self.read = self.marks(INK, "o", fillstyle="none", markersize=7)
        self.missed = self.marks(ACCENT, "x", markersize=8, markeredgewidth=2)
        self._frame = self.frame(0, 0, 0.9, 1.2, linewidth=1.6)

    def show(self, view: DropView) -> None:
        for bar, height in zip(self.bars, view.kept, strict=True):
            bar.set_height(height)
        for marks, places in ((self.read, view.finds), (self.missed, ~view.finds)):
            at = np.flatnonzero(places)
            marks.set_data(at, np.full(len(at), 1.11))
        self._frame.set_xy((view.question - 0.45, 0))


class MissedPlot(Plot):
    """The tokens missed most, with the share of each; the answer is bold."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Missed most by this question")
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.set(xlim=(0, 1), ylim=(LISTED - 0.5, -0.5), xticks=[], yticks=[])
        # One line for all bars and one text per row: every artist more takes a part of an update.
        width = 0.72 * 72 * axes.get_window_extent().height / axes.figure.dpi / LISTED
        self.bars = self.line(color="#f4b183", linewidth=width, solid_capstyle="butt")
        style: dict[str, Any] = {"fontsize": 8, "va": "center", "ha": "right"}
        self._labels = [self.text(-0.02, row, **style) for row in range(LISTED)]

    def show(self, view: DropView) -> None:
        listed = view.by_mass
        shares = [token.mass for token in listed]
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


def drop_scene(view: DropView) -> Scene:
    """Question by question, the heaviest token of every tile of the text: read, or missed."""
    tiles = view.tiles()
    size, notes = view.context // TILES, []
    for question, place in enumerate(view.text.places):
        does = "read" if view.finds[question] else "missed"
        notes.append((float(question), (
            f"Question {question + 1} ({reading.name_of(view.text.asked[question])}): the answer, "
            f"{view.name(int(place))}, is {does}; {view.kept[question]:.1%} of the softmax is kept."
        )))  # fmt: skip
    rows = TILES // ACROSS
    grid = Grid(
        f"The text, {size} tokens a cell: the heaviest of them is read (filled) or missed (hollow)",
        (0, 0, 1, 1), [f"{row * ACROSS * size:,}" for row in range(rows)], [""] * ACROSS,
        [*map(float, range(reading.QUESTIONS))], tiles.reshape(reading.QUESTIONS, rows, ACROSS),
    )  # fmt: skip
    return Scene(
        end=float(reading.QUESTIONS), words=view.sentence(), unit="questions", tall=0.2,
        grids=(grid,), notes=tuple(notes),
    )  # fmt: skip


class DropPanel(PlayedPanel):
    """Sparse decoding of a long text with needles: tokens read and missed.

    Example:
        >>> panel = DropPanel(system="quest", budget=64, context=1024)
        >>> int(panel.view.chosen.is_read[0, 0].sum())
        64
    """

    title = "Sparse decoding: what is read, what is missed, and what does it cost?"
    figure_size = (9.6, 4.1)
    opening_seconds = 3
    has_palette = True
    time_control = "question"

    system = Choice("System", "quest", {name: name for name in reading.SYSTEMS})
    budget = Number(
        "Budget", 128, low=64, high=8192, powers_of_two=True,
        explanation="Tokens per head and step, sinks and recent ones counted",
    )  # fmt: skip
    context = Choice("Context", 4096, {f"{n:,} tokens": n for n in reading.CONTEXTS})
    layer = Number("Layer", 1, low=1, high=LAYERS)
    head = Number("Head", 1, low=1, high=HEADS)
    question = Number("Question", 1, low=1, high=reading.QUESTIONS)

    compute = staticmethod(drop_view)
    scene = staticmethod(drop_scene)
    places = (
        (KeptPlot, (0.05, 0.47, 0.41, 0.42)),
        (MissedPlot, (0.7, 0.47, 0.28, 0.42)),
        (BytesPlot, (0.125, 0.17, 0.84, 0.11)),
    )
