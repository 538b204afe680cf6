"""Decoding with latent attention on several chips: shards, communication and time."""

from typing import Any

from matplotlib.figure import Figure

from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.latent.decode_plots import FasterPlot, HoldingPlot, StepPlot
from toolkit.lab.latent.decode_view import CONTEXTS, SCHEMES, TITLES, DecodeView, decode_view

_KINDS = {
    "H100": "h100", "H200": "h200", "H800": "h800",
    "TPU v5e": "v5e", "TPU v5p": "v5p", "TPU v6e": "v6e",
}  # fmt: skip
# Where each array is drawn: left and width as shares of the figure, and its title.
_COLUMNS = {
    "heads": (0.125, 0.1, "queries,\noutput: heads"),
    "down": (0.25, 0.07, "down:\nlatents"),
    "up": (0.345, 0.08, "up: heads\nx latents"),
    "cache": (0.45, 0.12, "cache: latents\nx tokens"),
}
_BOTTOM, _HEIGHT = 0.475, 0.44


class DecodePanel(Panel):
    """The shards of latent attention when several chips decode, and the time of a step.

    Example:
        >>> panel = DecodePanel(model="deepseek_v3", degree=2, slices=2)
        >>> [cost.name for cost in panel.view.costs if not cost.is_exact]
        ['tpla, g = 2', 'tpla-lean, g = 2']
    """

    title = "Latent attention on several chips: who holds what, and what does a step take?"
    figure_size = (9.6, 6.8)
    has_palette = True

    model = Choice("Model", "deepseek_v3", {title: name for name, title in TITLES.items()})
    kind = Choice("Chips", "h100", _KINDS)
    degree = Choice("How many", 8, {str(n): n for n in (2, 4, 8)})
    slices = Choice(
        "Slices", 2, {f"g = {n}": n for n in (2, 4, 8)},
        explanation="Of the latents, in the tpla schemes; at most one per chip",
    )  # fmt: skip
    batch = Number("Batch", 16, low=1, high=1024, powers_of_two=True, explanation="Rows")
    context = Number(
        "Context", 32768, low=CONTEXTS[0], high=CONTEXTS[-1], powers_of_two=True,
        explanation="Tokens in the cache of every row",
    )  # fmt: skip
    chip = Number(
        "Chip", 1, low=0, high=7, explanation="Whose parts are coloured",
        maximum=lambda view: view.degree - 1,
    )  # fmt: skip

    def compute(self, **state: Any) -> DecodeView:
        return decode_view(**state)

    def plots(self, figure: Figure) -> list[Plot]:
        for row, scheme in enumerate(SCHEMES):
            figure.text(
                0.112, _BOTTOM + _HEIGHT * (1 - (row + 0.5) / len(SCHEMES)), scheme,
                ha="right", va="center", fontweight="bold", fontsize=9.5,
            )  # fmt: skip
        return [
            *(
                HoldingPlot(figure.add_axes((left, _BOTTOM, width, _HEIGHT)), array, title)
                for array, (left, width, title) in _COLUMNS.items()
            ),
            StepPlot(figure.add_axes((0.6, _BOTTOM, 0.39, _HEIGHT))),
            FasterPlot(figure.add_axes((0.06, 0.115, 0.555, 0.29))),
        ]
