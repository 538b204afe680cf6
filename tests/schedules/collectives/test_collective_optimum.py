"""The exact optimum: golden fractions, brute force over all cuts, and what must never change it."""

import itertools
import random
from fractions import Fraction

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.schedules.collectives import (
    Topology,
    circulant,
    leaf_spine,
    named_topology,
    optimum,
    ring,
    torus,
)
from toolkit.schedules.collectives.fabrics.topology import from_cables

# Name -> 1/x* of an all-gather.
GOLDEN = {
    "ring:3": "1", "ring:4": "3/2", "ring:5": "2", "ring:8": "7/2", "path:3": "2", "path:5": "4",
    "complete:5": "1", "star:4": "3", "star:8": "7", "torus:3x3": "2", "torus:4x4": "15/4",
    "torus:4x8": "31/4", "torus:2x4": "7/4", "torus:3x3x3": "13/3", "torus:4x4x4": "21/2",
    "mesh:2x3": "5/2", "mesh:3x3": "4", "mesh:4x4": "15/2", "hypercube:2": "3/2",
    "hypercube:3": "7/3", "hypercube:4": "15/4", "hypercube:5": "31/5", "hypercube:6": "21/2",
    "dgx1": "7/150", "fat-tree:4": "15", "a100:8": "7/300", "a100:2x8": "3/65",
    "a100:4x8": "3/25", "a100:8x8": "7/25", "a100:16x8": "3/5", "a100:32x8": "31/25",
    "mi250:1x16": "7/150", "mi250:2x16": "15/166", "mi250:4x16": "3/16", "mi250:2x8": "1/13",
    "h100:8": "7/450", "h100:2x8": "3/100", "h100:4x8": "31/500", "h100:8x8": "7/50",
    "h100:16x8": "3/10", "h100:32x8": "31/50", "h100:64x8": "63/50",
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_fractions(name):
    network = named_topology(name)
    found = optimum(network)
    assert network.compute / found.rate == Fraction(GOLDEN[name])
    assert_proved(network, found)


def assert_proved(network, found):
    inside = [node for node in found.cut if node < network.compute]
    assert 0 < len(inside) < network.compute
    assert network.egress(found.cut) == found.cut_rate
    assert found.rate == network.compute * found.cut_rate / len(inside)


def graph(edges, compute=None, rate=1, switches=0):
    nodes = 1 + max(max(pair[:2]) for pair in edges)
    names = [f"s{each}" for each in range(switches)]
    return from_cables(
        "graph",
        nodes - switches,
        [(a, b, rest[0] if rest else rate) for a, b, *rest in edges],
        names,
    )


K4 = [*itertools.combinations(range(4), 2)]
UNNAMED = {
    "a compute hub with three leaves": (graph([(0, 1), (0, 2), (0, 3)]), "3"),
    "a wheel": (
        graph([(0, each) for each in range(1, 7)] + [(i, i % 6 + 1) for i in range(1, 7)]), "2",
    ),
    "Petersen": (graph([*networkx.petersen_graph().edges]), "3"),
    "two cliques and a bridge": (
        graph([(a + s, b + s, 3) for s in (0, 4) for a, b in K4] + [(3, 4, 1)]), "4",
    ),
    "two boxes on two networks": (
        graph([(g, 8 + g // 4, 10) for g in range(8)] + [(g, 10, 1) for g in range(8)], switches=3),
        "1",
    ),
    "leaf-spine, oversubscribed": (named_topology("leaf-spine:2x4x1"), "7"),
}  # fmt: skip


def test_golden_fractions_of_graphs_without_a_name():
    for title, (network, inverse) in UNNAMED.items():
        assert network.compute / optimum(network).rate == Fraction(inverse), title
    for network, inverse in (
        (leaf_spine(2, 4, 1, host_rate=2), "4"),
        (leaf_spine(2, 4, 2, uplink_rate=2), "7"),
        (leaf_spine(4, 4, 2, host_rate=4, uplink_rate=2), "15/4"),
    ):
        assert network.compute / optimum(network).rate == Fraction(inverse)


def test_idle_dies_may_relay():
    whole = named_topology("mi250:2x16")
    used = [16 * box + die for box in (0, 1) for die in range(8)]
    order = used + [node for node in range(len(whole.labels)) if node not in used]
    place = {node: position for position, node in enumerate(order)}
    links = {(place[a], place[b]): rate for (a, b), rate in whole.links.items()}
    network = Topology("relays", tuple(whole.labels[node] for node in order), 16, links)
    assert 16 / optimum(network).rate == Fraction(7, 166)


def test_one_way_rings():
    for nodes in (3, 4, 5, 8):
        links = {(i, (i + 1) % nodes): Fraction(1) for i in range(nodes)}
        network = Topology("one way", tuple(map(str, range(nodes))), nodes, links)
        assert optimum(network).rate == Fraction(nodes, nodes - 1)


def brute_force(network):
    """Of every set of nodes that leaves a compute node out, the largest ratio."""
    nodes, compute = len(network.labels), network.compute
    best = Fraction(0)
    for bits in range(1, 1 << nodes):
        inside = {node for node in range(nodes) if bits >> node & 1}
        weight = sum(node < compute for node in inside)
        if 0 < weight < compute:
            best = max(best, weight / network.egress(inside))
    return best


def connected_graphs(most):
    for each in networkx.graph_atlas_g():
        if 2 <= len(each) <= most and networkx.is_connected(each):
            yield [*each.edges]


def test_brute_force_on_every_connected_graph():
    for edges in connected_graphs(5):
        network = graph(edges)
        assert network.compute / optimum(network).rate == brute_force(network)


def test_brute_force_with_every_choice_of_two_rates_up_to_four_nodes():
    for edges in connected_graphs(4):
        for rates in itertools.product((1, 2), repeat=len(edges)):
            network = graph([(*edge, rate) for edge, rate in zip(edges, rates, strict=True)])
            assert network.compute / optimum(network).rate == brute_force(network)


@pytest.mark.nightly
def test_brute_force_with_every_choice_of_two_rates_on_five_nodes():
    for edges in connected_graphs(5):
        for rates in itertools.product((1, 3), repeat=len(edges)):
            network = graph([(*edge, rate) for edge, rate in zip(edges, rates, strict=True)])
            assert network.compute / optimum(network).rate == brute_force(network)


def random_network(seed, most_switches=3):
    """Directed links with random rates; what a switch lacks on one side is added to a node."""
    draw = random.Random(seed)
    compute, switches = draw.randint(2, 5), draw.randint(0, most_switches)
    nodes = compute + switches
    links = {(i, (i + 1) % compute): Fraction(draw.randint(1, 3)) for i in range(compute)}
    for _ in range(2 * nodes):
        a, b = draw.sample(range(nodes), 2)
        links[a, b] = Fraction(draw.randint(1, 6), draw.randint(1, 3))
    for switch in range(compute, nodes):
        inward = sum(rate for (_, b), rate in links.items() if b == switch)
        outward = sum(rate for (a, _), rate in links.items() if a == switch)
        link = (switch, draw.randrange(compute)) if inward > outward else (0, switch)
        if inward != outward:
            links[link] = links.get(link, Fraction(0)) + abs(inward - outward)
    return Topology(f"random {seed}", tuple(f"n{i}" for i in range(nodes)), compute, links)


def test_brute_force_on_three_hundred_random_networks():
    for seed in range(300):
        network = random_network(seed)
        found = optimum(network)
        assert network.compute / found.rate == brute_force(network), seed
        assert_proved(network, found)


def test_the_other_collectives():
    for seed in range(40):
        network = random_network(seed)
        backwards = network.backwards()
        assert optimum(network, "reduce-scatter").rate == optimum(backwards).rate
        assert optimum(network, "reduce", 1).rate == optimum(backwards, "broadcast", 1).rate
        best = optimum(network, "broadcast", 1)
        assert best.rate == best.cut_rate == network.egress(best.cut)
        directed = networkx.DiGraph()
        for (a, b), rate in network.links.items():
            directed.add_edge(a, b, capacity=rate)
        others = [node for node in range(network.compute) if node != 1]
        assert best.rate == min(networkx.maximum_flow_value(directed, 1, t) for t in others)
    both = optimum(named_topology("a100:2x8"), "all-reduce")
    assert both.rate == Fraction(520, 3)


VERTEX_TRANSITIVE = {
    "Heawood": networkx.heawood_graph(), "Desargues": networkx.desargues_graph(),
    "dodecahedron": networkx.dodecahedral_graph(), "icosahedron": networkx.icosahedral_graph(),
    "octahedron": networkx.octahedral_graph(), "K3,3": networkx.complete_bipartite_graph(3, 3),
    "Moebius-Kantor": networkx.moebius_kantor_graph(), "Pappus": networkx.pappus_graph(),
}  # fmt: skip


@pytest.mark.parametrize("name", VERTEX_TRANSITIVE)
def test_vertex_transitive_graphs(name):
    found = VERTEX_TRANSITIVE[name]
    degree = found.degree[next(iter(found))]
    network = graph([*networkx.convert_node_labels_to_integers(found).edges])
    assert network.compute / optimum(network).rate == Fraction(network.compute - 1, degree)


@given(st.integers(5, 14), st.sets(st.integers(1, 2), min_size=1), st.integers(1, 9))
@settings(deadline=None, max_examples=30)
def test_circulants(nodes, offsets, rate):
    if 1 not in offsets and nodes % 2 == 0:
        return  # not connected
    network = circulant(nodes, *sorted(offsets), rate=rate)
    expected = Fraction(nodes - 1, 2 * len(offsets) * rate)
    assert nodes / optimum(network).rate == expected


@given(st.integers(0, 10**6), st.randoms())
@settings(deadline=None, max_examples=40)
def test_names_of_nodes_and_units_of_rates_change_nothing(seed, draw):
    network = random_network(seed)
    order = draw.sample(range(network.compute), network.compute)
    order += range(network.compute, len(network.labels))
    links = {(order[a], order[b]): 7 * rate for (a, b), rate in network.links.items()}
    other = Topology("other", network.labels[::-1], network.compute, links)
    assert optimum(other).rate == 7 * optimum(network).rate


def test_symmetry_never_changes_the_optimum():
    for name in ("a100:2x8", "mi250:2x16", "leaf-spine:2x4x1", "hypercube:4", "torus:3x4"):
        network = named_topology(name)
        assert network.symmetries
        plain = Topology(network.name, network.labels, network.compute, network.links)
        assert len(plain.representatives) == plain.compute
        assert optimum(plain).rate == optimum(network).rate


def test_rates_beyond_any_machine_integer_stay_exact():
    rate = Fraction(10**40 + 1, 3**50)
    assert optimum(ring(5, rate=rate)).rate == Fraction(5, 2) * rate
    assert optimum(torus(3, 3, rate=rate)).rate == Fraction(9, 2) * rate


def test_a_root_that_is_no_rank_is_refused():
    with pytest.raises(ValueError, match="root must be 0 to 3; got 4"):
        optimum(ring(4), "broadcast", 4)
