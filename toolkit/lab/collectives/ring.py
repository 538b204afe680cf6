"""A ring that plays: which part goes where in every round, and what each device has by then."""

import functools
from collections import Counter
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from toolkit.figures import ACCENT, look
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.played import PlayedPanel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.scene import Grid, Kind, Message, Node, Scene
from toolkit.lab.kit.view import Data, View
from toolkit.schedules.collectives import Program, named_topology, ring_forest, to_program

MOST_DEVICES = 16
COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather")
_KINDS = (Kind("is added to", "#f4c99b"), Kind("replaces", "#a8cfe8"))


@functools.cache
def ring_program(devices: int, collective: str, is_bidirectional: bool) -> Program:
    """Rounds of a ring."""
    network = named_topology(f"ring:{devices}")
    return to_program(ring_forest(network, collective, is_bidirectional=is_bidirectional))


@dataclass(frozen=True)
class RingView(View):
    """A collective on a ring."""

    megabytes: float  # of the array of each device
    program: Program  # its rounds
    # After each round, the share of all devices whose numbers are in a part, or 1 for a copy
    # that has arrived [rounds + 1, devices, parts]; inf: nothing of it yet
    summed: Float[np.ndarray, "moments devices parts"]

    def carried(self, by_link: bool = False) -> list[float]:
        """Bytes sent by the end of each round: by the busiest device, or by it through one link."""
        part, found, loads = 1e6 * self.megabytes / len(self.program.owners), [0.0], Counter()
        for messages in self.program.rounds:
            loads.update((m.source, m.target) if by_link else m.source for m in messages)
            found.append(part * max(loads.values()))
        return found

    @property
    def limit(self) -> float:
        """Bytes that a device would send if there were endless devices."""
        times = 2 if self.program.collective == "all-reduce" else 1
        return 1e6 * times * self.megabytes

    def data(self) -> Data:
        whole = (np.isfinite(self.summed) & (self.summed > 1 - 1e-9)).sum(2).min(1)
        return {
            "after round": [*range(len(self.summed))],
            "sent per device (bytes)": self.carried(),
            "through one link (bytes)": self.carried(by_link=True),
            "whole parts of every device": [*map(int, whole)],
        }

    def sentence(self) -> str:
        program = self.program
        return (
            f"{program.ranks} devices in a ring, an {program.collective} of "
            f"{self.megabytes:g} MB in {len(program.owners)} parts: {len(program.rounds)} rounds, "
            f"in which each device sends {self.carried()[-1] / 1e6:.4g} MB; however many devices "
            f"there are, it stays below {self.limit / 1e6:g} MB (modelled)."
        )

    def footnote(self) -> str:
        return "Modelled: bytes counted from the rounds; the number of a message is its part."


def ring_view(*, devices: int, collective: str, size: float, ways: int) -> RingView:
    """The rounds, and what is where after each."""
    program = ring_program(devices, collective, ways == 2)
    owners, gathers = np.array(program.owners), collective == "all-gather"
    now = np.full((devices, len(owners)), np.inf if gathers else 1 / devices)
    if gathers:
        now[owners, np.arange(len(owners))] = 1
    moments = [now]
    for messages in program.rounds:
        before, now = now, now.copy()
        for part, source, target, adds in messages:
            now[target, part] = before[source, part] + (before[target, part] if adds else 0)
        moments.append(now)
    return RingView(size, program, np.minimum(np.array(moments), np.inf).round(9))


class SentPlot(Plot):
    """Bytes that a device has sent, over the rounds above, and their limit."""

    is_timed = True

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Sent by each device (MB)", grid="y", ylim=(0, 1.1))
        axes.set(xticks=[], yticks=(0, 1), xlim=(0, 1))
        self.lines = [self.line(**look(name).line) for name in ("full", "gdn")]
        axes.axhline(1, color=ACCENT, linewidth=1.3, linestyle=(0, (4, 3)))
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        self._limit = self.text(0.3, 1, va="center", fontsize=9, bbox=box)
        self._ends = [self.text(0.995, 0, ha="right", va="top", fontsize=9) for _ in self.lines]
        axes.set_yticklabels([])

    def show(self, view: RingView) -> None:
        self._limit.set_text(f"with endless devices {view.limit / 1e6:g}")
        names = "in all", "through each link"
        for by_link, (line, words) in enumerate(zip(self.lines, self._ends, strict=True)):
            shares = np.array(view.carried(bool(by_link))) / view.limit
            line.set_data(np.linspace(0, 1, len(shares)), shares)
            words.set_text(f"{names[by_link]} {shares[-1] * view.limit / 1e6:.4g}")
            words.set_y(shares[-1] - 0.06 - 0.2 * by_link)


def ring_scene(view: RingView) -> Scene:
    """The ring on the left; on the right what every device has of every part."""
    program = view.program
    ranks, parts, rounds = program.ranks, len(program.owners), len(program.rounds)
    angles = 2 * np.pi * np.arange(ranks) / ranks - np.pi / 2
    places = zip(0.17 + 0.145 * np.cos(angles), 0.5 + 0.5 * np.sin(angles), strict=True)
    nodes = tuple(Node(str(n), float(x), float(y)) for n, (x, y) in enumerate(places))
    messages = tuple(
        Message(source, target, at, at + 1, str(part), 0 if adds else 1)
        for at, moved in enumerate(program.rounds)
        for part, source, target, adds in moved
    )
    names = [str(part) if parts <= MOST_DEVICES else "" for part in range(parts)]
    cells = np.where(np.isinf(view.summed), np.inf, np.minimum(view.summed, 1))
    grid = Grid(
        "What each device has of each part", (0.4, 0, 0.6, 1),
        [f"device {n}" for n in range(ranks)], names, [*map(float, range(rounds + 1))], cells,
    )  # fmt: skip
    does = [
        "adds what arrives" if moved[0].adds else "keeps what arrives" for moved in program.rounds
    ]
    notes = [
        (float(at), f"Round {at + 1} of {rounds}: each device sends a part on, and {what}.")
        for at, what in enumerate(does)
    ]
    kinds = _KINDS if len(set(does)) > 1 else tuple(_KINDS[m.kind] for m in messages[:1])
    return Scene(
        end=float(rounds), words=view.sentence(), unit="rounds", nodes=nodes, tall=0.34,
        edges=tuple((n, (n + 1) % ranks) for n in range(ranks)), grids=(grid,), kinds=kinds,
        messages=tuple(m._replace(kind=min(m.kind, len(kinds) - 1)) for m in messages),
        notes=(*notes, (float(rounds), "Everything is where it must be.")),
    )  # fmt: skip


class RingPanel(PlayedPanel):
    """A collective on a ring, round by round: messages, sums, and bytes sent.

    Example:
        >>> panel = RingPanel(devices=4, collective="all-reduce")
        >>> panel.player.scene["end"]  # rounds: 2 (devices - 1)
        6.0
    """

    title = "A ring: who sends which part, and what has arrived?"
    figure_size = (9.6, 1.9)
    has_palette = True

    devices = Number("Devices", 8, low=2, high=MOST_DEVICES)
    collective = Choice("Collective", "all-reduce", {name: name for name in COLLECTIVES})
    size = Choice("Array", 64.0, {"64 kB": 0.064, "1 MB": 1.0, "64 MB": 64.0})
    ways = Choice("Sent", 1, {"to the right": 1, "half of it to the left": 2})

    compute = staticmethod(ring_view)
    scene = staticmethod(ring_scene)
    places = ((SentPlot, (0.02, 0.2, 0.96, 0.6)),)
