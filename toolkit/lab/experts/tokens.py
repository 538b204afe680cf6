"""A text coloured by the experts of its bytes, their loads, and what a capacity drops."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from toolkit.experts import route
from toolkit.figures import ACCENT, FAINT, INK
from toolkit.lab.experts.small_mixture import (
    CHOSEN,
    EXPERTS,
    LAYERS,
    kept_pairs,
    logits_of_text,
    record_of,
)
from toolkit.lab.kit.controls import Choice, Number, Words
from toolkit.lab.kit.played import PlayedPanel
from toolkit.lab.kit.plot import Drag, Plot
from toolkit.lab.kit.scene import Grid, Kind, Message, Node, Scene
from toolkit.lab.kit.text import TextView, looked_at
from toolkit.lab.kit.view import Data
from toolkit.measure.words import counted

TEXT = (
    "An object that is not hashable cannot be a key of a dictionary; the class "
    "returns 42 if its name is not found."
)
LINE, LINES = 32, 4
MOST = LINE * LINES
TRAINED = {"plain": "without a balance loss", "balanced": "with a balance loss"}


@dataclass(frozen=True)
class TokensView(TextView):
    """One layer's decisions for a text."""

    unit: ClassVar = "byte"

    model: str  # "plain" or "balanced"
    layer: int  # counted from 1
    capacity: float  # relative to an even load
    devices: int  # number of devices with equal parts of the text
    experts: Int[np.ndarray, "tokens chosen"]  # [tokens, chosen], largest score first
    weights: Float[np.ndarray, "tokens chosen"]  # [tokens, chosen]
    scores: Float[np.ndarray, "experts"]  # [experts], of the selected byte
    is_kept: Bool[np.ndarray, "tokens chosen"]  # [tokens, chosen]
    slots: int  # pairs that an expert takes from each device

    @property
    def loads(self) -> Int[np.ndarray, "experts"]:
        """Pairs of every expert."""
        return np.bincount(self.experts.ravel(), minlength=EXPERTS)

    @property
    def kept(self) -> Int[np.ndarray, "experts"]:
        """Pairs that it takes."""
        return np.bincount(self.experts[self.is_kept], minlength=EXPERTS)

    @property
    def even(self) -> float:
        """The load of every expert if all were even."""
        return self.experts.size / EXPERTS

    def data(self) -> Data:
        chosen = dict(zip(self.experts[self.token], self.weights[self.token], strict=True))
        return {
            "expert": [str(expert + 1) for expert in range(EXPERTS)],
            "pairs": [*map(int, self.loads)],
            "taken": [*map(int, self.kept)],
            "dropped": [*map(int, self.loads - self.kept)],
            "of an even load (share)": [float(load / self.even) for load in self.loads],
            "score of the byte": [*map(float, self.scores)],
            "weight": [float(chosen.get(expert, 0)) for expert in range(EXPERTS)],
        }

    def sentence(self) -> str:
        dropped, lost = (~self.is_kept).sum(), (~self.is_kept).all(1).sum()
        first, second = (
            f"expert {expert + 1} with {weight:.0%}"
            for expert, weight in zip(
                self.experts[self.token], self.weights[self.token], strict=True
            )
        )
        fullest = self.loads.max() / self.even
        parts = f"{self.devices} devices with equal parts" if self.devices > 1 else "one device"
        return (
            f"{self.place_in_words}, layer {self.layer} chooses {first} and {second}. The model "
            f"was trained {TRAINED[self.model]}; its fullest expert has {fullest:.2f} times an "
            f"even load. With capacity {self.capacity:g} and {parts}, an expert takes "
            f"{counted(self.slots, 'pair')} of each device: {dropped} of {self.experts.size} pairs "
            f"are dropped, and {lost} of {counted(len(self.words), 'byte')} lose both."
            f"{self.left_out_in_words}"
        )

    def footnote(self) -> str:
        loss = record_of(self.model)["result"]["held_out_loss"]
        return (
            f"Measured here on a small trained model (recorded: {loss:.2f} nats per byte), "
            f"{CHOSEN} of {EXPERTS} experts per byte. Struck out: dropped."
        )


def tokens_view(
    *, model: str, layer: int, text: str, token: int, capacity: float, devices: int
) -> TokensView:
    """The decisions for a text; `layer` and `token` count from 1."""
    letters = [chr(byte) if 32 <= byte < 127 else "·" for byte in text.encode()]
    fields = looked_at(letters, token, MOST)
    routed = _routed(model, text.encode()[:MOST])
    experts, weights, scores = (array[layer - 1] for array in routed)
    is_kept, slots = kept_pairs(experts, devices, capacity)
    return TokensView(
        **fields, model=model, layer=layer, capacity=capacity, devices=devices, experts=experts,
        weights=weights, scores=scores[fields["token"]], is_kept=is_kept, slots=slots,
    )  # fmt: skip


