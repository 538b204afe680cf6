"""Trees reach the optimum on every network, also when one counts everything again by hand."""

import dataclasses
import math
from collections import Counter
from fractions import Fraction

import pytest
from test_collective_optimum import connected_graphs, graph, random_network

from toolkit.schedules.collectives import (
    Forest,
    Message,
    Program,
    Topology,
    Tree,
    dgx1,
    forest,
    forest_faults,
    named_topology,
    optimum,
    program_faults,
    ring,
    to_program,
)
from toolkit.schedules.collectives.packed.flow import Network
from toolkit.schedules.collectives.packed.splitting import split_switches
from toolkit.schedules.collectives.packed.supply import Supply

NAMES = [
    "ring:4", "ring:8", "path:5", "complete:5", "star:8", "torus:3x3", "torus:2x4", "mesh:2x3",
    "hypercube:3", "twisted-torus:4x8", "dgx1", "a100:8", "a100:2x8", "mi250:1x16", "mi250:2x8",
    "h100:2x8", "leaf-spine:2x4x1", "fat-tree:4", "v5e:4x4",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_trees_reach_the_optimum(name):
    network = named_topology(name)
    best = optimum(network)
    found = forest(network)
    assert found.rate == best.rate
    assert forest_faults(found, best.rate) == []
    # The cut that proves the optimum is busy all the time.
    inside = set(best.cut)
    leaving = {(a, b) for a, b in network.links if a in inside and b not in inside}
    assert leaving <= set(found.busiest)


@pytest.mark.parametrize("collective", ["reduce-scatter", "broadcast", "reduce", "all-reduce"])
@pytest.mark.parametrize("name", ["dgx1", "star:4", "torus:3x3", "path:4", "a100:2x8"])
def test_the_other_collectives(name, collective):
    network = named_topology(name)
    root = 1 if collective in ("broadcast", "reduce") else 0
    found = forest(network, collective, root)
    assert forest_faults(found, found.rate) == []
    best = optimum(network, collective, root).rate
    assert found.rate >= best  # both phases of an all-reduce may overlap
    assert collective == "all-reduce" or found.rate == best


def ndv2(boxes):
    """DGX-1 boxes; rank 0 of each sends, and rank 1 receives, 12.5 GB/s over InfiniBand."""
    inside, count = dgx1().links, 8 * boxes
    links = {
        (8 * box + a, 8 * box + b): rate for box in range(boxes) for (a, b), rate in inside.items()
    }
    for box in range(boxes):
        links[8 * box, count] = links[count, 8 * box + 1] = Fraction(25, 2)
    labels = (*(f"box{node // 8}/{node % 8}" for node in range(count)), "network")
    return Topology(f"NDv2 x {boxes}", labels, count, links)


def dgx2(boxes=2):
    """Sixteen GPUs on a switch; odd ones send 12.5 GB/s to an even one of the other box."""
    cables = {}
    for node in range(16 * boxes):
        switch = 16 * boxes + node // 16
        cables[node, switch] = cables[switch, node] = Fraction(125)
        if node % 2:
            cables[node, (node + 16) % 32 - 1] = Fraction(25, 2)
    labels = tuple(f"n{node}" for node in range(16 * boxes + boxes))
    return Topology("DGX-2", labels, 16 * boxes, cables)


@pytest.mark.parametrize(
    ("network", "inverse"),
    [(ndv2(2), "16/25"), (ndv2(4), "48/25"), (dgx2(), "31/125")],
    ids=["NDv2 x 2", "NDv2 x 4", "DGX-2 x 2"],
)
def test_machines_whose_ranks_are_unbalanced(network, inverse):
    found = forest(network)
    assert network.compute / found.rate == Fraction(inverse)
    assert forest_faults(found, optimum(network).rate) == []


def test_random_networks():
    for seed in range(150):
        network = random_network(seed)
        for collective in ("all-gather", "reduce-scatter", "broadcast", "reduce"):
            found = forest(network, collective)
            rate = optimum(network, collective).rate
            assert forest_faults(found, rate) == [], (seed, collective)


def test_every_connected_graph():
    for edges in connected_graphs(5):
        network = graph(edges)
        assert forest_faults(forest(network), optimum(network).rate) == []


def test_splitting_keeps_what_reaches_every_node():
    for seed in range(60):
        network = random_network(seed)
        found = forest(network)
        units = int(1 / (network.compute * found.unit))
        times = Fraction(network.compute * units) / found.rate
        whole = math.lcm(*((rate * times).denominator for rate in network.links.values()))
        units, times = units * whole, times * whole
        supply = Supply(len(network.labels), [units] * network.compute)
        for (a, b), rate in network.links.items():
            supply.add(a, b, int(rate * times))
        supply.fill()
        split_switches(supply, network.compute)
        arcs = [(a, b, each) for a in range(supply.nodes) for b, each in supply.capacity[a].items()]
        assert all(max(arc[:2]) < network.compute for arc in arcs)
        source = len(network.labels)
        arcs += [(source, node, units) for node in range(network.compute)]
        for sink in range(network.compute):
            flow = Network(source + 1, arcs).flow(source, sink)
            assert flow == units * network.compute, (seed, sink)


# Trees per root -> GB/s.
FIXED = {
    "a100:2x8": {1: "2400/7", 2: "2400/7", 3: "2400/7", 5: "2400/7", 8: "12800/37"},
    "mi250:2x16": {1: "320", 2: "1024/3"},
    "dgx1": {1: "400/3", 6: "1200/7"},
}


@pytest.mark.parametrize("name", FIXED)
def test_fixed_numbers_of_trees(name):
    network = named_topology(name)
    best = optimum(network).rate
    for trees, rate in FIXED[name].items():
        found = forest(network, trees_per_root=trees)
        assert found.rate == Fraction(rate)
        bound = network.compute / best + 1 / (trees * min(network.links.values()))
        assert network.compute / found.rate <= bound
        assert max(Counter(tree.root for tree in found.trees("gather")).values()) <= trees


@pytest.mark.slow
def test_two_boxes_of_mi250_with_83_trees_per_root():
    network = named_topology("mi250:2x16")
    found = forest(network)
    assert found.rate == Fraction(5312, 15)
    assert found.unit == Fraction(1, 32 * 83)
    assert forest_faults(found, found.rate) == []


@pytest.mark.slow
def test_a_torus_of_a_thousand_nodes():
    found = forest(named_topology("torus:32x32"))
    assert found.rate == Fraction(4096, 1023)
    assert found.height == 32


def test_translated_trees_are_as_low_as_the_network_is_wide():
    for name, height in (("ring:8", 4), ("hypercube:4", 4), ("torus:4x4", 4), ("torus:4x8", 6)):
        found = forest(named_topology(name))
        assert found.translations
        assert found.height == height


def test_too_many_nodes_without_translations_are_refused():
    with pytest.raises(ValueError, match="more than 128 compute nodes need translations"):
        forest(named_topology("h100:32x8"))


def test_numbers_of_trees_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="1 or more"):
        forest(ring(4), trees_per_root=0)
    with pytest.raises(ValueError, match="one root"):
        forest(ring(4), "broadcast", trees_per_root=2)


