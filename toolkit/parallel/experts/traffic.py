"""The communication of a sharded mixture, by collective."""

import math
from typing import Annotated, Literal, NamedTuple

from toolkit._annotations import AtLeast
from toolkit._checks import checked
from toolkit.parallel.experts.dispatch import expert_slots

Count = Annotated[int, AtLeast(1)]


class Traffic(NamedTuple):
    """A kind of collective in the forward pass.

    Attributes:
        kind: the name in `toolkit.measure.collectives`.
        count: number of runs.
        bytes_sent: bytes that a device sends per run.

    Example:
        >>> Traffic("all-to-all", 2, 3584).kind
        'all-to-all'
    """

    kind: str
    count: int
    bytes_sent: int


@checked
def dispatch_traffic(
    tokens: Count, width: Count, experts: Count, chosen: Count, devices: Count, *,
    dispatch: Literal["all_to_all", "gather", "ragged"] = "all_to_all",
    capacity: float | None = None, itemsize: int = 2, hidden_devices: Count = 1,
    is_cut_inside: bool = False,
) -> list[Traffic]:  # fmt: skip
    """The collectives of one `sharded_mixture`, forward; its gradient runs their transposes.

        all-to-all      E C D b (n-1)/n, twice                C slots per expert and sender
        all-gather      t D b (n-1); reduce-scatter 4 t D (n-1), of float32 sums
        hidden cut m    2 (m-1)/m of E C D float32 numbers; if tokens are cut along it too, an
                        all-gather of (m-1) E C D b and a reduce-scatter of the same in float32

    The gradient further sums the router over all devices, and experts over their replicas.

    Args:
        tokens: t, on one device.
        width: D.
        experts: E, on all devices.
        chosen: experts per token.
        devices: n, the number of shards of the experts.
        dispatch: as in `sharded_mixture`; "ragged" at an even load.
        capacity: as there.
        itemsize: b, bytes of a number of the tokens.
        hidden_devices: m, the number of shards of the hidden size.
        is_cut_inside: whether tokens are sharded along that axis too.

    Returns:
        A `Traffic` per kind and size.

    Source: toolkit's own programs; they are equal to the byte (`tests/parallel/experts`).

    Example:
        >>> dispatch_traffic(8, 32, 16, 4, 8, capacity=1.0, itemsize=4)
        [Traffic(kind='all-to-all', count=2, bytes_sent=3584)]
    """
    pairs, sums = tokens * chosen, max(4, itemsize)
    slots = tokens if capacity is None else min(tokens, expert_slots(pairs, experts, capacity))
    if dispatch == "gather":
        each = tokens * (devices - 1)
        return [
            Traffic("all-gather", 1, each * width * itemsize),
            Traffic("all-gather", 2, each * chosen * 4),
            Traffic("reduce-scatter", 1, each * width * sums),
        ]
    if dispatch == "ragged":
        even = pairs * width * itemsize * (devices - 1) // devices
        return [
            Traffic("all-gather", 1, 4 * experts * (devices - 1)),
            Traffic("ragged-all-to-all", 2, even),
        ]
    rows = experts * slots * width
    found = [Traffic("all-to-all", 2, rows * itemsize * (devices - 1) // devices)]
    m = hidden_devices
    if m > 1 and is_cut_inside:
        found.append(Traffic("all-gather", 1, rows * itemsize * (m - 1)))
        found.append(Traffic("reduce-scatter", 1, rows * sums * (m - 1)))
    elif m > 1:
        found.append(Traffic("all-reduce", 1, math.ceil(2 * rows * sums * (m - 1) / m)))
    return found
