"""The optimum of a collective on a network with one cable slowed or cut. Pure functions."""

from dataclasses import dataclass
from fractions import Fraction

from toolkit.lab.collectives.networks import (
    NETWORKS,
    Drawing,
    best_of,
    changed,
    drawing_of,
    trees_of,
)
from toolkit.lab.kit.view import Data, View
from toolkit.schedules.collectives import Optimum

SPEEDS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
SCHEDULES = {"trees": "the best trees", "rings": "rings"}


@dataclass(frozen=True)
class CutView(View):
    """What the links carry, and which of them limit it.

    Attributes:
        name: of the network.
        collective: which one.
        schedule: "trees" or "rings".
        cable: counted from 1; 0 for none.
        speed: of that cable, times its rate.
        drawing: places and cables of the network.
        best: the optimum with its cut.
        rates: GB/s of "trees" and "rings".
        busy: link -> share of the time in which it is busy.
        moved: link -> GB/s that it carries.
        curve: for each of `SPEEDS` GB/s of trees and of rings.
    """

    name: str
    collective: str
    schedule: str
    cable: int
    speed: float
    drawing: Drawing
    best: Optimum
    rates: dict[str, Fraction]
    busy: dict[tuple[int, int], float]
    moved: dict[tuple[int, int], float]
    curve: tuple[tuple[float, float], ...]

    @property
    def crossing(self) -> set[tuple[int, int]]:
        """The links that leave the cut."""
        inside = set(self.best.cut)
        return {(a, b) for a, b in self.busy if a in inside and b not in inside}

    def cable_in_words(self, cable: int) -> str:
        """Its two ends."""
        labels = self.drawing.topology.labels
        return " – ".join(labels[node] for node in self.drawing.cables[cable - 1])

    def data(self) -> Data:
        cables = self.drawing.cables
        whole = self.drawing.topology.links
        times = [self.speed if at == self.cable else 1.0 for at in range(1, len(cables) + 1)]
        return {
            "cable": [str(at) for at in range(1, len(cables) + 1)],
            "between": [self.cable_in_words(at) for at in range(1, len(cables) + 1)],
            "GB/s each way": [
                float(whole[ends]) * part for ends, part in zip(cables, times, strict=True)
            ],
            "busy there (share)": [self.busy.get((a, b), 0.0) for a, b in cables],
            "busy back (share)": [self.busy.get((b, a), 0.0) for a, b in cables],
            "leaves the cut": [
                "yes" if {(a, b), (b, a)} & self.crossing else "" for a, b in cables
            ],
        }

    def sentence(self) -> str:
        compute = self.drawing.topology.compute
        inside = sum(node < compute for node in self.best.cut)
        how = "with all cables as built"
        if self.cable and self.speed != 1:
            way = "cut" if not self.speed else f"at {self.speed:g} times its rate"
            how = f"with cable {self.cable} ({self.cable_in_words(self.cable)}) {way}"
        rate, rings = (float(self.rates[name]) for name in SCHEDULES)
        shown = "Its trees are shown." if self.schedule == "trees" else "The rings are shown."
        return (
            f"{NETWORKS[self.name]}, {how}: at best an {self.collective} moves {rate:.4g} GB/s = "
            f"{self.rates['trees']}, because the data of {inside} of {compute} ranks must leave "
            f"them over links of {float(self.best.cut_rate):.4g} GB/s together (the red links). "
            f"Rings reach {rings:.4g} GB/s, {rings / rate:.0%} of it. {shown}"
        )

    def footnote(self) -> str:
        return (
            "Modelled, without delays. Width: GB/s on a link, on its right-hand side. Filled: "
            "inside the cut. Rings go around a cut cable, but not around a slow one."
        )


def cut_view(*, network: str, collective: str, schedule: str, cable: int, speed: float) -> CutView:
    """The view; a cable beyond the last is the last, and a cut that parts the ranks raises."""
    drawing = drawing_of(network)
    cable = min(cable, len(drawing.cables))
    forests = {
        name: trees_of(network, collective, name, cable, speed if cable else 1.0)
        for name in SCHEDULES
    }
    shown = forests[schedule]
    links = changed(network, cable, speed if cable else 1.0).links
    moved = {link: float(shown.loads.get(link, 0) * shown.rate) for link in links}
    curve = tuple(_rates(network, collective, cable, each) for each in SPEEDS)
    return CutView(
        network, collective, schedule, cable, speed, drawing,
        best_of(network, collective, cable, speed if cable else 1.0),
        {name: forest.rate for name, forest in forests.items()},
        {link: moved[link] / float(links[link]) for link in links}, moved, curve,
    )  # fmt: skip


def _rates(network: str, collective: str, cable: int, speed: float) -> tuple[float, float]:
    """GB/s at best and of rings; 0 where the cut parts the ranks."""
    try:
        best = best_of(network, collective, cable, speed if cable else 1.0)
    except ValueError:
        return 0.0, 0.0
    rings = trees_of(network, collective, "rings", cable, speed if cable else 1.0)
    return float(best.rate), float(rings.rate)
