"""Directed graphs of one degree, and larger graphs that are made of smaller ones."""

from fractions import Fraction

from toolkit._checks import checked
from toolkit.schedules.collectives.fabrics.topology import Topology, check_links


@checked
def directed(nodes: int, *offsets: int) -> Topology:
    """One-way links of 1 GB/s from every node to those some offsets further around a circle.

    Args:
        nodes: number of compute nodes.
        *offsets: distances.

    Example:
        >>> directed(4, 1).ingress[0]
        Fraction(1, 1)
    """
    check_links(nodes * len(offsets), nodes=nodes)
    links = {
        (node, (node + offset) % nodes): Fraction(1) for node in range(nodes) for offset in offsets
    }
    turn = tuple((node + 1) % nodes for node in range(nodes))
    name = f"directed {nodes} {{{', '.join(map(str, offsets))}}}"
    return Topology(name, tuple(map(str, range(nodes))), nodes, links, (turn,))


@checked
def kautz(degree: int, nodes: int) -> Topology:
    """The generalised Kautz graph: one-way links x -> -d x - a (mod N), for a = 1 to d.

    Args:
        degree: links that leave a node; those that lead back to it are left out.
        nodes: number of compute nodes.

    Source: Imase and Itoh, A Design for Directed Graphs with Minimum Diameter, 1983.

    Example:
        >>> kautz(2, 6).ingress[0]
        Fraction(2, 1)
    """
    check_links(nodes * degree, degree=degree, nodes=nodes)
    links: dict[tuple[int, int], Fraction] = {}
    for x in range(nodes):
        for a in range(1, degree + 1):
            y = (-degree * x - a) % nodes
            if x != y:
                links[x, y] = links.get((x, y), Fraction(0)) + 1
    return Topology(f"Kautz {degree}, {nodes}", tuple(map(str, range(nodes))), nodes, links)


@checked
def line_graph(topology: Topology) -> Topology:
    """Every link becomes a node, with links to those that begin where it ends.

    Args:
        topology: without switches, with links of 1 GB/s.

    Example:
        >>> line_graph(complete(3)).compute
        6
    """
    ends = sorted(topology.links)
    links = {
        (i, j): Fraction(1)
        for i, (_, b) in enumerate(ends)
        for j, (c, _) in enumerate(ends)
        if b == c and i != j
    }
    labels = tuple(f"{topology.labels[a]}>{topology.labels[b]}" for a, b in ends)
    return Topology(f"L({topology.name})", labels, len(ends), links)


@checked
def degree_expansion(topology: Topology, copies: int) -> Topology:
    """Every node several times, with links between all copies of joined nodes.

    Args:
        topology: without switches.
        copies: of every node.

    Example:
        >>> degree_expansion(complete(3), 2).ingress[0]
        Fraction(4, 1)
    """
    count = topology.compute
    check_links(copies**2 * len(topology.links), copies=copies)
    links = {
        (i * count + a, j * count + b): rate
        for (a, b), rate in topology.links.items()
        for i in range(copies)
        for j in range(copies)
    }
    labels = tuple(f"{label}/{i}" for i in range(copies) for label in topology.labels)
    return Topology(f"{topology.name} times {copies}", labels, count * copies, links)


@checked
def product(first: Topology, second: Topology) -> Topology:
    """The Cartesian product: a node for every pair, with the links of either.

    Args:
        first: without switches.
        second: without switches.

    Example:
        >>> product(ring(4), ring(4)).links == torus(4, 4).links
        True
    """
    n, m = first.compute, second.compute
    links = {(a * m + j, b * m + j): rate for (a, b), rate in first.links.items() for j in range(m)}
    links |= {
        (i * m + a, i * m + b): rate for (a, b), rate in second.links.items() for i in range(n)
    }
    shifts = [
        tuple(move[i] * m + j for i in range(n) for j in range(m)) for move in first.symmetries
    ]
    shifts += [
        tuple(i * m + move[j] for i in range(n) for j in range(m)) for move in second.symmetries
    ]
    labels = tuple(f"{a};{b}" for a in first.labels for b in second.labels)
    return Topology(f"{first.name} x {second.name}", labels, n * m, links, tuple(shifts))
