"""What one more token costs two linear-time mixers, with softmax attention in grey."""

from typing import Any

from matplotlib.artist import Artist
from matplotlib.figure import Figure

from toolkit.figures import FAINT, Look
from toolkit.lab.attention.cost_curves import CostCurves
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.mixers.costs import COUNTED, REFERENCE, DecodeCosts, decode_costs
from toolkit.lab.mixers.panel import LEFT, RIGHT, SIDES, MixerPanel

LOOKS = {REFERENCE: Look(FAINT, (0, (5, 2)), "o", ""), **SIDES}


class MixerCostPanel(Panel):
    """Operations, bytes moved and bytes kept of one decoded token, against context length.

    Attributes:
        left, right: names of recurrent rows of `MIXERS`.
        context_length: the context marked.
        heads: query, key and value heads.
        head_size: key and value size of a head.
        bytes_per_number: precision of activations and of the cache; states stay in float32.
    """

    title = "What does one more token cost them?"
    figure_size = (9.6, 4.2)

    left = LEFT
    right = RIGHT
    context_length = Number(
        "Context (tokens)", 16384, low=128, high=1 << 20, powers_of_two=True,
        explanation="Tokens already read; the slider doubles, the box takes any number",
    )  # fmt: skip
    heads = Number("Heads", 16, low=1, high=64)
    head_size = Choice("Head size", 128, {str(size): size for size in (32, 64, 128, 256)})
    bytes_per_number = Choice("Precision", 2, {"float32": 4, "bfloat16": 2, "8 bit": 1})

    def follow(self, panel: MixerPanel) -> "MixerCostPanel":
        """Show the mixers that another panel shows, now and whenever they change there.

        Args:
            panel: whose `left` and `right` to follow.

        Returns:
            This panel.

        Cost:
            One redraw now, and one with every change of a mixer there.
        """

        def take_over(_: Any = None) -> None:
            self.change(left=panel.left, right=panel.right)

        for side in SIDES:
            (menu,) = panel._control_widgets[side].inputs
            menu.observe(take_over, names="value")
        take_over()
        return self

    def compute(self, **state: Any) -> DecodeCosts:
        return decode_costs(**state)

    def build(self, figure: Figure) -> list[Artist]:
        figure.subplots_adjust(left=0.1, right=0.975, top=0.72, bottom=0.2, wspace=0.42)
        names = {side: side for side in LOOKS}
        self._curves = {
            what: CostCurves(
                figure, axes, counted.unit, counted.heading, columns=1, names=names, looks=LOOKS,
                name_inches=0.45, value_inches=1.62, limits=counted.limits,
            )
            for (what, counted), axes in zip(
                COUNTED.items(), figure.subplots(1, len(COUNTED)), strict=True
            )
        }  # fmt: skip
        figure.text(
            0.1, 0.025, "Modelled from the cost formulas of each mixer; one layer, one sequence.",
            fontsize=9,
        )  # fmt: skip
        return [artist for curves in self._curves.values() for artist in curves.artists()]

    def draw(self, view: DecodeCosts) -> None:
        for what, curves in self._curves.items():
            curves.show(view.chosen, view.curves[what], view.at_chosen[what], COUNTED[what].unit)
            for side, text in curves.names.items():
                name = "softmax" if side == REFERENCE else view.mixers[side]
                if text.get_text() != name:
                    text.set_text(name)
                    self.picture.forget_background()
