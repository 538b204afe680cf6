"""Unequal replicas, unlike chips, swapped tensors: published problems with known optima."""

import itertools

import numpy as np
import pytest

from toolkit.planning import (
    ActivationTensor,
    ChipKind,
    Strategy,
    keep_swap_recompute,
    pack_by_time,
    plan_mixed,
    plan_mixed_cluster,
    plan_replicas,
    plan_swaps,
    predict,
    ranks_of,
    swapped_share,
)
from toolkit.planning.uneven.replicas import divisions, rings_in_words

OVER = {1: 0.0, 2: 0.06, 4: 0.14, 8: 0.3}
LENGTHS = [28, 16, 8, 8, 8, 4, 4, 4, 4, 2, 2, 2, 1, 1]


def seconds(length: int, degree: int) -> float:
    return (0.01 * length**2 + 0.5 * length) / degree * (1 + OVER[degree])


def test_replicas_are_the_best_of_all_divisions():
    """Known optima of the same instance, by another program; all ten divisions of eight chips."""
    found = plan_replicas(LENGTHS, chips=8, seconds=seconds, capacity=8)
    assert found.sizes == (4, 2, 1, 1)
    assert found.seconds == pytest.approx(8.0560, abs=1e-4)
    assert found.equal_sizes == (4, 4)
    assert found.equal_seconds == pytest.approx(8.4303, abs=1e-4)
    assert found.bound <= found.seconds
    assert found.is_exact
    assert sorted(i for mine in found.sequences for i in mine) == list(range(14))
    for size, mine in zip(found.sizes, found.sequences, strict=True):
        assert max(LENGTHS[i] for i in mine) <= 8 * size
        assert sum(seconds(LENGTHS[i], size) for i in mine) <= found.seconds + 1e-9
    assert len(divisions(8)) == 10


def test_packs_balance_time_and_not_tokens():
    lengths = [24, 16, 12, 8, 8, 8, 6, 6, 4, 4, 4, 4, 2, 2]
    how = {"microbatches": 4, "room": 32, "stages": 4}
    _, took = pack_by_time(lengths, seconds=seconds, **how)
    assert took == pytest.approx(30.10, abs=0.01)
    by_tokens, _ = pack_by_time(lengths, seconds=lambda length, _: float(length), **how)
    assert sorted(sum(lengths[i] for i in pack) for pack in by_tokens) == [24, 28, 28, 28]
    each = [sum(seconds(lengths[i], 1) for i in pack) for pack in by_tokens]
    assert (sum(each) + 3 * max(each)) / 4 > took
    with pytest.raises(ValueError, match="do not hold"):
        pack_by_time(lengths, seconds=seconds, microbatches=1, room=32)


def test_short_sequences_stay_on_one_chip():
    """Keys and values sent round: 644 thousand tokens on all eight chips, 100 on as many as fit."""
    ranks = ranks_of(LENGTHS, 8)
    assert sum(length * 7 for length in LENGTHS) == 644
    assert sum(s * (d - 1) for s, d in zip(LENGTHS, ranks, strict=True)) == 100
    assert max(ranks_of(LENGTHS, 8, offloaded=0.75)) == 1
    words = rings_in_words(LENGTHS, 8)
    assert "12 on 1, 1 on 2, 1 on 4" in words
    assert f"{28 * 3 + 16:,} tokens are sent on, against {92 * 3:,} with 4 chips" in words


def test_unlike_chips_get_unequal_stages():
    fast, slow = ChipKind(2, 3.0, 6), ChipKind(4, 1.0, 3)
    found = plan_mixed({"fast": fast, "slow": slow}, 12, batch=12)
    assert found.rate == pytest.approx(found.bound) == pytest.approx(0.8333, abs=1e-4)
    assert [[stage.layers for stage in stages] for stages in found.pipelines] == [[6, 6], [3] * 4]
    assert (found.samples, found.rounded_rate) == ((7, 5), pytest.approx(0.8))
    # Equal layers on six stages would be no better than the fast chips alone.
    alone = plan_mixed({"fast": fast}, 12, batch=12).rate
    assert alone == pytest.approx(0.5) == pytest.approx(1 / max(2 / 1.0, 2 / 3.0))
    with pytest.raises(ValueError, match="all chips hold 12 layers"):
        plan_mixed({"fast": fast}, 13, batch=1)


