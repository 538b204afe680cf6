"""A search one round at a time: candidates, loss against rate, schedule, ledger."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from toolkit.figures import ACCENT, FAINT, INK
from toolkit.figures.axes import count_ticks, few_log_ticks, log_ticks
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Progress
from toolkit.lab.lr import search_rounds
from toolkit.lab.lr.search_plots import (
    KNOWN,
    PLAN,
    CandidatePlot,
    LandscapePlot,
    RoundPlot,
    legend_below,
)
from toolkit.lab.lr.search_view import SearchView, view_round
from toolkit.lab.lr.small_problems import BUDGETS, PROBLEMS, problem

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
        self.done.set_data(*search_rounds.with_gaps(view.run.spent, view.run.rates))
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


class SearchPanel(Panel):
    """A learning-rate search, step by step.

    A step executes the search's next request and returns the losses to it. All rounds are kept:
    `round` selects an earlier one. Another problem, budget or constant starts another search;
    earlier searches are kept too.

    Example:
        >>> panel = SearchPanel(problem="quadratic 1d", method="probe", budget=500)
        >>> panel.step()
        >>> panel.round
        2
    """

    title = "Watch a search think"
    figure_size = (9.6, 6.4)
    extra_rows = 1
    has_palette = True
    button = "Run to the end"

    problem = Choice("Problem", "quadratic 10", PROBLEMS)
    method = Choice("Method", "robust", search_rounds.METHODS)
    budget = Choice(
        "Budget", 2000, {f"{steps:,}": steps for steps in BUDGETS},
        explanation="Gradient evaluations in all, those of candidates included",
    )  # fmt: skip
    proposals = Choice(
        "Candidates come", "together", search_rounds.PROPOSALS, explanation="AutoLRS only"
    )
    candidates = Number(
        "Candidates", 10, low=3, high=16, is_continuous=False,
        explanation="Rates tried in a stage, or by the first probes",
    )  # fmt: skip
    kappa = Number(
        "Kappa", 1000, low=1, high=1 << 20, powers_of_two=True, is_continuous=False,
        explanation="Optimism of AutoLRS one by one, in standard deviations: 1000 in the paper",
    )  # fmt: skip
    round = Number(
        "Round", 1, low=1, high=500, maximum=lambda view: len(view.search.rounds),
        explanation="An earlier one, again",
    )  # fmt: skip

    def __init__(self, **values: Any) -> None:
        self._searches: dict[search_rounds.Settings, search_rounds.Search] = {}
        super().__init__(**values)

    @property
    def search(self) -> search_rounds.Search:
        """The current search with all rounds; its `arrays()` can be stored for `resume`."""
        return self._search(self.state)

    def step(self) -> None:
        """Take one round and look at it; nothing happens when the search is over."""
        self._searches[_settings(self.state)] = search_rounds.next_round(self.search)
        self.after_piece()

    def run(self) -> None:
        """Run all remaining rounds, and show the last."""
        self.finish()

    def reset(self) -> None:
        """Forget all rounds but the first."""
        self.page.job.stop()
        del self._searches[_settings(self.state)]
        self.after_piece()

    def resume(self, arrays: Mapping[str, np.ndarray]) -> Self:
        """Go on from a search taken from a panel before, from its `search.arrays()`."""
        search = search_rounds.from_arrays(arrays)
        self._searches[search.settings] = search
        self.change(**vars(search.settings))
        return self

    def change(self, **values: Any) -> None:
        checked = self._checked(values)
        if checked.keys() - {"round"} and "round" not in checked:
            values["round"] = len(self._search({**self.state, **checked}).rounds)
        super().change(**values)

    def compute(self, *, round: int, **settings: Any) -> SearchView:
        return view_round(self._search(settings), round)

    def plots(self, figure: Figure) -> list[Plot]:
        grid = figure.add_gridspec(
            2, 2, left=0.085, right=0.97, top=0.95, bottom=0.155, wspace=0.2, hspace=0.53
        )
        below = grid[1, 1].subgridspec(2, 1, height_ratios=(0.5, 1), hspace=0.74)
        spent, losses = (figure.add_subplot(place) for place in below)
        for axes in (spent, losses):  # room for the names beside the losses
            box = axes.get_position()
            axes.set_position((box.x0 + 0.045, box.y0, box.width - 0.045, box.height))
        return [
            CandidatePlot(figure.add_subplot(grid[0, 0])),
            LandscapePlot(figure.add_subplot(grid[0, 1])),
            SchedulePlot(figure.add_subplot(grid[1, 0])),
            LedgerPlot(spent),
            BoughtPlot(losses),
        ]

    def adjust(self, view: SearchView) -> None:
        self._step.disabled = view.is_over

    def extra_widgets(self) -> list[Any]:
        from ipywidgets import HBox

        from toolkit.lab.kit.job import button

        step, reset = (functools.partial(self.attempt, do) for do in (self.step, self.reset))
        self._step = button("Step", "step-forward", "search-step", step)
        self._reset = button("Start again", "fast-backward", "search-reset", reset)
        return [HBox([self._step, self._reset])]

    def _search(self, state: Any) -> search_rounds.Search:
        settings = _settings(state)
        if settings not in self._searches:
            # The first round runs at once, so that the picture is not empty.
            self._searches[settings] = search_rounds.next_round(search_rounds.begin(settings))
        return self._searches[settings]

    def after_piece(self) -> None:
        self.change(round=len(self.search.rounds))

    def pieces(self) -> Iterator[Progress]:
        settings = _settings(self.state)
        # Buttons and menus work between two pieces: take what is there, and only while it is shown.
        while settings == _settings(self.state):
            search = self._search(self.state)
            self._searches[settings] = further = search_rounds.next_round(search)
            spent = further.controller.ledger.gradient_evaluations
            yield spent, settings.budget, f"round {len(further.rounds)}, evaluations"
            if further is search:
                return


def _settings(state: Any) -> search_rounds.Settings:
    return search_rounds.Settings(
        **{name: state[name] for name in search_rounds.Settings.__dataclass_fields__}
    )
