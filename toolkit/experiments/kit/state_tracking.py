"""Running products in a group, learned on short words and asked about longer ones.

Shared code of `parity`, `swaps` and `s3`. A model that has learnt the group's rule generalises to
longer words; one that has memorised words does not.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from toolkit.experiments.kit.chart import caption_below, draw_curves, two_panels
from toolkit.experiments.kit.experiment import Column, Experiment, Workspace
from toolkit.experiments.kit.results import Outcome, Results
from toolkit.experiments.kit.synthetic import Recipe, train
from toolkit.experiments.tasks import WordProblem
from toolkit.looped import LoopedConfig

TRAINED = 16
LONGER = 64
SOLVED = 0.95
WITHIN, BEYOND = f"accuracy, first {TRAINED}", f"accuracy, up to {LONGER}"
_BY_POSITION = "accuracy by position"
COLUMNS = (Column(WITHIN), Column(BEYOND))


def recipe(
    group: str,
    pattern: str,
    loops: int,
    *,
    steps: int,
    is_negative: bool,
    is_swaps_only: bool = False,
    heads: int = 2,
) -> Recipe:
    """A model of one layer, run `loops` times, on words of TRAINED elements of a group."""
    # Without a short convolution, with which a model only memorises the words that fit into it.
    task = WordProblem(group, TRAINED, is_swaps_only)
    model = LoopedConfig.tiny(
        pattern,
        loops=loops,
        vocabulary=task.vocabulary,
        width=32,
        heads=heads,
        feed_forward=64,
        options={
            "gdn": {"negative_eigenvalues": is_negative, "convolution_size": 1},
            "delta_product": {"convolution_size": 1},
        },
    )
    return Recipe(model, task, steps=steps, learning_rate=5e-3)


def execute(setting: Recipe, seed: int, workspace: Workspace) -> Outcome:
    """Trains, then reads words of LONGER elements; accuracy at a position is that of its prefix."""
    assert isinstance(setting.task, WordProblem)
    trained = train(setting, seed, workspace)
    longer = dataclasses.replace(setting.task, length=LONGER)
    by_position = np.array(trained.accuracy_by_position(longer, seed))
    return {
        WITHIN: by_position[:TRAINED].mean(),
        BEYOND: by_position[TRAINED:].mean(),
        **trained.numbers,
        _BY_POSITION: by_position,
    }


def make_draw(chance: float, title: str) -> Callable[[Results, str], object]:
    """A figure: accuracy by position, and while training."""

    def draw(results: Results, caption: str):
        figure, (left, right) = two_panels()
        draw_curves(left, results, _BY_POSITION, 1 + np.arange(LONGER), every=8)
        draw_curves(right, results, "accuracy by step", has_band=False, every=4)
        left.axvline(TRAINED, color="#8a949e", linewidth=0.8)
        left.axhline(chance, color="#8a949e", linewidth=1)
        left.text(
            LONGER, chance - 0.02, "chance", ha="right", va="top", color="#8a949e", zorder=5,
            bbox={"color": "white", "alpha": 0.8, "pad": 1},
        )  # fmt: skip
        left.text(TRAINED + 0.6, 1.04, "trained up to here", color="#8a949e", fontsize=9)
        low = max(0.0, chance - 0.12)
        left.set(xlabel="position in the word", ylabel="accuracy", ylim=(low, 1.1), title=title)
        right.set(xlabel="training step", ylim=(low, 1.1), title="while training")
        right.legend(loc="best", fontsize=8)
        caption_below(figure, f"Lines: means over the seeds. Bands: all seeds. {caption}")
        return figure

    return draw


def experiment(settings: Mapping[str, Recipe], **rest) -> Experiment:
    """An experiment of word problems; `rest` are the fields that differ."""
    return Experiment(
        settings=settings,
        execute=execute,
        columns=COLUMNS,
        work=lambda setting: setting.work,
        **rest,
    )
