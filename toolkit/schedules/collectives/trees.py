"""A collective as weighted trees, with the load that they put on every link."""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np

from toolkit.schedules.collectives.fabrics.topology import Topology

Phase = Literal["reduce", "gather"]


class Edge(NamedTuple):
    """A step away from the root.

    Attributes:
        parent: compute node that is nearer to the root.
        child: its neighbour.
        path: the nodes that data pass between them, switches included, from parent to child.
        step: when a gather takes it; a reduction takes the last step first.

    Example:
        >>> Edge(0, 1, path=(0, 8, 1), step=0).child
        1
    """

    parent: int
    child: int
    path: tuple[int, ...]
    step: int


@dataclass(frozen=True)
class Tree:
    """A spanning tree that carries a share of the data.

    Attributes:
        root: compute node that sends in an all-gather and receives in a reduce-scatter.
        share: of the whole array, exactly.
        edges: every edge after the one that reaches its parent.

    Example:
        >>> ring(2).compute, forest(ring(2)).gather[0].edges
        (2, (Edge(parent=0, child=1, path=(0, 1), step=0),))
    """

    root: int
    share: Fraction
    edges: tuple[Edge, ...]

    def moved(self, permutation: tuple[int, ...]) -> "Tree":
        """The same tree elsewhere in a symmetric network."""
        edges = tuple(
            Edge(permutation[a], permutation[b], tuple(permutation[node] for node in path), step)
            for a, b, path, step in self.edges
        )
        return Tree(permutation[self.root], self.share, edges)


@dataclass(frozen=True)
class Forest:
    """A collective: along which trees which share of the data is reduced and gathered.

    An all-gather, or a broadcast, sends along `gather` from the roots; a reduce-scatter, or a
    reduce, sums along `reduce` towards the roots; an all-reduce does one after the other, each
    share on its own.

    Attributes:
        name: name for titles.
        collective: "all-gather", "reduce-scatter", "broadcast", "reduce" or "all-reduce".
        topology: the network.
        reduce: trees of the sums; data move from child to parent, against `Edge.path`.
        gather: trees of the copies.
        translations: if any, every tree stands for its images under these permutations.

    Example:
        >>> forest(ring(4)).rate, forest(ring(4)).height
        (Fraction(8, 3), 2)
    """

    name: str
    collective: str
    topology: Topology
    reduce: tuple[Tree, ...] = ()
    gather: tuple[Tree, ...] = ()
    translations: tuple[tuple[int, ...], ...] = ()

    def trees(self, phase: Phase) -> Iterator[Tree]:
        """All trees of a phase."""
        for tree in getattr(self, phase):
            if not self.translations:
                yield tree
            for translation in self.translations:
                yield tree.moved(translation)

    @functools.cached_property
    def stages(self) -> tuple[dict[tuple[int, int], Fraction], ...]:
        """Link -> share of the array that it carries, for every step of a single chunk."""
        return (*reversed(self._by_step("reduce", True)), *self._by_step("gather", False))

    @functools.cached_property
    def loads(self) -> dict[tuple[int, int], Fraction]:
        """Link -> share of the array that passes it."""
        found: dict[tuple[int, int], Fraction] = {}
        for stage in self.stages:
            for link, share in stage.items():
                found[link] = found.get(link, Fraction(0)) + share
        return found

    @property
    def rate(self) -> Fraction:
        """GB/s: bytes of the whole array over the time of the busiest link."""
        return 1 / max(share / self.topology.links[link] for link, share in self.loads.items())

    @property
    def busiest(self) -> tuple[tuple[int, int], ...]:
        """The links that are busy all the time."""
        links = self.topology.links
        return tuple(link for link, share in self.loads.items() if share * self.rate == links[link])

    @functools.cached_property
    def height(self) -> int:
        """Steps of a single chunk: as many as the deepest tree has edges one after the other."""
        return len(self.stages)

    def _by_step(self, phase: Phase, is_backwards: bool) -> list[dict[tuple[int, int], Fraction]]:
        unit, found = self.unit, []
        nodes = len(self.topology.labels)
        counts: list[np.ndarray] = []
        for tree in getattr(self, phase):
            weight = int(tree.share / unit)
            hops: dict[int, list[tuple[int, int]]] = {}
            for edge in tree.edges:
                hops.setdefault(edge.step, []).extend(itertools.pairwise(edge.path))
            for step, links in hops.items():
                while len(counts) <= step:
                    counts.append(np.zeros(nodes * nodes, np.int64))
                ends = np.array(links)
                if self.translations:
                    ends = np.array(self.translations)[:, ends].reshape(-1, 2)
                first, second = (1, 0) if is_backwards else (0, 1)
                at = ends[:, first] * nodes + ends[:, second]
                counts[step] += weight * np.bincount(at, minlength=nodes * nodes)
        for count in counts:
            used = np.flatnonzero(count)
            found.append({divmod(int(at), nodes): int(count[at]) * unit for at in used})
        return found

    @functools.cached_property
    def unit(self) -> Fraction:
        """The largest share of which every tree's share is a multiple."""
        shares = [tree.share for tree in (*self.reduce, *self.gather)]
        scale = math.lcm(*(share.denominator for share in shares))
        return Fraction(math.gcd(*(int(share * scale) for share in shares)), scale)
