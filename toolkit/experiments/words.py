"""Parity and S3 at the lengths of the papers that say what they need, with one layer.

Learned from words of 40 bits and of 128 elements, asked about words of up to 256 and 512. Width,
heads and batch for parity are those of a public configuration of "Unlocking State-Tracking"; for S3
the heads are those of a public command of "DeltaProduct". They train for longer than this (20,000
steps, and 4,900 steps of 2,048 words), score the whole word alone (parity), and have a short
convolution.

Source: Grazzi et al., arXiv:2411.12537, and Siems et al., arXiv:2502.10297, with their public code.
"""

import dataclasses
import functools

import numpy as np

from toolkit.experiments.kit.chart import caption_below, draw_curves, two_panels
from toolkit.experiments.kit.experiment import Column, Experiment, Workspace
from toolkit.experiments.kit.results import Outcome, Results
from toolkit.experiments.kit.synthetic import Recipe, train_side_by_side
from toolkit.experiments.kit.verdicts import LEAST_SEEDS, Claim, Judge, above, below, fails
from toolkit.experiments.tasks import WordProblem
from toolkit.looped import LoopedConfig

LONGER = {"Z2": 256, "S3": 512}
SOLVED, FAILED = 0.9, 0.75
WITHIN, BEYOND = "accuracy, length of training", "accuracy, longer"
_BY_POSITION = "accuracy by position"
_FLIPS, _FORGETS, _FULL = "parity: gdn, beta up to 2", "parity: gdn, beta up to 1", "parity: full"
_TWO, _ONE, _BOUNDED = "S3: delta product", "S3: gdn, beta up to 2", "S3: gdn, beta up to 1"


def _model(group: str, pattern: str, width: int, heads: int, **options) -> LoopedConfig:
    return LoopedConfig.tiny(
        pattern,
        vocabulary=WordProblem(group, 1).vocabulary,
        width=width,
        heads=heads,
        feed_forward=2 * width,
        options={pattern: options},
    )


def _parity(pattern: str, **options) -> Recipe:
    model = _model("Z2", pattern, 16, 4, **options)
    return Recipe(model, WordProblem("Z2", 40), 4000, batch=256, learning_rate=1e-3)


def _s3(pattern: str, **options) -> Recipe:
    model = _model("S3", pattern, 32, 8, **options)
    return Recipe(model, WordProblem("S3", 128), 2000, batch=64, learning_rate=5e-3)


@functools.lru_cache(maxsize=1)
def _block(recipe: Recipe, first: int) -> list[Outcome]:
    assert isinstance(recipe.task, WordProblem)
    seeds, outcomes = range(first, first + LEAST_SEEDS), []
    longer = dataclasses.replace(recipe.task, length=LONGER[recipe.task.group])
    for seed, trained in zip(seeds, train_side_by_side(recipe, seeds), strict=True):
        by_position = np.array(trained.accuracy_by_position(longer, seed))
        within, beyond = np.split(by_position, [recipe.task.length])
        outcomes.append(
            {
                WITHIN: within.mean(),
                BEYOND: beyond.mean(),
                _BY_POSITION: by_position,
                **trained.numbers,
            }
        )
    return outcomes


def execute(recipe: Recipe, seed: int, workspace: Workspace) -> Outcome:
    """Accuracy on prefixes as long as the words of training, and on longer ones."""
    return _block(recipe, seed - seed % LEAST_SEEDS)[seed % LEAST_SEEDS]


def _draw(results: Results, caption: str):
    figure, panels = two_panels()
    kinds = ("parity", "Z2", 40, 1 / 2), ("S3", "S3", 128, 1 / 6)
    for axes, (name, group, length, chance) in zip(panels, kinds, strict=True):
        longer = LONGER[group]
        labels = [label for label in results.labels if label.startswith(name)]
        own = Results({label: results.outcomes[label] for label in labels})
        draw_curves(axes, own, _BY_POSITION, 1 + np.arange(longer), every=longer // 8)
        axes.axhline(chance, color="#8a949e", linewidth=1)
        axes.axvline(length, color="#8a949e", linewidth=0.8)
        axes.set(
            xlabel="position in the word", ylim=(0, 1.05), title=f"{name}; line: trained so far"
        )
        axes.legend(loc="best", fontsize=8)
    panels[0].set_ylabel("accuracy")
    caption_below(figure, f"Lines: means over the seeds. Bands: all seeds. {caption}")
    return figure


def _claim(text: str, judge: Judge, failing: str) -> Claim:
    return Claim(text, judge, control=below(BEYOND, [failing], FAILED))


def _failure(text: str, failing: str, learning: str) -> Claim:
    """That a model fails, where another on the same words does not: they can be learnt."""
    control = fails(below(BEYOND, [learning], FAILED))
    return Claim(text, below(BEYOND, [failing], FAILED), control=control)


EXPERIMENT = Experiment(
    name="words",
    title="Who tracks parity and S3 at the lengths of the papers, and goes on to longer words?",
    settings={
        _FLIPS: _parity("gdn", convolution_size=1, negative_eigenvalues=True),
        _FORGETS: _parity("gdn", convolution_size=1),
        _FULL: _parity("full"),
        _TWO: _s3("delta_product", convolution_size=1),
        _ONE: _s3("gdn", convolution_size=1, negative_eigenvalues=True),
        _BOUNDED: _s3("gdn", convolution_size=1),
    },
    execute=execute,
    columns=(Column(WITHIN), Column(BEYOND)),
    claims=(
        _claim(
            "with negative eigenvalues a delta rule tracks parity, from 40 bits to 256",
            above(BEYOND, [_FLIPS], SOLVED),
            _FORGETS,
        ),
        _failure("attention does not", _FULL, _FLIPS),
        _claim(
            "two reflections per token solve S3 in words of 128",
            above(WITHIN, [_TWO], SOLVED),
            _BOUNDED,
        ),
        _claim("and go on to words of 512", above(BEYOND, [_TWO], SOLVED), _BOUNDED),
        _failure("one reflection per token does not", _ONE, _TWO),
    ),
    draw=_draw,
    beyond="A5 and S5, which want tens of thousands of steps: "
    "`toolkit.experiments.tasks.WordProblem` draws them.",
    minutes=60,
    work=lambda recipe: recipe.work,
    seeds_together=LEAST_SEEDS,
)
