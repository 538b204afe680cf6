"""Experts that change places as the text moves on (LAER-MoE), and the loads of their devices.

Pure functions.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes

from toolkit.figures import ACCENT, FAINT, INK, Look, look
from toolkit.lab.experts.small_mixture import CHOSEN, EXPERTS, LAYERS, held_out_logits
from toolkit.lab.experts.tokens import COLOURS, NAMES, TRAINED
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Data, Progress, View
from toolkit.parallel.experts import ExpertLayout, relayout, static_layout

DEVICES, STEPS = 8, 8
PLANS = ("static", "from the step before", "in hindsight")


@functools.cache
def loads_of(model: str, layer: int) -> Int[np.ndarray, "steps devices experts"]:
    """Pairs of every device's tokens with every expert; a step is the next part of the text."""
    logits = held_out_logits(model)[layer - 1]
    chosen = np.argsort(-logits, axis=-1, kind="stable")[:, :CHOSEN]
    parts = chosen.reshape(STEPS, DEVICES, -1)
    return np.stack(
        [[np.bincount(part, minlength=EXPERTS) for part in step] for step in parts]
    ).astype(np.int64)


@functools.cache
def layouts(model: str, layer: int, slots: int, node: int) -> dict[str, tuple[ExpertLayout, ...]]:
    """Plan -> its layout at every step; "from the step before" begins with the static one."""
    steps = loads_of(model, layer)
    how = {"devices_per_node": node}
    static = [static_layout(loads, slots, **how) for loads in steps]
    best = [relayout(loads, slots, **how) for loads in steps]
    return dict(zip(PLANS, map(tuple, (static, [static[0], *best[:-1]], best)), strict=True))


def device_loads(layout: ExpertLayout, loads: Int[np.ndarray, "devices experts"]) -> np.ndarray:
    """Pairs that every device computes of other loads than the layout was planned for."""
    return np.einsum("se,sed->d", loads, layout.shares)


@dataclass(frozen=True)
class LayoutView(View):
    """One step under every plan."""

    model: str
    layer: int
    slots: int  # of every device
    node: int  # devices per node
    step: int  # counted from 1
    of: dict[str, tuple[ExpertLayout, ...]]  # plan -> its layout at every step
    loads: Int[np.ndarray, "steps devices experts"]  # [steps, devices, experts]

    def layout(self, plan: str) -> ExpertLayout:
        """That of a plan at the step."""
        return self.of[plan][self.step - 1]

    @property
    def is_changed(self) -> np.ndarray:
        """Slots [devices, slots] whose expert is another than a step ago."""
        plan = self.of[PLANS[1]]
        return plan[self.step - 1].slots != plan[max(self.step - 2, 0)].slots

    def over_even(self, plan: str) -> Float[np.ndarray, "devices"]:
        """Loads of the devices at the step, over the mean."""
        found = device_loads(self.layout(plan), self.loads[self.step - 1])
        return found / found.mean()

    def imbalance(self, plan: str) -> Float[np.ndarray, "steps"]:
        """The fullest device's load over the mean, at every step."""
        pairs = zip(self.of[plan], self.loads, strict=True)
        found = np.array([device_loads(layout, loads) for layout, loads in pairs])
        return found.max(1) / found.mean(1)

    def across(self, plan: str) -> float:
        """Share of the step's pairs that cross nodes."""
        loads, shares = self.loads[self.step - 1], self.layout(plan).shares
        pairs, node = np.einsum("se,sed->sd", loads, shares), np.arange(DEVICES) // self.node
        return float(pairs[node[:, None] != node].sum() / pairs.sum())

    def data(self) -> Data:
        slots = self.layout(PLANS[1]).slots
        return {
            "device": [str(device) for device in range(DEVICES)],
            "its experts": [", ".join(str(expert + 1) for expert in row) for row in slots],
            "changed": [", ".join(str(n + 1) for n in np.flatnonzero(row)) or "none"
                        for row in self.is_changed],
            **{f"load, {plan} (share)": [*map(float, self.over_even(plan))] for plan in PLANS},
        }  # fmt: skip

    def sentence(self) -> str:
        fullest = {plan: self.imbalance(plan)[self.step - 1] for plan in PLANS}
        return (
            f"Step {self.step} of {STEPS}, layer {self.layer} of the model trained "
            f"{TRAINED[self.model]}, {self.slots} experts on each of {DEVICES} devices: the "
            f"fullest device has {fullest['static']:.2f} times an even load where experts stay, "
            f"{fullest[PLANS[1]]:.2f} times where they were placed by the loads of the step "
            f"before, and {fullest[PLANS[2]]:.2f} times with those of this step. "
            f"{self.is_changed.sum()} of {DEVICES * self.slots} slots have changed, and "
            f"{self.across(PLANS[1]):.0%} of the pairs cross nodes (static: "
            f"{self.across(PLANS[0]):.0%})."
        )

    def footnote(self) -> str:
        tokens = self.loads[0, 0].sum() // CHOSEN
        return (
            f"Modelled: the layouts; measured here: choices of a trained router, {tokens} bytes "
            f"per device and step.\nA node has {self.node} devices. Framed: slots with another "
            "expert than a step ago."
        )


def layout_view(*, model: str, layer: int, slots: int, node: int, step: int) -> LayoutView:
    """A step, counted from 1, under every plan."""
    of = layouts(model, layer, slots, node)
    return LayoutView(model, layer, slots, node, step, of, loads_of(model, layer))


SLOTS, NODES = (2, 4), (8, 4, 2)
_MOST = max(SLOTS)
_LOOKS: dict[str, Look] = dict(zip(PLANS, map(look, ("window", "full", "gdn")), strict=True))


