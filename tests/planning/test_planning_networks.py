"""Rates of a mesh's axes follow from a network's links, and planning takes them."""

import math

import pytest

from toolkit.planning import Strategy, cluster, place_axes, plan, predict
from toolkit.planning.networks import axis_rate
from toolkit.schedules.collectives import hypercube, named_topology, ring, torus

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
