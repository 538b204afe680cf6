"""A collective that plays chunk by chunk: rings on the left, the best trees on the right."""

import itertools
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit.figures import ACCENT, look
from toolkit.lab.collectives.chunks_view import ChunksView, chunks_view
from toolkit.lab.collectives.cut_view import SCHEDULES
from toolkit.lab.collectives.networks import NETWORKS
from toolkit.lab.kit.controls import Choice
from toolkit.lab.kit.player import PlayedPanel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.scene import Kind, Message, Node, Scene

_SIZES = {"64 kB": 0.064, "1 MB": 1.0, "64 MB": 64.0}
_KINDS = (Kind("copy", "#a8cfe8"), Kind("part of a sum", "#f4c99b"))
_SIDES = {"rings": 0.0, "trees": 0.56}
_WIDE = 0.44


class ArrivedPlot(Plot):
    """The share in place over time, of both."""

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

    def compute(self, **state: Any) -> ChunksView:
        return chunks_view(**state)

    def scene(self, view: ChunksView) -> Scene:
        return chunks_scene(view)

    def plots(self, figure: Figure) -> list[Plot]:
        return [ArrivedPlot(figure.add_axes((0.07, 0.32, 0.91, 0.56)))]


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
