"""The textbook collectives of a scheme: modelled, one per array and purpose.

For V bytes of an array on n devices, each device sends V (n-1)/n in an all-gather or a
reduce-scatter, and twice that in an all-reduce.

Source: Rajbhandari et al., "ZeRO", 2020, section 7; Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

import math
from typing import NamedTuple

from toolkit.lab.sharding.mlp_step import BATCH, WIDTH
from toolkit.lab.sharding.stored_steps import StoredArray, StoredStep

FLOAT32 = 4


class Expected(NamedTuple):
    """A collective, with the bytes a device sends in it and what it is for."""

    kind: str
    bytes_sent: float
    purpose: str


def textbook(step: StoredStep) -> list[Expected]:
    """Those of one step in the order they come; none along an axis of one device."""
    axes, found = step.axes, []
    model = axes.get("model", 1)
    data = math.prod(axes.values()) // model
    stream = BATCH // data * WIDTH * FLOAT32
    gathered = [array for array in step.arrays if _data_cuts(array, "weights", axes) > 1]
    scattered = [array for array in step.arrays if _data_cuts(array, "optimizer", axes) > 1]
    for phase in ("forward", "backward"):
        for array in gathered:
            found.append(_one("all-gather", _bytes(array, axes), data, f"weights, {phase}"))
        found.append(_one("all-reduce", stream, model, f"partial products, {phase}"))
    for array in step.arrays:
        kind = "reduce-scatter" if array in scattered else "all-reduce"
        found.append(_one(kind, _bytes(array, axes), data, "gradients"))
    found.append(_one("all-reduce", FLOAT32, data, "the loss"))
    for array in scattered:
        if array not in gathered:
            found.append(_one("all-gather", _bytes(array, axes), data, "new weights"))
    return [collective for collective in found if collective.bytes_sent]


def _one(kind: str, size: float, devices: int, purpose: str) -> Expected:
    times = 2 if kind == "all-reduce" else 1
    return Expected(kind, times * size * (devices - 1) / devices, purpose)


def _data_cuts(array: StoredArray, state: str, axes: dict[str, int]) -> int:
    """Into how many parts the data parallel axes cut it."""
    cuts = (axes[axis] for along in array.states[state] for axis in along if axis != "model")
    return math.prod(cuts)


def _bytes(array: StoredArray, axes: dict[str, int]) -> float:
    """What is left of it where tensor parallelism has cut it, gathered over the data axes."""
    whole = math.prod(array.shape) * FLOAT32
    is_cut = any("model" in along for along in array.states["weights"])
    return whole / axes["model"] if is_cut else whole
