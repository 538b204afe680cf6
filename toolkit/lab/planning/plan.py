"""The fastest strategy, the reason, and the errors of the model."""

import functools
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from toolkit._compat import tooltip
from toolkit.figures import FAINT, INK, look
from toolkit.lab.kit.controls import Choice
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Data, View
from toolkit.lab.planning.memory import CHIP
from toolkit.measure import in_words
from toolkit.measure.stored import stored_folder
from toolkit.planning import Plan, Prediction
from toolkit.planning.grade.by_compiler import graded, summary
from toolkit.planning.models import DENSE
from toolkit.planning.search.plan import reason, searched, why
from toolkit.planning.search.weigh import RUNNERS_UP

RECORD = "libtpu-0.0.42.jsonl"
RECORDED = (
    f"toolkit plan --grade data/planning/{RECORD}; compiled by libtpu 0.0.42 for TPU slices, "
    "on a CPU, 2026-11-22 and 23"
)
MOST_PLANS = 32
_PLANS: dict[tuple[str, str, int, int], Plan] = {}  # of settings come back to


@dataclass(frozen=True)
class PlanView(View):
    """The fastest strategy that fits, its runners-up, and the grading of the model."""

    model: str
    plan: Plan
    graded: list[dict[str, Any]]

    @property
    def rows(self) -> tuple[Prediction, ...]:
        """The best and its runners-up."""
        return (self.plan.best, *self.plan.runners_up)

    def remark(self, row: Prediction) -> str:
        """Why a strategy is the best, or what makes it slower than that."""
        if row is self.plan.best:
            return f"best; MFU {in_words(row.utilisation, 'share')}"
        return why(row, self.plan.best)

    def data(self) -> Data:
        return {
            "strategy, modelled": [str(row.strategy) for row in self.rows],
            "step (seconds)": [row.step_seconds for row in self.rows],
            "per chip (bytes)": [row.memory.total for row in self.rows],
            "reason": [*map(self.remark, self.rows)],
        }

    def sentence(self) -> str:
        best = self.plan.best
        judged = summary(self.graded).splitlines()[1]
        return (
            f"{self.model} on {best.cluster.name}, {best.batch} x {best.sequence_length:,} tokens: "
            f"{self.plan.fitting} of {self.plan.considered} strategies fit; best: {best.strategy}, "
            f"{in_words(best.step_seconds, 'seconds')} per step; {reason(best)} (modelled). "
            f"Against libtpu's compiled programs (recorded), {judged}."
        )

    def footnote(self) -> str:
        return f"Table: modelled. Right: modelled against recorded.\n{RECORDED}."


