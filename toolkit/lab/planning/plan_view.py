"""The planner's modelled table, and the recorded errors of its model of memory."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolkit.lab.kit.stored import stored_folder
from toolkit.lab.kit.view import Data, View
from toolkit.measure import in_words
from toolkit.planning import Plan, Prediction
from toolkit.planning.grade.by_compiler import graded, summary
from toolkit.planning.search.plan import reason, searched, why

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
    *,
    model: str,
    chip: str,
    chips: int,
    sequences: int,
    context: int,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> PlanView:
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
