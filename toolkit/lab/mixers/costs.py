"""The cost of one more token for two mixers and softmax attention. Modelled."""

import functools
from typing import Any

from matplotlib.figure import Figure

from toolkit.attention import mixer
from toolkit.figures import FAINT, Look
from toolkit.lab.attention.cost_curves import DECODE, KEPT, CostCurves, CostView, Counted, Layer
from toolkit.lab.attention.instrument import CONTEXT, HEAD_SIZES, PRECISION
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.mixers.panel import LEFT, RIGHT, SIDES

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
