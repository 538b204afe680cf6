"""A collective as it runs: which chunks are where at a time, along rings and trees. Pure."""

import functools
import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from toolkit.lab.collectives.cut_view import SCHEDULES
from toolkit.lab.collectives.networks import NETWORKS, Drawing, best_of, drawing_of, trees_of
from toolkit.lab.kit.view import Data, View
from toolkit.measure import in_words
from toolkit.schedules.collectives import to_program
from toolkit.schedules.collectives.program import unit_trees


@dataclass(frozen=True)
class Run:
    """A program on its network, with a clock.

    Attributes:
        ends: [rounds], seconds at which each round ends (modelled).
        messages: for each round (chunk's root, path, whether it adds).
        shares: [rounds + 1, ranks, ranks], the part of the rank's (second axis) root's data (third
            axis) that is in place: copied everywhere, or at their root added up.
    """

    ends: Float[np.ndarray, "rounds"]
    messages: tuple[tuple[tuple[int, tuple[int, ...], bool], ...], ...]
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
    """Two schedules of one collective.

    Attributes:
        name: of the network.
        collective: which one.
        megabytes: of the whole array.
        drawing: places of the network.
        runs: of "trees" and "rings".
        bound: seconds at the optimum's rate, without delays and rounds.
    """

    name: str
    collective: str
    megabytes: float
    drawing: Drawing
    runs: dict[str, Run]
    bound: float

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
