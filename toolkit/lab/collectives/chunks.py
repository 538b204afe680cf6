"""A collective that plays chunk by chunk: rings on the left, the best trees on the right."""

import functools
import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from toolkit.figures import ACCENT, look
from toolkit.lab.collectives.cut import SCHEDULES
from toolkit.lab.collectives.networks import NETWORKS, Drawing, best_of, drawing_of, trees_of
from toolkit.lab.kit.controls import Choice
from toolkit.lab.kit.played import PlayedPanel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.scene import Kind, Message, Node, Scene
from toolkit.lab.kit.view import Data, View
from toolkit.measure import in_words
from toolkit.schedules.collectives import to_program
from toolkit.schedules.collectives.program import unit_trees


@dataclass(frozen=True)
class Run:
    """A program on its network, with a clock."""

    ends: Float[np.ndarray, "rounds"]  # [rounds], seconds at which each round ends (modelled)
    # For each round (chunk's root, path, whether it adds)
    messages: tuple[tuple[tuple[int, tuple[int, ...], bool], ...], ...]
    # [rounds + 1, ranks, ranks], the part of the rank's (second axis) root's data (third
    # axis) that is in place: copied everywhere, or at their root added up
    shares: Float[np.ndarray, "moments ranks roots"]


@functools.lru_cache(128)
def run_of(name: str, collective: str, schedule: str, megabytes: float) -> Run:
    """Rounds of a schedule; one lasts as long as its busiest link, and a delay."""
    forest = trees_of(name, collective, schedule, 0, 1.0)
    topology, program = forest.topology, to_program(forest)
    paths = {}
    for phase in ("reduce", "gather"):
        for chunk, tree in enumerate(unit_trees(forest, phase)):  # type: ignore[arg-type]
            for edge in tree.edges:
                adds = phase == "reduce"
                ends = (edge.child, edge.parent) if adds else (edge.parent, edge.child)
                paths[chunk, *ends, adds] = edge.path[::-1] if adds else edge.path
    size = float(forest.unit) * megabytes / 1e3
    ranks, chunks = program.ranks, Counter(program.owners)
    summed = collective != "all-gather"
    # How many summands of each chunk a rank has, and whether it has the whole.
    count = np.ones((ranks, len(program.owners)), int)
    owners = np.array(program.owners)
    whole = np.zeros(count.shape, bool)
    if not summed:
        whole[owners, np.arange(len(owners))] = True
    seconds, ends, shares, messages = 0.0, [], [_shares(whole, owners, chunks)], []
    for moved in program.rounds:
        loads: Counter = Counter()
        listed, before = [], count.copy()
        for chunk, source, target, adds in moved:
            path = paths[chunk, source, target, adds]
            loads.update(itertools.pairwise(path))
            listed.append((program.owners[chunk], path, adds))
            if adds:
                count[target, chunk] += before[source, chunk]
                whole[target, chunk] = count[target, chunk] == ranks
            else:
                whole[target, chunk] = True
        busiest = max(number * size / float(topology.links[link]) for link, number in loads.items())
        seconds += topology.seconds + busiest
        ends.append(seconds)
        messages.append(tuple(listed))
        shares.append(_shares(whole, owners, chunks))
    return Run(np.array(ends), tuple(messages), np.array(shares))


def _shares(whole: np.ndarray, owners: np.ndarray, chunks: Counter) -> np.ndarray:
    found = np.zeros((len(whole), len(whole)))
    for root, number in chunks.items():
        found[:, root] = whole[:, owners == root].sum(1) / number
    return found


@dataclass(frozen=True)
class ChunksView(View):
    """Two schedules of one collective."""

    name: str  # of the network
    collective: str  # which one
    megabytes: float  # of the whole array
    drawing: Drawing  # places of the network
    runs: dict[str, Run]  # of "trees" and "rings"
    bound: float  # seconds at the optimum's rate, without delays and rounds

    @property
    def end(self) -> float:
        """Seconds until both are done."""
        return max(float(run.ends[-1]) for run in self.runs.values())

    @property
    def moments(self) -> np.ndarray:
        """Seconds, evenly from start to end."""
        return np.linspace(0, self.end, 41)

    def data(self) -> Data:
        columns = {
            f"in place, {SCHEDULES[name]} (share)": [
                float(run.shares[np.searchsorted(run.ends, moment, side="right")].mean())
                for moment in self.moments
            ]
            for name, run in self.runs.items()
        }
        return {"after (seconds)": [*map(float, self.moments)], **columns}

    def sentence(self) -> str:
        took = {
            name: f"{len(run.ends)} rounds, {in_words(float(run.ends[-1]), 'seconds')}"
            for name, run in self.runs.items()
        }
        times = float(self.runs["rings"].ends[-1] / self.runs["trees"].ends[-1])
        return (
            f"{NETWORKS[self.name]}, an {self.collective} of {self.megabytes:g} MB (modelled). "
            f"Left: rings, {took['rings']}. Right: the best trees, {took['trees']}; the rings take "
            f"{times:.2f} times as long. Without rounds and delays it would be "
            f"{in_words(self.bound, 'seconds')}."
        )

    def footnote(self) -> str:
        seconds = in_words(self.drawing.topology.seconds, "seconds")
        return (
            f"Modelled: a round takes {seconds} and the bytes of its busiest link. The number of a "
            "message is the rank whose part it is."
        )


