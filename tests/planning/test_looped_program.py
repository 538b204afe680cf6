"""Looped models as compiled: weights are gathered in every loop, and bytes are as predicted."""

import statistics
from collections import Counter
from pathlib import Path

import pytest

from toolkit.looped import LoopedConfig
from toolkit.measure import collectives
from toolkit.planning import Strategy, predict, train_program
from toolkit.planning.grade.by_compiler import grade_record, graded
from toolkit.planning.grade.cases import looped_cases

RECORD = Path(__file__).parents[2] / "data" / "planning" / "looped-libtpu-0.0.42.jsonl"
# Shares of the memory by which predictions may be off: the median, and the farthest.
MEDIAN, FARTHEST = 0.05, 0.12
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


@pytest.fixture(scope="module")
def rows():
    return graded(RECORD, looped_cases())


def test_memory_of_looped_hybrid_and_latent_models_is_as_compiled(rows):
    """Once 16 to 39% too low where layers repeat, or keep a state."""
    errors = [abs(row["memory_error"]) for row in rows]
    assert statistics.median(errors) <= MEDIAN
    assert max(errors) <= FARTHEST, max(rows, key=lambda row: abs(row["memory_error"]))["case"]


def test_the_record_is_of_the_configurations(rows):
    assert len(rows) == len(RECORD.read_text().splitlines())
    assert f"{len(rows)} of {len(looped_cases())} configurations" in grade_record(
        RECORD, minutes=0, is_looped=True
    )
