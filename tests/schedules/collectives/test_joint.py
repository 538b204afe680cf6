"""The all-reduce with overlapping phases: exact, proved, and reached by trees."""

from fractions import Fraction

import pytest
from test_collective_optimum import random_network

from toolkit.schedules.collectives import (
    forest_faults,
    joint_all_reduce,
    joint_forest,
    named_topology,
    optimum,
)

# Name -> GB/s, and where switches copy and add.
GOLDEN = {
    "path:3": ("1", "1"), "path:4": ("1", "1"), "path:5": ("1", "1"),
    "ring:3": ("3/2", "3/2"), "ring:4": ("4/3", "4/3"), "ring:8": ("8/7", "8/7"),
    "complete:4": ("2", "2"), "hypercube:3": ("12/7", "12/7"), "torus:3x3": ("9/4", "9/4"),
    "torus:4x4": ("32/15", "32/15"), "h100:8": ("1800/7", "450"), "h100:2x8": ("800/3", "400"),
    "a100:4": ("200", "300"), "a100:2x8": ("520/3", "200"), "mi250:1x16": ("1200/7", "1200/7"),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_rates(name):
    network = named_topology(name)
    for computes, rate in zip((False, True), GOLDEN[name], strict=True):
        found = joint_all_reduce(network, switches_compute=computes)
        assert found.rate == Fraction(rate) == sum(found.roots)
        assert found.rate >= optimum(network, "all-reduce").rate


@pytest.mark.slow
def test_two_boxes_of_mi250():
    network = named_topology("mi250:2x16")
    assert joint_all_reduce(network).rate == Fraction(2656, 15)
    assert joint_all_reduce(network, switches_compute=True).rate == 182
    assert joint_all_reduce(named_topology("h100:4x8")).rate == Fraction(8000, 31)


@pytest.mark.parametrize("name", ["path:4", "dgx1", "star:4", "v5e:4x4", "leaf-spine:2x2x1"])
def test_trees_reach_the_joint_rate(name):
    network = named_topology(name)
    found = joint_forest(network)
    assert forest_faults(found, joint_all_reduce(network).rate) == []


def test_a_row_gains_half_and_a_torus_nothing():
    gains = {"path:4": (3, 2), "v5e:4x4": (3, 2), "mesh:3x3": (4, 3)}
    for name in (*gains, "torus:4x4", "dgx1", "a100:2x4"):
        network = named_topology(name)
        gain = joint_all_reduce(network).rate / optimum(network, "all-reduce").rate
        assert gain == Fraction(*gains.get(name, (1, 1))), name


def test_random_networks():
    for seed in range(40):
        network = random_network(seed)
        best = joint_all_reduce(network)
        assert best.rate >= optimum(network, "all-reduce").rate
        assert forest_faults(joint_forest(network), best.rate) == [], seed


def test_the_cuts_prove_the_rate():
    """Weights on cuts bound every all-reduce: counted here once more, without switches."""
    network = named_topology("mesh:2x3")
    best = joint_all_reduce(network)
    price = dict.fromkeys(network.links, Fraction(0))
    for phase in ("gather", "reduce"):
        on = dict.fromkeys(network.links, Fraction(0))
        for _, inside, weight in (cut for cut in best.cuts if cut[0] == phase):
            for a, b in network.links:
                ends = (a, b) if phase == "gather" else (b, a)
                on[a, b] += weight * (ends[0] in inside and ends[1] not in inside)
        price = {link: max(price[link], on[link]) for link in price}
    of_rank = [
        sum(weight for _, inside, weight in best.cuts if rank in inside)
        for rank in range(network.compute)
    ]
    assert min(of_rank) >= 1
    assert sum(price[link] * rate for link, rate in network.links.items()) == best.rate
