"""Swaps of three things: what one reflection per token can follow, looped or not.

A swap is a reflection, and a delta rule makes one per token if its write strength reaches 2. So
words of swaps need no second reflection, as a cycle of three does (`s3`), and no loop.

Products of swaps are odd and even in turn: a model that always guesses one element is right a third
of the time at every other position, and never between, which draws a zigzag.
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
STEPS = 1000


def _label(loops: int, is_negative: bool) -> str:
    return f"gdn, T={loops}, beta up to {1 + is_negative}"


_REFLECTS, _FORGETS = ([_label(loops, kind) for loops in LOOPS] for kind in (True, False))


EXPERIMENT = experiment(
    name="swaps",
    title=f"Who follows swaps of three things, learned from words of {TRAINED}?",
    settings={
        _label(loops, is_negative): recipe(
            "S3", "gdn", loops, steps=STEPS, is_negative=is_negative, is_swaps_only=True
        )
        for is_negative in (True, False)
        for loops in LOOPS
    },
    claims=(
        Claim(
            "with negative eigenvalues swaps are followed, whatever T",
            above(WITHIN, _REFLECTS, SOLVED),
            control=below(WITHIN, _FORGETS, SOLVED),
        ),
        Claim(
            "one pass then goes on to longer words",
            above(BEYOND, _REFLECTS[:1], SOLVED),
            control=below(BEYOND, _FORGETS, SOLVED),
        ),
        Claim(
            "without them no T follows swaps",
            below(WITHIN, _FORGETS, SOLVED),
            control=above(WITHIN, _REFLECTS, SOLVED),
        ),
    ),
    draw=make_draw(1 / 6, "Running product of swaps in S3"),
    beyond="swaps of five things: `WordProblem('S5', length, is_swaps_only=True)`.",
    minutes=12,
)
