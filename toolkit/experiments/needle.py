"""How far back does a window of w tokens see after T loops?  Exactly T (w - 1) tokens.

One layer runs T times. A needle is D tokens before the question; the model is trained on all
reachable distances and tested on these and larger ones.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from toolkit.experiments.kit.chart import caption_below, draw_curves, looks, two_panels
from toolkit.experiments.kit.experiment import Column, Experiment, Workspace
from toolkit.experiments.kit.results import Results
from toolkit.experiments.kit.synthetic import Recipe, train
from toolkit.experiments.kit.verdicts import Claim, above, in_words
from toolkit.experiments.tasks import Needle
from toolkit.looped import LoopedConfig, tokens_reached

WINDOW = 8
VALUES = 4
CHANCE = 1 / VALUES
LOOPS = (1, 2, 4, 8)
_LABELS = [f"T={loops}" for loops in LOOPS]
FARTHEST = 64
SEQUENCES = 256  # a distance
_BY_DISTANCE = "accuracy by distance"
_SOLVED = 0.95
_NEAR_CHANCE = 0.05
_JUST_BEYOND = 8  # distances: together so many answers that chance is told from one right distance


def _model(loops: int) -> LoopedConfig:
    return LoopedConfig.tiny(
        "window",
        loops=loops,
        vocabulary=2 * VALUES + 1,
        width=32,
        heads=2,
        options={"window": {"sliding_window": WINDOW}},
        feed_forward=64,
    )


def _reach(loops: int) -> int:
    """T (w - 1): the farthest token that is not the position itself."""
    reached = tokens_reached(_model(loops))
    assert reached is not None
    return reached - 1


def _recipe(loops: int) -> Recipe:
    return Recipe(_model(loops), Needle(_reach(loops), VALUES), steps=max(300, 100 * loops))


def _execute(recipe: Recipe, seed: int, workspace: Workspace) -> dict:
    trained = train(recipe, seed, workspace)
    accuracies = jax.device_get(_by_distance(trained.graph, trained.params, seed))
    reach = _reach(recipe.model.loops)
    return {
        "accuracy within reach": accuracies[:reach].mean(),
        "accuracy beyond": accuracies[reach:].mean(),
        **trained.numbers,
        _BY_DISTANCE: accuracies,
    }


@functools.partial(jax.jit, static_argnames="graph")
def _by_distance(graph, params, seed):
    model, task = nnx.merge(graph, params), Needle(FARTHEST, VALUES)

    def accuracy(distance):
        key = jax.random.fold_in(jax.random.key(seed), distance)
        batch = task.draw_at(key, jnp.full(SEQUENCES, distance))
        return ((model(batch.tokens).argmax(-1) == batch.targets) & batch.mask).sum() / SEQUENCES

    return jax.lax.map(accuracy, 1 + jnp.arange(FARTHEST))


def _reaches(results: Results) -> tuple[np.ndarray, str]:
    rows = np.array([curve[:, :reach].min(-1) for reach, curve in _curves(results)])
    return rows.min(0) - _SOLVED, "least accuracy at D <= T(w-1): " + in_words(_LABELS, rows)


def _no_farther(results: Results) -> tuple[np.ndarray, str]:
    rows = np.array([
        curve[:, reach : reach + _JUST_BEYOND].mean(-1) for reach, curve in _curves(results)
    ])  # fmt: skip
    words = f"accuracy at the {_JUST_BEYOND} next D: {in_words(_LABELS, rows)} (chance {CHANCE})"
    return CHANCE + _NEAR_CHANCE - rows.max(0), words


def _curves(results: Results) -> Iterator[tuple[int, np.ndarray]]:
    """Reach and accuracies [seeds, distances] of each setting."""
    return zip(map(_reach, LOOPS), results.paired(_BY_DISTANCE, _LABELS), strict=True)


def _draw(results: Results, caption: str):
    figure, (left, right) = two_panels()
    draw_curves(left, results, _BY_DISTANCE, 1 + np.arange(FARTHEST), every=7)
    draw_curves(right, results, "accuracy by step", has_band=False, every=4)
    for label, look in looks(results):
        reach = _reach(EXPERIMENT.settings[label].model.loops)
        left.axvline(reach, color=look.colour, linewidth=0.8)
    left.axhline(CHANCE, color="#8a949e", linewidth=1)
    left.set(xlabel="distance of the needle (tokens)", ylabel="accuracy", ylim=(0, 1.05),
             title=f"A window of {WINDOW} tokens, T loops")  # fmt: skip
    left.text(FARTHEST, CHANCE - 0.06, "chance", ha="right", color="#8a949e")
    right.set(xlabel="training step", ylim=(0, 1.05), title="while training, within reach")
    right.legend(loc="lower right")
    caption_below(figure, f"Thin lines: T (w - 1). Bands: all seeds. {caption}")
    return figure


EXPERIMENT = Experiment(
    name="needle",
    title="How far back does a sliding window see, loop by loop?",
    settings=dict(zip(_LABELS, map(_recipe, LOOPS), strict=True)),
    execute=_execute,
    columns=(
        Column("accuracy within reach"),
        Column("accuracy beyond"),
    ),
    claims=(
        Claim(
            "T loops of a window of w tokens find a needle T(w-1) tokens back",
            _reaches,
            control=_no_farther,
        ),
        Claim(
            "and nothing farther: beyond, the answer is chance",
            _no_farther,
            control=above("accuracy within reach", _LABELS, CHANCE + _NEAR_CHANCE),
        ),
    ),
    draw=_draw,
    beyond="windows of hundreds of tokens and deeper models; their reach is "
    "`toolkit.looped.tokens_reached(config) - 1`, the formula tested here.",
    minutes=13,
    work=lambda recipe: recipe.work,
)