def planned(
    *, model: str, chip: str, chips: int, sequences: int, context: int,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> PlanView:  # fmt: skip
    """The plan for a number of chips, with `sequences` per chip; `tell` is called with the progress
    of a new search."""
    setting = model, f"{chip}:{chips}", sequences * chips, context
    if setting not in _PLANS:
        found = searched(*setting, tell=tell)
        if len(_PLANS) >= MOST_PLANS:
            _PLANS.pop(next(iter(_PLANS)))
        _PLANS[setting] = found
    return PlanView(model, _PLANS[setting], _graded())


@functools.cache
def _graded() -> list[dict[str, Any]]:
    return graded(stored_folder("planning") / RECORD)


_COLUMNS = {"strategy": (0.0, 52), "step": (0.585, 0), "per chip": (0.69, 0), "reason": (0.8, 20)}
GIB = 2**30


class TablePlot(Plot):
    """One strategy per row, the best first and bold."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_axis_off()
        axes.set(xlim=(0, 1), ylim=(RUNNERS_UP + 1, -0.5))
        style: dict[str, Any] = {"va": "top", "fontsize": 8}
        for name, (left, _) in [*_COLUMNS.items()][1:]:
            axes.text(left, -0.45, name, fontweight="bold", va="top", fontsize=9)
        self._heading = self.text(0, -0.45, fontweight="bold", va="top", fontsize=9)
        for row in range(RUNNERS_UP + 1):
            axes.axhline(row - 0.1, color=FAINT, linewidth=0.6)
        self.rows = [
            [self.text(left, row, **style) for left, _ in _COLUMNS.values()]
            for row in range(RUNNERS_UP + 1)
        ]

    def show(self, view: PlanView) -> None:
        # Letters are what a redraw takes; what all strategies share is said once.
        chunks = {row.strategy.head_chunks for row in view.rows}
        shared = f"head in {max(chunks)} chunks" if len(chunks) == 1 and max(chunks) > 1 else ""
        self._heading.set_text(f"strategy (all: {shared})" if shared else "strategy")
        for at, texts in enumerate(self.rows):
            cells = ("", "", "", "")
            if at < len(view.rows):
                row = view.rows[at]
                cells = (
                    str(row.strategy).removesuffix(f", {shared}"),
                    in_words(row.step_seconds, "seconds"),
                    in_words(row.memory.total, "bytes"),
                    view.remark(row),
                )
            for text, cell, (_, letters) in zip(texts, cells, _COLUMNS.values(), strict=True):
                text.set_text(textwrap.fill(cell, letters) if letters else cell)
                text.set_fontweight("normal" if at else "bold")


class GradePlot(Plot):
    """Predicted memory over compiled memory; on the line, a prediction is exact."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_title("How far off was it?", fontsize=10.5)
        axes.set_xlabel("compiled (recorded), GiB", fontsize=8.5)
        axes.set_ylabel("predicted (modelled), GiB", fontsize=8.5)
        axes.tick_params(labelsize=8)
        self._errors = self.text(0.02, 0.98, va="top", fontsize=8, transform=axes.transAxes)
        self._exact = self.line(color=INK, linewidth=1, linestyle="--")
        self.dots = self.marks(look("full").colour, "o", markersize=4, alpha=0.7)

    def show(self, view: PlanView) -> None:
        self._errors.set_text(
            summary(view.graded).splitlines()[1].replace(": ", "\n").replace(", ", "\n")
        )
        compiled = [row["memory"] / GIB for row in view.graded]
        predicted = [row["memory"] * (1 + row["memory_error"]) / GIB for row in view.graded]
        self.dots.set_data(compiled, predicted)
        most = 1.05 * max(*compiled, *predicted)
        self._exact.set_data([0, most], [0, most])
        if self.axes.get_xlim()[1] != most:  # the record does not change
            self.axes.set(xlim=(0, most), ylim=(0, most))


def _menu(label: str, default: int, *values: int) -> Choice:
    return Choice(label, default, {f"{number:,}": number for number in values})


class PlanPanel(Panel):
    """The planner's strategies with reasons, and its model against compiled programs.

    Menus only: a new setting is searched for half a second, which a bar shows.

    Example:
        >>> panel = PlanPanel(model="llama-3.2-1b", chips=8)
        >>> panel.view.plan.best.fits
        True
    """

    title = "Which strategy, and why?"
    figure_size = (9.6, 4.8)
    opening_seconds = 3
    extra_rows = 1

    model = Choice("Model", "llama-3-8b", {name: name for name in DENSE})
    chip = CHIP
    chips = _menu("Chips", 64, 8, 16, 32, 64, 128)
    sequences = _menu("Sequences per chip", 2, 1, 2, 4, 8)
    context = _menu("Context length", 4096, 2048, 4096, 8192)

    def compute(self, **state: Any) -> PlanView:
        try:
            return planned(**state, tell=self._tell)
        finally:
            if self._page is not None:
                self._bar.layout.visibility = "hidden"

    def extra_widgets(self) -> list[Any]:
        from ipywidgets import IntProgress

        # Hidden between searches, yet as high, so that the page does not move.
        look = {"description": "Search", "layout": {"visibility": "hidden"}}
        self._bar = IntProgress(**look, **tooltip("Cuts weighed"))
        return [self._bar]

    def _tell(self, done: int, total: int) -> None:
        if self._page is None:
            return
        if done == 1:
            self._bar.value, self._bar.max = 0, total
        if done in (1, total) or done % 16 == 0:  # a message to the page each
            self._bar.value = done
            self._bar.layout.visibility = "visible"

    places = (
        (TablePlot, (0.02, 0.14, 0.66, 0.83)),
        (GradePlot, (0.76, 0.26, 0.225, 0.6)),
    )
