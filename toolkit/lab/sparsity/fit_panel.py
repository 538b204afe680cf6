"""Tactic's fit: the number of tokens it reads, and the number that would have sufficed."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit.experiments.sparse.model import HEADS
from toolkit.figures import ACCENT, FAINT, INK, look
from toolkit.figures.axes import set_limits
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.sparsity.fit_view import FitView, fit_view
from toolkit.lab.sparsity.reading import CONTEXTS, QUESTIONS

_LEAST = 1e-7  # weights below are drawn here


class ListPlot(Plot):
    """Weights in Tactic's order, the fit through two segments, and where reading stops."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Weights in the order of the clusters")
        axes.set(xscale="log", yscale="log", ylim=(_LEAST, 2), xlabel="place in the list")
        axes.set_ylabel("weight, over the largest")
        self.exact = self.marks(FAINT, "o", markersize=3, label="exact")
        self.fit = self.line(color=look("full").colour, linewidth=1.8, label="a / x + b")
        self.looked_at = self.marks(
            look("gdn").colour, "D", markersize=7, label="the two segments looked at"
        )
        self.stop = self.line(color=ACCENT, linewidth=1.6, linestyle="--", label="stops here")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, fontsize=8.5)

    def show(self, view: FitView) -> None:
        at = view.places()
        self.exact.set_data(at + 1, np.maximum(view.exact[at], _LEAST))
        fitted = at[at >= view.seen[0]]
        self.fit.set_data(fitted + 1, np.maximum(view.curve[fitted], _LEAST))
        self.looked_at.set_data(view.seen[1:], np.maximum(view.levels, _LEAST))
        self.stop.set_data([max(view.count, 1)] * 2, [_LEAST, 2])
        set_limits(self.axes, x=(0.9, 1.1 * len(view.exact)))


class MassPlot(Plot):
    """Share of the softmax against the number of tokens, and the requested share."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Softmax held")
        axes.set(xscale="log", ylim=(0, 1.02), xlabel="listed tokens read")
        self.own = self.line(color=look("full").colour, label="in this order")
        self.best = self.line(**look("window").line, linewidth=1.6, label="in the best order")
        self.target = self.line(color=INK, linewidth=1, linestyle=":", label="asked for")
        self.stop = self.line(color=ACCENT, linewidth=1.6, linestyle="--")
        self.got = self.marks(ACCENT, "o", markersize=7, label="got")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, fontsize=8.5)

    def show(self, view: FitView) -> None:
        at = view.places() + 1
        self.own.set_data(at, view.mass[at])
        self.best.set_data(at, view.best_mass[at])
        right = 1.1 * len(view.exact)
        self.target.set_data([0.9, right], [view.target] * 2)
        stop = max(view.count, 1)
        self.stop.set_data([stop] * 2, [0, 1.02])
        self.got.set_data([stop], [view.mass[view.count]])
        set_limits(self.axes, x=(0.9, right))


class FitPanel(Panel):
    """Tactic's stopping point: its fit and the exact list.

    Example:
        >>> view = FitPanel(target=0.9, context=1024).view
        >>> view.fewest <= view.needed
        True
    """

    title = "Tactic: how much must be read for a share of the softmax?"
    figure_size = (9.6, 4.9)
    has_palette = True

    target = Number("Share", 0.9, low=0.5, high=0.99, step=0.01, explanation="Of the softmax")
    context = Choice("Context", 4096, {f"{n:,} tokens": n for n in CONTEXTS})
    head = Number("Head", 1, low=1, high=HEADS, explanation="Of layer 1")
    question = Number("Question", 3, low=1, high=QUESTIONS)

    def compute(self, **state: Any) -> FitView:
        return fit_view(**state)

    def plots(self, figure: Figure) -> list[Plot]:
        return [
            ListPlot(figure.add_axes((0.085, 0.29, 0.45, 0.62))),
            MassPlot(figure.add_axes((0.6, 0.29, 0.385, 0.62))),
        ]
