"""A text whose tokens go to experts: choices, loads, and what a capacity drops. Pure functions."""

import functools
from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from toolkit.experts import route
from toolkit.lab.experts.small_mixture import (
    CHOSEN,
    EXPERTS,
    logits_of_text,
    record_of,
)
from toolkit.lab.kit.text import TextView, looked_at
from toolkit.lab.kit.view import Data
from toolkit.measure.words import counted
from toolkit.parallel.experts.dispatch import expert_slots

TEXT = (
    "An object that is not hashable cannot be a key of a dictionary; the class "
    "returns 42 if its name is not found."
)
LINE, LINES = 32, 4
MOST = LINE * LINES
TRAINED = {"plain": "without a balance loss", "balanced": "with a balance loss"}


def kept_pairs(
    experts: Int[np.ndarray, "tokens chosen"], count: int, devices: int, capacity: float
) -> tuple[Bool[np.ndarray, "tokens chosen"], int]:
    """The pairs that experts with a capacity take, and their slots for each device.

    Each of `devices` has an equal part of the tokens in their order, the last one perhaps less; an
    expert takes the first pairs of each, as in `toolkit.parallel.experts.sharded_mixture`.
    """
    tokens, chosen = experts.shape
    each = -(-tokens // devices)
    slots = min(each, expert_slots(each * chosen, count, capacity))
    is_kept = np.zeros(experts.shape, bool)
    for first in range(0, tokens, each):
        part = experts[first : first + each].ravel()
        before = np.cumsum(part[:, None] == np.arange(count), axis=0)
        rank = before[np.arange(len(part)), part] - 1
        is_kept[first : first + each] = (rank < slots).reshape(-1, chosen)
    return is_kept, slots


@dataclass(frozen=True)
class TokensView(TextView):
    """One layer's decisions for a text.

    Attributes:
        model: "plain" or "balanced".
        layer: counted from 1.
        capacity: relative to an even load.
        devices: number of devices with equal parts of the text.
        experts: [tokens, chosen], largest score first.
        weights: [tokens, chosen].
        scores: [experts], of the selected byte.
        is_kept: [tokens, chosen].
        slots: pairs that an expert takes from each device.
    """

    unit: ClassVar = "byte"

    model: str
    layer: int
    capacity: float
    devices: int
    experts: Int[np.ndarray, "tokens chosen"]
    weights: Float[np.ndarray, "tokens chosen"]
    scores: Float[np.ndarray, "experts"]
    is_kept: Bool[np.ndarray, "tokens chosen"]
    slots: int

    @property
    def loads(self) -> Int[np.ndarray, "experts"]:
        """Pairs of every expert."""
        return np.bincount(self.experts.ravel(), minlength=EXPERTS)

    @property
    def kept(self) -> Int[np.ndarray, "experts"]:
        """Pairs that it takes."""
        return np.bincount(self.experts[self.is_kept], minlength=EXPERTS)

    @property
    def even(self) -> float:
        """The load of every expert if all were even."""
        return self.experts.size / EXPERTS

    def data(self) -> Data:
        chosen = dict(zip(self.experts[self.token], self.weights[self.token], strict=True))
        return {
            "expert": [str(expert + 1) for expert in range(EXPERTS)],
            "pairs": [*map(int, self.loads)],
            "taken": [*map(int, self.kept)],
            "dropped": [*map(int, self.loads - self.kept)],
            "of an even load (share)": [float(load / self.even) for load in self.loads],
            "score of the byte": [*map(float, self.scores)],
            "weight": [float(chosen.get(expert, 0)) for expert in range(EXPERTS)],
        }

    def sentence(self) -> str:
        dropped, lost = (~self.is_kept).sum(), (~self.is_kept).all(1).sum()
        first, second = (
            f"expert {expert + 1} with {weight:.0%}"
            for expert, weight in zip(
                self.experts[self.token], self.weights[self.token], strict=True
            )
        )
        fullest = self.loads.max() / self.even
        parts = f"{self.devices} devices with equal parts" if self.devices > 1 else "one device"
        return (
            f"{self.place_in_words}, layer {self.layer} chooses {first} and {second}. The model "
            f"was trained {TRAINED[self.model]}; its fullest expert has {fullest:.2f} times an "
            f"even load. With capacity {self.capacity:g} and {parts}, an expert takes "
            f"{counted(self.slots, 'pair')} of each device: {dropped} of {self.experts.size} pairs "
            f"are dropped, and {lost} of {counted(len(self.words), 'byte')} lose both."
            f"{self.left_out_in_words}"
        )

    def footnote(self) -> str:
        loss = record_of(self.model)["result"]["held_out_loss"]
        return (
            f"Measured here on a small trained model (recorded: {loss:.2f} nats per byte), "
            f"{CHOSEN} of {EXPERTS} experts per byte. Struck out: dropped."
        )


def tokens_view(
    *, model: str, layer: int, text: str, token: int, capacity: float, devices: int
) -> TokensView:
    """The decisions for a text; `layer` and `token` count from 1."""
    letters = [chr(byte) if 32 <= byte < 127 else "·" for byte in text.encode()]
    fields = looked_at(letters, token, MOST)
    routed = _routed(model, text.encode()[:MOST])
    experts, weights, scores = (array[layer - 1] for array in routed)
    is_kept, slots = kept_pairs(experts, EXPERTS, devices, capacity)
    return TokensView(
        **fields, model=model, layer=layer, capacity=capacity, devices=devices, experts=experts,
        weights=weights, scores=scores[fields["token"]], is_kept=is_kept, slots=slots,
    )  # fmt: skip


@functools.lru_cache(64)
def _routed(model: str, text: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Experts, weights and scores of every layer and byte."""
    logits = logits_of_text(model, text)
    routing = route(jnp.asarray(logits), CHOSEN, scores="sigmoid")
    return np.asarray(routing.experts), np.asarray(routing.weights), 1 / (1 + np.exp(-logits))
