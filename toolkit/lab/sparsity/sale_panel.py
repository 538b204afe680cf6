"""SALE's tiles: the map, and one row of it against the threshold."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from toolkit.experiments.sparse.model import HEADS
from toolkit.figures import ACCENT, FAINT, look
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.sparsity.sale_view import (
    COLUMNS,
    KEY_BLOCK,
    QUERY_BLOCK,
    ROWS,
    SaleView,
    sale_view,
)

_LOW, _HIGH = -6.0, 10.0  # nats; margins beyond are drawn here
_KINDS = ListedColormap(["#ffffff", "#eef1f4", "#a8cfe8", "#2f7fb8"])
_THRESHOLDS = (0.008, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_DROPPED, _ALWAYS, _KEPT = 1, 2, 3


class TileMapPlot(Plot):
    """Every tile: dropped, always kept, or kept for its score; crosses: exact scores differ."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_title("Tiles: dark blue kept, pale always", fontsize=10.5)
        axes.set(xlabel="keys", ylabel="queries")
        axes.grid(False)
        axes.set_xticks(np.linspace(-0.5, COLUMNS - 0.5, 5), [f"{256 * n:,}" for n in range(5)])
        axes.set_yticks(np.linspace(-0.5, ROWS - 0.5, 5), [f"{256 * n:,}" for n in range(5)])
        axes.tick_params(labelsize=8)
        self.image_of = self.image((ROWS, COLUMNS), _KINDS, 0, 3)
        self.wrong = self.marks(
            ACCENT, "x", markersize=6, markeredgewidth=1.4, label="4 bits decide otherwise"
        )
        self._row = self.line(color=ACCENT, linewidth=1.6, clip_on=False)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), fontsize=8.5)

    def show(self, view: SaleView) -> None:
        kinds = np.where(view.kept, _KEPT, _DROPPED)
        kinds = np.where(view.tiles.always, _ALWAYS, kinds)
        self.image_of.set_data(np.where(view.causal, kinds, 0))
        rows, columns = np.nonzero((view.kept != view.by_exact) & view.causal)
        self.wrong.set_data(columns, rows)
        left, right, top, bottom = -0.5, COLUMNS - 0.5, view.chosen - 0.5, view.chosen + 0.5
        self._row.set_data([left, right, right, left, left], [top, top, bottom, bottom, top])


class MarginPlot(Plot):
    """One row of tiles: how far the largest score lies above each query's bound, against tau."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_title("The framed row: largest score over the bound", fontsize=10.5)
        axes.set(xlim=(-0.5, COLUMNS - 0.5), ylim=(_LOW, _HIGH), xlabel="keys", ylabel="nats")
        axes.set_xticks(np.linspace(-0.5, COLUMNS - 0.5, 5), [f"{256 * n:,}" for n in range(5)])
        axes.tick_params(labelsize=8)
        self.always = self.marks(FAINT, "s", markersize=6, label="always kept")
        self.estimated = self.marks(look("full").colour, "o", markersize=6, label="in 4 bits")
        self.exact = self.marks(
            look("gdn").colour, "_", markersize=9, markeredgewidth=1.8, label="exact"
        )
        self.bound = self.line(color=ACCENT, linewidth=1.4, linestyle="--", label="log tau")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=4, fontsize=8.5)

    def show(self, view: SaleView) -> None:
        of, at = view.tiles, np.flatnonzero(view.causal[view.chosen])
        is_always = of.always[view.chosen, at]
        estimated, exact = (
            np.clip(x[view.chosen, at], _LOW, _HIGH) for x in (of.estimated, of.exact)
        )
        self.always.set_data(at[is_always], estimated[is_always])
        self.estimated.set_data(at[~is_always], estimated[~is_always])
        self.exact.set_data(at, exact)
        self.bound.set_data([-0.5, COLUMNS - 0.5], [np.log(view.threshold)] * 2)


class SalePanel(Panel):
    """Which tiles SALE keeps at a threshold, and why.

    Example:
        >>> panel = SalePanel(threshold=0.1)
        >>> panel.threshold = 10.0
    """

    title = "SALE: which tiles of a prompt are worth reading?"
    figure_size = (9.6, 4.9)
    has_palette = True

    threshold = Choice(
        "Tau", 3.0, {f"{tau:g}": tau for tau in _THRESHOLDS},
        explanation="Of the sinks' and local keys' sum of exponentials",
    )  # fmt: skip
    head = Number("Head", 1, low=1, high=HEADS, explanation="Of layer 1")
    row = Number(
        "Row", 12, low=1, high=ROWS,
        explanation=f"Block of {QUERY_BLOCK} queries; keys come in blocks of {KEY_BLOCK}",
    )  # fmt: skip

    def compute(self, **state: Any) -> SaleView:
        return sale_view(**state)

    def plots(self, figure: Figure) -> list[Plot]:
        return [
            TileMapPlot(figure.add_axes((0.075, 0.29, 0.36, 0.61))),
            MarginPlot(figure.add_axes((0.52, 0.29, 0.45, 0.61))),
        ]
