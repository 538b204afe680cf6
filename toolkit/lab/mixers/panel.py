"""Two linear-time mixers side by side on one text: state, reach and decay, head by head."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle, StepPatch
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, NullLocator

from toolkit.figures import ACCENT, FAINT, INK, WEIGHTS, Look, look
from toolkit.lab.kit.controls import Choice, Number, Words
from toolkit.lab.kit.panel import Panel
from toolkit.lab.mixers.inputs import HEADS, MAX_TOKENS, Settings, recurrent_mixers
from toolkit.lab.mixers.view import (
    MOST,
    Comparison,
    Memory,
    compare,
    in_tokens,
    is_same,
    tokens_in_words,
)

TEXT = (
    "the cat sat on the mat because the mat was warm and the dog saw the cat "
    "on the warm mat and was sorry"
)
MENU = {row.title: name for name, row in recurrent_mixers().items()}
LEFT = Choice("Left mixer", "retention", MENU, explanation="Blue, solid")
RIGHT = Choice("Right mixer", "gdn", MENU, explanation="Orange, dotted")
SIDES: dict[str, Look] = {"left": look("full"), "right": look("gdn")}
HEAD_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.2, 1.4)), (0, (6, 2, 1, 2)))
# Half-lives are coloured from half a token to a thousand.
SHORTEST, LONGEST = 0.5, 1000.0
# Fixed, so that a redraw moves only the artists. One fresh write has a norm of about 1.
NORM_LIMITS = (1e-3, 1e2)
SHARES = (0.0, 0.01, 0.1, 0.25, 0.5, 1.0)


@dataclass
class Side:
    """The artists of one mixer: three plots, one above the other.

    Attributes:
        norms, reach, decay: axes.
        heading: the mixer's name above them.
        lines: state norm of each head.
        bars: share of each token.
        same: dots on the tokens with the same word as the one looked at.
        span: the tokens that hold most of the reach.
        span_words: how many they are.
        image: half-lives, head by token.
        half_lives: median half-life of each head, beside its row.
        marks: the token looked at, in the two upper plots.
        column_mark: the same in the lower one.
    """

    norms: Axes
    reach: Axes
    decay: Axes
    heading: Text
    lines: list[Line2D]
    bars: StepPatch
    same: Line2D
    span: Line2D
    span_words: Text
    image: AxesImage
    half_lives: list[Text]
    marks: list[Line2D]
    column_mark: Rectangle

    def artists(self) -> list[Artist]:
        """What moves, lowest first."""
        return [
            self.image, *self.marks, self.bars, *self.lines, self.same, self.span, self.span_words,
            *self.half_lives, self.column_mark,
        ]  # fmt: skip


class MixerPanel(Panel):
    """State norm, effective memory and decay of two mixers that read the same text.

    Attributes:
        left, right: names of recurrent rows of `MIXERS`.
        text: what they read.
        token: the token whose output is traced back.
        head: the head looked at.
        decay_strength: multiplies every log-decay; 1 as the papers initialise it.
        write_strength: typical beta of the delta rules.
        seed: which random projections.
    """

    title = "Two mixers read one text"
    figure_size = (9.6, 6.3)

    left = LEFT
    right = RIGHT
    text = Words("Text", TEXT, f"Up to {MAX_TOKENS} words; press Enter")
    token = Number("Token", 24, low=1, high=MAX_TOKENS, explanation="Whose output is traced back")
    head = Number("Head", 0, low=0, high=HEADS - 1, explanation="Drawn thick; its reach is shown")
    decay_strength = Number(
        "Decay strength", 1.0, low=0.0, high=4.0, step=0.05,
        explanation="Multiplies every log-decay: 1 as the papers start, 0 never fades",
    )  # fmt: skip
    write_strength = Number(
        "Write (beta)", 0.5, low=0.0, high=2.0, step=0.05,
        explanation="Of delta rules, 0.5 as the papers start; 1 replaces, above 1 overshoots",
    )  # fmt: skip
    seed = Number("Seed", 0, low=0, high=99, explanation="Other random projections and gates")

    def data(self) -> dict[str, Any]:
        """The numbers now shown: `["left"]["state_norm"]` and the like, and the words."""
        return self.view.arrays()

    def compute(
        self, *, decay_strength: float, write_strength: float, seed: int, **state: Any
    ) -> Comparison:
        return compare(settings=Settings(decay_strength, write_strength, seed), **state)

    def build(self, figure: Figure) -> list[Artist]:
        grid = figure.add_gridspec(
            3, 2, height_ratios=(1.15, 1.6, 0.8), left=0.095, right=0.9, top=0.9, bottom=0.155,
            wspace=0.16, hspace=0.14,
        )  # fmt: skip
        self._sides = {
            name: self._build_side(figure, grid, column, name) for column, name in enumerate(SIDES)
        }
        left = self._sides["left"]
        left.norms.set_ylabel("state norm")
        left.reach.set_ylabel("effective memory\n(share of gradient)")
        left.decay.set_ylabel("half-life")
        left.decay.set_yticks(range(HEADS), [f"head {h}" for h in range(HEADS)], fontsize=8.5)
        box = self._sides["right"].decay.get_position()
        bar = figure.add_axes((box.x1 + 0.05, box.y0, 0.011, box.height))
        figure.colorbar(left.image, cax=bar, ticks=[0, 1, 2, 3])
        bar.set_yticklabels(["1", "10", "100", "1000"], fontsize=8)
        bar.set_title("half-life\n(tokens)", fontsize=8, fontweight="normal", loc="center", pad=4)
        self._name_heads(figure)
        self._words: tuple[str, ...] = ()
        return [artist for side in self._sides.values() for artist in side.artists()]

    def _build_side(self, figure: Figure, grid: GridSpec, column: int, name: str) -> Side:
        colour = SIDES[name].colour
        norms, reach, decay = (figure.add_subplot(grid[row, column]) for row in range(3))
        norms.set(yscale="log", ylim=NORM_LIMITS)
        norms.yaxis.set_major_locator(LogLocator(numticks=12))
        norms.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        norms.yaxis.set_minor_locator(NullLocator())
        # A root: shares of one and of ninety per cent are both seen, and zero is there.
        reach.set_yscale("function", functions=(np.sqrt, np.square))
        reach.set(ylim=(0, 1.5), yticks=SHARES)
        reach.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        decay.grid(False)
        for axes in (norms, reach):
            axes.grid(axis="x", visible=False)
            axes.tick_params(axis="x", bottom=False, labelbottom=False)
        for axes in (norms, reach, decay):
            axes.tick_params(axis="y", labelleft=column == 0)
        decay.set_yticks([])
        positions = np.arange(MAX_TOKENS)
        heading = norms.text(
            0, 1.06, "", color=colour, fontsize=12, fontweight="bold", transform=norms.transAxes
        )
        lines = [
            norms.plot(positions, np.ones(MAX_TOKENS), linestyle=dashes)[0]
            for dashes in HEAD_DASHES
        ]
        # One step line with gaps instead of a patch a bar: a fifth of the drawing time.
        edges = np.stack([positions - 0.39, positions + 0.39], axis=1).ravel()
        bars = reach.stairs(
            np.zeros(2 * MAX_TOKENS - 1), edges, fill=True, facecolor=colour, edgecolor="white",
            hatch=SIDES[name].hatch, linewidth=0,
        )  # fmt: skip
        (same,) = reach.plot(
            [], [], color=INK, marker="o", markersize=4.5, markeredgecolor="white",
            markeredgewidth=0.8, linestyle="none",
        )  # fmt: skip
        (span,) = reach.plot([0, 0], [1.12, 1.12], color=INK, marker="|", linewidth=1.2)
        words = reach.text(0, 1.18, "", fontsize=9, va="bottom")
        image = decay.imshow(
            np.zeros((HEADS, MAX_TOKENS)), cmap=WEIGHTS, aspect="auto", interpolation="nearest",
            vmin=np.log10(SHORTEST), vmax=np.log10(LONGEST),
        )  # fmt: skip
        half_lives = [
            decay.text(
                1.01, h, "", fontsize=8.5, va="center", transform=decay.get_yaxis_transform()
            )
            for h in range(HEADS)
        ]
        # Below the words of the effective memory the line ends, so that both can be read.
        marks = [
            axes.plot([0, 0], ends, color=ACCENT, linewidth=1.2)[0]
            for axes, ends in ((norms, (1e-9, 1e9)), (reach, (0, 1.05)))
        ]
        column_mark = Rectangle(
            (0, -0.5), 1, HEADS, fill=False, edgecolor=ACCENT, linewidth=1.8, clip_on=False
        )
        decay.add_patch(column_mark)
        return Side(
            norms, reach, decay, heading, lines, bars, same, span, words, image, half_lives, marks,
            column_mark,
        )  # fmt: skip

    def _name_heads(self, figure: Figure) -> None:
        samples = [Line2D([], [], color=INK, linestyle=dashes) for dashes in HEAD_DASHES]
        figure.legend(
            samples, [f"head {h}" for h in range(HEADS)], loc="upper right", ncols=HEADS,
            bbox_to_anchor=(0.91, 1.008), handlelength=2.6, columnspacing=1.4,
        )  # fmt: skip
        figure.text(
            0.095, 0.014,
            "Red: the token looked at; dots: the same word. Beside the maps: median half-life of a "
            "head. Measured here; nothing is trained.", fontsize=9,
        )  # fmt: skip

    def draw(self, view: Comparison) -> None:
        if view.words != self._words:
            self._name_tokens(view.words)
        self._make_room(view)
        for name, memory in (("left", view.left), ("right", view.right)):
            side = self._sides[name]
            if side.heading.get_text() != memory.title:
                side.heading.set_text(memory.title)
                self.picture.forget_background()
            for mark in side.marks:
                mark.set_xdata([view.token, view.token])
            side.column_mark.set_x(view.token - 0.5)
            self._draw_norms(side, name, memory, view.head)
            self._draw_reach(side, memory, view)
            self._draw_decay(side, memory, view.head)

    def _draw_norms(self, side: Side, name: str, memory: Memory, head: int) -> None:
        for h, line in enumerate(side.lines):
            line.set_data(np.arange(len(memory.state_norm)), memory.state_norm[:, h])
            is_chosen = h == head
            line.set_color(SIDES[name].colour if is_chosen else FAINT)
            line.set_linewidth(2.6 if is_chosen else 1.3)

    def _draw_reach(self, side: Side, memory: Memory, view: Comparison) -> None:
        share = memory.share(view.token, view.head)
        heights = np.zeros(2 * MAX_TOKENS - 1)
        heights[: 2 * len(share) : 2] = share
        side.bars.set_data(heights)
        same = [s for s in range(view.token + 1) if is_same(view.words[s], view.words[view.token])]
        side.same.set_data(same, share[same])
        distance = memory.distance(view.token, view.head)
        side.span.set_visible(distance is not None)
        if distance is None:
            words, start = "nothing reaches it", view.token
        else:
            words = f"{MOST:.0%}: " + (f"{in_tokens(distance)} back" if distance else "itself")
            start = view.token - distance
            side.span.set_xdata([start - 0.4, view.token + 0.4])
        # Words start where the span starts, unless they would leave the axes on the right.
        is_late = start > len(view.words) - 10
        side.span_words.set_text(words)
        side.span_words.set_x(view.token + 0.4 if is_late else start - 0.4)
        side.span_words.set_horizontalalignment("right" if is_late else "left")

    def _draw_decay(self, side: Side, memory: Memory, head: int) -> None:
        half_life = memory.half_life()
        side.image.set_data(np.log10(np.clip(half_life, SHORTEST, LONGEST)).T)
        side.image.set_extent((-0.5, len(half_life) - 0.5, HEADS - 0.5, -0.5))
        for h, (text, median) in enumerate(
            zip(side.half_lives, np.median(half_life, axis=0), strict=True)
        ):
            text.set_text(tokens_in_words(median))
            text.set_fontweight("bold" if h == head else "normal")

    def _name_tokens(self, words: tuple[str, ...]) -> None:
        self._words = words
        self.picture.forget_background()
        names = [word if len(word) <= 9 else word[:8] + "…" for word in words]
        for side in self._sides.values():
            for axes in (side.norms, side.reach, side.decay):
                axes.set_xlim(-0.5, len(words) - 0.5)
            side.decay.set_xticks(range(len(words)), names, fontsize=8, rotation=90)

    def _make_room(self, view: Comparison) -> None:
        """A state that outgrows the axes stretches those of both sides."""
        highest = max(np.max(memory.state_norm) for memory in (view.left, view.right))
        top = max(NORM_LIMITS[1], 10 ** np.ceil(np.log10(max(highest, 1.0))))
        for side in self._sides.values():
            if not np.isclose(side.norms.get_ylim()[1], top):
                side.norms.set_ylim(NORM_LIMITS[0], top)
                self.picture.forget_background()

    def adjust(self, view: Comparison) -> None:
        self._control_widgets["token"].set_maximum(len(view.words))
