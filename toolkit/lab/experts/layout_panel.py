"""Experts that change places as the text moves on (LAER-MoE), and the loads of their devices."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit.figures import ACCENT, FAINT, INK, Look, look
from toolkit.lab.experts.layout_view import (
    DEVICES,
    PLANS,
    STEPS,
    LayoutView,
    layout_view,
)
from toolkit.lab.experts.small_mixture import EXPERTS, LAYERS
from toolkit.lab.experts.tokens_panel import COLOURS, NAMES
from toolkit.lab.experts.tokens_view import TRAINED
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Progress

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
            bars = axes.bar(
                places, 0, 0.36, color="white" if hatch else colour, edgecolor=colour, hatch=hatch,
                label=plan,
            )  # fmt: skip
            self.bars[plan] = list(map(self.moving, bars))
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

    def compute(self, **state: Any) -> LayoutView:
        return layout_view(**state)

    def pieces(self) -> Iterator[Progress]:
        start = self.step + 1 if self.step < STEPS else 1
        for step in range(start, STEPS + 1):
            self.change(step=step)
            yield step, STEPS, "steps of the text"

    def after_piece(self) -> None:
        """Nothing: every piece has shown itself."""

    def plots(self, figure: Figure) -> list[Plot]:
        return [
            SlotsPlot(figure.add_axes((0.055, 0.64, 0.42, 0.27)), PLANS[0], "Static"),
            SlotsPlot(
                figure.add_axes((0.555, 0.64, 0.42, 0.27)), PLANS[1],
                "Placed by the loads of the step before",
            ),
            DevicesPlot(figure.add_axes((0.065, 0.19, 0.41, 0.33))),
            AlongPlot(figure.add_axes((0.565, 0.19, 0.41, 0.33))),
        ]  # fmt: skip
