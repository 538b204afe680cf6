"""Two linear-time mixers on one text: states that play, memory, decay, and what a token costs."""

import functools
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit.attention import mixer
from toolkit.bench.mixers.layer_costs import DECODE, KEPT, Layer
from toolkit.figures import ACCENT, FAINT, INK, WEIGHTS, Look, look
from toolkit.figures.axes import set_limits
from toolkit.lab.attention.cost_curves import CostCurves, CostView, Counted
from toolkit.lab.attention.instrument import CONTEXT, HEAD_SIZES, PRECISION
from toolkit.lab.kit.controls import Choice, Number, Words
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.played import PlayedPanel
from toolkit.lab.kit.plot import Drag, Plot
from toolkit.lab.kit.scene import Grid, Scene
from toolkit.lab.kit.text import MOST
from toolkit.lab.mixers.inputs import HEADS, MAX_TOKENS, Settings, recurrent_mixers
from toolkit.lab.mixers.view import LIKE, Comparison, compare, is_same, two_digits
from toolkit.measure.words import counted

SIDES: dict[str, Look] = {"left": look("full"), "right": look("gdn")}
# Half-lives are coloured from half a token to a thousand.
SHORTEST, LONGEST = 0.5, 1000.0
CORNER, WORDS_DOWN = 8, 8  # of the states' channels, and rows of the words beside them
SHARES = (0.0, 0.01, 0.1, 0.25, 0.5, 1.0)


class SidePlot(Plot):
    """Of one mixer, over the tokens: words on the left only, and none below."""

    def __init__(self, axes: Axes, side: str, label: str, **settings: Any) -> None:
        super().__init__(axes, grid="y", **settings)
        self._side = side
        axes.tick_params(axis="x", bottom=False, labelbottom=False)
        axes.tick_params(axis="y", labelleft=side == "left")
        axes.set_ylabel(label if side == "left" else "")


class ReturnPlot(SidePlot):
    """What the state returns for the key of each token, as cosine with that token's value."""

    def __init__(self, axes: Axes, side: str) -> None:
        super().__init__(axes, side, "value returned\n(cosine)", ylim=(-1.05, 1.05))
        axes.set_yticks((-1, 0, LIKE, 1))
        axes.axhline(0, color=FAINT, linewidth=0.8)
        self.heading = axes.text(
            0, 1.06, "", color=SIDES[side].colour, fontsize=12, fontweight="bold",
            transform=axes.transAxes,
        )  # fmt: skip
        self._mark = self.line(color=ACCENT, linewidth=1.2)
        self.stems = self.segments(colors=SIDES[side].colour, linewidths=1.6)
        self.dots = self.marks(SIDES[side].colour, SIDES[side].marker, markersize=5)

    def show(self, view: Comparison) -> None:
        memory, token = view.sides[self._side], view.token
        self.heading.set_text(memory.title)
        self._mark.set_data([token, token], (-2, 2))
        returned = memory.returned[token, : token + 1, view.head]
        self.stems.set_segments([[(x, 0), (x, y)] for x, y in enumerate(returned)])
        self.dots.set_data(range(token + 1), returned)
        set_limits(self.axes, x=_width(view))


