"""Rates of a mesh's axes follow from a network's links, and planning takes them."""

import math
from fractions import Fraction

import pytest

from toolkit.planning import Strategy, cluster, place_axes, plan, predict
from toolkit.planning.networks import axis_rate, tree_steps
from toolkit.schedules.collectives import (
    double_binary_trees,
    hypercube,
    named_topology,
    ring,
    star,
    torus,
)

GIGA = 1e9


@pytest.mark.parametrize(
    ("name", "inner", "degree", "ring_rate", "best"),
    [
        ("h100:2x8", 1, 8, 450, 500),  # both ways through NVSwitch; trees use the cards too
        ("h100:2x8", 8, 2, 50, 50),  # a card per GPU
        ("h100:2x8", 1, 16, 100, 500),  # one crossing of the boxes, or all cards
        ("v5e:4x4", 1, 4, 45, 45),  # a row without wrap-around
        ("v5e:4x4", 4, 4, 45, 45),
        ("v4:4x4x4", 1, 4, 90, 90),  # a closed axis
        ("v4:4x4x4", 16, 4, 90, 90),
    ],
)
def test_rates_of_axes(name, inner, degree, ring_rate, best):
    network = named_topology(name)
    assert axis_rate(network, inner, degree, "ring") == ring_rate * GIGA
    assert axis_rate(network, inner, degree, "optimum") == best * GIGA


def test_groups_that_share_links_share_their_rates():
    # Ranks 0, 2 and 1, 3 of a ring of four: all paths pass through a stranger.
    assert axis_rate(ring(4), 2, 2, "ring") < axis_rate(ring(4), 1, 2, "ring")
    assert axis_rate(named_topology("leaf-spine:2x4x1"), 4, 2, "optimum") == GIGA / 4
    assert axis_rate(torus(4, 4), 1, 1, "ring") == math.inf
    with pytest.raises(ValueError, match="do not hold groups of 3"):
        axis_rate(torus(4, 4), 1, 3, "ring")


def test_trees_of_an_all_reduce_take_few_steps_and_nearly_the_rate():
    # Inside one of a pair and a leaf of the other, a rank sends half the array up and half to each
    # of two children, then half up: 2 M, where a bandwidth-optimal all-reduce sends 2 (N-1)/N M.
    for ranks in (4, 8, 64):
        rate = axis_rate(star(ranks), 1, ranks, "tree")
        assert rate == pytest.approx(float(Fraction(ranks - 1, ranks)) * GIGA)
        assert axis_rate(star(ranks), 1, ranks, "ring") == GIGA
        assert tree_steps(star(ranks), 1, ranks) == math.log2(ranks)
    # What planning takes is what the forest of double binary trees does.
    for name in ("h100:2x8", "dgx1", "torus:4x4"):
        network = named_topology(name)
        trees, share = double_binary_trees(network), 2 * (network.compute - 1) / network.compute
        rate = axis_rate(network, 1, network.compute, "tree")
        assert rate == pytest.approx(share * float(trees.rate) * GIGA)
        assert 2 * tree_steps(network, 1, network.compute) == trees.height


def test_a_plan_runs_trees_for_its_all_reduces_only():
    network = named_topology("h100:16x8")
    trees = cluster("h100:128", topology=network, collectives="tree")
    rings = cluster("h100:128", topology=network, collectives="ring")
    assert trees.link(1, 128, "all-gather").seconds == rings.link(1, 128).seconds == network.seconds
    reduced, around = trees.link(1, 128, "all-reduce"), rings.link(1, 128, "all-reduce")
    assert reduced.seconds * 127 == pytest.approx(network.seconds * tree_steps(network, 1, 128))
    assert reduced.seconds < around.seconds / 8
    assert reduced.bytes_per_second > around.bytes_per_second  # eight cards, not one
    model = "llama-3.2-1b"
    plain = Strategy(data=128)
    fast, slow = (predict(model, each, plain, batch=128).step_seconds for each in (trees, rings))
    assert fast < slow


@pytest.mark.parametrize(
    ("chips", "complaint"),
    [
        ("v5e:3x7", "no v5e slice 3x7; the nearest is v5e:4x8"),
        ("v4:3x4x4", "the nearest is v4:4x4x4"),
        ("v6e:1x8", "no v6e slice 1x8"),
        ("v5e:16x32", "256 chips"),
        ("a100:3x7", "as a100:3x8"),
    ],
)
def test_a_shape_that_nobody_offers_is_refused_with_the_nearest(chips, complaint):
    with pytest.raises(ValueError, match=complaint) as caught:
        cluster(chips)
    assert "\n" not in str(caught.value)


def test_shapes_on_offer_pass_in_any_order():
    for chips, count in (("v5e:8x4", 32), ("v5p:2x2x1", 4), ("v4:8x4x12", 384), ("h100:2x8", 16)):
        assert cluster(chips).chips == count
    assert cluster("v5e:21").chips == 21  # a number of chips has no shape
    assert named_topology("v5e:8").links == named_topology("v5e:2x4").links
    with pytest.raises(ValueError, match=r"no v5e slice of 21 chips; the nearest is v5e:4x4"):
        named_topology("v5e:21")


def test_the_heavy_axis_lies_on_the_fast_links():
    network = named_topology("h100:2x8")
    sizes = {"data": 2, "tensor": 8}
    found = place_axes(network, sizes, {"data": 1e9, "tensor": 1e11})
    assert found.axes == ("tensor", "data")
    assert found.rates == {"tensor": 500 * GIGA, "data": 50 * GIGA}
    assert found.seconds == pytest.approx(1e11 / 5e11 + 1e9 / 5e10)
    # With less to send over it, the tensor axis rather spans both boxes, and data stay inside.
    light = place_axes(network, sizes, {"data": 1e9, "tensor": 1e10})
    assert light.axes == ("data", "tensor")
    assert light.rates == {"data": 500 * GIGA, "tensor": 350 * GIGA}
    with pytest.raises(ValueError, match="sizes must multiply to 16 ranks"):
        place_axes(network, {"data": 2}, {"data": 1.0})


def test_a_plan_takes_a_network():
    model, network = "llama-3.2-1b", named_topology("h100:2x8")
    trees = cluster("h100:16", topology=network)
    rings = cluster("h100:16", topology=network, collectives="ring")
    strategy, seconds = Strategy(fsdp=16), {}
    for name, where in (("plain", cluster("h100:16")), ("trees", trees), ("rings", rings)):
        seconds[name] = predict(model, where, strategy, batch=64).step_seconds
    assert seconds["trees"] < seconds["plain"] < seconds["rings"]
    assert plan(model, trees, batch=64).best.step_seconds <= seconds["trees"]


def test_the_shape_of_a_slice_counts():
    closed = cluster("v5e:16x16", topology=named_topology("v5e:16x16"))
    flat = cluster("v5e:16x16", topology=named_topology("mesh:16x16"))
    assert closed.link(1, 16).bytes_per_second == 90 * GIGA
    assert flat.link(1, 16).bytes_per_second == GIGA


def test_a_network_of_another_size_is_refused():
    with pytest.raises(ValueError, match="has 8 ranks; chips 'h100:16' are 16"):
        cluster("h100:16", topology=hypercube(3))
