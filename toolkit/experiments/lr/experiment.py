"""Which way of choosing a learning rate is best at equal gradient evaluations, search included?

Ten workloads on which no constant of a search was chosen, by three budgets (two of them by a
fourth), each with the same seeds for all methods: a seed determines the initial state and the order
of the data, so that differences between methods are paired.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.experiments.kit.experiment import Column, Experiment, Workspace
from toolkit.experiments.kit.results import Results
from toolkit.experiments.kit.verdicts import LEAST_SEEDS, Claim, Judge, fails
from toolkit.experiments.lr.evaluation import EVALUATION, MILLISECONDS
from toolkit.experiments.lr.methods import METHODS, SPENT, TEST
from toolkit.experiments.lr.report import (
    DEFAULT,
    REFERENCE,
    Cell,
    cells,
    judge_costs_no_more,
    judge_profile,
    report,
)
from toolkit.experiments.lr.workloads import workload

BUDGETS = (300, 1000, 4000)
LONG_BUDGET, LONG = 16000, ("sets", "field")  # and for these two
QUARTER = 4  # oracle-tuned linear decay is also run with a quarter of each budget
SEEDS = LEAST_SEEDS  # trained side by side
CHANCE = "random search"
JUDGED = BUDGETS[:2]  # in which methods are judged
AREA_THAT_MATTERS = 0.05  # of the profile


@dataclass(frozen=True)
class MethodSetting:
    """A method with a budget on a workload."""

    workload: str  # a key of `EVALUATION`
    budget: int  # gradient evaluations
    method: str  # a key of `METHODS`

    @property
    def label(self) -> str:
        """As in tables and records."""
        return f"{self.workload} {self.budget}: {self.method}"


def _settings() -> dict[str, MethodSetting]:
    """Short budgets first; the oracle also at a quarter of each."""
    found = []
    for budget in (*BUDGETS, LONG_BUDGET):
        for name in EVALUATION if budget != LONG_BUDGET else LONG:
            found.append(MethodSetting(name, budget // QUARTER, REFERENCE))
            found += [MethodSetting(name, budget, method) for method in METHODS]
    return {setting.label: setting for setting in found}


_blocks: dict[tuple[MethodSetting, int], list[dict[str, Any]]] = {}


def execute(setting: MethodSetting, seed: int, workspace: Workspace) -> dict[str, Any]:
    """One run; neighbouring seeds are trained in the same program and cached."""
    first = seed - seed % SEEDS
    if (setting, first) not in _blocks:
        seeds = np.arange(first, first + SEEDS)
        run = METHODS[setting.method].run
        found = run(workload(setting.workload), setting.budget, seeds, workspace.progress)
        _blocks.clear()
        _blocks[setting, first] = found
    return _blocks[setting, first][seed - first]


def work(setting: MethodSetting) -> float:
    """Expected core seconds of one seed."""
    return setting.budget * METHODS[setting.method].cost * MILLISECONDS[setting.workload] / 1000


def _cells(results: Results) -> list[Cell]:
    found = cells(results, EVALUATION, BUDGETS) + cells(results, LONG, (LONG_BUDGET,))
    return [cell for cell in found if cell.losses]


def _ahead_of(rival: str, budget: int, method: str = DEFAULT) -> Judge:
    return lambda results: judge_profile(_judged(results, budget, method, rival), rival, method)


def _costs_no_more(budget: int, method: str = DEFAULT) -> Judge:
    return lambda results: judge_costs_no_more(_judged(results, budget, method), method)


def _judged(results: Results, budget: int, *methods: str) -> list[Cell]:
    """A claim reads no other runs than those it compares, so that one commit of these is enough."""
    return cells(results, EVALUATION, (budget,), (REFERENCE, *methods))


def _claims(budget: int) -> list[Claim]:
    """Controls: chance must be seen to need more than the oracle, and not to be ahead of it."""
    ahead, control = (
        f"in {budget} evaluations ahead of",
        fails(_ahead_of(REFERENCE, budget, CHANCE)),
    )
    return [
        Claim(
            f"in {budget} evaluations probe then decay is as good as oracle-tuned linear decay",
            _costs_no_more(budget),
            control=fails(_costs_no_more(budget, CHANCE)),
        ),
        *(
            Claim(f"{ahead} {rival}", _ahead_of(rival, budget), AREA_THAT_MATTERS, control=control)
            for rival in ("Prodigy + cosine", CHANCE, "random probes", "linear, fixed rate")
        ),
    ]


def _draw(results: Results, caption: str):
    from toolkit.experiments.lr.figure import draw

    return draw(_cells(results), caption)


EXPERIMENT = Experiment(
    name="lr",
    title="At equal gradient evaluations, search included: how to choose a learning rate?",
    settings=_settings(),
    execute=execute,
    columns=(Column(TEST, "1", 4), Column(SPENT, "1", 0)),
    claims=tuple(claim for budget in JUDGED for claim in _claims(budget)),
    draw=_draw,
    beyond="language models of millions of parameters, where a search pays off or does not; give "
    "`toolkit.lr.search` such a loss.",
    minutes=290,
    work=work,
    report=lambda results: report(_cells(results)),
    seeds_together=SEEDS,
)
