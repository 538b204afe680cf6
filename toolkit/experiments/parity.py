"""Parity asks for one reflection per token: can a delta rule follow it with eigenvalues above zero?

A write strength of at most 1 keeps the eigenvalues of a step in [0, 1]: the state can forget, not
flip. Up to 2 they reach -1, and one token can flip the state.
"""

from toolkit.experiments.kit.state_tracking import (
    BEYOND,
    SOLVED,
    TRAINED,
    experiment,
    make_draw,
    recipe,
)
from toolkit.experiments.kit.verdicts import Claim, above, below

STEPS = 600
_FLIPS = "gdn, beta up to 2"
_FORGETS = "gdn, beta up to 1"
_FULL = "full attention"


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
            above(BEYOND, [_FLIPS], SOLVED),
            control=below(BEYOND, [_FORGETS, _FULL], SOLVED),
        ),
        Claim(
            "without them, and with attention, no model of one layer does",
            below(BEYOND, [_FORGETS, _FULL], SOLVED),
            control=above(BEYOND, [_FLIPS], SOLVED),
        ),
    ),
    draw=make_draw(0.5, "Parity of the bits so far"),
    beyond="words of thousands of bits, and deeper models without negative eigenvalues.",
    minutes=3,
)
