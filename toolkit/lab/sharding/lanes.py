"""The compiled step as two lanes, compute and collectives, with modelled durations.

A device computes 64 FLOPs in the time of one byte sent. An H100 in its node computes 2,200, so the
block stands for one whose sizes are all some 34 times as large. Messages have no latency, nothing
overlaps. The order is that of the data: weights are gathered before they are used, sums follow
their products, new weights are gathered last.
"""

import math
from typing import NamedTuple

from toolkit.lab.sharding.mlp_step import BATCH, DEVICES, HIDDEN, WIDTH
from toolkit.lab.sharding.stored_steps import StoredCollective

FLOPS_PER_BYTE_SENT = 64
# Two products of 2 BATCH WIDTH HIDDEN operations each; the backward pass has two for each.
_FORWARD = 2 * 2 * BATCH * WIDTH * HIDDEN / DEVICES / FLOPS_PER_BYTE_SENT
PASSES = {"forward": _FORWARD, "backward": 2 * _FORWARD}


class Span(NamedTuple):
    """A span of modelled time, in bytes that could be sent during it."""

    lane: str
    name: str
    start: float
    length: float


def lanes(collectives: tuple[StoredCollective, ...]) -> list[Span]:
    """Spans in order; a collective is named by its number, from 1."""
    before, amid, after = [], [], []
    for number, collective in enumerate(collectives, 1):
        place = (
            before if "from argument" in collective.cause
            else after if "(backward)" in collective.cause or "result" in collective.cause
            else amid
        )  # fmt: skip
        place.append(("collectives", str(number), collective.bytes_sent))
    forward, backward = (("compute", name, length) for name, length in PASSES.items())
    order = [*before, forward, *amid, backward, *after]
    starts = [math.fsum(length for *_, length in order[:at]) for at in range(len(order))]
    return [
        Span(lane, name, start, length)
        for (lane, name, length), start in zip(order, starts, strict=True)
    ]
