"""What the field runs without a search: rings, halving and doubling, double binary trees."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

from toolkit._checks import checked
from toolkit.schedules.collectives.fabrics.topology import Topology
from toolkit.schedules.collectives.rings import Order, Wires, box_size, disjoint_rings
from toolkit.schedules.collectives.times import pipelined
from toolkit.schedules.collectives.trees import Forest, Tree

Trees = Callable[[str], Iterable[Tree]]
_PHASES = {
    "all-gather": ("gather",), "reduce-scatter": ("reduce",), "all-reduce": ("reduce", "gather"),
}  # fmt: skip


def _forest(name: str, collective: str, topology: Topology, trees: Trees) -> Forest:
    """The forest of a collective whose phases have these trees."""
    if collective not in _PHASES:
        raise ValueError(f"collective must be {', '.join(_PHASES)}; got {collective!r}")
    parts: dict[str, Any] = {phase: tuple(trees(phase)) for phase in _PHASES[collective]}
    return Forest(name, collective, topology, **parts)


@checked
def ring_forest(
    topology: Topology,
    collective: str = "all-gather",
    orders: Sequence[Order] | None = None,
    is_bidirectional: bool = False,
) -> Forest:
    """Every rank's data pass once around one or several rings.

    Args:
        topology: the network.
        collective: "all-gather", "reduce-scatter" or "all-reduce".
        orders: the ranks of every ring, in order; by default one ring, in the order of ranks.
        is_bidirectional: whether half of the data go around the other way.

    Example:
        >>> ring_forest(ring(8)).rate, ring_forest(ring(8), is_bidirectional=True).rate
        (Fraction(8, 7), Fraction(16, 7))
    """
    ranks = topology.compute
    orders = [tuple(range(ranks))] if orders is None else list(orders)
    for order in orders:
        if sorted(order) != list(range(ranks)):
            raise ValueError(f"orders: want every rank from 0 to {ranks - 1} once; got {order}")
    if is_bidirectional:
        orders = [*orders, *(order[::-1] for order in orders)]
    wires, share = Wires(topology), Fraction(1, ranks * len(orders))

    def chain(order: Order, start: int, phase: str) -> Tree:
        """Once around a ring; sums arrive from behind, copies leave ahead."""
        way = 1 if phase == "gather" else -1
        passed = [order[(start + way * step) % ranks] for step in range(ranks)]
        pairs = enumerate(itertools.pairwise(passed))
        edges = tuple(wires.edge(a, b, step, phase) for step, (a, b) in pairs)
        return Tree(passed[0], share, edges)

    name = "bidirectional ring" if is_bidirectional else f"{len(orders)} rings"
    return _forest(
        name if len(orders) > 1 else "ring", collective, topology,
        lambda phase: (chain(order, at, phase) for order in orders for at in range(ranks)),
    )  # fmt: skip


@checked
def halving_doubling(topology: Topology, collective: str = "all-gather") -> Forest:
    """Recursive doubling (and halving): at step t a rank exchanges 2^t shares with rank XOR 2^t.

    Args:
        topology: the network, of a power of two ranks.
        collective: "all-gather", "reduce-scatter" or "all-reduce".

    Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in
        MPICH, 2005, section 4.

    Example:
        >>> halving_doubling(hypercube(3)).height
        3
    """
    ranks = topology.compute
    if ranks & (ranks - 1):
        raise ValueError(f"topology: halving and doubling want a power of two ranks; got {ranks}")
    wires = Wires(topology)

    def tree(root: int, phase: str) -> Tree:
        edges = [
            wires.edge(root ^ known, root ^ known ^ (1 << step), step, phase)
            for step in range(ranks.bit_length() - 1)
            for known in range(1 << step)
        ]
        return Tree(root, Fraction(1, ranks), tuple(edges))

    return _forest(
        "halving and doubling", collective, topology,
        lambda phase: (tree(root, phase) for root in range(ranks)),
    )  # fmt: skip


@checked
def grid_rings(topology: Topology, sizes: Sequence[int], collective: str = "all-gather") -> Forest:
    """Rings along each axis of a grid, one axis after the other; every order of axes has a share.

    Args:
        topology: a torus whose ranks count along the last axis first.
        sizes: ranks along each axis.
        collective: "all-gather", "reduce-scatter" or "all-reduce".

    Source: Ying et al., Image Classification at Supercomputer Scale, 2018,
        https://arxiv.org/abs/1811.06992, section 3, for two axes.

    Example:
        >>> grid_rings(torus(4, 4), (4, 4)).rate == forest(torus(4, 4)).rate
        True
    """
    places = list(itertools.product(*map(range, sizes)))
    if len(places) != topology.compute:
        raise ValueError(f"sizes {tuple(sizes)} have {len(places)} ranks, not {topology.compute}")
    wires, axes = Wires(topology), [axis for axis, size in enumerate(sizes) if size > 1]
    turns = [axes[turn:] + axes[:turn] for turn in range(len(axes))]
    share = Fraction(1, len(places) * 2 * len(turns))

    def tree(root: int, turn: list[int], way: int, phase: str) -> Tree:
        reached, edges, begin = [places[root]], [], 0
        for axis in turn:
            front = list(reached)
            for step in range(sizes[axis] - 1):
                front, before = [], front
                for place in before:
                    moved = [*place]
                    moved[axis] = (place[axis] + way) % sizes[axis]
                    front.append(tuple(moved))
                    ends = places.index(place), places.index(front[-1])
                    edges.append(wires.edge(*ends, begin + step, phase))
                reached += front
            begin += sizes[axis] - 1
        return Tree(root, share, tuple(edges))

    every = list(itertools.product(range(len(places)), turns, (1, -1)))
    return _forest(
        "rings along axes", collective, topology,
        lambda phase: (tree(root, turn, way, phase) for root, turn, way in every),
    )  # fmt: skip


@checked
def double_binary_trees(topology: Topology) -> Forest:
    """An all-reduce along pairs of binary trees over boxes, with chains inside the boxes.

    A rank that is a leaf in one tree of a pair is inside the other. There is a pair for every rank
    of a box, which stands for its box; ranks without boxes are boxes of one.

    Args:
        topology: the network; a box is what has the part of the labels before "/" in common.

    Source: Sanders, Speck and Traeff, Two-tree algorithms for full bandwidth broadcast, reduction
        and scan, 2009; as NCCL has used them since version 2.4.

    Example:
        >>> double_binary_trees(star(8)).height
        6
    """
    wires, each = Wires(topology), box_size(topology)
    pairs = binary_pairs(range(topology.compute), each)
    return _forest(
        "double binary trees", "all-reduce", topology,
        lambda phase: (
            Tree(root, Fraction(1, 2 * each), tuple(wires.edge(*edge, phase) for edge in edges))
            for root, edges in pairs
        ),
    )  # fmt: skip


def binary_pairs(ranks: Sequence[int], each: int) -> list[tuple[int, list[tuple[int, int, int]]]]:
    """Trees over boxes of `each` ranks, two per rank of a box: root, (parent, child, step)s."""
    boxes, found = len(ranks) // each, []
    first = _binary(boxes)
    mirrored = {boxes - 1 - a: (boxes - 1 - b) for a, b in first.items()}
    shifted = {(a + 1) % boxes: (b + 1) % boxes for a, b in first.items()}
    for parents in (first, mirrored if boxes % 2 == 0 else shifted):
        root = next(box for box in range(boxes) if box not in parents)
        depth, among = {root: 0}, []
        while len(depth) < boxes:
            for box, parent in parents.items():
                if box not in depth and parent in depth:
                    depth[box] = depth[parent] + 1
                    among.append((parent * each, box * each, depth[parent]))
        for lead in range(each):
            edges = [(ranks[a + lead], ranks[b + lead], step) for a, b, step in among]
            for box, step in depth.items():
                chain = [ranks[box * each + (lead + place) % each] for place in range(each)]
                pairs = enumerate(itertools.pairwise(chain), step)
                edges += [(a, b, at) for at, (a, b) in pairs]
            found.append((ranks[root * each + lead], edges))
    return found


def _binary(count: int) -> dict[int, int]:
    """The parent of all but one of `count` numbers, in a tree in which every second is a leaf."""
    if count == 1:
        return {}
    parents: dict[int, int] = {}
    for number in range(1, count):
        low = number & -number
        up = (number ^ low) | (low << 1)
        parents[number] = up if up < count else number ^ low
    top = max(number for number in parents if parents[number] == 0)
    return parents | {number: top for number in parents if parents[number] == 0 and number != top}


@checked
def nccl_choice(topology: Topology, size: float, collective: str = "all-reduce") -> Forest:
    """Rings or double binary trees, whichever the model finds faster at a size, as NCCL chooses.

    Args:
        topology: the network.
        size: bytes of the whole array.
        collective: "all-gather", "reduce-scatter" or "all-reduce"; only the last has trees.

    Example:
        >>> nccl_choice(star(64), 1e3).name, nccl_choice(star(64), 1e9).name
        ('double binary trees', 'ring')
    """
    found = [ring_forest(topology, collective, disjoint_rings(topology))]
    if collective == "all-reduce":
        found.append(double_binary_trees(topology))
    return min(found, key=lambda each: pipelined(each, size).seconds)
