"""The best possible throughput of a collective, as a fraction, with the cut that proves it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from toolkit._checks import checked
from toolkit.schedules.collectives.fabrics.topology import Topology
from toolkit.schedules.collectives.packed.flow import Network

Collective = Literal["all-gather", "reduce-scatter", "broadcast", "reduce", "all-reduce"]


@dataclass(frozen=True)
class Optimum:
    """The best throughput of a collective, and a set of nodes that allows no better one.

    All data that start inside the set (those of its compute nodes, or of the root) must leave it,
    because a compute node lies outside: rate <= N * (rate out of the set) / (compute nodes in it).
    For "reduce-scatter" and "reduce", links and cut are those of the network turned around; an
    "all-reduce" is a reduce-scatter, then an all-gather, and the cut is the all-gather's.

    Attributes:
        collective: which one.
        rate: GB/s: bytes of the whole array over seconds ("algorithm bandwidth").
        cut: indices of the nodes inside, in order.
        cut_rate: GB/s of the links that leave it.

    Example:
        >>> best = optimum(ring(8))
        >>> best.rate, len(best.cut), best.cut_rate
        (Fraction(16, 7), 7, Fraction(2, 1))
    """

    collective: str
    rate: Fraction
    cut: tuple[int, ...]
    cut_rate: Fraction

    def seconds(self, size: float) -> float:
        """Seconds for an array of `size` bytes, without delays (modelled)."""
        return size / 1e9 / float(self.rate)


@checked
def optimum(topology: Topology, collective: Collective = "all-gather", root: int = 0) -> Optimum:
    """The highest throughput that any schedule of a collective can reach on a network.

        1/x* = max over S of |compute nodes in S| / (rate out of S),  rate = N x*

    over all sets S of nodes that leave a compute node out. It is reached by trees (`forest`), with
    or without switches that copy. Found by Newton's method on cuts, in integers.

    Args:
        topology: the network.
        collective: "all-gather", "reduce-scatter", "broadcast", "reduce", or "all-reduce" as one
            reduce-scatter and one all-gather after the other (`joint_all_reduce` overlaps them).
        root: the rank that sends in a broadcast, or receives in a reduce.

    Cost: one to three times a maximum flow per compute node, or per class of them under the
        topology's symmetries.

    Source: Zhao et al., ForestColl, 2024, https://arxiv.org/abs/2402.06787, section 4.

    Example:
        >>> optimum(gpu_boxes(2, 8, rate=300, network_rate=25, rails=2)).rate
        Fraction(1040, 3)
    """
    if not 0 <= root < topology.compute:
        raise ValueError(f"root must be 0 to {topology.compute - 1}; got {root}")
    if collective == "all-reduce":
        gather = optimum(topology)
        scatter = gather if topology.backwards() is topology else optimum(topology.backwards())
        rate = 1 / (1 / gather.rate + 1 / scatter.rate)
        return Optimum(collective, rate, gather.cut, gather.cut_rate)
    if collective in ("reduce-scatter", "reduce"):
        topology = topology.backwards()
    if collective in ("broadcast", "reduce"):
        rate, cut = _smallest_cut(topology, root)
        return Optimum(collective, rate, cut, rate)
    inverse, cut = tightest_cut(topology)
    return Optimum(collective, topology.compute / inverse, cut, topology.egress(cut))


def scale_of(rates: Iterable[Fraction]) -> int:
    """The smallest number that makes whole numbers of all rates."""
    return math.lcm(*(rate.denominator for rate in rates))


def tightest_cut(topology: Topology) -> tuple[Fraction, tuple[int, ...]]:
    """The largest |compute nodes in S| / (rate out of S), which is 1/x*, and its S."""
    compute, nodes = topology.compute, len(topology.labels)
    last = min(topology.representatives, key=lambda node: topology.ingress[node])
    cut = tuple(node for node in range(nodes) if node != last)
    ratio = (compute - 1) / topology.ingress[last]
    scale = scale_of(topology.links.values())
    while True:
        # At x = q/p: links carry p times their rate, and q units of data start at every node.
        p, q = ratio.numerator, ratio.denominator * scale
        arcs = [(a, b, int(rate * scale) * p) for (a, b), rate in topology.links.items()]
        network = Network(nodes + 1, [*arcs, *((nodes, node, q) for node in range(compute))])
        better = ratio
        for sink in topology.representatives:
            if network.flow(nodes, sink) < compute * q:
                inside = network.reached(nodes) - {nodes}
                weight = sum(node < compute for node in inside)
                if weight / topology.egress(inside) > better:
                    better, cut = weight / topology.egress(inside), tuple(sorted(inside))
        if better == ratio:
            return ratio, cut
        ratio = better


def _smallest_cut(topology: Topology, root: int) -> tuple[Fraction, tuple[int, ...]]:
    """The least rate out of a set with the root that leaves a compute node out, and the set."""
    scale = scale_of(topology.links.values())
    arcs = [(a, b, int(rate * scale)) for (a, b), rate in topology.links.items()]
    network = Network(len(topology.labels), arcs)
    found = []
    for sink in range(topology.compute):
        if sink != root:
            rate = Fraction(network.flow(root, sink), scale)
            found.append((rate, tuple(sorted(network.reached(root)))))
    return min(found)
