"""The networks of the instruments: places of nodes, cables that can be slowed, cached trees."""

import functools
import re
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from jaxtyping import Float

from toolkit.schedules import collectives

NETWORKS = {
    "ring:8": "ring of 8", "mesh:3x3": "mesh 3 x 3", "torus:4x4": "torus 4 x 4",
    "v5e:4x4": "TPU v5e 4 x 4", "hypercube:3": "hypercube of 8", "dgx1": "DGX-1, 8 V100",
    "a100:2x4": "2 boxes of 4 A100", "leaf-spine:2x4x1": "2 leaves of 4, a spine",
}  # fmt: skip
MOST_CABLES = 32


@dataclass(frozen=True, eq=False)
class Drawing:
    """Where the nodes of a network lie, and its cables."""

    topology: collectives.Topology  # the network as it was built
    places: Float[np.ndarray, "nodes 2"]  # [nodes, 2], in [0, 1]
    cables: tuple[tuple[int, int], ...]  # pairs of nodes, the lower one first, in order
    is_grid: bool  # whether the nodes are a grid, whose cables around its ends are drawn as stubs

    def path(self, a: int, b: int) -> Float[np.ndarray, "points 2"]:
        """The line of a link; around the ends of a grid two stubs, with NaN between them."""
        start, end = self.places[a], self.places[b]
        along = end - start
        side = 1 / max(1, round(len(self.places) ** 0.5) - 1)
        if not self.is_grid or np.abs(along).max() < 1.5 * side:
            return np.stack([start, end])
        out = 0.45 * side * along / np.hypot(*along)
        return np.stack([start, start - out, [np.nan, np.nan], end + out, end])


@functools.lru_cache(64)
def drawing_of(name: str) -> Drawing:
    """A network by name with its places: grids as grids, switches above, others by NetworkX."""
    import networkx

    topology = collectives.named_topology(name)
    nodes, switches = range(len(topology.labels)), topology.labels[topology.compute :]
    graph = networkx.Graph(list(topology.links))
    is_grid = all(re.fullmatch(r"\d+,\d+", label) for label in topology.labels)
    if is_grid:
        rows = [tuple(map(int, label.split(","))) for label in topology.labels]
        places = {node: (column, -row) for node, (row, column) in enumerate(rows)}
    elif switches:
        tiers = [0] * topology.compute
        tiers += [2 if label.startswith(("spine", "network")) else 1 for label in switches]
        order = [[node for node in nodes if tiers[node] == tier] for tier in range(3)]
        places = {
            node: ((at + 0.5) / len(row), tier)
            for tier, row in enumerate(order)
            for at, node in enumerate(row)
        }
    elif name.startswith("hypercube"):
        places = {n: ((n & 1) + 0.4 * (n >> 2), (n >> 1 & 1) + 0.4 * (n >> 2)) for n in nodes}
    elif max(dict(graph.degree).values()) == 2:
        places = networkx.circular_layout(graph)
    else:
        places = networkx.kamada_kawai_layout(graph)
    found = np.array([places[node] for node in nodes], float)
    found -= found.min(0)
    cables = sorted({(min(link), max(link)) for link in topology.links})
    return Drawing(topology, found / found.max(0), tuple(cables), is_grid)


@functools.lru_cache(512)
def changed(name: str, cable: int, speed: float) -> collectives.Topology:
    """A network with one cable (counted from 1; 0: none) at a multiple of its rate, or cut."""
    drawing = drawing_of(name)
    topology, times = drawing.topology, Fraction(str(speed))
    if not cable or times == 1:
        return topology
    ends = drawing.cables[cable - 1]
    links = {
        link: rate * times if set(link) == set(ends) else rate
        for link, rate in topology.links.items()
        if times or set(link) != set(ends)
    }
    return collectives.Topology(
        topology.name, topology.labels, topology.compute, links, seconds=topology.seconds
    )


@functools.lru_cache(512)
def best_of(name: str, collective: str, cable: int, speed: float) -> collectives.Optimum:
    """The optimum on the network as changed."""
    return collectives.optimum(changed(name, cable, speed), collective)  # type: ignore[arg-type]


@functools.lru_cache(256)
def trees_of(
    name: str, collective: str, schedule: str, cable: int, speed: float
) -> collectives.Forest:
    """The best trees, or rings that were found before the cable changed and go around a cut."""
    network = changed(name, cable, speed)
    if schedule == "trees":
        return collectives.forest(network, collective)  # type: ignore[arg-type]
    return collectives.ring_forest(network, collective, _rings(name))


@functools.lru_cache(64)
def _rings(name: str) -> tuple[tuple[int, ...], ...]:
    return tuple(collectives.disjoint_rings(drawing_of(name).topology))
