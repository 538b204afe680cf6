"""How long a collective takes on a network: steps, chunks and the busiest link (modelled)."""

import math
from dataclasses import dataclass

import numpy as np

from toolkit._checks import checked
from toolkit.schedules.collectives.trees import Forest

_MOST_CHUNKS = 1 << 20


@dataclass(frozen=True)
class Pipelining:
    """A forest whose trees carry their data in equal chunks, one behind the other.

    Attributes:
        chunks: per tree.
        steps: S + C - 1 for S steps and C chunks.
        seconds: modelled.

    Example:
        >>> pipelined(forest(ring(4)), 1e9, chunks=1).steps
        2
    """

    chunks: int
    steps: int
    seconds: float


@checked
def pipelined(forest: Forest, size: float, chunks: int | None = None) -> Pipelining:
    """The modelled time of a forest, with the number of chunks that makes it shortest.

        T = sum over steps of (delay + max over links of (bytes in this step) / rate)

    Chunk c takes step s of a single chunk at step s + c. More chunks keep the busiest link busy all
    the time, T -> size / `Forest.rate`, and add a delay each.

    Args:
        forest: trees of a collective.
        size: bytes of the whole array: what an all-gather returns, or an all-reduce sums.
        chunks: a number of chunks instead of the best.

    Source: Zhao et al., Bandwidth Optimal Pipeline Schedule for Collective Communication, 2023,
        https://arxiv.org/abs/2305.18461, for the pipelining; the delay is the usual alpha.

    Example:
        >>> from toolkit.schedules.collectives import forest, torus
        >>> found = forest(torus(4, 4))
        >>> pipelined(found, 1e3).chunks, pipelined(found, 1e9).chunks > 10
        (1, True)
    """
    if not 0 < size < math.inf:
        raise ValueError(f"size must be a positive number of bytes; got {size}")
    if chunks is not None and not 1 <= chunks <= _MOST_CHUNKS:
        raise ValueError(f"chunks must be 1 to {_MOST_CHUNKS:,}; got {chunks}")
    links = {link: column for column, link in enumerate(forest.loads)}
    delay, steps = forest.topology.seconds, len(forest.stages)
    # Seconds of every link up to every step, for the whole array.
    until = np.zeros((steps + 1, len(links)))
    for step, stage in enumerate(forest.stages):
        for link, share in stage.items():
            until[step + 1, links[link]] = float(share / forest.topology.links[link]) * size / 1e9
    until = np.cumsum(until, 0)

    def seconds(count: int) -> float:
        """Chunks are in up to `count` steps at a time; between start and end, in all of them."""
        width = min(count, steps)
        last = np.arange(1, steps + width)
        window = until[np.minimum(last, steps)] - until[np.maximum(last - width, 0)]
        busy = window.max(1).sum() + max(0, count - steps) * until[-1].max()
        return delay * (steps + count - 1) + busy / count

    if chunks is None:
        ends = (steps * seconds(steps) - delay * steps * (2 * steps - 1)) - steps * until[-1].max()
        best = math.sqrt(max(0.0, ends) / delay) if delay else _MOST_CHUNKS
        candidates = {1 << power for power in range(max(1, steps).bit_length())} | {steps}
        candidates |= {min(_MOST_CHUNKS, max(1, round(best)))}
        chunks = min(sorted(candidates), key=seconds)
    return Pipelining(chunks, steps + chunks - 1, float(seconds(chunks)))
