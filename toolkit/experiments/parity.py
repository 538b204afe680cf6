"""Parity asks for one reflection per token: can a delta rule follow it with eigenvalues above zero?

A write strength of at most 1 keeps the eigenvalues of a step in [0, 1]: the state can forget, not
flip. Up to 2 they reach -1, and one token can flip the state.
"""

from functools import partial

from toolkit.experiments.experiment import Claim, Results
from toolkit.experiments.state_tracking import (
    SOLVED,
    TRAINED,
    are_solved_longer,
    experiment,
    in_words,
    make_draw,
    recipe,
    solved_longer,
)

STEPS = 600
_FLIPS = "gdn, beta up to 2"
_FORGETS = "gdn, beta up to 1"
_FULL = "full attention"


def _others_do_not(results: Results) -> tuple[bool, str]:
    others = [_FORGETS, _FULL]
    best = max(max(solved_longer(results, label)) for label in others)
    return best < SOLVED, in_words(results, others)


EXPERIMENT = experiment(
    name="parity",
    title=f"Who finds parity from {TRAINED} bits, and goes on to longer words?",
    settings={
        _FLIPS: recipe("Z2", "gdn", 1, steps=STEPS, is_negative=True),
        _FORGETS: recipe("Z2", "gdn", 1, steps=STEPS, is_negative=False),
        _FULL: recipe("Z2", "full", 1, steps=STEPS, is_negative=False),
    },
    claims=(
        Claim(
            "with negative eigenvalues a delta rule tracks parity beyond it",
            partial(are_solved_longer, [_FLIPS]),
        ),
        Claim("without them, and with attention, no model of one layer does", _others_do_not),
    ),
    draw=make_draw(0.5, "Parity of the bits so far"),
    beyond="words of thousands of bits, and deeper models without negative eigenvalues.",
    minutes=2,
)
