"""Networks in which every node sees the same: trees from one root, translated to the others."""

from fractions import Fraction

import numpy as np

from toolkit.schedules.collectives.fabrics.topology import Topology, distances
from toolkit.schedules.collectives.packed.flow import Network
from toolkit.schedules.collectives.trees import Edge, Tree

_MOST = 4096  # nodes; the translations are a table of their square


def translations(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """For every node the one symmetry that brings rank 0 there; none if these are no group.

    They exist for Cayley graphs with their generators as symmetries: tori, hypercubes, circulants.
    """
    nodes = topology.compute
    if len(topology.labels) > nodes or not topology.symmetries or nodes > _MOST:
        return ()
    found: list[np.ndarray | None] = [None] * nodes
    found[0] = np.arange(nodes)
    generators, waiting = [np.array(each) for each in topology.symmetries], [0]
    while waiting:
        node = waiting.pop()
        for generator in generators:
            image = generator[found[node]]
            if found[image[0]] is None:
                found[image[0]] = image
                waiting.append(image[0])
            elif not np.array_equal(found[image[0]], image):
                return ()
    if any(each is None for each in found):
        return ()
    return tuple(tuple(each.tolist()) for each in found if each is not None)


def lowest_trees(
    topology: Topology, moves: tuple[tuple[int, ...], ...], units: int, scale: Fraction
) -> tuple[Tree, ...] | None:
    """`units` trees of shortest paths from rank 0 whose translations fit the links, or None.

    A translated tree uses the links of one kind as often as the tree itself does in sum over the
    nodes, so that only the number of edges of each kind is limited, to `scale` times its rate. A
    flow chooses, for every node and unit, the kind of the last edge to it.
    """
    nodes, origin = topology.compute, {}
    for link in topology.links:
        if link[0] == 0:
            origin[link[1]] = len(origin)
    inverse = [np.argsort(move) for move in moves]
    kinds = {(a, b): origin[int(inverse[a][b])] for a, b in topology.links}
    depth = distances(topology.links, len(topology.labels), 0)
    arcs, last = [], {}
    for (a, b), kind in kinds.items():
        if depth[b] == depth[a] + 1:
            last.setdefault(b, {})[kind] = a
    for node in range(1, nodes):
        arcs.append((0, node, units))
        arcs += [(node, nodes + kind, units) for kind in last[node]]
    limits = [int(topology.links[0, other] * scale) for other in origin]
    arcs += [(nodes + kind, nodes + len(origin), limit) for kind, limit in enumerate(limits)]
    network = Network(nodes + len(origin) + 1, arcs)
    if network.flow(0, nodes + len(origin)) < units * (nodes - 1):
        return None
    chosen: dict[int, list[int]] = {node: [] for node in range(1, nodes)}
    for position, (a, b, _) in enumerate(arcs):
        if 0 < a < nodes:
            used = network.residual[2 * position + 1]
            chosen[a] += [last[a][b - nodes]] * used
    order = sorted(chosen, key=lambda node: depth[node])

    def edge(parent: int, node: int) -> Edge:
        return Edge(parent, node, (parent, node), depth[parent])

    return tuple(
        Tree(0, Fraction(1, nodes * units), tuple(edge(chosen[node][unit], node) for node in order))
        for unit in range(units)
    )