# What is wrong -> the words that name it.
def spoilt():
    good = forest(named_topology("mesh:2x3"))
    first = good.gather[0]

    def with_edges(edges, share=first.share):
        tree = Tree(first.root, share, tuple(edges))
        return dataclasses.replace(good, gather=(tree, *good.gather[1:]))

    edges, last = list(first.edges), first.edges[-1]
    far = next(e for e in edges if e.step)
    yield with_edges(edges[:-1]), "is not reached"
    yield with_edges([*edges, last]), "reached twice"
    yield with_edges([*edges[:-1], last._replace(step=-1)]), "has no data at step"
    yield (
        with_edges([e._replace(step=0) if e == far else e for e in edges]),
        "has no data at step 0",
    )
    yield with_edges([*edges[:-1], last._replace(path=(last.parent, 0, 5, last.child))]), "no link"
    yield with_edges([*edges[:-1], last._replace(path=last.path[:1])]), "does not lead to"
    yield with_edges(edges, first.share / 2), "of the array for rank"
    yield with_edges(edges, -first.share), "its share is"
    other = next(tree for tree in good.gather if tree.root != first.root)
    yield dataclasses.replace(good, gather=tuple(t for t in good.gather if t != other)), "carry"


def test_every_mutation_of_a_forest_is_named():
    for bad, words in spoilt():
        found = forest_faults(bad)
        assert any(words in fault for fault in found), (words, found[:3])


def test_a_claim_above_what_the_links_give_is_named():
    found = forest(named_topology("dgx1"))
    assert "which gives 1200/7 GB/s; claimed were 180" in forest_faults(found, Fraction(180))[0]
    # The same trees on slower links no longer reach the rate.
    slow = {link: rate / 2 for link, rate in found.topology.links.items()}
    network = Topology("slow", found.topology.labels, 8, slow)
    assert forest_faults(dataclasses.replace(found, topology=network), found.rate)


def test_every_mutation_of_a_program_is_named():
    good = to_program(forest(named_topology("star:4"), "all-reduce"))
    assert program_faults(good) == []
    rounds = list(good.rounds)

    def changed(position, messages):
        return dataclasses.replace(
            good, rounds=(*rounds[:position], tuple(messages), *rounds[position + 1 :])
        )

    first = rounds[0][0]
    for position in range(len(rounds)):  # every message matters
        for skipped in rounds[position]:
            assert program_faults(changed(position, set(rounds[position]) - {skipped}))
    for bad, words in (
        (changed(0, rounds[0][1:]), "sent before the data of rank"),
        (changed(0, [*rounds[0], rounds[0][0]]), "2 messages from rank"),
        (changed(1, rounds[0]), "would be added twice"),
        (changed(len(rounds) - 1, rounds[-1][1:]), "at the end rank"),
        (changed(0, [first._replace(adds=False), *rounds[0][1:]]), "sent before the data"),
        (dataclasses.replace(good, rounds=good.rounds[::-1]), "sent before the data"),
        (dataclasses.replace(good, rounds=(*rounds, rounds[-1])), "the receiver has it already"),
    ):
        assert any(words in fault for fault in program_faults(bad)), words
    lonely = Program("lonely", "all-gather", 2, (0, 1), ((Message(0, 1, 0, False),),))
    assert "the sender does not have it yet" in program_faults(lonely)[0]


def test_rounds_are_close_to_their_bound():
    for name in ("ring:8", "hypercube:3", "dgx1"):
        program = to_program(forest(named_topology(name)))
        arrivals = Counter((m.source, m.target) for each in program.rounds for m in each)
        least = max(arrivals.values())
        assert least <= len(program.rounds) <= 1.6 * least


def test_reversed_trees_reduce():
    gather = forest(named_topology("a100:2x8"))
    reduce = Forest("reversed", "reduce-scatter", gather.topology, reduce=gather.gather)
    assert forest_faults(reduce, gather.rate) == []
