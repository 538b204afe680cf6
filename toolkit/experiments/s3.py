"""S3, the smallest group whose elements do not commute: does looping a layer help to track it?

One delta-rule step per token reflects once; an element of S3 may need two reflections. DeltaProduct
makes two in one pass. Looping a layer that makes one is not the same: every loop starts from an
empty state, and the loops meet in the residual stream only.

DeltaProduct with eight heads of four channels finds the group with most seeds; two heads of sixteen
stop at the sign of the permutation. `swaps` shows what negative eigenvalues are needed for.
"""

from toolkit.experiments.kit.state_tracking import (
    BEYOND,
    SOLVED,
    TRAINED,
    WITHIN,
    experiment,
    make_draw,
    recipe,
)
from toolkit.experiments.kit.verdicts import Claim, above, below

LOOPS = (1, 2, 4)
STEPS = 2000
_PATTERNS = {"delta product": "delta_product", "gdn": "gdn"}


def _label(name: str, loops: int) -> str:
    return f"{name}, T={loops}"


_TWO, _ONE = ([_label(name, loops) for loops in LOOPS] for name in _PATTERNS)


EXPERIMENT = experiment(
    name="s3",
    title=f"Does looping one layer help to track S3, learned from {TRAINED} elements?",
    settings={
        _label(name, loops): recipe("S3", word, loops, steps=STEPS, is_negative=True, heads=8)
        for name, word in _PATTERNS.items()
        for loops in LOOPS
    },
    claims=(
        # The controls: one reflection per token, in one pass, must not solve it.
        *(
            Claim(text, above(where, who, SOLVED), control=below(where, _ONE[:1], SOLVED))
            for text, where, who in (
                ("two reflections per token solve it in one pass", WITHIN, _TWO[:1]),
                ("and go on to longer words", BEYOND, _TWO[:1]),
                ("looped, they solve it too", WITHIN, _TWO[1:]),
                ("looping one reflection per token solves it too", WITHIN, _ONE[1:]),
            )
        ),
        *(
            Claim(text, above(where, _ONE[2:], _ONE[:1]), control=below(where, _ONE[:1], SOLVED))
            for text, where in (
                ("four loops help it on words as long as the trained ones", WITHIN),
                ("four loops help it on longer words", BEYOND),
            )
        ),
    ),
    draw=make_draw(1 / 6, "Running product in S3"),
    beyond="A5 and S5, which want tens of thousands of steps: "
    "`toolkit.experiments.tasks.WordProblem` draws them.",
    minutes=30,
)
