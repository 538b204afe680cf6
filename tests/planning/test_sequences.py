"""Sequences of different lengths: groups no slower than equal ones, by the room's own model."""

import pytest

from toolkit.planning import Strategy, cluster, plan_sequences, predict
from toolkit.planning.uneven.sequences import sequence_costs

LENGTHS = [32768, 8192, 4096, 4096, 2048, 2048]


def test_groups_hold_every_sequence_once_and_are_no_slower_than_equal_ones():
    found = plan_sequences("llama-3-8b", "h100:8", LENGTHS, memory=32e9)
    held = [at for groups in found.micro_batches for group in groups for at in group.sequences]
    assert sorted(held) == list(range(len(LENGTHS)))
    for groups in found.micro_batches:
        assert sum(group.degree for group in groups) <= 8
        for group in groups:
            tokens = sum(LENGTHS[at] for at in group.sequences)
            assert tokens <= found.costs.capacity * group.degree
    assert found.seconds <= found.equal_seconds
    assert "per step; " in str(found)


def test_a_sequence_takes_what_the_room_predicts_of_it():
    """One sequence on one chip: computing as `predict` has it, head included.

    A short one fills its last wave of tiles in part, which no parabola has.
    """
    for length, most in ((1024, 0.04), (2048, 0.04), (8192, 1e-6), (16_384, 1e-6)):
        other = predict(
            "llama-2-7b", "h100:1", Strategy(recompute="layer"), batch=1, sequence_length=length
        )
        costs = sequence_costs(other.config, cluster("h100:1"), "layer", None, other.constants)
        took = costs.milliseconds(length, 1) + costs.constant
        assert took == pytest.approx(1e3 * other.parts.computing, rel=most)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lengths": []}, "lengths must be"),
        ({"recompute": "some"}, "recompute must be one of"),
        ({"lengths": [1 << 30]}, "nearest that works: at most .* on 8 chips"),
        ({"memory": 1e9}, "capacity"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_line(given, words):
    usual = {"model": "llama-3-8b", "chips": "h100:8", "lengths": LENGTHS}
    with pytest.raises(ValueError, match=words) as refused:
        plan_sequences(**(usual | given))
    assert "\n" not in str(refused.value)
