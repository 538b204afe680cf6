"""State-based recall in stages: how many cells can a model follow?

Cells and swaps double from stage to stage. A model advances, with its parameters, when it answers a
share `PASS` of the questions within the stage's budget; n_max is the largest number of cells
passed.
"""

import dataclasses

import numpy as np

from toolkit.experiments.kit.chart import LOOKS, caption_below, two_panels
from toolkit.experiments.kit.experiment import Column, Experiment, Workspace
from toolkit.experiments.kit.results import Outcome, Results
from toolkit.experiments.kit.verdicts import Claim, in_words
from toolkit.experiments.recall import accuracy_where_moved, model
from toolkit.experiments.synthetic import Recipe, train
from toolkit.experiments.tasks import StateBasedRecall
from toolkit.experiments.tasks.pointers import PASS, STAGES

BUDGET = 100_000  # steps a stage
_SOLVED, _STEPS, _MOVED = "n_max", "steps by stage", "accuracy where moved, by stage"
_PATTERNS = {
    "full": "full full full full",
    "gdn + window": "gdn window gdn window",
    "gdn + full": "gdn full gdn full",
}
_LOOPS = (1, 4, 8)


def _recipe(pattern: str, loops: int) -> Recipe:
    task = StateBasedRecall(STAGES[-1], most_cells=STAGES[-1])
    return Recipe(
        model(pattern, task, loops, 256), task, steps=BUDGET, batch=64, learning_rate=1e-3
    )


def run_stages(
    recipe: Recipe, seed: int, workspace: Workspace, stages: tuple[int, ...] = STAGES
) -> Outcome:
    """Train stage after stage until one is not passed; returns n_max and the stages tried."""
    assert isinstance(recipe.task, StateBasedRecall)
    start, passed, steps, moved = None, [0], [], []
    for index, cells in enumerate(stages):
        task = StateBasedRecall(cells, most_cells=recipe.task.most_cells)
        stage = dataclasses.replace(recipe, task=task)
        place = Workspace(workspace.directory / str(cells), lambda share: None)
        trained = train(stage, seed, place, start=start, enough=PASS)
        start = trained.params
        steps.append(trained.numbers["step"][-1])
        moved.append(accuracy_where_moved(trained, task, seed))
        workspace.progress((index + 1) / len(stages))
        if trained.numbers["accuracy by step"][-1] < PASS:
            break
        passed.append(cells)
    return {_SOLVED: passed[-1], _STEPS: steps, _MOVED: moved}


def _execute(recipe: Recipe, seed: int, workspace: Workspace) -> Outcome:
    return run_stages(recipe, seed, workspace)


def _farther(results: Results) -> tuple[np.ndarray, str]:
    best = np.array([
        results.paired(_SOLVED, [_label(name, loops) for loops in _LOOPS]).max(0)
        for name in _PATTERNS
    ])  # fmt: skip
    full, *hybrids = best
    return np.min(hybrids, 0) - full, f"best over T: {in_words([*_PATTERNS], best, 0)}"


def _label(name: str, loops: int) -> str:
    return f"{name}, T={loops}"


def _draw(results: Results, caption: str):
    figure, (left, right) = two_panels(5.4)
    figure.subplots_adjust(left=0.16)
    for index, label in enumerate(results.labels):
        look = LOOKS[index // len(_LOOPS)]
        samples = results.samples(label, _SOLVED)
        left.barh(index, np.mean(samples), color=look.colour, hatch=look.hatch, edgecolor="white")
        left.plot(samples, [index] * len(samples), ".", color="#1f2933")
        steps = results.samples(label, _STEPS)[0]
        right.plot(STAGES[: len(steps)], steps, color=look.colour, linestyle=look.dashes,
                   marker=look.marker)  # fmt: skip
    left.set_yticks(range(len(results.labels)), results.labels)
    left.invert_yaxis()
    left.set(xlabel="n_max: most cells passed", title="How far the curriculum goes")
    right.set_xscale("log", base=2)
    right.set_xticks(STAGES, [str(cells) for cells in STAGES])
    right.set(xlabel="cells", ylabel="steps to pass", title="steps a stage, first seed")
    caption_below(figure, f"Bars: means over the seeds; dots: all seeds. {caption}")
    return figure


EXPERIMENT = Experiment(
    name="curriculum",
    title="How many cells behind swapped pointers can a model follow?",
    settings={
        _label(name, loops): _recipe(pattern, loops)
        for name, pattern in _PATTERNS.items()
        for loops in _LOOPS
    },
    execute=_execute,
    columns=(Column(_SOLVED, "1", 0),),
    claims=(Claim("hybrids of state and attention go farther than attention", _farther),),
    draw=_draw,
    beyond="all of this: a stage may take its whole budget of "
    f"{BUDGET:,} steps; two cores manage stage 1 (`toolkit experiment recall`).",
    minutes=100_000,
    work=lambda recipe: recipe.work,
)
