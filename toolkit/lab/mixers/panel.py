"""Two linear-time mixers on one text, and the cost of a token."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from toolkit.figures import ACCENT, FAINT, INK, WEIGHTS, Look, look
from toolkit.figures.axes import log_ticks, set_limits
from toolkit.lab.attention.cost_curves import CostCurves
from toolkit.lab.attention.instrument import CONTEXT, HEAD_SIZES, PRECISION
from toolkit.lab.kit.controls import Choice, Number, Words
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.text import MOST
from toolkit.lab.mixers.costs import COUNTED, REFERENCE, DecodeCosts, decode_costs
from toolkit.lab.mixers.inputs import HEADS, MAX_TOKENS, Settings, recurrent_mixers
from toolkit.lab.mixers.view import Comparison, compare, is_same, two_digits
from toolkit.measure.words import counted

SIDES: dict[str, Look] = {"left": look("full"), "right": look("gdn")}
HEAD_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.2, 1.4)), (0, (6, 2, 1, 2)))
# Half-lives are coloured from half a token to a thousand.
SHORTEST, LONGEST = 0.5, 1000.0
# Fixed, so that a redraw moves only the artists. One fresh write has a norm of about 1.
NORM_LIMITS = (1e-3, 1e2)
SHARES = (0.0, 0.01, 0.1, 0.25, 0.5, 1.0)


class SidePlot(Plot):
    """Of one mixer, over the tokens: words on the left only, and none below."""

    def __init__(self, axes: Axes, side: str, label: str, **settings: Any) -> None:
        super().__init__(axes, grid="y", **settings)
        self._side = side
        axes.tick_params(axis="x", bottom=False, labelbottom=False)
        axes.tick_params(axis="y", labelleft=side == "left")
        axes.set_ylabel(label if side == "left" else "")


class NormPlot(SidePlot):
    """The norm of the state of each head."""

    def __init__(self, axes: Axes, side: str) -> None:
        super().__init__(axes, side, "state norm", yscale="log", ylim=NORM_LIMITS)
        log_ticks(axes.yaxis, count=12)
        self.heading = axes.text(
            0, 1.06, "", color=SIDES[side].colour, fontsize=12, fontweight="bold",
            transform=axes.transAxes,
        )  # fmt: skip
        self._mark = self.line(color=ACCENT, linewidth=1.2)
        self.lines = [self.line(linestyle=dashes) for dashes in HEAD_DASHES]

    def show(self, view: Comparison) -> None:
        memory = view.sides[self._side]
        self.heading.set_text(memory.title)
        self._mark.set_data([view.token, view.token], (1e-9, 1e9))
        for head, line in enumerate(self.lines):
            line.set_data(np.arange(len(view.words)), memory.state_norm[:, head])
            is_chosen = head == view.head
            line.set_color(SIDES[self._side].colour if is_chosen else FAINT)
            line.set_linewidth(2.6 if is_chosen else 1.3)
        # A state that outgrows the axes stretches those of both sides.
        highest = max(np.max(side.state_norm) for side in view.sides.values())
        top = max(NORM_LIMITS[1], 10 ** np.ceil(np.log10(max(highest, 1.0))))
        set_limits(self.axes, x=_width(view), y=(NORM_LIMITS[0], top))


class ReachPlot(SidePlot):
    """The share of each token in what reaches the output, and how far back most of it lies."""

    def __init__(self, axes: Axes, side: str) -> None:
        super().__init__(axes, side, "effective memory\n(share of gradient)")
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


def name_heads(figure: Figure) -> None:
    """What is the same for all plots: the heads' dashes above them."""
    samples = [Line2D([], [], color=INK, linestyle=dashes) for dashes in HEAD_DASHES]
    figure.legend(
        samples, [f"head {h}" for h in range(HEADS)], loc="upper right", ncols=HEADS,
        bbox_to_anchor=(0.91, 1.008), handlelength=2.6, columnspacing=1.4,
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


class MixerPanel(Panel):
    """State norm, effective memory and decay of two mixers that read the same text.

    Example:
        >>> panel = MixerPanel(left="linear", right="gdn", token=5)
        >>> panel.decay_strength = 0
        >>> panel.view.left.half_life().min()  # tokens
        np.float64(inf)
    """

    title = "Two mixers read one text"
    figure_size = (9.6, 6.3)

    left = LEFT
    right = RIGHT
    text = Words("Text", TEXT, f"Up to {MAX_TOKENS} words; press Enter")
    token = Number(
        "Token", 24, low=1, high=MAX_TOKENS, explanation="Whose output is traced back",
        maximum=lambda view: len(view.words),
    )  # fmt: skip
    head = Number("Head", 0, low=0, high=HEADS - 1, explanation="Drawn thick; its reach is shown")
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

    def plots(self, figure: Figure) -> list[Plot]:
        grid = figure.add_gridspec(
            3, 2, height_ratios=(1.15, 1.6, 0.8), left=0.095, right=0.9, top=0.9, bottom=0.155,
            wspace=0.16, hspace=0.14,
        )  # fmt: skip
        name_heads(figure)
        return [
            plot(figure.add_subplot(grid[row, column]), side)
            for column, side in enumerate(SIDES)
            for row, plot in enumerate((NormPlot, ReachPlot, DecayPlot))
        ]


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

    def compute(self, **state: Any) -> DecodeCosts:
        return decode_costs(**state)

    def plots(self, figure: Figure) -> list[Plot]:
        figure.subplots_adjust(left=0.1, right=0.975, top=0.72, bottom=0.2, wspace=0.42)
        looks = {REFERENCE: Look(FAINT, (0, (5, 2)), "o", ""), **SIDES}
        return [
            CostCurves(figure, axes, *plot, looks=looks, name_inches=0.45, value_inches=1.62)
            for plot, axes in zip(COUNTED.items(), figure.subplots(1, 3), strict=True)
        ]