@pytest.mark.parametrize("seed", range(6))
def test_unlike_chips_are_searched_exhaustively(seed):
    """One pipeline of single chips, by hand: every cut of the layers in every order."""
    rng = np.random.default_rng(seed)
    kinds = {
        "a": ChipKind(1, float(rng.integers(1, 9)), 9),
        "b": ChipKind(1, float(rng.integers(1, 9)), 9),
    }
    layers = int(rng.integers(10, 18))
    cuts = (
        1 / max(first / kinds["a"].speed, (layers - first) / kinds["b"].speed)
        for first in range(1, layers)
        if first <= 9 and layers - first <= 9
    )
    assert plan_mixed(kinds, layers, batch=1).rate == pytest.approx(max(cuts))


def test_a_models_stages_follow_its_chips():
    found = plan_mixed_cluster("llama-3-8b", "h100:4+a100:4", batch=64)
    assert all(sum(stage.layers for stage in stages) == 32 for stages in found.pipelines)
    assert 0.9 * found.bound < found.rate <= found.bound
    assert sum(found.samples) == 64
    with pytest.raises(ValueError, match="stands twice"):
        plan_mixed_cluster("llama-3-8b", "h100:4+h100:4", batch=64)


@pytest.mark.parametrize("seed", range(12))
def test_fates_are_the_cheapest_of_all(seed):
    rng = np.random.default_rng(seed)
    tensors = [
        ActivationTensor(str(at), float(rng.integers(1, 9)), float(rng.integers(1, 20)) / 4)
        for at in range(5)
    ]
    memory, host, link, hidden = (float(rng.integers(low, 20)) for low in (0, 0, 1, 0))
    costs = []
    for fates in itertools.product(range(3), repeat=5):
        kept, swapped = (
            sum(each.size for each, fate in zip(tensors, fates, strict=True) if fate == way)
            for way in (0, 1)
        )
        if kept <= memory and swapped <= host:
            again = sum(each.again for each, fate in zip(tensors, fates, strict=True) if fate == 2)
            costs.append(again + max(0.0, swapped / link - hidden))
    found = keep_swap_recompute(tensors, memory=memory, host=host, link=link, hidden=hidden)
    assert found.seconds == pytest.approx(min(costs))


def test_swaps_of_a_plan_are_of_the_memory_it_predicts():
    whole = predict("llama-3-8b", "h100:8", Strategy(fsdp=8), batch=16, sequence_length=8192)
    assert not whole.fits
    found = plan_swaps(whole, host=2e11, link=5e10)
    assert sum(found.bytes) == whole.memory.activations
    kept, swapped, _ = found.bytes
    assert kept <= whole.limit - (whole.memory.total - whole.memory.activations)
    assert swapped <= 2e11
    # No choice by one rule for all layers is as fast.
    names = [each.name for each in found.tensors]
    assert found.counts[names.index("input")][2] == 0
    layer = predict(
        "llama-3-8b", "h100:8", Strategy(fsdp=8, recompute="layer"), batch=16, sequence_length=8192
    )
    assert found.seconds < layer.seconds["recomputed"]
    slower = plan_swaps(whole, host=2e11, link=5e9)
    assert slower.seconds > found.seconds
    assert slower.bytes[1] < swapped


def test_the_share_that_hides_grows_with_the_length():
    shares = [
        swapped_share(0.02 * s**2 + s, 16.0 * s, link=1.0, host=1e9, layers=32)
        for s in (8, 32, 128, 512, 750)
    ]
    assert shares == pytest.approx([0.0725, 0.1025, 0.2225, 0.7025, 1.0])
