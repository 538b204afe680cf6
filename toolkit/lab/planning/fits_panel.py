"""Which models fit which numbers of chips, under six schemes."""

from typing import Any

from matplotlib.figure import Figure

from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.planning.fits_plots import FewestPlot, MapPlot
from toolkit.lab.planning.fits_view import SCHEMES, FitsView, fits
from toolkit.lab.planning.memory_panel import CHIP


class FitsPanel(Panel):
    """Which models fit how many chips under a scheme, and the fewest chips under each.

    Example:
        >>> panel = FitsPanel(chip="h100", scheme="ZeRO-3, recomputing")
        >>> panel.view.fewest(3, "data parallel") is None  # llama-3-8b
        True
    """

    title = "What fits?"
    figure_size = (9.6, 4.6)

    chip = CHIP
    scheme = Choice("Scheme", "ZeRO-3, recomputing", {name: name for name in SCHEMES})
    # All predictions of a map take longer than a frame: on release.
    sequences = Number(
        "Sequences", 1, low=1, high=32, powers_of_two=True, is_continuous=False,
        explanation="Per chip",
    )  # fmt: skip
    context = Number(
        "Context length", 4096, low=1024, high=131_072, powers_of_two=True, is_continuous=False,
        explanation="Tokens per sequence",
    )  # fmt: skip

    def compute(self, **state: Any) -> FitsView:
        return fits(**state)

    def plots(self, figure: Figure) -> list[Plot]:
        return [
            MapPlot(figure.add_axes((0.123, 0.215, 0.457, 0.685))),
            FewestPlot(figure.add_axes((0.6, 0.215, 0.39, 0.685))),
        ]
