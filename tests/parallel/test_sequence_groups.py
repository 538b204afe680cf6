"""Groups of devices for sequences of different lengths: the source's numbers, and brute force."""

import itertools
import math

import pytest

from toolkit.parallel import (
    SequenceCosts,
    bucket_lengths,
    divide_evenly,
    plan_micro_batches,
    plan_sequence_groups,
)

MIXED = [60000] + [6000] * 6 + [2000] * 8
EIGHT = [30000, 8000, 4000, 4000, 2000, 2000, 1000, 1000]


def slowest(groups):
    return max(group.milliseconds for group in groups)


def test_costs_are_the_sources():
    costs = SequenceCosts()
    assert costs.capacity == 14349
    for tokens, degree, wanted in ((8192, 1, 1851.115), (8192, 8, 248.315), (32768, 8, 1509.461)):
        assert costs.milliseconds(tokens, degree) == pytest.approx(wanted, abs=5e-4)


@pytest.mark.parametrize(
    ("lengths", "devices", "degrees", "wanted"),
    [
        (EIGHT, 8, None, 2577.365),
        (MIXED, 16, None, 4440.605),
        (MIXED, 16, [8], 4440.605),
        (MIXED, 16, [16], 4759.539),
    ],
)
def test_plans_are_the_sources(lengths, devices, degrees, wanted):
    groups = plan_sequence_groups(lengths, devices=devices, capacity=8192, degrees=degrees)
    assert slowest(groups) == pytest.approx(wanted, abs=1e-3)
    assert sorted(i for group in groups for i in group.sequences) == list(range(len(lengths)))
    assert sum(group.degree for group in groups) <= devices
    for group in groups:
        assert sum(lengths[i] for i in group.sequences) <= 8192 * group.degree


@pytest.mark.parametrize("lengths", [[9000, 5000, 3000, 2500], [12000, 12000, 500, 400, 300]])
def test_no_plan_is_better(lengths):
    """All partitions of the sequences among all multisets of group sizes, one by one."""
    costs, capacity, devices = SequenceCosts(), 8192, 4
    best = math.inf
    for degrees in ([4], [2, 2], [2, 1, 1], [1, 1, 1, 1]):
        for places in itertools.product(range(len(degrees)), repeat=len(lengths)):
            time, room = [0.0] * len(degrees), [capacity * degree for degree in degrees]
            for place, length in zip(places, lengths, strict=True):
                time[place] += costs.milliseconds(length, degrees[place])
                room[place] -= length
            if min(room) >= 0:
                best = min(best, costs.constant + max(time))
    groups = plan_sequence_groups(lengths, devices=devices, capacity=capacity, degrees=[1, 2, 4])
    assert slowest(groups) == pytest.approx(best, rel=1e-6)


def test_buckets_waste_least():
    assert bucket_lengths([50, 1, 2, 3, 10, 11, 12], 3) == [(3, 3), (12, 3), (50, 1)]
    assert bucket_lengths([5, 5, 5], 2) == [(5, 3)]
    groups = plan_sequence_groups(EIGHT, devices=8, capacity=8192, buckets=4)
    assert sorted(i for group in groups for i in group.sequences) == list(range(len(EIGHT)))


def test_micro_batches_hold_what_fits():
    parts = divide_evenly([9, 8, 7, 6, 5, 4, 3, 2, 1], 3)
    assert parts == [[0, 1], [2, 3], [4, 5, 6, 7, 8]]
    plans = plan_micro_batches(MIXED * 2, devices=16, capacity=8192)
    assert len(plans) == 2
    seen = sorted(i for plan in plans for group in plan for i in group.sequences)
    assert seen == list(range(2 * len(MIXED)))


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: plan_sequence_groups([], devices=8), "lengths"),
        (lambda: plan_sequence_groups([0], devices=8), "lengths"),
        (lambda: plan_sequence_groups([8], devices=6), "devices"),
        (lambda: plan_sequence_groups([8], devices=10**12), "devices"),
        (lambda: plan_sequence_groups([8], devices=8, capacity=0), "capacity"),
        (lambda: plan_sequence_groups([8], devices=8, degrees=[3]), "degrees"),
        (lambda: plan_sequence_groups([8], devices=8, seconds=0.0), "seconds"),
        (lambda: plan_sequence_groups([99], devices=8, capacity=10), "plan_micro_batches"),
        (lambda: plan_sequence_groups(MIXED, devices=16, capacity=8192, degrees=[4]), "32768"),
        (lambda: plan_sequence_groups(list(range(1, 1000)), devices=512), "buckets"),
        (lambda: plan_micro_batches([99], devices=8, capacity=10), "lengths"),
        (lambda: bucket_lengths([1], 0), "buckets"),
        (lambda: divide_evenly([1], 0), "parts"),
        (lambda: SequenceCosts(bandwidth={2: 0.0}), "bandwidth"),
        (lambda: SequenceCosts(layers=0), "layers"),
    ],
)
def test_what_cannot_be_planned_is_refused(call, word):
    with pytest.raises(ValueError, match=word):
        call()
