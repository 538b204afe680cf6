"""Looking up more keys than a state holds: does one layer of attention make up for it?

MQAR with as many pairs as fill the first half of the text. The state of a head that follows the
delta rule holds as many orthogonal keys as a key has channels; beyond that, a new pair overwrites
old ones. `mqar` is the same task with few pairs.
"""

import functools

import numpy as np

from toolkit.experiments.kit.chart import caption_below, draw_bar, draw_curves, looks, two_panels
from toolkit.experiments.kit.experiment import Column, Experiment, Workspace
from toolkit.experiments.kit.results import Outcome, Results
from toolkit.experiments.kit.synthetic import Recipe, train_side_by_side
from toolkit.experiments.kit.verdicts import LEAST_SEEDS, Claim, above, below, fails
from toolkit.experiments.tasks import MultiQueryRecall
from toolkit.looped import LoopedConfig

PAIRS, SMALL, LARGE, WINDOW = 32, 8, 64, 8
TASK = MultiQueryRecall(PAIRS, length=4 * PAIRS, vocabulary=4 * PAIRS)
SOLVED = 0.95
END, MEAN = "accuracy", "mean accuracy while training"
_HYBRID, _FULL, _WINDOW = f"gdn + full, keys of {SMALL}", "full", "window"


def _state(key_size: int) -> str:
    return f"gdn, keys of {key_size}"


def _recipe(pattern: str, key_size: int = SMALL) -> Recipe:
    options = {
        "gdn": {"key_size": key_size, "value_size": 32},
        "window": {"sliding_window": WINDOW},
    }
    model = LoopedConfig.tiny(
        pattern,
        vocabulary=TASK.vocabulary,
        width=64,
        heads=2,
        options={word: options[word] for word in options if word in pattern},
        feed_forward=64,
    )
    return Recipe(model, TASK, steps=3000)


@functools.lru_cache(maxsize=1)
def _block(recipe: Recipe, first: int) -> list[Outcome]:
    seeds = range(first, first + LEAST_SEEDS)
    return [
        {
            END: trained.accuracy(recipe.task, seed),
            MEAN: np.mean(trained.numbers["accuracy by step"]),
            **trained.numbers,
        }
        for seed, trained in zip(seeds, train_side_by_side(recipe, seeds), strict=True)
    ]


def execute(recipe: Recipe, seed: int, workspace: Workspace) -> Outcome:
    """Accuracy after training, and its mean over the course of it."""
    return _block(recipe, seed - seed % LEAST_SEEDS)[seed % LEAST_SEEDS]


def _draw(results: Results, caption: str):
    figure, (left, right) = two_panels()
    draw_curves(left, results, "accuracy by step", every=2)
    for place, (label, look) in enumerate(looks(results)):
        draw_bar(right, place, results.samples(label, END), look, 0.6)
    left.set(xlabel="training step", ylabel="accuracy", ylim=(0, 1.35),
             title=f"{PAIRS} pairs among {TASK.length} tokens")  # fmt: skip
    left.legend(loc="upper center", ncols=3, fontsize=8)
    right.set_xticks([])
    right.set(ylim=(0, 1.35), title="after training")
    caption_below(figure, f"Means over the seeds; bands and dots: all seeds. {caption}")
    return figure


_CONTROL = below(END, [_WINDOW], 0.5)
"""A window sees few pairs; where even that recalls, the task does not ask for a memory."""
_claim = functools.partial(Claim, control=_CONTROL)

EXPERIMENT = Experiment(
    name="overflow",
    title=f"Who looks up {PAIRS} keys: states for {SMALL} to {LARGE}, attention, or a hybrid?",
    settings={
        **{_state(size): _recipe("gdn gdn", size) for size in (SMALL, 2 * SMALL, LARGE)},
        _HYBRID: _recipe("gdn full"),
        _FULL: _recipe("full full"),
        _WINDOW: _recipe("window window"),
    },
    execute=execute,
    columns=(Column(END), Column(MEAN)),
    claims=(
        _claim("attention recalls", above(END, [_FULL], SOLVED)),
        _claim(f"a state for {LARGE} keys a head recalls", above(END, [_state(LARGE)], SOLVED)),
        Claim(
            f"a state for {SMALL} recalls less than half",
            below(END, [_state(SMALL)], 0.5),
            control=fails(below(END, [_HYBRID], 0.5)),  # the task can be learnt
        ),
        _claim(
            f"the hybrid, with a state for {SMALL}, beats that state alone",
            above(END, [_HYBRID], [_state(SMALL)]),
            smallest=0.1,
        ),
        _claim(
            "the hybrid recalls more than attention alone",
            above(END, [_HYBRID], [_FULL]),
            smallest=0.05,
        ),
        _claim(
            "the hybrid recalls more than attention alone in the course of training",
            above(MEAN, [_HYBRID], [_FULL]),
            smallest=0.1,
        ),
    ),
    draw=_draw,
    beyond="the original 8,192 words and 64 pairs in 256 tokens: "
    "`toolkit.experiments.tasks.MultiQueryRecall(64, 256, 8192)`.",
    minutes=90,
    work=lambda recipe: recipe.work,
    seeds_together=LEAST_SEEDS,
)
