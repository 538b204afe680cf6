"""S3, the smallest group whose elements do not commute: does looping a layer help to track it?

One delta-rule step per token reflects once; an element of S3 may need two reflections. DeltaProduct
makes two in one pass. Looping a layer that makes one is not the same: every loop starts from an
empty state, and the loops meet in the residual stream only.

DeltaProduct with eight heads of four channels finds the group with most seeds; two heads of sixteen
stop at the sign of the permutation. `swaps` shows what negative eigenvalues are needed for.
"""

from functools import partial

from toolkit.experiments.experiment import Claim, Results
from toolkit.experiments.state_tracking import (
    BEYOND,
    TRAINED,
    WITHIN,
    are_solved,
    are_solved_longer,
    experiment,
    make_draw,
    recipe,
)

LOOPS = (1, 2, 4)
STEPS = 2000
# A difference of means that is smaller is not called one.
_MARGIN = 0.05
_PATTERNS = {"delta product": "delta_product", "gdn": "gdn"}


def _label(name: str, loops: int) -> str:
    return f"{name}, T={loops}"


_TWO, _ONE = ([_label(name, loops) for loops in LOOPS] for name in _PATTERNS)


def _gain(name: str, results: Results) -> tuple[bool, str]:
    means = [results.mean(label, name) for label in _ONE]
    words = ", ".join(f"{label}: {mean:.2f}" for label, mean in zip(_ONE, means, strict=True))
    return max(means[1:]) > means[0] + _MARGIN, f"means: {words}"


EXPERIMENT = experiment(
    name="s3",
    title=f"Does looping one layer help to track S3, learned from {TRAINED} elements?",
    settings={
        _label(name, loops): recipe("S3", word, loops, steps=STEPS, is_negative=True, heads=8)
        for name, word in _PATTERNS.items()
        for loops in LOOPS
    },
    claims=(
        Claim("two reflections per token solve it in one pass", partial(are_solved, _TWO[:1])),
        Claim("and go on to longer words", partial(are_solved_longer, _TWO[:1])),
        Claim("looped, they solve it too, with every seed", partial(are_solved, _TWO[1:])),
        Claim("looping one reflection per token solves it too", partial(are_solved, _ONE[1:])),
        Claim("looping helps it on words as long as the trained ones", partial(_gain, WITHIN)),
        Claim("looping helps it on longer words", partial(_gain, BEYOND)),
    ),
    draw=make_draw(1 / 6, "Running product in S3"),
    beyond="A5 and S5, which want tens of thousands of steps: "
    "`toolkit.experiments.tasks.WordProblem` draws them.",
    minutes=18,
)
