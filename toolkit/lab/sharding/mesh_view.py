"""The shards of every array of the step on every device of the mesh. Pure functions.

Modelled: counted from the specs of `parallel.layout`; no program is run.
"""

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from toolkit.lab.kit.view import Data, View
from toolkit.lab.sharding.mlp_step import BATCH, DEVICES, WIDTH
from toolkit.lab.sharding.stored_steps import Cuts, stored_step
from toolkit.measure import in_words

FLOAT32 = 4
COPIES = {"weights": 1, "gradient": 1, "optimizer": 2}  # Adam keeps two moments per weight
BATCH_NAME = "batch"


class Part(NamedTuple):
    """A piece of an array, and the devices that hold it."""

    start: tuple[int, ...]  # counted in pieces, per dimension
    holders: tuple[int, ...]


@dataclass(frozen=True)
class Placed:
    """An array in one state, cut into parts."""

    name: str
    state: str
    shape: tuple[int, ...]
    cuts: Cuts
    pieces: tuple[int, ...]  # per dimension
    parts: tuple[Part, ...]

    @property
    def copies(self) -> int:
        """The number of copies of the whole array over all devices."""
        return len(self.parts[0].holders)

    @property
    def bytes_per_device(self) -> int:
        """Of all that the state keeps."""
        kept = COPIES.get(self.state, 1) * FLOAT32
        return math.prod(self.shape) // len(self.parts) * kept

    @property
    def spec(self) -> str:
        """As jax writes it."""
        entries = (
            "None" if not axes else repr(axes[0]) if len(axes) == 1 else repr(axes)
            for axes in self.cuts
        )
        return f"P({', '.join(entries)})"


def place(
    name: str, state: str, shape: tuple[int, ...], cuts: Cuts, axes: dict[str, int]
) -> Placed:
    """Which devices hold which part: devices count through the mesh, its last axis fastest."""
    cuts = cuts + ((),) * (len(shape) - len(cuts))
    pieces = tuple(math.prod(axes[axis] for axis in along) for along in cuts)
    holders: dict[tuple[int, ...], list[int]] = {
        start: [] for start in itertools.product(*map(range, pieces))
    }
    for device, at in enumerate(itertools.product(*map(range, axes.values()))):
        coordinate = dict(zip(axes, at, strict=True))
        start = []
        for along in cuts:
            index = 0
            for axis in along:
                index = index * axes[axis] + coordinate[axis]
            start.append(index)
        holders[tuple(start)].append(device)
    parts = tuple(Part(start, tuple(devices)) for start, devices in holders.items())
    return Placed(name, state, shape, cuts[: _last(cuts)], pieces, parts)


def _last(cuts: Cuts) -> int:
    """Trailing dimensions that are whole are not written."""
    return max((at + 1 for at, along in enumerate(cuts) if along), default=0)


@dataclass(frozen=True)
class MeshView(View):
    """Every array on the mesh, and one device's shards."""

    mesh: str
    scheme: str
    device: int
    axes: dict[str, int]
    arrays: tuple[Placed, ...]  # the batch, then every parameter in every state

    def bytes_of(self, state: str) -> int:
        """Bytes of a device's shards of one state of all parameters."""
        return sum(array.bytes_per_device for array in self.arrays if array.state == state)

    def bytes_whole(self, state: str) -> int:
        """The same on a single device."""
        return sum(
            array.bytes_per_device * len(array.parts)
            for array in self.arrays
            if array.state == state
        )

    def data(self) -> Data:
        return {
            "array": [array.name for array in self.arrays],
            "state": [array.state for array in self.arrays],
            "spec": [array.spec for array in self.arrays],
            "parts": [len(array.parts) for array in self.arrays],
            "copies": [array.copies for array in self.arrays],
            "per device (bytes)": [array.bytes_per_device for array in self.arrays],
        }

    def sentence(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.axes.items())
        stored = ", ".join(
            f"{in_words(self.bytes_of(state), 'bytes')} of {name}"
            for state, name in (
                ("weights", "weights"), ("gradient", "gradients"), ("optimizer", "Adam's moments"),
            )
        )  # fmt: skip
        total = sum(map(self.bytes_of, COPIES))
        share = total / sum(map(self.bytes_whole, COPIES))
        return (
            f"{DEVICES} devices as {axes}, scheme {self.scheme!r}. Device {self.device} holds "
            f"{stored}: {in_words(total, 'bytes')} in all, {share:.0%} of what one device "
            "alone would hold. Modelled: counted from the layout."
        )

    def footnote(self) -> str:
        return (
            "Numbers in a part: the devices that hold it; framed: the part of the chosen device. "
            "Modelled from the layout."
        )


def who_holds_what(*, mesh: str, scheme: str, device: int) -> MeshView:
    """Every array of the step under a scheme of `parallel.layout` on a mesh such as "2x4"."""
    step = stored_step(mesh, scheme)
    arrays = [place(BATCH_NAME, "input", (BATCH, WIDTH), step.batch, step.axes)]
    for array in step.arrays:
        name = array.path.removesuffix("/kernel").removeprefix("feed_forward/")
        arrays += [
            place(name, state, array.shape, cuts, step.axes) for state, cuts in array.states.items()
        ]
    return MeshView(mesh, scheme, device, step.axes, tuple(arrays))


def box_of(part: Part, pieces: tuple[int, ...]) -> tuple[float, float, float, float]:
    """Left, top, width and height of a part as shares of its array; a vector stands upright."""
    row, column = (*part.start, 0)[:2]
    rows, columns = (*pieces, 1)[:2]
    return column / columns, row / rows, 1 / columns, 1 / rows
