"""What decoding achieves of the published rates of chips and links."""

from toolkit.planning.clusters import Cluster
from toolkit.planning.time.seconds import Constants

ROOFLINE = Constants(
    matmul=1.0, attention=1.0, elementwise=1.0, memory=1.0, launch=0.0, link=1.0, slowdown=1.0
)
"""Every chip and link at its published rate; nothing is overlapped at a loss."""

# Of kernels alone, on an H800, as their authors publish them: DeepGEMM's grouped products in
# float8 for decoding, 0.41 to 0.62 of the peak, and its products of 64 and 128 rows, at 1.5 to 2.7
# TB/s (README of May 2025); FlashMLA, 660 TFLOP/s and 3 TB/s; DeepEP's low-latency all-to-alls,
# 37 to 40 GB/s of a card's 50 for what leaves the host (docs/legacy.md). The time that a layer
# takes beside, and what is lost where two halves of the rows take turns, are fitted to deployments
# (`toolkit.planning.grade.served`).
SERVED = Constants(matmul=0.5, attention=0.667, memory=0.8, link=0.77, launch=4.1e-4, slowdown=1.44)
"""What deployments of mixtures on GPUs reach, with attention cut by rows and experts spread."""


def exchange_seconds(
    where: Cluster, size: float, members: int, rates: Constants, rate: float | None = None
) -> float:
    """Seconds in which every chip sends `size` bytes, evenly to all `members` (itself included).

    Bytes for other hosts go through a chip's own network card, whatever its neighbours send.
    """
    if members == 1:
        return 0.0
    near = where.chip.links[0]
    if rate is not None or where.topology is not None or members <= near.chips:
        link = where.link(1, members, "all-to-all")
        moved = (members - 1) / members * size / (rate or link.bytes_per_second * rates.link)
        return link.seconds * rates.latency + moved
    far = next((link for link in where.chip.links if link.chips >= members), where.chip.links[-1])
    outside = (members - near.chips) / members * size / far.bytes_per_second
    inside = (near.chips - 1) / members * size / near.bytes_per_second
    return far.seconds * rates.latency + max(outside, inside) / rates.link
