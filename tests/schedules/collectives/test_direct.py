"""Breadth-first broadcasts and direct graphs cost what their formulas say."""

from fractions import Fraction

import networkx
import pytest
from test_collective_optimum import graph

from toolkit.schedules.collectives import (
    breadth_first,
    circulant,
    complete,
    degree_expansion,
    design_front,
    directed,
    forest_faults,
    kautz,
    line_graph,
    named_topology,
    optimum,
    product,
    ring,
    star,
    torus,
)


def step_times(network):
    """Of every step, the shares that the busiest link carries: U of the paper."""
    found = breadth_first(network)
    return [max(stage.values()) * network.compute for stage in found.stages]


def bandwidth_time(network, degree):
    return degree * sum(step_times(network)) / network.compute


# Name -> the busiest link's shares at every step.
GOLDEN = {
    "ring:4": "1 1/2", "ring:5": "1 1", "ring:8": "1 1 1 1/2", "complete:5": "1",
    "hypercube:3": "1 1 1/3", "hypercube:4": "1 3/2 1 1/4", "torus:4x4": "1 3/2 1 1/4",
    "hypercube:5": "1 2 2 1 1/5", "torus:3x3": "1 1", "torus:5x5": "1 2 2 1",
    "torus:3x4": "1 5/4 1/2", "torus:4x8": "1 7/4 2 7/4 1 1/4", "torus:3x3x3": "1 2 4/3",
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_steps(name):
    network = named_topology(name)
    assert step_times(network) == [Fraction(each) for each in GOLDEN[name].split()]
    found = breadth_first(network)
    assert found.rate == optimum(network).rate
    assert forest_faults(found, found.rate) == []


def test_golden_steps_of_graphs_without_translations():
    for drawn, steps in (
        (networkx.petersen_graph(), "1 2"),
        (networkx.octahedral_graph(), "1 1/4"),
        (networkx.heawood_graph(), "1 2 4/3"),
        (networkx.complete_bipartite_graph(3, 3), "1 2/3"),
        (networkx.icosahedral_graph(), "1 1 1/5"),
        (networkx.dodecahedral_graph(), "1 2 2 1 1/3"),
        (networkx.desargues_graph(), "1 2 2 1 1/3"),
    ):
        network = graph([*networkx.convert_node_labels_to_integers(drawn).edges])
        assert step_times(network) == [Fraction(each) for each in steps.split()]
        found = breadth_first(network, "reduce-scatter")
        assert forest_faults(found, optimum(network).rate) == []


def test_circulants_of_degree_four_are_optimal():
    for nodes in range(7, 41):
        steps = next(m for m in range(1, nodes) if 2 * m * m + 2 * m + 1 >= nodes)
        found = breadth_first(circulant(nodes, steps, steps + 1))
        assert found.height == steps
        assert found.rate == Fraction(4 * nodes, nodes - 1)


def test_directed_graphs():
    assert step_times(directed(8, 1, 3)) == [1, Fraction(3, 2), 1]
    for degree, nodes, steps, time in (
        (2, 6, 2, "1"), (2, 8, 3, "7/4"), (2, 12, 3, "7/6"), (4, 16, 2, "5/4"),
        (4, 20, 2, "1"), (4, 32, 3, "13/8"), (4, 64, 3, "21/16"),
    ):  # fmt: skip
        network = kautz(degree, nodes)
        assert len(step_times(network)) == steps
        assert bandwidth_time(network, degree) == Fraction(time)


def test_line_graphs_take_one_step_and_one_share_more():
    for network, degree, time in (
        (complete(3), 2, "1"), (complete(4), 3, "1"), (ring(5), 2, "1"),
        (line_graph(complete(3)), 2, "7/6"), (complete(5), 4, "1"),
    ):  # fmt: skip
        larger = line_graph(network)
        assert larger.compute == degree * network.compute
        assert len(step_times(larger)) == len(step_times(network)) + 1
        known = bandwidth_time(network, degree) + Fraction(1, network.compute)
        assert bandwidth_time(larger, degree) == known == Fraction(time)


def test_copies_and_products_of_optimal_graphs_are_optimal():
    for network in (complete(3), complete(4), ring(5)):
        larger = degree_expansion(network, 2)
        assert breadth_first(larger).rate == optimum(larger).rate
    for larger in (product(ring(4), complete(3)), product(directed(8, 1, 3), ring(3))):
        assert breadth_first(larger).rate == optimum(larger).rate


@pytest.mark.parametrize("nodes", [8, 12, 16, 20, 36, 48])
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_every_design_is_what_it_says(nodes, degree):
    front = design_front(nodes, degree)
    for each in front:
        network = each.build()
        assert network.compute == nodes
        assert max(network.ingress) == degree
        found = breadth_first(network)
        assert found.height == each.steps, each.name
        assert bandwidth_time(network, degree) == each.bandwidth_time, each.name
    times = [each.bandwidth_time for each in front]
    assert times == sorted(times, reverse=True)
    assert times[-1] >= Fraction(nodes - 1, nodes)


def test_the_front_of_a_thousand_nodes():
    front = {each.steps: each.bandwidth_time for each in design_front(1024, 4)}
    assert front[5] == Fraction(4, 3) * Fraction(1023, 1024)
    assert front[6] == Fraction(1044, 1024)
    assert front[8] == Fraction(1028, 1024)
    assert front[10] == Fraction(1023, 1024)  # half the steps of four one-way rings
    half = line_graph(line_graph(directed(8, 1, 3)))
    found = breadth_first(half)
    assert (half.compute, found.height) == (32, 5)
    assert forest_faults(found, optimum(half).rate) == []


@pytest.mark.nightly
def test_a_product_of_line_graphs_is_optimal():
    part = line_graph(directed(8, 1, 3))
    found = breadth_first(product(part, part))
    assert (found.height, found.rate) == (8, Fraction(256 * 4, 255))


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="has switches"):
        breadth_first(star(4))
    with pytest.raises(ValueError, match="got 'all-reduce'"):
        breadth_first(torus(3, 3), "all-reduce")
    with pytest.raises(ValueError, match="2 nodes or more"):
        design_front(1, 4)
