"""Looking up eight keys among noise: who recalls, a state, a window, or a hybrid?

MQAR at a size that two cores can learn. Every model has two layers of the same width.
"""

from toolkit.experiments.kit.chart import caption_below, draw_bar, draw_curves, looks, two_panels
from toolkit.experiments.kit.experiment import Column, Experiment, Workspace
from toolkit.experiments.kit.results import Results
from toolkit.experiments.kit.synthetic import Recipe, train
from toolkit.experiments.kit.verdicts import Claim, above, below
from toolkit.experiments.tasks import MultiQueryRecall
from toolkit.looped import LoopedConfig

PAIRS = (8, 12)
TASK = MultiQueryRecall(pairs=PAIRS[0], length=48, vocabulary=64)
WINDOW = 8
SOLVED = 0.95
_PATTERNS = {
    "gdn": "gdn gdn",
    "window": "window window",
    "gdn + full": "gdn full",
}


def _recipe(pattern: str) -> Recipe:
    model = LoopedConfig.tiny(
        pattern,
        vocabulary=TASK.vocabulary,
        width=64,
        heads=2,
        options={"window": {"sliding_window": WINDOW}},
        feed_forward=64,
    )
    return Recipe(model, TASK, steps=1000, learning_rate=5e-3)


def _execute(recipe: Recipe, seed: int, workspace: Workspace) -> dict:
    trained = train(recipe, seed, workspace)
    more = MultiQueryRecall(PAIRS[1], TASK.length, TASK.vocabulary)
    return {
        _accuracy(PAIRS[0]): trained.accuracy(recipe.task, seed),
        _accuracy(PAIRS[1]): trained.accuracy(more, seed),
        **trained.numbers,
    }


def _accuracy(pairs: int) -> str:
    return f"accuracy, {pairs} pairs"


def _draw(results: Results, caption: str):
    figure, (left, right) = two_panels()
    draw_curves(left, results, "accuracy by step")
    for index, (label, look) in enumerate(looks(results)):
        for place, pairs in enumerate(PAIRS):
            samples = results.samples(label, _accuracy(pairs))
            draw_bar(right, place + 0.25 * (index - 1), samples, look, 0.22)
    left.set(xlabel="training step", ylabel="accuracy", ylim=(0, 1.05),
             title=f"{PAIRS[0]} pairs among {TASK.length} tokens, while training")  # fmt: skip
    left.legend(loc="upper left")
    right.set_xticks(range(len(PAIRS)), [f"{pairs} pairs" for pairs in PAIRS])
    right.set(ylim=(0, 1.05), title="after training on 8")
    right.grid(axis="x", visible=False)
    caption_below(figure, f"Means over the seeds; bands and dots: all seeds. {caption}")
    return figure


EXPERIMENT = Experiment(
    name="mqar",
    title=f"Who looks up {PAIRS[0]} keys: a state, a window of {WINDOW}, or a hybrid?",
    settings={label: _recipe(pattern) for label, pattern in _PATTERNS.items()},
    execute=_execute,
    columns=(
        Column(_accuracy(PAIRS[0])),
        Column(_accuracy(PAIRS[1])),
    ),
    claims=(
        Claim(
            f"a window of {WINDOW} alone, which sees {2 * (WINDOW - 1)} tokens back, recalls less "
            "than half",
            below(_accuracy(PAIRS[0]), ["window"], 0.5),
            control=above(_accuracy(PAIRS[0]), ["gdn + full"], 0.5),
        ),
        *(
            Claim(
                f"{who} recalls",
                above(_accuracy(PAIRS[0]), [label], SOLVED),
                control=below(_accuracy(PAIRS[0]), ["window"], SOLVED),
            )
            for who, label in (("a state alone", "gdn"), ("the hybrid", "gdn + full"))
        ),
        Claim(
            f"the hybrid is ahead on {PAIRS[1]} pairs, unseen in training",
            above(_accuracy(PAIRS[1]), ["gdn + full"], ["gdn", "window"]),
            control=below(_accuracy(PAIRS[1]), ["window"], ["gdn"]),
        ),
    ),
    draw=_draw,
    beyond="the original 8,192 words and 64 pairs, where a state of fixed size runs out: "
    "`toolkit.experiments.tasks.MultiQueryRecall(64, 256, 8192)`.",
    minutes=20,
    work=lambda recipe: recipe.work,
)
