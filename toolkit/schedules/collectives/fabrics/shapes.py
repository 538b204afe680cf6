"""Regular networks: rings, meshes, tori, hypercubes, stars, fat trees."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from toolkit._checks import checked
from toolkit.schedules.collectives.fabrics.topology import Cable, Topology, check_links, from_cables

Rate = int | float | str | Any


@checked
def ring(nodes: int, rate: Rate = 1) -> Topology:
    """A ring of full-duplex cables.

    Args:
        nodes: number of compute nodes, from 2; two of them are joined by two cables.
        rate: GB/s per cable and direction.

    Example:
        >>> ring(8).compute
        8
    """
    return torus(nodes, rate=rate)


@checked
def mesh(*sizes: int, rate: Rate = 1) -> Topology:
    """A grid without wrap-around; with one size, a path.

    Args:
        *sizes: nodes along each axis.
        rate: GB/s per cable and direction.

    Example:
        >>> len(mesh(2, 3).links)
        14
    """
    return grid(f"mesh {_by(sizes)}", sizes, rate, [False] * len(sizes))


@checked
def torus(*sizes: int, rate: Rate = 1, twist: int = 0) -> Topology:
    """A grid with wrap-around; an axis of two nodes has two cables.

    Args:
        *sizes: nodes along each axis.
        rate: GB/s per cable and direction.
        twist: the cables that close the first axis also move by this number of nodes along
            the last one.

    Example:
        >>> torus(4, 4).ingress[0]
        Fraction(4, 1)
    """
    kind = "ring" if len(sizes) == 1 else "twisted torus" if twist else "torus"
    return grid(f"{kind} {_by(sizes)}", sizes, rate, [True] * len(sizes), twist)


def _by(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def grid(name, sizes, rate, wraps, twist=0, seconds=1e-6) -> Topology:
    """A grid that wraps around along some axes; its translations are its symmetries."""
    if not sizes or min(sizes) < 1 or math.prod(sizes) < 2:
        raise ValueError(f"sizes must be positive and have 2 nodes or more; got {_by(sizes)}")
    if twist and (len(sizes) < 2 or not all(wraps)):
        raise ValueError(f"twist needs a torus of two axes or more; got {_by(sizes)}")
    check_links(2 * len(sizes) * math.prod(sizes), nodes=math.prod(sizes))
    places = list(itertools.product(*map(range, sizes)))
    index = {place: node for node, place in enumerate(places)}

    def step(place, axis):
        """The next place along an axis, around its end."""
        moved = [*place]
        moved[axis] += 1
        if moved[axis] == sizes[axis]:
            moved[axis] = 0
            if axis == 0:
                moved[-1] = (moved[-1] + twist) % sizes[-1]
        return tuple(moved)

    cables: list[Cable] = [
        (index[place], index[step(place, axis)], rate)
        for place in places
        for axis in range(len(sizes))
        if sizes[axis] > 1 and (place[axis] + 1 < sizes[axis] or wraps[axis])
    ]
    shifts = [
        [index[step(place, axis)] for place in places]
        for axis in range(len(sizes))
        if wraps[axis] and sizes[axis] > 1
    ]
    labels = [",".join(map(str, place)) for place in places]
    return from_cables(name, labels, cables, symmetries=shifts, seconds=seconds)


@checked
def hypercube(dimensions: int, rate: Rate = 1) -> Topology:
    """A hypercube: nodes whose numbers differ in one bit are joined.

    Args:
        dimensions: number of bits.
        rate: GB/s per cable and direction.

    Example:
        >>> hypercube(3).compute
        8
    """
    check_links(dimensions << min(dimensions, 64), dimensions=dimensions)
    count, bits = 1 << dimensions, [1 << bit for bit in range(dimensions)]
    cables = [(node, node | bit, rate) for node in range(count) for bit in bits if not node & bit]
    flips = [[node ^ bit for node in range(count)] for bit in bits]
    return from_cables(f"hypercube {dimensions}", count, cables, symmetries=flips)


@checked
def complete(nodes: int, rate: Rate = 1) -> Topology:
    """A cable between every pair of nodes.

    Args:
        nodes: number of compute nodes.
        rate: GB/s per cable and direction.

    Example:
        >>> complete(4).ingress[0]
        Fraction(3, 1)
    """
    check_links(nodes * (nodes - 1), nodes=nodes)
    return circulant(nodes, *range(1, nodes // 2 + 1), rate=rate)


@checked
def circulant(nodes: int, *offsets: int, rate: Rate = 1) -> Topology:
    """Cables from every node to those that are some offsets further around a circle.

    Args:
        nodes: number of compute nodes.
        *offsets: distances, from 1 to half the nodes.
        rate: GB/s per cable and direction.

    Example:
        >>> circulant(8, 1, 3).ingress[0]
        Fraction(4, 1)
    """
    check_links(2 * nodes * len(offsets), nodes=nodes)
    wrong = [offset for offset in offsets if not 1 <= offset <= nodes // 2]
    if wrong or len(set(offsets)) < len(offsets):
        raise ValueError(f"offsets must differ and be 1 to {nodes // 2}; got {offsets}")
    cables = [
        (node, (node + offset) % nodes, rate)
        for offset in offsets
        for node in range(nodes if 2 * offset != nodes else offset)
    ]
    turn = [(node + 1) % nodes for node in range(nodes)]
    name = f"circulant {nodes} {{{', '.join(map(str, offsets))}}}"
    return from_cables(name, nodes, cables, symmetries=[turn])


@checked
def star(nodes: int, rate: Rate = 1) -> Topology:
    """Compute nodes around one switch.

    Args:
        nodes: number of compute nodes.
        rate: GB/s per cable and direction.

    Example:
        >>> star(8, 300).labels[-1]
        'switch'
    """
    check_links(2 * nodes, nodes=nodes)
    turn = [*((node + 1) % nodes for node in range(nodes)), nodes]
    cables = [(node, nodes, rate) for node in range(nodes)]
    return from_cables(f"star {nodes}", nodes, cables, ["switch"], [turn])


@checked
def leaf_spine(
    leaves: int, hosts: int, spines: int, host_rate: Rate = 1, uplink_rate: Rate = 1
) -> Topology:
    """Two tiers of switches: hosts on leaves, every leaf on every spine.

    Args:
        leaves: number of leaf switches.
        hosts: compute nodes per leaf.
        spines: number of spine switches.
        host_rate: GB/s between a host and its leaf.
        uplink_rate: GB/s between a leaf and a spine.

    Example:
        >>> leaf_spine(2, 4, 1).compute
        8
    """
    count = leaves * hosts
    check_links(2 * (count + leaves * spines), leaves=leaves, hosts=hosts, spines=spines)
    cables: list[Cable] = [(node, count + node // hosts, host_rate) for node in range(count)]
    cables += [
        (count + leaf, count + leaves + spine, uplink_rate)
        for leaf in range(leaves)
        for spine in range(spines)
    ]
    names = [f"leaf{leaf}" for leaf in range(leaves)] + [f"spine{each}" for each in range(spines)]
    inside = [node - node % hosts + (node + 1) % hosts for node in range(count)]
    among = [(node + hosts) % count for node in range(count)]
    tops = list(range(count + leaves, count + leaves + spines))
    shifts = [
        [*inside, *range(count, count + leaves), *tops],
        [*among, *(count + (leaf + 1) % leaves for leaf in range(leaves)), *tops],
    ]
    return from_cables(f"leaf-spine {leaves}x{hosts}x{spines}", count, cables, names, shifts)


@checked
def fat_tree(ports: int, rate: Rate = 1) -> Topology:
    """A three-tier fat tree of switches with the same number of ports, for ports^3/4 hosts.

    Args:
        ports: an even number; there are `ports` pods of ports/2 edge and ports/2 other switches.
        rate: GB/s per cable and direction.

    Source: Al-Fares, Loukissas and Vahdat, A Scalable, Commodity Data Center Network Architecture,
        2008, section 3.

    Example:
        >>> fat_tree(4).compute
        16
    """
    if ports < 2 or ports % 2:
        raise ValueError(f"ports must be an even number from 2; got {ports}")
    half, hosts = ports // 2, ports**3 // 4
    check_links(6 * hosts, ports=ports)
    tiers = {"edge": ports * half, "aggregation": ports * half, "core": half * half}
    names = [f"{tier}{each}" for tier, count in tiers.items() for each in range(count)]
    edge, aggregation = hosts, hosts + ports * half
    core = aggregation + ports * half
    cables: list[Cable] = [(node, edge + node // half, rate) for node in range(hosts)]
    for pod, i, j in itertools.product(range(ports), range(half), range(half)):
        cables.append((edge + pod * half + i, aggregation + pod * half + j, rate))
        cables.append((aggregation + pod * half + i, core + i * half + j, rate))
    return from_cables(f"fat tree {ports}", hosts, cables, names)