class SlotsPlot(Plot):
    """The expert in every slot of every device under one plan."""

    def __init__(self, axes: Axes, plan: str, title: str) -> None:
        super().__init__(axes, title=title, grid="")
        self._plan = plan
        axes.set(xlim=(-0.5, DEVICES - 0.5), yticks=[])
        axes.set_xticks(range(DEVICES), map(str, range(DEVICES)))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        self.image_of = self.image((_MOST, DEVICES), COLOURS, -0.5, EXPERTS - 0.5)
        self.numbers = [
            self.marks(INK, f"${name}$", markersize=7, markeredgewidth=0.3) for name in NAMES
        ]
        self.changed = self.segments(colors=ACCENT, linewidths=2)
        self.nodes = self.segments(colors=INK, linewidths=2.5)

    def show(self, view: LayoutView) -> None:
        if self.axes.get_ylim() != (view.slots - 0.5, -0.5):  # new limits draw the figure anew
            self.axes.set_ylim(view.slots - 0.5, -0.5)
        slots = np.full((DEVICES, _MOST), np.nan)
        slots[:, : view.slots] = view.layout(self._plan).slots
        self.image_of.set_data(slots.T)
        for expert, numbers in enumerate(self.numbers):
            numbers.set_data(*np.nonzero(slots == expert))
        between = np.arange(view.node, DEVICES, view.node) - 0.5
        self.nodes.set_segments([[(x, -0.5), (x, _MOST)] for x in between])
        places = np.argwhere(view.is_changed) if self._plan == PLANS[1] else []
        self.changed.set_segments(
            [
                [(x - 0.44, y - 0.42), (x + 0.44, y - 0.42), (x + 0.44, y + 0.42),
                 (x - 0.44, y + 0.42), (x - 0.44, y - 0.42)]
                for x, y in places
            ]
        )  # fmt: skip


class DevicesPlot(Plot):
    """Loads of the devices at the step, static and placed by the step before."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Loads of the devices at this step", grid="y")
        axes.set(xlim=(-0.6, DEVICES - 0.4), ylim=(0, 3.2), xlabel="device")
        axes.set_ylabel("of an even load")
        axes.set_xticks(range(DEVICES))
        axes.tick_params(axis="x", length=0)
        self.bars = {}
        for plan, offset, hatch in zip(PLANS[:2], (-0.2, 0.2), ("//", ""), strict=True):
            places, colour = np.arange(DEVICES) + offset, _LOOKS[plan].colour
            style: Any = {
                "color": "white" if hatch else colour,
                "edgecolor": colour,
                "hatch": hatch,
            }
            self.bars[plan] = self.bars_at(places, 0.36, label=plan, **style)
        axes.axhline(1, color=INK, linestyle="--", linewidth=1.4, zorder=5)
        axes.legend(loc="upper left", ncols=2, fontsize=9)

    def show(self, view: LayoutView) -> None:
        for plan, bars in self.bars.items():
            for bar, load in zip(bars, view.over_even(plan), strict=True):
                bar.set_height(load)


class AlongPlot(Plot):
    """The fullest device's load at every step, by plan."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Fullest device, step by step")
        axes.set(xlim=(0.7, STEPS + 0.3), ylim=(0.9, 3.2), xlabel="step")
        axes.axhline(1, color=FAINT, linestyle="--", linewidth=1.2)
        self.now = self.line(color=ACCENT, linewidth=1.3)
        self.lines = {
            plan: self.line(label=plan, marker=look.marker, markersize=5, **look.line)
            for plan, look in _LOOKS.items()
        }
        axes.legend(loc="upper left", ncols=3, fontsize=8.5, columnspacing=1, handlelength=1.8)

    def show(self, view: LayoutView) -> None:
        for plan, line in self.lines.items():
            line.set_data(range(1, STEPS + 1), view.imbalance(plan))
        self.now.set_data([view.step] * 2, [0.9, 3.2])


class LayoutPanel(Panel):
    """Experts that change places as the text moves on, and the loads of their devices.

    Example:
        >>> panel = LayoutPanel(step=2)
        >>> panel.view.is_changed.shape
        (8, 2)
    """

    title = "Experts placed anew by their loads: when does it pay?"
    figure_size = (9.6, 5.4)
    has_palette = True
    button = "Play the steps"

    model = Choice("Trained", "plain", {words: name for name, words in TRAINED.items()})
    layer = Number("Layer", 1, low=1, high=LAYERS)
    slots = Choice("Slots", 2, {str(n): n for n in SLOTS}, explanation="Experts on every device")
    node = Choice(
        "Devices per node", 2, {str(n): n for n in NODES},
        explanation="Pairs that cross nodes cost as much as computing them",
    )  # fmt: skip
    step = Number("Step", 4, low=1, high=STEPS, explanation="The next part of the text")

    compute = staticmethod(layout_view)

    def pieces(self) -> Iterator[Progress]:
        start = self.step + 1 if self.step < STEPS else 1
        for step in range(start, STEPS + 1):
            self.change(step=step)
            yield step, STEPS, "steps of the text"

    def after_piece(self) -> None:
        """Nothing: every piece has shown itself."""

    places = (
        (SlotsPlot, (0.055, 0.64, 0.42, 0.27), PLANS[0], "Static"),
        (SlotsPlot, (0.555, 0.64, 0.42, 0.27), PLANS[1], "Placed by the loads of the step before"),
        (DevicesPlot, (0.065, 0.19, 0.41, 0.33)),
        (AlongPlot, (0.565, 0.19, 0.41, 0.33)),
    )
