"""Directly joined nodes: breadth-first broadcasts, and the graphs that suit them."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from toolkit._checks import check_choice, checked
from toolkit.schedules.collectives.fabrics import expansions, shapes
from toolkit.schedules.collectives.fabrics.topology import Topology, distances
from toolkit.schedules.collectives.optimum import scale_of
from toolkit.schedules.collectives.packed.flow import Network
from toolkit.schedules.collectives.packed.symmetry import translations
from toolkit.schedules.collectives.trees import Edge, Forest, Tree

_MOST_BASES = 64  # nodes of a graph whose time is computed, not derived


@checked
def breadth_first(topology: Topology, collective: str = "all-gather") -> Forest:
    """Every rank's data flood the network along shortest paths, one link per step (BFB).

    At step t a rank receives the data of those t links away; how much by which of its links is
    chosen, in fractions, so that the busiest of them is least busy: the largest of
    |A| / (rate of the links that can bring A) over all sets A of such ranks.

    Args:
        topology: a network without switches.
        collective: "all-gather" or "reduce-scatter".

    Source: Zhao et al., Efficient Direct-Connect Topologies for Collective Communications, 2022,
        https://arxiv.org/abs/2202.03356, on BFB schedules.

    Example:
        >>> found = breadth_first(torus(3, 3))
        >>> found.height, found.rate == optimum(torus(3, 3)).rate
        (2, True)
    """
    check_choice("collective", collective, ("all-gather", "reduce-scatter"))
    if len(topology.labels) > topology.compute:
        raise ValueError(f"topology {topology.name!r} has switches; breadth-first has none")
    network = topology if collective == "all-gather" else topology.backwards()
    ranks, moves = network.compute, translations(network)
    depth = [distances(network.links, ranks, source) for source in range(ranks)]
    chosen = {0: _last_links(network, depth, 0)} if moves else {}
    if not moves:
        chosen = {target: _last_links(network, depth, target) for target in range(ranks)}
    parts: dict[int, dict[int, dict[int, Fraction]]] = {}  # root -> node -> parent -> part
    if moves:
        # What node 0 receives from v, node g(0) receives from g(v); root 0 = g(v).
        inverse = [{image: node for node, image in enumerate(move)} for move in moves]
        parts[0] = {
            node: {moves[node][a]: part for a, part in chosen[0][inverse[node][0]].items()}
            for node in range(1, ranks)
        }
    else:
        for root in range(ranks):
            parts[root] = {node: chosen[node][root] for node in range(ranks) if node != root}
    trees = []
    for root, nodes in parts.items():
        pieces = math.lcm(*(p.denominator for each in nodes.values() for p in each.values()))
        order = sorted(nodes, key=lambda node: depth[root][node])
        parents = {
            node: [a for a, part in nodes[node].items() for _ in range(int(part * pieces))]
            for node in order
        }
        for piece in range(pieces):
            edges = tuple(
                Edge(a, node, (a, node), depth[root][a])
                for node in order
                for a in [parents[node][piece]]
            )
            trees.append(Tree(root, Fraction(1, ranks * pieces), edges))
    found: dict[str, Any] = {"gather" if collective == "all-gather" else "reduce": tuple(trees)}
    return Forest("breadth first", collective, topology, **found, translations=moves)


def _last_links(topology: Topology, depth, target: int) -> dict[int, dict[int, Fraction]]:
    """For every source, which part of its data arrives at the target by which neighbour."""
    near = [a for a, b in topology.links if b == target]
    rates, found = [topology.links[a, target] for a in near], {}
    for step in range(1, max(row[target] for row in depth) + 1):
        sources = [v for v, row in enumerate(depth) if row[target] == step]
        usable = [
            [at for at, a in enumerate(near) if depth[source][a] == step - 1] for source in sources
        ]
        time = Fraction(len(sources)) / sum(rates[at] for at in {at for u in usable for at in u})
        while True:
            scale = scale_of([time * rate for rate in rates])
            first, sink = 1 + len(sources), 1 + len(sources) + len(near)
            arcs = [(0, 1 + i, scale) for i in range(len(sources))]
            arcs += [(1 + i, first + at, scale) for i, ways in enumerate(usable) for at in ways]
            arcs += [(first + at, sink, int(time * rate * scale)) for at, rate in enumerate(rates)]
            network = Network(sink + 1, arcs)
            if network.flow(0, sink) == scale * len(sources):
                break
            inside = network.reached(0)
            few = [i for i in range(len(sources)) if 1 + i in inside]
            time = len(few) / sum(
                (rates[at] for at in {at for i in few for at in usable[i]}), Fraction(0)
            )
        for position, (a, b, _) in enumerate(arcs):
            used = network.residual[2 * position + 1]
            if 0 < a < first and used:
                part = found.setdefault(sources[a - 1], {})
                part[near[b - first]] = Fraction(used, scale)
    return found


@dataclass(frozen=True)
class Design:
    """A graph for a number of nodes and links per node, with the cost of its broadcast.

    Time of an all-gather of M bytes at B bytes/s per node: steps * delay + bandwidth_time * M / B.

    Attributes:
        name: how it is built.
        nodes: number of nodes.
        degree: links per node.
        steps: of the all-gather.
        bandwidth_time: at least (N - 1) / N.
        build: makes its `Topology`.
        is_simple: whether all links lead to different, other nodes, as expansions need it.

    Example:
        >>> design_front(8, 2)[0].bandwidth_time
        Fraction(7, 8)
    """

    name: str
    nodes: int
    degree: int
    steps: int
    bandwidth_time: Fraction
    build: Callable[[], Topology]
    is_simple: bool = True


@checked
def design_front(nodes: int, degree: int) -> list[Design]:
    """The graphs of N nodes with d links each that no other of them beats in steps and bandwidth.

    Small graphs (rings, circulants, complete, Kautz) and their expansions: the line graph L(G),
    with d N nodes, one step more and at most 1/N more bandwidth time, and the product of graphs
    whose broadcast is optimal in bandwidth, which is optimal too.

    Args:
        nodes: number of nodes, from 2.
        degree: links that leave and enter a node, from 1.

    Returns:
        `Design`s by increasing steps and decreasing bandwidth time.

    Cost: seconds; the broadcasts of graphs of up to 64 nodes are computed, others bounded.

    Source: Zhao et al., Efficient Direct-Connect Topologies for Collective Communications, 2022,
        https://arxiv.org/abs/2202.03356, on expansions.

    Example:
        >>> [(each.steps, each.bandwidth_time) for each in design_front(16, 4)]
        [(2, Fraction(5, 4)), (3, Fraction(15, 16))]
    """
    if nodes < 2 or degree < 1:
        raise ValueError(f"want 2 nodes or more of degree 1 or more; got {nodes} and {degree}")
    found = sorted(_designs(nodes, degree, {}), key=lambda each: (each.steps, each.bandwidth_time))
    front: list[Design] = []
    for each in found:
        if not front or each.bandwidth_time < front[-1].bandwidth_time:
            front.append(each)
    return front


def _designs(nodes: int, degree: int, known: dict[tuple[int, int], list[Design]]) -> list[Design]:
    """All that can be built; of equal steps only the best."""
    if (nodes, degree) in known:
        return known[nodes, degree]
    known[nodes, degree] = []  # not built from itself
    found = _bases(nodes, degree)
    if degree > 1 and nodes % degree == 0 and nodes // degree > degree:
        smaller = _designs(nodes // degree, degree, known)
        found += [_line(each) for each in smaller if each.is_simple]
    for first in range(2, nodes // 2 + 1):
        if nodes % first:
            continue
        for part in range(1, degree):
            for a in _designs(first, part, known):
                for b in _designs(nodes // first, degree - part, known):
                    if _can_multiply(a) and _can_multiply(b):
                        found.append(_product(a, b))
    best: dict[tuple[int, bool], Design] = {}
    for each in found:
        key = each.steps, each.is_simple
        if key not in best or each.bandwidth_time < best[key].bandwidth_time:
            best[key] = each
    known[nodes, degree] = list(best.values())
    return known[nodes, degree]


def _can_multiply(design: Design) -> bool:
    return design.is_simple and design.bandwidth_time == Fraction(design.nodes - 1, design.nodes)


def _line(of: Design) -> Design:
    nodes, build = of.nodes * of.degree, lambda: expansions.line_graph(of.build())
    if nodes <= _MOST_BASES:
        return _computed(f"L({of.name})", nodes, of.degree, build)
    time = of.bandwidth_time + Fraction(1, of.nodes)
    return Design(f"L({of.name})", nodes, of.degree, of.steps + 1, time, build)


def _computed(name: str, nodes: int, degree: int, build: Callable[[], Topology]) -> Design:
    network = build()
    forest = breadth_first(network)
    busiest = (max(stage[e] / network.links[e] for e in stage) for stage in forest.stages)
    time = degree * sum(busiest, Fraction(0))
    return Design(
        name, nodes, degree, forest.height, time, build, len(network.links) == nodes * degree
    )


def _product(a: Design, b: Design) -> Design:
    nodes = a.nodes * b.nodes
    return Design(
        f"{a.name} x {b.name}", nodes, a.degree + b.degree, a.steps + b.steps,
        Fraction(nodes - 1, nodes), lambda: expansions.product(a.build(), b.build()),
    )  # fmt: skip


def _bases(nodes: int, degree: int) -> list[Design]:
    """Small graphs, whose broadcasts are computed, and those with known costs."""
    found: list[tuple[str, Callable[[], Topology]]] = []
    if degree == 1:  # every link is crossed by all but one of the shares
        whole = Fraction(nodes - 1, nodes)
        name = f"one-way ring {nodes}"
        return [Design(name, nodes, 1, nodes - 1, whole, lambda: expansions.directed(nodes, 1))]
    power = round(math.log(nodes, degree))
    if nodes == degree**power and nodes > _MOST_BASES:
        time = Fraction(degree, degree - 1) * Fraction(nodes - 1, nodes)
        build = functools.partial(expansions.kautz, degree, nodes)
        return [Design(f"Kautz {degree}, {nodes}", nodes, degree, power, time, build, False)]
    if degree == nodes - 1:
        found.append((f"complete {nodes}", lambda: shapes.complete(nodes)))
    if nodes <= _MOST_BASES:
        if degree == 2 and nodes > 2:
            found.append((f"ring {nodes}", lambda: shapes.ring(nodes)))
        if (nodes, degree) == (8, 2):
            found.append(("directed 8 {1, 3}", lambda: expansions.directed(8, 1, 3)))
        if degree == 4 and nodes >= 6:
            m = math.ceil((math.sqrt(2 * nodes - 1) - 1) / 2)
            if m + 1 < nodes / 2:
                found.append((f"circulant {nodes} {{{m}, {m + 1}}}",
                              lambda: shapes.circulant(nodes, m, m + 1)))  # fmt: skip
        if nodes > degree:
            found.append((f"Kautz {degree}, {nodes}", lambda: expansions.kautz(degree, nodes)))
    designs = []
    for name, build in found:
        try:
            designs.append(_computed(name, nodes, degree, build))
        except ValueError:  # not connected, such as some circulants
            continue
    return designs
