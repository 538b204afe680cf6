"""What the links of a network give each axis of a mesh, and which axis to lay on which links."""

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from toolkit._checks import checked
from toolkit.schedules.collectives import Topology, optimum
from toolkit.schedules.collectives.baselines import binary_pairs
from toolkit.schedules.collectives.rings import Wires, box_size

Collectives = Literal["ring", "tree", "optimum"]


@dataclass(frozen=True)
class AxisPlacement:
    """Axes of a mesh on a network, the innermost first, with their modelled times.

    Attributes:
        axes: names, from the axis whose chips lie next to each other outwards.
        rates: axis -> bytes/s that a chip sends.
        seconds: of all axes' bytes, one after the other, without delays.

    Example:
        >>> from toolkit.schedules.collectives import named_topology
        >>> network = named_topology("h100:2x8")
        >>> place_axes(network, {"data": 2, "tensor": 8}, {"data": 1e9, "tensor": 1e11}).axes
        ('tensor', 'data')
    """

    axes: tuple[str, ...]
    rates: Mapping[str, float]
    seconds: float


def axis_rate(topology: Topology, inner: int, degree: int, collectives: Collectives) -> float:
    """Bytes/s that a chip sends while all groups along an axis communicate at the same time.

    A group is `degree` ranks that are `inner` apart. "ring": two rings, one each way, in the order
    of ranks, along shortest paths; their loads add up. "tree": an all-reduce along double binary
    trees, likewise. "optimum": the best trees on the links between members of a group and to
    switches, with an equal share of links between switches; where these do not connect the members,
    the rings.
    """
    if degree == 1:
        return math.inf
    groups = _groups(topology, inner, degree)
    # Edges with what each way carries, and bytes that a chip sends in all, of one array.
    if collectives == "tree":
        sent, whole = [], Fraction(2 * (degree - 1), degree)
        for group in groups:
            each = box_size(topology, group)
            pairs = binary_pairs(group, each)
            sent += [(a, b, Fraction(1, 2 * each)) for _, edges in pairs for a, b, _ in edges]
    else:
        ends = [
            pair for group in groups for pair in zip(group, (*group[1:], group[0]), strict=True)
        ]
        sent, whole = [(a, b, Fraction(1, 2)) for a, b in ends], Fraction(1)
    rate = whole / _busiest(topology, sent)
    if collectives == "optimum":
        best = [_of_trees(topology, group, len(groups)) for group in groups]
        if all(best):
            rate = max(rate, min(best))
    return float(rate) * 1e9


def tree_steps(topology: Topology, inner: int, degree: int) -> int:
    """Messages one after the other in one phase of a group's double binary trees."""
    group = _groups(topology, inner, degree)[0]
    pairs = binary_pairs(group, box_size(topology, group))
    return 1 + max(step for _, edges in pairs for *_, step in edges)


def _groups(topology: Topology, inner: int, degree: int) -> list[tuple[int, ...]]:
    if topology.compute % (inner * degree):
        raise ValueError(
            f"topology {topology.name!r}: {topology.compute} ranks do not hold groups of {degree} "
            f"that are {inner} apart"
        )
    return [
        tuple(start + inner * place for place in range(degree))
        for block in range(0, topology.compute, inner * degree)
        for start in range(block, block + inner)
    ]


def _busiest(topology: Topology, sent: list[tuple[int, int, Fraction]]) -> Fraction:
    """The time of the link that is busy longest, of messages (rank, rank, size) both ways."""
    wires, loads = Wires(topology), dict.fromkeys(topology.links, Fraction(0))
    for a, b, size in sent:
        for path in (wires.path(a, b), wires.path(b, a)):
            for link in itertools.pairwise(path):
                loads[link] += size
    return max(load / topology.links[link] for link, load in loads.items())


def _of_trees(topology: Topology, group: tuple[int, ...], groups: int) -> Fraction:
    """The optimum of one group, as what a chip sends; 0 where its own links do not connect it."""
    compute = topology.compute
    place = {node: position for position, node in enumerate(group)}
    place |= {node: len(group) + node - compute for node in range(compute, len(topology.labels))}
    links = {
        (place[a], place[b]): rate / groups if min(a, b) >= compute else rate
        for (a, b), rate in topology.links.items()
        if a in place and b in place
    }
    return _sent(len(group), len(topology.labels) - compute, tuple(sorted(links.items())))


@functools.lru_cache(maxsize=4096)
def _sent(ranks: int, switches: int, links) -> Fraction:
    labels = tuple(map(str, range(ranks + switches)))
    try:
        network = Topology("group", labels, ranks, dict(links))
    except ValueError:  # disconnected
        return Fraction(0)
    return optimum(network).rate * Fraction(ranks - 1, ranks)


@checked
def place_axes(
    topology: Topology,
    sizes: Mapping[str, int],
    sent: Mapping[str, float],
    collectives: Collectives = "optimum",
) -> AxisPlacement:
    """Which axis of a mesh to lay on which links: the order of axes that communicates fastest.

    Every order is tried; the innermost axis joins ranks that follow each other.

    Args:
        topology: the network; the product of sizes is its number of ranks.
        sizes: chips along each axis.
        sent: bytes that a chip sends along each axis.
        collectives: "ring", "tree" or the "optimum" of `toolkit.schedules.collectives`.

    Example:
        >>> from toolkit.schedules.collectives import named_topology
        >>> sizes, sent = {"data": 4, "tensor": 2}, {"data": 1e9, "tensor": 1e9}
        >>> place_axes(named_topology("ring:8"), sizes, sent).seconds  # at 1 GB/s per link
        2.0
    """
    if math.prod(sizes.values()) != topology.compute or set(sizes) != set(sent):
        raise ValueError(
            f"sizes must multiply to {topology.compute} ranks, with bytes sent for each axis; got "
            f"{dict(sizes)} and {dict(sent)}"
        )
    found = []
    for axes in itertools.permutations(sizes):
        inner, rates = 1, {}
        for axis in axes:
            rates[axis] = axis_rate(topology, inner, sizes[axis], collectives)
            inner *= sizes[axis]
        found.append(AxisPlacement(axes, rates, sum(sent[axis] / rates[axis] for axis in axes)))
    return min(found, key=lambda each: each.seconds)
