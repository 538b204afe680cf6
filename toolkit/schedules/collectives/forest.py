"""ForestColl: trees that reach the optimum of a collective on any network."""

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from toolkit._checks import checked
from toolkit.schedules.collectives.fabrics.topology import Topology
from toolkit.schedules.collectives.optimum import Collective, optimum, scale_of, tightest_cut
from toolkit.schedules.collectives.packed.flow import Network
from toolkit.schedules.collectives.packed.packing import pack_trees
from toolkit.schedules.collectives.packed.splitting import split_switches
from toolkit.schedules.collectives.packed.supply import Supply
from toolkit.schedules.collectives.packed.symmetry import lowest_trees, translations
from toolkit.schedules.collectives.trees import Edge, Forest, Tree

MOST_PACKED = 128  # nodes without symmetry, for which packing takes minutes


@checked
def forest(
    topology: Topology,
    collective: Collective = "all-gather",
    root: int = 0,
    trees_per_root: int | None = None,
) -> Forest:
    """The trees of a collective whose throughput is the optimum.

    Every root sends along k trees, each with 1/k of its data; link e carries at most U b_e of all
    N k trees, and U / k = 1/x*. Where translations bring every node to every other (rings, tori,
    hypercubes), the trees are shortest paths; else switches are split away and trees are packed.

    Args:
        topology: the network.
        collective: as `optimum` takes it.
        root: the rank that sends in a broadcast, or receives in a reduce.
        trees_per_root: a smaller k, if the optimum's is too large; the throughput is then the best
            for this k: U/k <= 1/x* + 1/(k min b).

    Raises:
        ValueError: for more than 128 nodes without such translations.

    Cost: a second or three for 32 GPUs, fifteen for 64; five for a torus of 1,024 nodes.

    Source: Zhao et al., ForestColl, 2024, https://arxiv.org/abs/2402.06787, section 5.

    Example:
        >>> network = gpu_boxes(2, 8, rate=300, network_rate=25, rails=2)
        >>> forest(network).rate == optimum(network).rate
        True
    """
    if trees_per_root is not None and (trees_per_root < 1 or collective in ("broadcast", "reduce")):
        raise ValueError(
            f"trees_per_root must be 1 or more, and is not for {collective!r} with its one root; "
            f"got {trees_per_root}"
        )
    parts: dict[str, Any] = {}
    moves: tuple[tuple[int, ...], ...] = ()
    directed = {"gather": topology, "reduce": topology.backwards()}
    phases = {"all-reduce": ("reduce", "gather"), "all-gather": ("gather",)}
    phases |= {"broadcast": ("gather",), "reduce-scatter": ("reduce",), "reduce": ("reduce",)}
    for phase in phases[collective]:
        network = directed[phase]
        if phase == "gather" and parts and network is directed["reduce"]:
            parts[phase] = parts["reduce"]
        elif collective in ("broadcast", "reduce"):
            parts[phase] = _from_one_root(network, root)
        else:
            parts[phase], moves = _from_all_roots(network, trees_per_root)
    return Forest(f"forest on {topology.name}", collective, topology, **parts, translations=moves)


def _from_all_roots(topology, trees_per_root):
    ratio, _ = tightest_cut(topology)
    scale = scale_of(topology.links.values())
    if trees_per_root is None:
        whole = [int(rate * scale) for rate in topology.links.values()]
        per_unit = ratio / scale  # U / k for these whole capacities
        trees = per_unit.denominator // math.gcd(per_unit.denominator, *whole)
        times = trees * ratio
    else:
        trees, times = trees_per_root, _fewest(topology, trees_per_root, ratio)
    moves = translations(topology)
    if moves:
        found = lowest_trees(topology, moves, trees, times)
        if found is not None:
            return found, moves
    capacities = {link: math.floor(rate * times) for link, rate in topology.links.items()}
    return pack(topology, capacities, [trees] * topology.compute), ()


