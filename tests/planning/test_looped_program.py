"""Looped models as compiled: weights are gathered in every loop, and bytes are as predicted."""

from collections import Counter

import pytest

from toolkit.looped import LoopedConfig
from toolkit.measure import collectives
from toolkit.planning import Strategy, predict, train_program

NEAR = 0.002  # of the bytes sent: what is small is not cut
LAYERS, LOOPS = 2, 3
CONFIG = LoopedConfig.tiny(
    " ".join(["full"] * LAYERS), width=128, heads=4, vocabulary=512, loops=LOOPS
)


@pytest.mark.parametrize("recompute", ["layer", "none"])
def test_no_gather_of_weights_leaves_the_loops(recompute):
    """Once those of the forward pass did: a third fewer, and all weights whole at one time."""
    strategy = Strategy(fsdp=4, recompute=recompute)
    compiled = train_program(CONFIG, strategy, batch=4, sequence_length=64).compile()
    runs = Counter()
    for found in collectives(compiled):
        runs[found.kind] += found.count
    # Seven matrices of a layer, forward and backward, and the table once.
    assert runs["all-gather"] == 2 * LOOPS * LAYERS * 7 + 1
    sent = sum(found.total_bytes_sent for found in collectives(compiled))
    expected = predict(CONFIG, "h100:4", strategy, batch=4, sequence_length=64).sent_bytes
    assert sent == pytest.approx(expected, rel=NEAR)
