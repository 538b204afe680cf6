"""Two linear-time mixers on one text, and the cost of a token."""

from typing import Any

from matplotlib.figure import Figure

from toolkit.figures import FAINT, Look
from toolkit.lab.attention.cost_curves import CostCurves
from toolkit.lab.attention.instrument import CONTEXT, HEAD_SIZES, PRECISION
from toolkit.lab.kit.controls import Choice, Number, Words
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.mixers.costs import COUNTED, REFERENCE, DecodeCosts, decode_costs
from toolkit.lab.mixers.inputs import HEADS, MAX_TOKENS, Settings, recurrent_mixers
from toolkit.lab.mixers.plots import SIDES, DecayPlot, NormPlot, ReachPlot, name_heads
from toolkit.lab.mixers.view import Comparison, compare

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
