"""Paths between ranks, and searches for rings that share no link."""

import functools
import itertools
import random
from collections.abc import Iterable, Iterator

from toolkit._checks import checked
from toolkit.schedules.collectives.fabrics.topology import Topology
from toolkit.schedules.collectives.trees import Edge

Order = tuple[int, ...]
_ATTEMPTS, _MOST_TRIES = 6, 1500  # searches for rings, and the ranks that one of them visits


class Wires:
    """Shortest paths between ranks: through switches only, or where there are none, through all."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.after: list[list[int]] = [[] for _ in topology.labels]
        for (a, b), _ in sorted(topology.links.items(), key=lambda each: -each[1]):
            self.after[a].append(b)

    @functools.cache  # noqa: B019 - lives as long as one forest is made
    def from_rank(self, source: int, through_ranks: bool = False) -> dict[int, tuple[int, ...]]:
        """The path to every node that can be reached."""
        paths: dict[int, tuple[int, ...]] = {source: (source,)}
        waiting = [source]
        for node in waiting:
            if node == source or node >= self.topology.compute or through_ranks:
                for other in self.after[node]:
                    if other not in paths:
                        paths[other] = (*paths[node], other)
                        waiting.append(other)
        return paths

    def edge(self, parent: int, child: int, step: int, phase: str) -> Edge:
        """A step of a tree; data of a reduction move from child to parent."""
        if phase == "gather":
            return Edge(parent, child, self.path(parent, child), step)
        return Edge(parent, child, self.path(child, parent)[::-1], step)

    def path(self, a: int, b: int) -> tuple[int, ...]:
        """The nodes from one rank to another."""
        return self.from_rank(a).get(b) or self.from_rank(a, True)[b]


def box_size(topology: Topology, ranks: Iterable[int] | None = None) -> int:
    """Of some ranks those per box, by their labels; 1 where these name no boxes of one size."""
    among = range(topology.compute) if ranks is None else ranks
    boxes = [topology.labels[rank].rpartition("/")[0] for rank in among]
    sizes = [len(list(group)) for _, group in itertools.groupby(boxes)]
    return sizes[0] if len(set(sizes)) == 1 and len(sizes) > 1 and boxes[0] else 1


@checked
def disjoint_rings(topology: Topology) -> list[Order]:
    """Rings that share no link's rate, each as fast as the slowest link, as NCCL searches them.

    A ring visits all of a box before it leaves it; its reverse is a ring too. Depth-first searches
    from several starts take what links have left; the most rings that one of them finds count.

    Args:
        topology: the network.

    Returns:
        The orders of ranks; the order of ranks alone if no ring is found.

    Example:
        >>> len(disjoint_rings(dgx1()))
        6
    """
    wires, unit = Wires(topology), min(topology.links.values())
    # For every rank those that it reaches through no other, each with the links on the way.
    near = [
        [
            (other, tuple(itertools.pairwise(path)))
            for other, path in wires.from_rank(rank).items()
            if rank != other < topology.compute
        ]
        for rank in range(topology.compute)
    ]
    most, best = min(topology.ingress[: topology.compute]) // unit, []
    for seed in range(_ATTEMPTS):
        found, left, draw = [], dict(topology.links), random.Random(seed)
        while (
            order := _ring(near, left, unit, box_size(topology), draw, seed % 2 == 0)
        ) is not None:
            for each in (order, order[::-1]):
                ends = zip(each, (*each[1:], each[0]), strict=True)
                used = [link for a, b in ends for link in dict(near[a])[b]]
                if all(left[link] >= used.count(link) * unit for link in used):
                    found.append(each)
                    for link in used:
                        left[link] -= unit
        best = max(best, found, key=len)
        if len(best) >= most:
            break
    return best or [tuple(range(topology.compute))]


def _ring(near, left, unit, each: int, draw: random.Random, by_rate: bool) -> Order | None:
    """One ring through links with enough left."""
    each = each if each > 1 else len(near)
    ways = [
        sum(min(left[link] for link in links) >= unit for _, links in others) for others in near
    ]

    def neighbours(rank: int) -> Iterator[int]:
        """First the ranks from which fewest others can be reached (Warnsdorff), or fast links."""
        found = []
        for other, links in near[rank]:
            rate = min(left[link] for link in links)
            if rate >= unit:
                order = (-rate, ways[other]) if by_rate else (ways[other], -rate)
                found.append((len(links), *order, draw.random(), other))
        return (other for *_, other in sorted(found))

    tries = 0
    starts = sorted(draw.sample(range(each), each), key=lambda rank: -ways[rank])
    for start in starts:
        order, waiting, visited = [start], [neighbours(start)], {start}
        while waiting and tries < _MOST_TRIES:
            tries += 1
            is_inside = len(order) % each != 0
            for rank in waiting[-1]:
                if rank not in visited and (rank // each == order[-1] // each) == is_inside:
                    order.append(rank)
                    visited.add(rank)
                    waiting.append(neighbours(rank))
                    if len(order) == len(near) and start in neighbours(rank):
                        return tuple(order)
                    break
            else:
                visited.discard(order.pop())
                waiting.pop()
    return None
