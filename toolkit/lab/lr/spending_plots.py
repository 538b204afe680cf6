"""A search's cost up to a round: schedule, ledger, and loss."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from toolkit.figures import ACCENT, FAINT, INK
from toolkit.figures.axes import count_ticks, few_log_ticks, log_ticks
from toolkit.lab.lr.search_plots import KNOWN, PLAN, RoundPlot, legend_below
from toolkit.lab.lr.search_problems import problem
from toolkit.lab.lr.search_rounds import with_gaps
from toolkit.lab.lr.search_view import SearchView

LOSSES = 4  # at the start, now, tuned linear, best
NEARLY = 0.97  # of the run: the last rates before zero need no room


class SchedulePlot(RoundPlot):
    """Rates against evaluations spent, beside the best schedule."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="The schedule so far", yscale="log")
        axes.set_xlabel("gradient evaluations, candidates included", labelpad=2)
        axes.set_ylabel("learning rate", labelpad=1)
        log_ticks(axes.yaxis, count=8)
        count_ticks(axes.xaxis, 5)
        # Neighbours meet without a seam.
        searched = PolyCollection([], facecolor="#e6eaee", linewidth=0, antialiased=False)
        self._searched = self.moving(axes.add_collection(searched))
        self._tried = self.marks(FAINT, ".", markersize=3.5)
        self._best = self.line(color=KNOWN, linewidth=1.5, linestyle=(0, (1, 1.2)))
        self._planned = self.line(color=ACCENT, linewidth=1.6, linestyle=PLAN)
        self.done = self.line(color=INK, linewidth=2.4)

    def name(self, view: SearchView) -> None:
        settings = view.settings
        low, high = problem(settings.problem).lr_range
        known = view.best or view.linear
        lowest = min(low, known.rates[int(NEARLY * settings.budget)]) / 1.5
        self.axes.set(xlim=(0, settings.budget), ylim=(lowest, high * 1.8))
        best = "best there is" if view.best else "tuned linear decay"
        names = {"trained": self.done, "planned": self._planned, best: self._best}
        legend_below(self.axes, {**names, "candidates": self._searched}, columns=4)
        self._best.set_data(known.spent, known.rates)

    def move(self, view: SearchView) -> None:
        low, high = self.axes.get_ylim()
        tried = [turn for turn in view.taken if turn.candidates]
        corners = [
            [(a, low), (a, high), (b, high), (b, low)] for a, b in (turn.spent for turn in tried)
        ]
        self._searched.set_verts(corners)
        dots = [(sum(turn.spent) / 2, c.rate) for turn in tried for c in turn.candidates]
        self._tried.set_data(*np.reshape(dots, (-1, 2)).T)
        self.done.set_data(*with_gaps(view.run.spent, view.run.rates))
        self._planned.set_data(*view.planned)


class LedgerPlot(RoundPlot):
    """Evaluations by purpose."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Evaluations", grid="", ylim=(-0.5, 0.5), yticks=[])
        axes.spines["left"].set_visible(False)
        count_ticks(axes.xaxis, 5)
        looks: dict[str, Any] = {
            "facecolor": (FAINT, INK, "white"), "edgecolor": ("white", INK, INK),
            "hatch": ("///", "", ""),
        }  # fmt: skip
        bars = axes.barh([0] * 3, [0] * 3, 0.62, **looks)
        self.bars = [self.moving(bar) for bar in bars]
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        middle = {"ha": "center", "va": "center", "fontsize": 8.8, "fontweight": "bold"}
        self._words = [
            self.text(color=colour, bbox=box, **middle)
            for colour, box in ((INK, behind), ("white", None), (INK, None))
        ]
        above = {"ha": "right", "va": "bottom", "transform": axes.transAxes}
        self._depth = self.text(1, 1.06, fontsize=9, **above)

    def name(self, view: SearchView) -> None:
        self.axes.set_xlim(0, view.settings.budget)

    def move(self, view: SearchView) -> None:
        start = 0
        parts = zip(self.bars, self._words, view.ledger.items(), strict=True)
        for bar, word, (name, count) in parts:
            bar.set(x=start, width=count)
            word.set_position((start + count / 2, 0))
            word.set_text(f"{name} {count:,}" if count > 0.22 * view.settings.budget else "")
            start += count
        self._depth.set_text(f"depth {view.taken[-1].after.ledger.sequential_depth:,} steps")


class BoughtPlot(RoundPlot):
    """The loss reached, and those of known schedules."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Loss", xscale="log", ylim=(LOSSES - 0.45, -0.55))
        axes.spines["left"].set_visible(False)
        self.dots = [
            self.marks(colour, marker, markersize=8)
            for colour, marker in ((FAINT, "o"), (ACCENT, "D"), (KNOWN, "s"), (KNOWN, "*"))
        ]
        self._words = [self.text(va="center", fontsize=9) for _ in range(LOSSES)]

    def name(self, view: SearchView) -> None:
        start, _, *known = self._losses(view)
        lowest, highest = np.nanmin([start, *known]) / 1.25, np.nanmax([start, *known]) * 2.2
        self.axes.set_xlim(lowest, highest)
        few_log_ticks(self.axes.xaxis, lowest, highest)
        last = "best there is" if view.best else "best: not known"
        names = ["at the start", "now", "tuned linear", last]
        self.name_rows(names, fontsize=9)

    def move(self, view: SearchView) -> None:
        for row, value in enumerate(self._losses(view)):
            self.dots[row].set_data([value], [row])
            self._words[row].set_text("" if np.isnan(value) else f"   {value:.3g}")
            self._words[row].set_position((value, row))

    def _losses(self, view: SearchView) -> list[float]:
        best = view.best.loss if view.best else np.nan
        return [view.search.start_loss, view.run.loss, view.linear.loss, best]
