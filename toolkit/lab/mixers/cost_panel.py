"""What one more token costs two linear-time mixers, with softmax attention in grey."""

from typing import Any

from matplotlib.figure import Figure

from toolkit.figures import FAINT, Look
from toolkit.lab.attention.cost_curves import CostCurves
from toolkit.lab.attention.instrument import CONTEXT, HEAD_SIZES
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.mixers.costs import COUNTED, REFERENCE, DecodeCosts, decode_costs
from toolkit.lab.mixers.panel import LEFT, RIGHT
from toolkit.lab.mixers.plots import SIDES

LOOKS = {REFERENCE: Look(FAINT, (0, (5, 2)), "o", ""), **SIDES}


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
    bytes_per_number = Choice("Precision", 2, {"float32": 4, "bfloat16": 2, "8 bit": 1})

    def compute(self, **state: Any) -> DecodeCosts:
        return decode_costs(**state)

    def plots(self, figure: Figure) -> list[Plot]:
        figure.subplots_adjust(left=0.1, right=0.975, top=0.72, bottom=0.2, wspace=0.42)
        return [
            CostCurves(figure, axes, *plot, looks=LOOKS, name_inches=0.45, value_inches=1.62)
            for plot, axes in zip(COUNTED.items(), figure.subplots(1, 3), strict=True)
        ]
