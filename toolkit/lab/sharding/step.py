"""The collectives of the compiled step and of the textbook, hop by hop, with their causes.

Durations are modelled. A device computes 64 FLOPs in the time of one byte sent. An H100 in its node
computes 2,200, so the block stands for one whose sizes are all some 34 times as large. Messages
have no latency, nothing overlaps. The order is that of the data: weights are gathered before they
are used, sums follow their products, new weights are gathered last.

The textbook's are modelled, one per array and purpose. For V bytes of an array on n devices, each
device sends V (n-1)/n in an all-gather or a reduce-scatter, and twice that in an all-reduce.

Source: Rajbhandari et al., "ZeRO", 2020, section 7; Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

import math
import textwrap
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from toolkit.figures import INK, look
from toolkit.lab.kit.controls import Number
from toolkit.lab.kit.played import PlayedPanel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.scene import Bar, Kind, Message, Scene
from toolkit.lab.kit.view import Data, View
from toolkit.lab.sharding.mesh import MESH, SCHEME, device_nodes
from toolkit.lab.sharding.stored_steps import (
    BATCH,
    DEVICES,
    FLOAT32,
    HIDDEN,
    WIDTH,
    StoredArray,
    StoredCollective,
    StoredStep,
    compiled_with,
    stored_step,
)
from toolkit.measure import in_words
from toolkit.measure.words import counted


class Expected(NamedTuple):
    """A collective, with the bytes a device sends in it and what it is for."""

    kind: str
    bytes_sent: float
    purpose: str


def textbook(step: StoredStep) -> list[Expected]:
    """Those of one step in the order they come; none along an axis of one device."""
    axes, found = step.axes, []
    model = axes.get("model", 1)
    data = math.prod(axes.values()) // model
    stream = BATCH // data * WIDTH * FLOAT32
    gathered = [array for array in step.arrays if _data_cuts(array, "weights", axes) > 1]
    scattered = [array for array in step.arrays if _data_cuts(array, "optimizer", axes) > 1]
    for phase in ("forward", "backward"):
        for array in gathered:
            found.append(_one("all-gather", _bytes(array, axes), data, f"weights, {phase}"))
        found.append(_one("all-reduce", stream, model, f"partial products, {phase}"))
    for array in step.arrays:
        kind = "reduce-scatter" if array in scattered else "all-reduce"
        found.append(_one(kind, _bytes(array, axes), data, "gradients"))
    found.append(_one("all-reduce", FLOAT32, data, "the loss"))
    for array in scattered:
        if array not in gathered:
            found.append(_one("all-gather", _bytes(array, axes), data, "new weights"))
    return [collective for collective in found if collective.bytes_sent]


def _one(kind: str, size: float, devices: int, purpose: str) -> Expected:
    times = 2 if kind == "all-reduce" else 1
    return Expected(kind, times * size * (devices - 1) / devices, purpose)


def _data_cuts(array: StoredArray, state: str, axes: dict[str, int]) -> int:
    """Into how many parts the data parallel axes cut it."""
    cuts = (axes[axis] for along in array.states[state] for axis in along if axis != "model")
    return math.prod(cuts)


def _bytes(array: StoredArray, axes: dict[str, int]) -> float:
    """What is left of it where tensor parallelism has cut it, gathered over the data axes."""
    whole = math.prod(array.shape) * FLOAT32
    is_cut = any("model" in along for along in array.states["weights"])
    return whole / axes["model"] if is_cut else whole


FLOPS_PER_BYTE_SENT = 64
# Two products of 2 BATCH WIDTH HIDDEN operations each; the backward pass has two for each.
_FORWARD = 2 * 2 * BATCH * WIDTH * HIDDEN / DEVICES / FLOPS_PER_BYTE_SENT
PASSES = {"forward": _FORWARD, "backward": 2 * _FORWARD}


class Span(NamedTuple):
    """A span of modelled time, in bytes that could be sent during it."""

    lane: str
    name: str
    start: float
    length: float


def lanes(collectives: tuple[StoredCollective, ...]) -> list[Span]:
    """Spans in order; a collective is named by its number, from 1."""
    before, amid, after = [], [], []
    for number, collective in enumerate(collectives, 1):
        place = (
            before if "from argument" in collective.cause
            else after if "(backward)" in collective.cause or "result" in collective.cause
            else amid
        )  # fmt: skip
        place.append(("collectives", str(number), collective.bytes_sent))
    forward, backward = (("compute", name, length) for name, length in PASSES.items())
    order = [*before, forward, *amid, backward, *after]
    starts = [math.fsum(length for *_, length in order[:at]) for at in range(len(order))]
    return [
        Span(lane, name, start, length)
        for (lane, name, length), start in zip(order, starts, strict=True)
    ]


KINDS = ("all-reduce", "all-gather", "reduce-scatter")  # no other is in a stored step


@dataclass(frozen=True)
class StepView(View):
    """The collectives of one step, as compiled and as in the textbook."""

    mesh: str
    scheme: str
    axes: dict[str, int]
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
    return StepView(mesh, scheme, step.axes, step.collectives, tuple(textbook(step)), spans, chosen)


LANES = ("compute", "collectives")
_COLOURS = ("#cfd6dc", "#9ea9b4", "#f4c99b", "#a8cfe8", "#b9dfc4")
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
            "color": "white", "edgecolor": INK, "hatch": "//", "label": "textbook (modelled)",
        }  # fmt: skip
        self.bars = []
        for offset, style in ((-0.21, compiled), (0.21, book)):
            places = [at + offset for at in range(len(KINDS))]
            self.bars.append(self.bars_at(places, 0.36, is_flat=True, **style))
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


def step_scene(view: StepView) -> Scene:
    """The mesh, with every message of every collective in a ring of its devices, and the step's
    lanes."""
    kinds = tuple(map(Kind, (*PASSES, *KINDS), _COLOURS))
    numbers = {kind.name: number for number, kind in enumerate(kinds)}
    messages, bars, notes, picks, edges = [], [], [], [], dict[tuple[int, int], None]()
    for span in view.spans:
        start, end = span.start / 1e3, (span.start + span.length) / 1e3
        if span.lane == "compute":
            bars.append(Bar(0, start, end, span.name, numbers[span.name]))
            notes.append((start, f"Every device computes: {span.name}."))
            picks.append(-1)
            continue
        collective = view.collectives[int(span.name) - 1]
        number, over = numbers[collective.kind], "+".join(collective.axes)
        bars.append(Bar(1, start, end, f"{span.name} {collective.kind} over {over}", number))
        notes.append((start, f"{span.name}: {collective.kind} over {over}: {collective.cause}."))
        picks.append(int(span.name))
        for group in groups_of(view.axes, collective.axes):
            hops = (2 if collective.kind == "all-reduce" else 1) * (len(group) - 1)
            times = np.linspace(start, end, hops + 1)
            pairs = [*zip(group, (*group[1:], group[0]), strict=True)]
            edges |= dict.fromkeys(pairs)
            messages += [
                Message(a, b, float(times[hop]), float(times[hop + 1]), "", number)
                for hop in range(hops)
                for a, b in pairs
            ]
    return Scene(
        end=bars[-1].end, words=view.sentence(), unit="kB of sending", tall=0.17,
        nodes=tuple(device_nodes(view.axes, 0.35, 0.3)), edges=tuple(edges),
        messages=tuple(messages), lanes=LANES, bars=tuple(bars), kinds=kinds,
        notes=tuple(notes), picks=tuple(picks),
    )  # fmt: skip


class StepPanel(PlayedPanel):
    """The communication of one block's compiled step, which plays hop by hop, with its causes, and
    that of the textbook.

    Example:
        >>> panel = StepPanel(mesh="1x8", scheme="tensor")
        >>> panel.view.compiled_of("all-reduce") == panel.view.expected_of("all-reduce")
        True
    """

    title = "What does the compiled step send?"
    figure_size = (9.6, 3.5)
    bar_control = "collective"

    mesh = MESH
    scheme = SCHEME
    collective = Number(
        "Collective", 1, low=1, high=MOST_COLLECTIVES, explanation="Told in words below the lanes",
        maximum=lambda view: max(len(view.collectives), 1),
    )  # fmt: skip

    compute = staticmethod(step_of)
    scene = staticmethod(step_scene)
    places = (
        (KindsPlot, (0.125, 0.5, 0.855, 0.38)),
        (CausePlot, (0.02, 0.1, 0.96, 0.3)),
    )


def groups_of(axes: dict[str, int], over: tuple[str, ...]) -> list[list[int]]:
    """Devices that a collective over some axes of the mesh brings together."""
    devices = np.arange(DEVICES).reshape(*axes.values())
    places = [[*axes].index(name) for name in over]
    moved = np.moveaxis(devices, places, range(-len(places), 0))
    return moved.reshape(-1, math.prod(axes[name] for name in over)).tolist()
