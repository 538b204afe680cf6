"""Experts placed anew as the text moves on: copies, loads of devices, pairs that travel.

Pure functions.
"""

import functools
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from toolkit.lab.experts.small_mixture import CHOSEN, EXPERTS, held_out_logits
from toolkit.lab.experts.tokens_view import TRAINED
from toolkit.lab.kit.view import Data, View
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
    """One step under every plan.

    Attributes:
        slots: of every device.
        node: devices per node.
        step: counted from 1.
        of: plan -> its layout at every step.
        loads: [steps, devices, experts].
    """

    model: str
    layer: int
    slots: int
    node: int
    step: int
    of: dict[str, tuple[ExpertLayout, ...]]
    loads: Int[np.ndarray, "steps devices experts"]

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