def _from_one_root(topology: Topology, root: int) -> tuple[Tree, ...]:
    rate = optimum(topology, "broadcast", root).rate
    scale = scale_of([*topology.links.values(), rate])
    whole = [int(each * scale) for each in topology.links.values()]
    common = math.gcd(int(rate * scale), *whole)
    capacities = {link: each // common for link, each in zip(topology.links, whole, strict=True)}
    units = [0] * topology.compute
    units[root] = int(rate * scale) // common
    return pack(topology, capacities, units)


def _fewest(topology: Topology, trees: int, ratio: Fraction) -> Fraction:
    """The smallest U for which links of capacity floor(U b) hold k trees from every root."""
    rates = set(topology.links.values())
    low = trees * ratio
    high = low + 1 / min(rates)
    steps = {low} | {
        Fraction(units) / rate
        for rate in rates
        for units in range(math.ceil(low * rate), math.floor(high * rate) + 1)
    }
    *candidates, largest = sorted(steps)
    at = bisect_left(candidates, True, key=lambda times: _holds(topology, trees, times))
    return [*candidates, largest][at]


def _holds(topology: Topology, trees: int, times: Fraction) -> bool:
    compute, nodes = topology.compute, len(topology.labels)
    arcs = [(a, b, math.floor(rate * times)) for (a, b), rate in topology.links.items()]
    network = Network(nodes + 1, [*arcs, *((nodes, node, trees) for node in range(compute))])
    sinks = topology.representatives
    return all(network.flow(nodes, sink) == trees * compute for sink in sinks)


def pack(
    topology: Topology, capacities: Mapping[tuple[int, int], int], units: list[int]
) -> tuple[Tree, ...]:
    """`units[v]` trees from every compute node v within whole capacities of the links."""
    if topology.compute > MOST_PACKED:
        raise ValueError(
            f"topology {topology.name!r}: more than {MOST_PACKED} compute nodes need translations, "
            f"as rings, tori and hypercubes have; got {topology.compute}, for `optimum` alone"
        )
    for switch in range(topology.compute, len(topology.labels)):
        inward = sum(each for (_, b), each in capacities.items() if b == switch)
        outward = sum(each for (a, _), each in capacities.items() if a == switch)
        if inward != outward:
            raise ValueError(
                f"switch {topology.labels[switch]!r} is unbalanced once capacities are rounded "
                "down; leave trees_per_root out"
            )
    supply = Supply(len(topology.labels), units)
    for (a, b), capacity in capacities.items():
        supply.add(a, b, capacity)
    supply.fill()
    routes = split_switches(supply, topology.compute)
    trees: dict[tuple[int, tuple[Edge, ...]], int] = {}
    for batch in pack_trees(supply):
        for edges, weight in _routed(routes, batch):
            key = batch.root, edges
            trees[key] = trees.get(key, 0) + weight
    total = sum(units)
    return tuple(
        Tree(root, Fraction(weight, total), edges) for (root, edges), weight in trees.items()
    )


def _routed(routes, batch) -> Iterator[tuple[tuple[Edge, ...], int]]:
    """The trees of a batch, divided where their edges take different paths."""
    drawn: list[list[tuple[tuple[int, ...], int]]] = []  # each path, and up to which unit
    for a, b in batch.edges:
        pieces: dict[tuple[int, ...], int] = {}
        for path, units in routes.draw(a, b, batch.weight):
            pieces[path] = pieces.get(path, 0) + units
        stops = itertools.accumulate(pieces.values())
        drawn.append(list(zip(pieces, stops, strict=True)))
    start = 0
    for end in sorted({stop for pieces in drawn for _, stop in pieces}):
        paths = [next(path for path, stop in pieces if stop > start) for pieces in drawn]
        yield (
            tuple(
                Edge(a, b, path, batch.depth[a])
                for (a, b), path in zip(batch.edges, paths, strict=True)
            ),
            end - start,
        )
        start = end
