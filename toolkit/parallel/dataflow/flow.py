"""The modelled cost of a program for given cuts of its inputs: moves, seconds, FLOPs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import PartitionSpec

from toolkit._checks import check_fields
from toolkit.parallel.axes import axes_of

WHOLE, PARTIAL = -1, -2
Cut = tuple[int, ...]
"""For each mesh axis: the dimension it cuts, or WHOLE, or PARTIAL."""


@dataclass(frozen=True)
class Machine:
    """Modelled rates of communication and computation. The defaults are those of an H100 in its
    node.

    Attributes:
        latency: seconds per message.
        bandwidth: bytes per second that a device sends.
        flops: floating point operations per second.
        memory_bandwidth: bytes per second between a device and its memory.

    Example:
        >>> Machine(bandwidth=5e10).latency
        1e-06
    """

    latency: float = 1e-6
    bandwidth: float = 4.5e11
    flops: float = 9.9e14
    memory_bandwidth: float = 3.35e12

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value in vars(self).items():
            if value < 0 or (value == 0 and name != "latency"):
                raise ValueError(f"{name}={value!r}: want more than 0")


# A small program stands for a large one: products count with the FLOPs per byte of sizes in the
# thousands, messages by their bytes.
RANKING = Machine(latency=0.0, flops=16 * Machine().bandwidth)


@dataclass(frozen=True)
class Move:
    """One modelled communication: `bytes_sent` per device and run, `count` runs.

    `sources` are the lines that produce and consume the array.
    """

    kind: str
    axis: str
    bytes_sent: float
    count: int
    sources: tuple[str, str]


@dataclass
class Flow:
    """The cost of a program per device, for given cuts of its inputs."""

    moves: list[Move]
    seconds_moving: float = 0.0
    flops: float = 0.0
    cuts: dict[int, list[Cut]] = field(default_factory=dict)
    """The cuts of each equation's results, by its `id`."""
    loops: set[int] = field(default_factory=set)
    """The `id` of each loop at every trip of which something moves."""

    def seconds(self, machine: Machine) -> float:
        """Moving, then computing; nothing overlaps."""
        return self.seconds_moving + self.flops / machine.flops

    @property
    def bytes_sent(self) -> float:
        return sum(move.bytes_sent * move.count for move in self.moves)


def cut_of(spec: PartitionSpec, rank: int, axes: Sequence[str]) -> Cut:
    """A PartitionSpec as a cut."""
    places = {axis: dim for dim, names in enumerate(axes_of(spec)) for axis in names}
    return tuple(places.get(axis, WHOLE) if places.get(axis, 0) < rank else WHOLE for axis in axes)


def spec_of(cut: Cut, rank: int, axes: Sequence[str]) -> PartitionSpec:
    """A cut as a PartitionSpec, in which partial sums count as whole."""
    entries: list[Any] = []
    for dimension in range(rank):
        names = tuple(axis for axis, place in zip(axes, cut, strict=True) if place == dimension)
        entries.append(None if not names else names[0] if len(names) == 1 else names)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


_LIBRARIES = re.compile(r"/(jax|flax|optax|equinox|haiku)/|^<")


def is_library(file: str) -> bool:
    """Whether a line belongs to a library instead of the user's code."""
    return _LIBRARIES.search(file) is not None


def source_of(equation: Any) -> str:
    """File and line of the user's call behind an equation, if any."""
    traceback = None if equation is None else equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not is_library(frame.file_name):
            return f"{frame.file_name.rpartition('/')[2]}:{frame.line_num}"
    return ""