class ReachPlot(SidePlot):
    """The share of each token in what reaches the output, and how far back most of it lies."""

    drag = Drag("token", "x", -1)

    def __init__(self, axes: Axes, side: str) -> None:
        super().__init__(axes, side, "memory (share\nof gradient)")
        # A root: shares of one and of ninety per cent are both seen, and zero is there.
        axes.set_yscale("function", functions=(np.sqrt, np.square))
        axes.set(ylim=(0, 1.5), yticks=SHARES)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        # One step line with gaps instead of a patch per bar: a fifth of the drawing time.
        edges = np.add.outer(np.arange(MAX_TOKENS), (-0.39, 0.39)).ravel()
        # The line ends below the words, so that both can be read.
        self._mark = self.line(color=ACCENT, linewidth=1.2)
        self.bars = self.moving(
            axes.stairs(
                np.zeros(2 * MAX_TOKENS - 1), edges, fill=True, facecolor=SIDES[side].colour,
                edgecolor="white", hatch=SIDES[side].hatch, linewidth=0,
            )
        )  # fmt: skip
        edge = {"markeredgecolor": "white", "markeredgewidth": 0.8}
        self.same = self.marks(INK, "o", markersize=4.5, **edge)
        self.span = self.line(color=INK, marker="|", linewidth=1.2)
        self.span_words = self.text(0, 1.18, fontsize=9, va="bottom")

    def show(self, view: Comparison) -> None:
        memory, token = view.sides[self._side], view.token
        self._mark.set_data([token, token], (0, 1.05))
        share = memory.share(token, view.head)
        heights = np.zeros(2 * MAX_TOKENS - 1)
        heights[: 2 * len(share) : 2] = share
        self.bars.set_data(heights)
        same = [s for s in range(token + 1) if is_same(view.words[s], view.words[token])]
        self.same.set_data(same, share[same])
        distance = memory.distance(token, view.head)
        start = token - (distance or 0)
        self.span.set_data([start - 0.4, token + 0.4], [1.12, 1.12])
        self.span.set_visible(distance is not None)
        back = f"{counted(distance, 'token')} back" if distance else "itself"
        words = "nothing reaches it" if distance is None else f"{MOST:.0%}: {back}"
        # Words start where the span starts, unless they would leave the axes on the right.
        is_late = start > len(view.words) - 10
        self.span_words.set_text(words)
        self.span_words.set_x(token + 0.4 if is_late else start - 0.4)
        self.span_words.set_horizontalalignment("right" if is_late else "left")
        set_limits(self.axes, x=_width(view))


class DecayPlot(Plot):
    """The half-life of each head at each token, and beside it the median."""

    def __init__(self, axes: Axes, side: str) -> None:
        super().__init__(axes, grid="")
        self._side = side
        axes.set_yticks(range(HEADS), [f"head {h}" for h in range(HEADS)], fontsize=8.5)
        limits = np.log10([SHORTEST, LONGEST])
        self.matrix = self.image((HEADS, MAX_TOKENS), WEIGHTS, *limits)
        axes.set_ylim(HEADS - 0.5, -0.5)
        beside = axes.get_yaxis_transform()
        self._medians = [
            self.text(1.01, h, fontsize=8.5, va="center", transform=beside) for h in range(HEADS)
        ]
        self._mark = self.frame(0, -0.5, 1, HEADS, linewidth=1.8, clip_on=False)
        if side == "left":
            axes.set_ylabel("half-life")
            return
        axes.set_yticks([])
        bar = self.scale_beside(self.matrix, 0.035, 0.011, ticks=[0, 1, 2, 3]).ax
        bar.set_yticklabels(["1", "10", "100", "1,000"], fontsize=8)
        bar.set_title("half-life\n(tokens)", fontsize=8, fontweight="normal", loc="center", pad=8)

    def show(self, view: Comparison) -> None:
        half_life = view.sides[self._side].half_life()
        self.matrix.set_data(np.log10(np.clip(half_life, SHORTEST, LONGEST)).T)
        self.matrix.set_extent((-0.5, len(half_life) - 0.5, HEADS - 0.5, -0.5))
        self._mark.set_x(view.token - 0.5)
        for head, text in enumerate(self._medians):
            text.set_text(two_digits(np.median(half_life[:, head])))
            text.set_fontweight("bold" if head == view.head else "normal")
        self.name_places("x", view.words, fontsize=8, rotation=90)


