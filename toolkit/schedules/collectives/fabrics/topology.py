"""A network as data: compute nodes, switches and directed links with their rates."""

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from toolkit._checks import checked

Cable = tuple[int, int, Any]
MOST_LINKS = 1 << 20  # about 1 GB of fractions


@dataclass(frozen=True, eq=False)
class Topology:
    """Compute nodes, switches and the directed links between them.

    Attributes:
        name: name for titles.
        labels: the name of every node; the compute nodes come first, in the order of their ranks.
        compute: number of compute nodes.
        links: (source, target) as indices into `labels` -> GB/s in this direction, exactly.
        symmetries: permutations of the nodes that map links onto links of the same rate. They make
            large networks fast and change no result.
        seconds: delay per message.

    Example:
        >>> ring(3).links[0, 1], ring(3).compute
        (Fraction(1, 1), 3)
    """

    name: str
    labels: tuple[str, ...]
    compute: int
    links: Mapping[tuple[int, int], Fraction]
    symmetries: tuple[tuple[int, ...], ...] = ()
    seconds: float = 1e-6

    def __post_init__(self) -> None:
        found = _fault(self)
        if found:
            raise ValueError(f"topology {self.name!r}: {found}")

    @functools.cached_property
    def ingress(self) -> tuple[Fraction, ...]:
        """The rate into every node."""
        rates = [Fraction(0)] * len(self.labels)
        for (_, target), rate in self.links.items():
            rates[target] += rate
        return tuple(rates)

    @functools.cached_property
    def representatives(self) -> tuple[int, ...]:
        """One compute node of every class that the symmetries map onto each other."""
        leader = list(range(self.compute))

        def find(node: int) -> int:
            while leader[node] != node:
                node = leader[node]
            return node

        for symmetry in self.symmetries:
            for node in range(self.compute):
                first, second = sorted((find(node), find(symmetry[node])))
                leader[second] = first
        return tuple(node for node in range(self.compute) if leader[node] == node)

    def egress(self, inside: Iterable[int]) -> Fraction:
        """The rate of the links that leave a set of nodes."""
        inside = set(inside)
        return sum(
            (rate for (a, b), rate in self.links.items() if a in inside and b not in inside),
            Fraction(0),
        )

    def backwards(self) -> "Topology":
        """The same network with every link turned around."""
        links = {(b, a): rate for (a, b), rate in self.links.items()}
        if links == self.links:
            return self
        return Topology(
            f"{self.name} backwards", self.labels, self.compute, links, self.symmetries,
            self.seconds,
        )  # fmt: skip

    def to_json(self) -> str:
        """Nodes and links as JSON, with rates as strings such as "25/2"."""
        switches = [False] * self.compute + [True] * (len(self.labels) - self.compute)
        nodes = [
            {"id": label, "kind": "switch" if is_switch else "compute"}
            for label, is_switch in zip(self.labels, switches, strict=True)
        ]
        links = [
            {"src": self.labels[a], "dst": self.labels[b], "rate": str(rate)}
            for (a, b), rate in self.links.items()
        ]
        return json.dumps(
            {"name": self.name, "seconds": self.seconds, "nodes": nodes, "links": links}, indent=1
        )


def _fault(topology: Topology) -> str | None:
    """What is wrong with a network, in one line; None if nothing is."""
    labels, compute, links = topology.labels, topology.compute, topology.links
    if compute < 2:
        return f"want at least 2 compute nodes; got {compute}"
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        return f"two nodes have the name {twice!r}"
    for (a, b), rate in links.items():
        if not (0 <= a < len(labels) and 0 <= b < len(labels)):
            return f"link {a}->{b} leads to no node; there are {len(labels)}"
        if a == b:
            return f"a link leads from {labels[a]!r} to itself"
        if not isinstance(rate, Fraction) or rate <= 0:
            return f"link {labels[a]}->{labels[b]}: rate must be above 0; got {rate}"
    outward = [Fraction(0)] * len(labels)
    for (a, _), rate in links.items():
        outward[a] += rate
    for switch in range(compute, len(labels)):
        if topology.ingress[switch] != outward[switch]:
            return (
                f"switch {labels[switch]!r} is unbalanced: {topology.ingress[switch]} GB/s in, "
                f"{outward[switch]} out; trim its links until both are equal"
            )
    for way, back, ends in (("from", "to", links), ("to", "from", [(b, a) for a, b in links])):
        far = distances(ends, len(labels), 0)[:compute]
        if -1 in far:
            lost = labels[far.index(-1)]
            return f"disconnected: no links lead {way} {labels[0]!r} {back} {lost!r}"
    for symmetry in topology.symmetries:
        image = {(symmetry[a], symmetry[b]): rate for (a, b), rate in links.items()}
        keeps = all((symmetry[node] < compute) == (node < compute) for node in range(len(labels)))
        if sorted(symmetry) != list(range(len(labels))) or image != links or not keeps:
            return "a symmetry does not map the links onto links of the same rate"
    return None


