"""Stage 1 of state-based recall: track five swapped pointers, then read the memory at one.

The task needs both a recurrent state, to follow the swaps, and attention, to read an address. A
hybrid has both. Training begins with few swaps and has hints throughout
(`StateBasedRecall.draw_easier`); the accuracies are those of the task itself.
"""

import functools

import jax
from flax import nnx

from toolkit.experiments.kit.chart import caption_below, draw_bar, draw_curves, looks, two_panels
from toolkit.experiments.kit.experiment import Column, Experiment, Workspace
from toolkit.experiments.kit.results import Results
from toolkit.experiments.kit.verdicts import Claim, above
from toolkit.experiments.synthetic import Recipe, Trained, train
from toolkit.experiments.tasks import StateBasedRecall
from toolkit.experiments.tasks.pointers import PASS
from toolkit.looped import LoopedConfig

CELLS = 8
TASK = StateBasedRecall(CELLS)
WINDOW = 24  # two layers of it see the whole sequence
_PATTERNS = {
    "gdn + full": "gdn full",
    "window": "window window",
}
_ACCURACY, _MOVED = "accuracy", "accuracy where the address moved"


def model(pattern: str, task: StateBasedRecall, loops: int, width: int) -> LoopedConfig:
    """The model of an experiment on state-based recall."""
    # A swap is a reflection, so beta reaches 2. Tokens weigh as much as what layers add to them,
    # and no rotary wavelength is much longer than the sequence: all channels tell neighbouring
    # addresses apart.
    return LoopedConfig.tiny(
        pattern,
        loops=loops,
        vocabulary=task.vocabulary,
        width=width,
        heads=2,
        options={
            "window": {"sliding_window": WINDOW},
            "gdn": {"negative_eigenvalues": True},
        },
        feed_forward=2 * width,
        embedding_std=1.0,
        tied_embedding=False,
        rope_theta=2.0 * task.length,
    )


def accuracy_where_moved(trained: Trained, task: StateBasedRecall, seed: int) -> float:
    """Share of right answers where the queried pointer ended at another address."""
    return float(_moved(trained.graph, trained.params, task, seed))


@functools.partial(jax.jit, static_argnames=("graph", "task"))
def _moved(graph, params, task, seed):
    batch, has_moved = task.draw_with_moves(jax.random.key(seed + 7_000_003), 2048)
    right = nnx.merge(graph, params)(batch.tokens)[:, -1].argmax(-1) == batch.targets[:, -1]
    return (right & has_moved).sum() / has_moved.sum()


def _execute(recipe: Recipe, seed: int, workspace: Workspace) -> dict:
    trained = train(recipe, seed, workspace)
    return {
        _ACCURACY: trained.accuracy(recipe.task, seed, batches=8),
        _MOVED: accuracy_where_moved(trained, TASK, seed),
        **trained.numbers,
    }


def _draw(results: Results, caption: str):
    figure, (left, right) = two_panels()
    draw_curves(left, results, "accuracy by step")
    for index, (label, look) in enumerate(looks(results)):
        draw_bar(right, index, results.samples(label, _MOVED), look, 0.6)
    left.axhline(PASS, color="#8a949e", linewidth=1)
    left.text(0.01, PASS + 0.01, "passed", color="#8a949e", fontsize=9,
              transform=left.get_yaxis_transform())  # fmt: skip
    left.set(xlabel="training step", ylabel="accuracy", ylim=(0.4, 1.05),
             title=f"{CELLS} cells, {CELLS} swaps, while training")  # fmt: skip
    left.legend(loc="upper right")
    right.set_xticks(range(len(results.labels)), results.labels)
    right.set(ylim=(0.4, 1.05), title="where the address moved")
    right.grid(axis="x", visible=False)
    caption_below(figure, f"Chance is 0.5. Means over the seeds; bands, dots: all seeds. {caption}")
    return figure


EXPERIMENT = Experiment(
    name="recall",
    title=f"{CELLS} cells behind five swapped pointers: hybrid or windows alone?",
    settings={
        label: Recipe(model(pattern, TASK, 1, 64), TASK, steps=3000, growing=0.45)
        for label, pattern in _PATTERNS.items()
    },
    execute=_execute,
    columns=(Column(_ACCURACY), Column(_MOVED)),
    claims=(
        Claim(
            "a hybrid of state and attention passes stage 1",
            above(_ACCURACY, ["gdn + full"], PASS),
        ),
        Claim(
            "and is ahead of windows alone",
            above(_ACCURACY, ["gdn + full"], ["window"]),
        ),
    ),
    draw=_draw,
    beyond="16 to 256 cells, in stages.",
    minutes=25,
    work=lambda recipe: recipe.work,
)