@functools.lru_cache(64)
def _routed(model: str, text: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Experts, weights and scores of every layer and byte."""
    logits = logits_of_text(model, text)
    routing = route(jnp.asarray(logits), CHOSEN, scores="sigmoid")
    return np.asarray(routing.experts), np.asarray(routing.weights), 1 / (1 + np.exp(-logits))


TINTS = (
    "#a8cfe8", "#f4c99b", "#a9dbc3", "#e9b8d3", "#f2e394", "#c9c3e6", "#d9d4cb", "#f3a59b",
)  # fmt: skip
"""A colour per expert, pale enough for a number to be read on it."""
NAMES = [str(expert + 1) for expert in range(EXPERTS)]
_ROWS = 1 + CHOSEN  # of every line: the bytes, then their experts
COLOURS = ListedColormap(TINTS).with_extremes(bad=(1, 1, 1, 0))
"""The same for an image, whose NaN show what lies below."""


class TextPlot(Plot):
    """The bytes in lines, and below each the numbers and colours of its experts."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="The text, and below each byte its two experts", grid="")
        axes.set(xlim=(-0.6, LINE - 0.4), ylim=(_ROWS * LINES - 0.4, -0.6), xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        look: dict[str, Any] = {"ha": "center", "va": "center", "family": "DejaVu Sans Mono"}
        self.letters = [axes.text(*_place(at), "", fontsize=12, **look) for at in range(MOST)]
        shape = (_ROWS * LINES, LINE)
        self.image_of = self.image(shape, COLOURS, -0.5, EXPERTS - 0.5)
        # A line per expert, whose markers are its number: a text per cell would take too long.
        self.numbers = [
            self.marks(INK, f"${name}$", markersize=5.5, markeredgewidth=0.25) for name in NAMES
        ]
        self.strikes = self.segments(colors=ACCENT, linewidths=1.7)
        self._frame = self.frame(0, 0, 0.96, _ROWS - 0.04, linewidth=1.8)

    def show(self, view: TokensView) -> None:
        count = len(view.words)
        for at, letter in enumerate(self.letters):
            word = view.words[at] if at < count else ""
            if letter.get_text() != word:
                letter.set_text(word)
        x, y = np.array([_place(at) for at in range(count)]).T
        cells = np.full((_ROWS * LINES, LINE), np.nan)
        for choice in range(CHOSEN):
            cells[y + 1 + choice, x] = view.experts[:, choice]
        self.image_of.set_data(cells)
        rows = y[:, None] + 1 + np.arange(CHOSEN)
        columns = np.repeat(x[:, None], CHOSEN, axis=1)
        for expert, numbers in enumerate(self.numbers):
            own = view.experts == expert
            numbers.set_data(columns[own], rows[own])
        lost = ~view.is_kept
        struck = [(columns[lost], rows[lost]), (x[lost.all(1)], y[lost.all(1)])]
        self.strikes.set_segments(
            [
                [(left - 0.4, top + 0.3), (left + 0.4, top - 0.3)]
                for places in struck
                for left, top in zip(*places, strict=True)
            ]
        )
        left, top = _place(view.token)
        self._frame.set_xy((left - 0.48, top - 0.48))


def _place(at: int) -> tuple[int, int]:
    """Column and row of a byte."""
    return at % LINE, _ROWS * (at // LINE)


class LoadPlot(Plot):
    """Pairs of every expert, taken and dropped, with the even load and what may be taken."""

    drag = Drag("capacity", "y")

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Pairs of each expert", grid="y")
        axes.set(xlim=(-0.6, EXPERTS - 0.4), ylim=(0, 4.2), xlabel="expert")
        axes.set_ylabel("of an even load")
        axes.set_xticks(range(EXPERTS), NAMES)
        axes.tick_params(axis="x", length=0)
        look: dict[str, Any] = {"edgecolor": INK, "linewidth": 0.7}
        self.taken = self.bars_at(range(EXPERTS), 0.72, color=TINTS, **look)
        look |= {"color": "white", "hatch": "////", "label": "dropped"}
        self.dropped = self.bars_at(range(EXPERTS), 0.72, **look)
        self.even = self.line(color=INK, linestyle="--", linewidth=1.4, label="even")
        self.room = self.line(color=ACCENT, linewidth=1.6, label="capacity")
        axes.legend(
            loc="upper left", ncols=3, fontsize=8.5, handlelength=1.4, columnspacing=0.8,
            borderpad=0.1,
        )  # fmt: skip

    def show(self, view: TokensView) -> None:
        loads, kept = view.loads / view.even, view.kept / view.even
        for taken, dropped, load, part in zip(self.taken, self.dropped, loads, kept, strict=True):
            taken.set_height(part)
            dropped.set(y=part, height=load - part)
        self.even.set_data([-0.6, EXPERTS - 0.4], [1, 1])
        room = min(view.slots * view.devices / view.even, 9)
        self.room.set_data([-0.6, EXPERTS - 0.4], [room, room])


class RouterPlot(Plot):
    """Scores of the selected byte, the weights of its experts in words."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Scores of the framed byte", grid="y")
        axes.set(xlim=(-0.6, EXPERTS - 0.4), ylim=(0, 1.18), xlabel="expert")
        axes.set_xticks(range(EXPERTS), NAMES)
        axes.tick_params(axis="x", length=0)
        self.bars = self.bars_at(range(EXPERTS), 0.72, color=TINTS)
        self._words = [self.text(ha="center", va="bottom", fontsize=8.5) for _ in range(CHOSEN)]

    def show(self, view: TokensView) -> None:
        chosen = [*view.experts[view.token]]
        for expert, (bar, score) in enumerate(zip(self.bars, view.scores, strict=True)):
            bar.set(height=score, linewidth=1.8 if expert in chosen else 0.5)
            bar.set_edgecolor(ACCENT if expert in chosen else FAINT)
        for words, expert, weight in zip(
            self._words, chosen, view.weights[view.token], strict=True
        ):
            words.set(text=f"{weight:.0%}", x=expert, y=view.scores[expert] + 0.02)


def token_scene(view: TokensView) -> Scene:
    """Every device sends its bytes to their experts in turn; experts fill, and what finds no slot
    is lost."""
    count, flight = len(view.words), 3.0
    each = -(-count // view.devices)
    nodes = [Node(f"d{n + 1}" if view.devices > 1 else "text", 0.06, (n + 0.5) / view.devices)
             for n in range(view.devices)]  # fmt: skip
    nodes += [Node(name, 0.34, (n + 0.5) / EXPERTS) for n, name in enumerate(NAMES)]
    taken: list[list[float]] = [[] for _ in range(EXPERTS)]
    cells = np.full((each + 1, LINES * LINE), np.inf)
    messages = []
    for at in range(count):
        device, start = divmod(at, each)
        for expert, is_kept in zip(view.experts[at], view.is_kept[at], strict=True):
            node, kind = view.devices + int(expert), int(not is_kept)
            messages.append(Message(device, node, start, start + flight, view.words[at], kind))
            if is_kept:
                taken[expert].append(start + flight)
        share = view.is_kept[at].mean()
        cells[start + 1 :, at] = share if share else np.nan
    room = max(view.slots * view.devices, 1)
    levels = [((0.0,), (0.0,))] * view.devices
    levels += [
        ([0.0, *sorted(times)], [n / room for n in range(len(times) + 1)]) for times in taken
    ]
    grid = Grid(
        "Taken by both experts; pale: by one; crossed out: by none", (0.42, 0, 0.58, 1),
        [""] * LINES, [""] * LINE, [*map(float, range(each + 1))],
        cells.reshape(-1, LINES, LINE), [*view.words, *[""] * (LINES * LINE - count)],
    )  # fmt: skip
    return Scene(
        end=each + flight, words=view.sentence(), unit="bytes of a device", nodes=tuple(nodes),
        edges=tuple((d, view.devices + e) for d in range(view.devices) for e in range(EXPERTS)),
        tall=0.22, messages=tuple(messages), levels=tuple(levels), grids=(grid,),
        kinds=(Kind("taken", "#a8cfe8"), Kind("dropped", ACCENT)),
    )  # fmt: skip


class ExpertPanel(PlayedPanel):
    """The experts of a text's bytes, their loads, and what a capacity drops.

    Example:
        >>> panel = ExpertPanel(model="plain", capacity=1.0)
        >>> bool(panel.view.is_kept.all())
        False
    """

    title = "Experts: where do the tokens go, and which are dropped?"
    figure_size = (9.6, 4.1)
    opening_seconds = 3
    has_palette = True

    text = Words("Text", TEXT, explanation=f"The first {MOST} bytes are shown")
    model = Choice("Trained", "plain", {words: name for name, words in TRAINED.items()})
    layer = Number("Layer", 2, low=1, high=LAYERS)
    capacity = Number(
        "Capacity", 1.25, low=0.25, high=EXPERTS / CHOSEN, step=0.05,
        explanation="Pairs that an expert takes, relative to an even load",
    )  # fmt: skip
    devices = Choice(
        "Devices", 1, {str(n): n for n in (1, 2, 4, 8)},
        explanation="Each has an equal part of the text, and its own slots at every expert",
    )  # fmt: skip
    token = Number(
        "Byte", 39, low=1, high=MOST, explanation="The framed one",
        maximum=lambda view: len(view.words),
    )  # fmt: skip

    compute = staticmethod(tokens_view)
    scene = staticmethod(token_scene)
    places = (
        (TextPlot, (0.02, 0.13, 0.6, 0.79)),
        (LoadPlot, (0.69, 0.6, 0.3, 0.32)),
        (RouterPlot, (0.69, 0.13, 0.3, 0.3)),
    )