def distances(links: Iterable[tuple[int, int]], nodes: int, start: int) -> list[int]:
    """The number of links from a node to every other; -1 where none lead."""
    after: list[list[int]] = [[] for _ in range(nodes)]
    for a, b in links:
        after[a].append(b)
    found = [-1] * nodes
    found[start], waiting = 0, [start]
    for node in waiting:
        for other in after[node]:
            if found[other] < 0:
                found[other] = found[node] + 1
                waiting.append(other)
    return found


def rate_of(value: Any) -> Fraction:
    """A rate as an exact fraction; a float stands for the decimal number that it prints."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return Fraction(str(value)) if isinstance(value, float) else Fraction(value)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        raise ValueError(
            f"rate must be a number or a fraction such as '25/2'; got {value!r}"
        ) from None


def check_links(links: int, **sizes: int) -> None:
    """Refuse a network of more links than memory holds, before any is made."""
    if links > MOST_LINKS:
        given = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(f"{given}: got {links} links, wanted at most {MOST_LINKS}")


def from_cables(
    name: str, compute: int | Sequence[str], cables: Iterable[Cable], switches: Sequence[str] = (),
    symmetries: Iterable[Sequence[int]] = (), seconds: float = 1e-6,
) -> Topology:  # fmt: skip
    """A network of full-duplex cables (a, b, rate); parallel ones add up."""
    names = [str(node) for node in range(compute)] if isinstance(compute, int) else list(compute)
    links: dict[tuple[int, int], Fraction] = {}
    for a, b, rate in cables:
        for link in ((a, b), (b, a)):
            links[link] = links.get(link, Fraction(0)) + rate_of(rate)
    labels = (*names, *switches)
    return Topology(name, labels, len(names), links, tuple(map(tuple, symmetries)), seconds)


@checked
def read_topology(file: Path | str) -> Topology:
    """Read a network from a JSON file, or from JSON as a string.

    {"nodes": [{"id": "gpu0", "kind": "compute"}, {"id": "s", "kind": "switch"}],
     "links": [{"src": "gpu0", "dst": "s", "rate": 25}, ...]}: a link is one direction, its rate is
    in GB/s, as a number or as a string such as "25/2"; links between the same nodes add up.

    Args:
        file: the file's path, or the JSON itself, which begins with a brace.

    Returns:
        A checked `Topology`.

    Example:
        >>> read_topology(ring(3).to_json()).links == ring(3).links
        True
    """
    is_text = str(file).lstrip().startswith("{")
    title = "JSON" if is_text else Path(file).stem
    try:
        found = json.loads(str(file) if is_text else Path(file).read_text(encoding="utf-8"))
        nodes = [(str(node["id"]), node.get("kind", "compute")) for node in found["nodes"]]
        rows = [(str(row["src"]), str(row["dst"]), row["rate"]) for row in found["links"]]
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"topology {title!r}: want nodes with id and kind, links with src, dst and rate; "
            f"got {type(error).__name__}: {error}"
        ) from None
    for label, kind in nodes:
        if kind not in ("compute", "switch"):
            raise ValueError(
                f"topology {title!r}: node {label!r} is a {kind!r}; want compute or switch"
            )
    nodes.sort(key=lambda node: node[1] != "compute")  # keeps the order of ranks
    index = {label: position for position, (label, _) in enumerate(nodes)}
    links: dict[tuple[int, int], Fraction] = {}
    for source, target, rate in rows:
        for end in (source, target):
            if end not in index:
                raise ValueError(f"topology {title!r}: a link names {end!r}, which is not a node")
        link = index[source], index[target]
        exact = rate_of(rate)
        if exact <= 0:
            raise ValueError(
                f"topology {title!r}: link {source}->{target}: rate must be above 0; got {rate}"
            )
        links[link] = links.get(link, Fraction(0)) + exact
    seconds = found.get("seconds", 1e-6)
    if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ValueError(f"topology {title!r}: seconds must be a number from 0; got {seconds!r}")
    labels = tuple(label for label, _ in nodes)
    compute = sum(kind == "compute" for _, kind in nodes)
    return Topology(str(found.get("name", title)), labels, compute, links, (), float(seconds))
