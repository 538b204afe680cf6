"""S3, the smallest group whose elements do not commute: does looping a layer help to track it?

One delta-rule step a token reflects once; an element of S3 may need two reflections. DeltaProduct
makes two in one pass. Looping a layer that makes one is not the same: every loop starts from an
empty state, and the loops meet in the residual stream only.
"""

from functools import partial

from toolkit.experiments.experiment import Claim, Results
from toolkit.experiments.state_tracking import (
    BEYOND,
    SOLVED,
    TRAINED,
    WITHIN,
    experiment,
    in_words,
    make_draw,
    recipe,
)

LOOPS = (1, 2, 4)
STEPS = 2000
_PRODUCT = "delta product, T=1"
# A difference of means that is smaller is not called one.
_MARGIN = 0.05


def _label(loops: int, is_negative: bool) -> str:
    return f"gdn, T={loops}, beta up to {1 + is_negative}"


_LOOPED = [_label(loops, True) for loops in LOOPS]


def _gain(name: str, results: Results) -> tuple[bool, str]:
    means = [results.mean(label, name) for label in _LOOPED]
    words = ", ".join(f"{label}: {mean:.2f}" for label, mean in zip(_LOOPED, means, strict=True))
    return max(means[1:]) > means[0] + _MARGIN, f"means: {words}"


def _is_solved(labels: list[str], results: Results) -> tuple[bool, str]:
    best = max(min(results.samples(label, WITHIN)) for label in labels)
    return best >= SOLVED, f"worst seed of the best, trained length: {best:.2f}; " + in_words(
        results, labels
    )


def _negative_helps(results: Results) -> tuple[bool, str]:
    gains = [
        results.mean(_label(loops, True), WITHIN) - results.mean(_label(loops, False), WITHIN)
        for loops in LOOPS
    ]
    words = ", ".join(f"T={loops}: {gain:+.2f}" for loops, gain in zip(LOOPS, gains, strict=True))
    return min(gains) > _MARGIN, f"gain of beta up to 2, trained length: {words}"


EXPERIMENT = experiment(
    name="s3",
    title=f"Does looping one layer help to track S3, learned from {TRAINED} elements?",
    settings={
        _PRODUCT: recipe("S3", "delta_product", 1, steps=STEPS, is_negative=True),
        **{
            _label(loops, is_negative): recipe(
                "S3", "gdn", loops, steps=STEPS, is_negative=is_negative
            )
            for is_negative in (True, False)
            for loops in LOOPS
        },
    },
    claims=(
        Claim("two reflections a token solve it in one pass", partial(_is_solved, [_PRODUCT])),
        Claim("looping one reflection a token solves it too", partial(_is_solved, _LOOPED)),
        Claim("looping helps on words as long as the trained ones", partial(_gain, WITHIN)),
        Claim("looping helps on longer words", partial(_gain, BEYOND)),
        Claim("negative eigenvalues help at every T", _negative_helps),
    ),
    draw=make_draw(1 / 6, "Running product in S3"),
    beyond="A5 and S5, which want tens of thousands of steps: "
    "`toolkit.experiments.tasks.WordProblem` draws them.",
    minutes=14,
)