def reading_scene(view: Comparison) -> Scene:
    """A corner of both states, twice per token: what is left of the old, and with the new; and
    for every word how like its value is what its key returns."""
    count, corner = len(view.words), [""] * CORNER
    halves = [half / 2 for half in range(2 * count)]
    grids, notes, across = [], list[tuple[float, str]](), -(-count // WORDS_DOWN)
    words = [*view.words, *[""] * (across * WORDS_DOWN - count)]
    for x, memory in zip((0.0, 0.51), view.sides.values(), strict=True):
        states = memory.states[:, view.head, :CORNER, :CORNER]
        largest = max(float(np.abs(states).max()), 1e-9)
        returned = np.full((count, len(words)), np.inf)
        returned[:, :count] = memory.returned[:, :, view.head]
        returned[:, :count][np.triu_indices(count, 1)] = np.inf
        grids += [
            Grid(f"{memory.title}: state", (x, 0, 0.185, 1), corner, corner, halves,
                 states / largest),
            Grid("Does its key return its value?", (x + 0.2, 0, 0.29, 1),
                 [""] * WORDS_DOWN, [""] * across, [at + 0.5 for at in range(count)],
                 returned.reshape(count, WORDS_DOWN, across), words),
        ]  # fmt: skip
    for token, word in enumerate(view.words):
        norms = [np.linalg.norm(memory.states[:, view.head], axis=(1, 2))
                 for memory in view.sides.values()]  # fmt: skip
        kept = [
            f"{memory.title} keeps {norm[2 * token] / max(norm[2 * token - 1], 1e-9):.0%}"
            for memory, norm in zip(view.sides.values(), norms, strict=True)
        ]
        before = f"before it is written {', '.join(kept)} of the state's norm" if token else "empty"
        notes += [(token, f"“{word}”: {before}."), (token + 0.5, f"“{word}” is written.")]
    return Scene(
        end=float(count), words=view.sentence(), unit="tokens", tall=0.17, grids=tuple(grids),
        notes=tuple(notes),
    )  # fmt: skip


def _width(view: Comparison) -> tuple[float, float]:
    return -0.5, len(view.words) - 0.5


TEXT = (
    "the cat sat on the mat because the mat was warm and the dog saw the cat "
    "on the warm mat and was sorry"
)
MENU = {row.title: name for name, row in recurrent_mixers().items()}
LEFT = Choice("Left mixer", "retention", MENU, explanation="Blue, solid")
RIGHT = Choice("Right mixer", "gdn", MENU, explanation="Orange, dotted")


class MixerPanel(PlayedPanel):
    """States of two mixers that play while the same text is read: what they write, erase, return.

    Example:
        >>> panel = MixerPanel(left="linear", right="gdn", token=5)
        >>> panel.decay_strength = 0
        >>> panel.view.left.half_life().min()  # tokens
        np.float64(inf)
    """

    title = "Two mixers read one text"
    figure_size = (9.6, 4.35)
    opening_seconds = 2
    time_control = "token"

    left = LEFT
    right = RIGHT
    text = Words("Text", TEXT, f"Up to {MAX_TOKENS} words; press Enter")
    token = Number(
        "Token", 24, low=1, high=MAX_TOKENS, explanation="Whose output is traced back",
        maximum=lambda view: len(view.words),
    )  # fmt: skip
    head = Number("Head", 0, low=0, high=HEADS - 1, explanation="Whose state and reach are shown")
    decay_strength = Number(
        "Decay strength", 1.0, low=0.0, high=4.0, step=0.05,
        explanation="Multiplies every log-decay: 1 as the papers start, 0 never forgets",
    )  # fmt: skip
    write_strength = Number(
        "Write (beta)", 0.5, low=0.0, high=2.0, step=0.05,
        explanation="Of delta rules, 0.5 as the papers start; 1 replaces, above 1 overshoots",
    )  # fmt: skip
    seed = Number("Seed", 0, low=0, high=99, explanation="Other random projections and gates")

    def compute(
        self, *, decay_strength: float, write_strength: float, seed: int, **state: Any
    ) -> Comparison:
        return compare(settings=Settings(decay_strength, write_strength, seed), **state)

    scene = staticmethod(reading_scene)

    def plots(self, figure: Figure) -> list[Plot]:
        grid = figure.add_gridspec(
            3, 2, height_ratios=(0.95, 1.9, 0.8), left=0.095, right=0.9, top=0.9, bottom=0.19,
            wspace=0.16, hspace=0.14,
        )  # fmt: skip
        return [
            plot(figure.add_subplot(grid[row, column]), side)
            for column, side in enumerate(SIDES)
            for row, plot in enumerate((ReturnPlot, ReachPlot, DecayPlot))
        ]


REFERENCE = "full"
# Limits hold every size that can be set, so that a moved slider is seen to move the lines.
_BYTES = (2.0**10, 2.0**38)
COUNTED = {
    "operations": Counted(DECODE, "FLOP", "Operations per token", (1e3, 1e12)),
    "moved": Counted(DECODE, "bytes", "Bytes moved per token", _BYTES),
    "kept": Counted(KEPT, "bytes", "Bytes kept", _BYTES),
}


class DecodeCosts(CostView):
    """Costs of one layer and one sequence; the lines are `"full"`, `"left"` and `"right"`."""

    @functools.cached_property
    def names(self) -> dict[str, str]:
        return self.mixers | {REFERENCE: "softmax"}

    def heading(self, plot: str, line: str) -> str:
        """The two sides by their sides too, for they may show one mixer."""
        side = "" if line == REFERENCE else f"{line}: "
        return f"{plot}, {side}{self.names[line]}"

    def footnote(self) -> str:
        return "Modelled from the cost formulas of each mixer; one layer, one sequence."

    def sentence(self) -> str:
        parts = [
            f"{mixer(self.mixers[side]).title} moves {self.cell_of('moved', side)} and keeps a "
            f"state of {self.cell_of('kept', side)}"
            for side in ("left", "right")
        ]
        left, right, cache = (self.cost("kept", line) for line in ("left", "right", REFERENCE))
        outgrown = min(left, right) * self.chosen / cache
        return (
            f"At {self.chosen:,} tokens of context softmax attention moves "
            f"{self.cell_of('moved', REFERENCE)} for one more token and keeps a cache of "
            f"{self.cell_of('kept', REFERENCE)}; {parts[0]}; {parts[1]}. The cache outgrows the "
            f"smaller state at {outgrown:,.0f} tokens. Modelled; one layer, {self.layer.heads} "
            f"heads of {self.layer.head_size}, one sequence."
        )


def decode_costs(*, left: str, right: str, context_length: int, **sizes: Any) -> DecodeCosts:
    """Cost of one decoded token, and what is kept until the next; `sizes` are a `Layer`'s."""
    sides = {REFERENCE: REFERENCE, "left": left, "right": right}
    return DecodeCosts(context_length, Layer(**sizes), sides, COUNTED)


class MixerCostPanel(Panel):
    """Operations, bytes moved and bytes kept of one decoded token, against context length.

    Example:
        >>> panel = MixerCostPanel(left="retention", right="gdn")
        >>> panel.follow(MixerPanel(left="linear")).left
        'linear'
    """

    title = "What does one more token cost them?"
    figure_size = (9.6, 4.2)

    left = LEFT
    right = RIGHT
    context_length = CONTEXT
    heads = Number("Heads", 16, low=1, high=64)
    head_size = Choice("Head size", 128, HEAD_SIZES)
    bytes_per_number = Choice("Precision", 2, PRECISION)

    compute = staticmethod(decode_costs)

    def plots(self, figure: Figure) -> list[Plot]:
        figure.subplots_adjust(left=0.1, right=0.975, top=0.72, bottom=0.2, wspace=0.42)
        looks = {REFERENCE: Look(FAINT, (0, (5, 2)), "o", ""), **SIDES}
        return [
            CostCurves(figure, axes, *plot, looks=looks, name_inches=0.45, value_inches=1.62)
            for plot, axes in zip(COUNTED.items(), figure.subplots(1, 3), strict=True)
        ]
