"""A search one round at a time: candidates, loss against rate, schedule, ledger."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
from matplotlib.figure import Figure

from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Progress
from toolkit.lab.lr.search_plots import CandidatePlot, LandscapePlot
from toolkit.lab.lr.search_problems import BUDGETS, PROBLEMS
from toolkit.lab.lr.search_rounds import (
    METHODS,
    PROPOSALS,
    Search,
    Settings,
    begin,
    from_arrays,
    next_round,
)
from toolkit.lab.lr.search_view import SearchView, view_round
from toolkit.lab.lr.spending_plots import BoughtPlot, LedgerPlot, SchedulePlot


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
    figure_size = (9.6, 6.8)
    has_palette = True
    button = "Run to the end"

    problem = Choice("Problem", "quadratic 10", PROBLEMS)
    method = Choice("Method", "autolrs", METHODS)
    budget = Choice(
        "Budget", 2000, {f"{steps:,}": steps for steps in BUDGETS},
        explanation="Gradient evaluations in all, those of candidates included",
    )  # fmt: skip
    proposals = Choice("Candidates come", "sequential", PROPOSALS, explanation="AutoLRS only")
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
        self._searches: dict[Settings, Search] = {}
        super().__init__(**values)

    @property
    def search(self) -> Search:
        """The current search with all rounds; its `arrays()` can be stored for `resume`."""
        return self._search(self.state)

    def step(self) -> None:
        """Take one round and look at it; nothing happens when the search is over."""
        self._searches[_settings(self.state)] = next_round(self.search)
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
        search = from_arrays(arrays)
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

    def _search(self, state: Any) -> Search:
        settings = _settings(state)
        if settings not in self._searches:
            # The first round runs at once, so that the picture is not empty.
            self._searches[settings] = next_round(begin(settings))
        return self._searches[settings]

    def after_piece(self) -> None:
        self.change(round=len(self.search.rounds))

    def pieces(self) -> Iterator[Progress]:
        settings = _settings(self.state)
        # Buttons and menus work between two pieces: take what is there, and only while it is shown.
        while settings == _settings(self.state):
            search = self._search(self.state)
            self._searches[settings] = further = next_round(search)
            spent = further.controller.ledger.gradient_evaluations
            yield spent, settings.budget, f"round {len(further.rounds)}, evaluations"
            if further is search:
                return


def _settings(state: Any) -> Settings:
    return Settings(**{name: state[name] for name in Settings.__dataclass_fields__})
