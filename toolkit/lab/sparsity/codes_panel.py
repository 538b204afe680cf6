"""Keys in a few bits: estimates of scores by hashes and by product-quantised codes."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit.experiments.sparse.model import HEADS
from toolkit.figures import ACCENT, INK, SIGNED, WEIGHTS
from toolkit.figures.axes import set_limits
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.sparsity.codes_view import BINS, CODE_BITS, TOP, CodesView, codes_view
from toolkit.lab.sparsity.reading import CONTEXTS, QUESTIONS

_MOST_PARTS, _LINES = 4, 8


class CountPlot(Plot):
    """All tokens by an estimate and the truth, counted in cells; the chosen one is marked."""

    def __init__(self, axes: Axes, names: tuple[str, str], titles: tuple[str, str, str]) -> None:
        super().__init__(axes)
        self._pair, self._is_hash = names, names[0] == "alike"
        axes.set(title=titles[0], xlabel=titles[1], ylabel=titles[2])
        axes.grid(False)
        axes.locator_params(axis="y", nbins=5)  # for short words beside the axis
        self.image_of = self.image((BINS, BINS), WEIGHTS, 0, 1, origin="lower")
        label = "SimHash law" if self._is_hash else "exact"
        self.law = self.line(color=INK, linewidth=1.1, linestyle="--", label=label)
        self.mark = self.marks(ACCENT, "o", fillstyle="none", markersize=9, label="the token")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, fontsize=8.5)

    def show(self, view: CodesView) -> None:
        counts, extent = view.counts(*self._pair)
        self.image_of.set(data=counts, extent=extent, clim=(0, counts.max()))
        left, right, low, high = extent
        x = np.linspace(left, right, 40)
        self.law.set_data(x, np.sin(np.pi / 2 * x) if self._is_hash else x)
        xs, ys = (getattr(view, name) for name in self._pair)
        self.mark.set_data([xs[view.token]], [ys[view.token]])
        pad = 0.05 * (right - left), 0.05 * (high - low)
        set_limits(self.axes, x=(left - pad[0], right + pad[0]),
                   y=(low - pad[1], high + pad[1]))  # fmt: skip


class BitsPlot(Plot):
    """The token's hash, bit by bit: dark where it is the question's."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_title("Bits of the token: blue if also the question's", fontsize=10)
        axes.set(xticks=[], yticks=[])
        axes.grid(False)
        self.image_of = self.image((_LINES, 1), WEIGHTS, 0, 1.4)

    def show(self, view: CodesView) -> None:
        self.image_of.set_data(view.bits.reshape(_LINES, -1).astype(float))


class TablePlot(Plot):
    """The question's table: its product with every centroid, and which are the token's."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_title("Products with the centroids; x: the token's codes", fontsize=10)
        axes.set_xlabel("centroid", fontsize=9)
        axes.set_yticks(range(_MOST_PARTS), [f"part {n + 1}" for n in range(_MOST_PARTS)])
        axes.set_xticks((0, 16, 32, 48, 63))
        axes.tick_params(length=0, labelsize=8)
        axes.grid(False)
        self.image_of = self.image((_MOST_PARTS, 2**CODE_BITS), SIGNED, -1, 1)
        self.crosses = self.marks(INK, "x", markersize=7, markeredgewidth=1.6)

    def show(self, view: CodesView) -> None:
        parts, clusters = view.products.shape
        shown = np.full((_MOST_PARTS, clusters), np.nan)
        shown[:parts] = view.products
        most = np.abs(view.products).max()
        self.image_of.set(data=shown, clim=(-most, most))
        self.crosses.set_data(view.codes, range(parts))


class CodesPanel(Panel):
    """Hash bits and product-quantised codes against true scores, and one token's own.

    Example:
        >>> panel = CodesPanel(bits=32, context=1024)
        >>> panel.view.bits.shape
        (32,)
    """

    title = "Keys in a few bits: how well do they rank?"
    figure_size = (9.6, 6.4)
    has_palette = True

    bits = Choice("Hash", 128, {f"{n} bits": n for n in (32, 128, 512)})
    parts = Choice(
        "Codes", 2, {f"{n} parts of {CODE_BITS} bits": n for n in (2, _MOST_PARTS)}
    )  # fmt: skip
    context = Choice("Context", 4096, {f"{n:,} tokens": n for n in CONTEXTS})
    head = Number("Head", 1, low=1, high=HEADS, explanation="Of layer 1")
    question = Number("Question", 3, low=1, high=QUESTIONS)
    rank = Number("Token", 1, low=1, high=TOP, explanation="By weight, the heaviest first")

    def compute(self, **state: Any) -> CodesView:
        return codes_view(**state)

    def plots(self, figure: Figure) -> list[Plot]:
        titles = ("HATA: bits shared", "bits shared, -1 to 1", "cosine with the key")
        others = ("PQCache: rounded keys", "score by the codes", "true score")
        return [
            CountPlot(figure.add_axes((0.075, 0.51, 0.4, 0.42)), ("alike", "cosines"), titles),
            CountPlot(figure.add_axes((0.58, 0.51, 0.4, 0.42)), ("estimates", "exact"), others),
            BitsPlot(figure.add_axes((0.075, 0.13, 0.4, 0.15))),
            TablePlot(figure.add_axes((0.58, 0.13, 0.4, 0.15))),
        ]