def chunks_view(*, network: str, collective: str, size: float) -> ChunksView:
    """The view."""
    rate = float(best_of(network, collective, 0, 1.0).rate)
    runs = {name: run_of(network, collective, name, size) for name in SCHEDULES}
    return ChunksView(network, collective, size, drawing_of(network), runs, size / 1e3 / rate)


_SIZES = {"64 kB": 0.064, "1 MB": 1.0, "64 MB": 64.0}
_KINDS = (Kind("copy", "#a8cfe8"), Kind("part of a sum", "#f4c99b"))
_SIDES = {"rings": 0.0, "trees": 0.56}
_WIDE = 0.44


class ArrivedPlot(Plot):
    """The share in place over time, of both."""

    is_timed = True

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="In place, over time", ylabel="share", ylim=(-0.03, 1.03))
        axes.set_xlabel("ms")
        self.lines = {
            name: self.line(label=words, drawstyle="steps-post", **look.line)
            for (name, words), look in zip(
                SCHEDULES.items(), map(look, ("full", "window")), strict=True
            )
        }
        self.bound = self.line(color=ACCENT, linewidth=1.3, label="bound, no rounds, no delays")
        axes.legend(loc="lower right", fontsize=9)

    def show(self, view: ChunksView) -> None:
        _, *shares = view.data().values()
        for line, share in zip(self.lines.values(), shares, strict=True):
            line.set_data(1e3 * view.moments, share)
        self.bound.set_data([1e3 * view.bound] * 2, [0, 1])
        if self.axes.get_xlim()[1] != 1e3 * view.end:  # new limits draw the figure anew
            self.axes.set_xlim(0, 1e3 * view.end)


def chunks_scene(view: ChunksView) -> Scene:
    """The network twice, with messages link by link, and ranks as full as what they have."""
    nodes, edges, messages, levels = [], [], list[Message](), []
    drawing = view.drawing
    for number, (name, left) in enumerate(_SIDES.items()):
        run, first = view.runs[name], number * len(drawing.places)
        for node, (x, y) in enumerate(drawing.places):
            is_rank = node < drawing.topology.compute
            nodes.append(Node(str(node) if is_rank else "", left + _WIDE * float(x), 1 - float(y)))
            shares = run.shares[:, node].mean(1) if is_rank else [0.0]
            times = [0.0, *(1e3 * run.ends)] if is_rank else [0.0]
            levels.append(([*map(float, times)], [*map(float, shares)]))
        edges += [(first + a, first + b) for a, b in drawing.cables]
        starts = [0.0, *map(float, run.ends)]
        for now, moving in enumerate(run.messages):
            for root, path, adds in moving:
                hop = 1e3 * (starts[now + 1] - starts[now]) / (len(path) - 1)
                for at, (a, b) in enumerate(itertools.pairwise(path)):
                    start = 1e3 * starts[now] + at * hop
                    messages.append(
                        Message(first + a, first + b, start, start + hop, str(root), int(adds))
                    )
    return Scene(
        end=1e3 * view.end, words=view.sentence(), unit="ms", nodes=tuple(nodes),
        edges=tuple(edges), tall=0.36, messages=tuple(messages), levels=tuple(levels),
        kinds=_KINDS if view.collective == "all-reduce" else _KINDS[:1],
    )  # fmt: skip


class ChunksPanel(PlayedPanel):
    """A collective chunk by chunk, along rings and along the best trees.

    Example:
        >>> panel = ChunksPanel(network="mesh:3x3")
        >>> panel.player.scene["unit"]
        'ms'
    """

    title = "Collectives, chunk by chunk: rings beside the best trees"
    figure_size = (9.6, 2.6)
    has_palette = True

    network = Choice(
        "Network", "mesh:3x3",
        {words: name for name, words in NETWORKS.items() if "torus" not in name},
    )  # fmt: skip
    collective = Choice(
        "Collective", "all-gather", {name: name for name in ("all-gather", "all-reduce")}
    )
    size = Choice("Whole array", 64.0, _SIZES)

    compute = staticmethod(chunks_view)
    scene = staticmethod(chunks_scene)
    places = ((ArrivedPlot, (0.07, 0.32, 0.91, 0.56)),)
