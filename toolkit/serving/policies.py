"""Other shapes of a batch than `Scheduler`'s chunks: small classes that plan differently.

Flover's fusion in time is what all of them but `Static` do: requests join the batch between steps.
Where a row can be replaced in place (`LoopedCache.insert`) its reordering of buffers has nothing to
do, and its steps without a limit of rows are a formula, `fused_steps`: fusion buys latency, not
fewer steps than a batch that waits.

An order is a function of a waiting job, for `Scheduler(order=...)`: by default first come, first
served. `toolkit.serving.simulation.lengths` has orders by expected length.
"""

from collections.abc import Callable, Iterable

from toolkit.serving.scheduler import Iteration, Scheduler


class PrefillFirst(Scheduler):
    """Whole prompts as soon as any fits, and nothing beside them; otherwise a step of all rows.

    `budget` bounds the tokens of an iteration that reads; a longer prompt is read alone.

    Source: vLLM before chunked prefill; Zhong et al., "DistServe", 2024 (arXiv:2401.09670).

    Example:
        >>> scheduler = PrefillFirst()
        >>> scheduler.admit(Job(0, prompt=100, output=3, arrival=0.0))
        >>> scheduler.plan(lambda number: 0)
        Iteration(pieces=((0, 100),), rows=())
    """

    def plan(self, reserve: Callable[[int], int | None]) -> Iteration | None:
        """Prompts if any fits, else rows."""
        pieces: list[tuple[int, int]] = []
        left = float("inf") if self.budget is None else self.budget
        while self.waiting:
            if pieces and self.waiting[0][-1].prompt > left:
                break
            if (job := self.begin(reserve)) is None:
                break
            self.reading.append(job)
            pieces.append((job.number, job.prompt - job.read))
            left -= job.prompt - job.read
        if pieces:
            return Iteration(tuple(pieces), ())
        rows = tuple(job.number for job in self.writing)
        return Iteration((), rows) if rows else None


class Static(PrefillFirst):
    """A batch is read together, and the next one waits until its longest text has ended.

    Rows that have ended are not charged here; FasterTransformer computes them too, and returns
    all texts with the longest.

    Source: FasterTransformer; the baseline of Yu et al., "Orca", 2022 (OSDI), section 2.

    Example:
        >>> Static().plan(lambda number: 0) is None
        True
    """

    def plan(self, reserve: Callable[[int], int | None]) -> Iteration | None:
        """Rows as long as there are any, then the next batch."""
        rows = tuple(job.number for job in self.writing)
        return Iteration((), rows) if rows else super().plan(reserve)


class WriteOnly(Scheduler):
    """The decoding half of two pools: every request comes with its prompt read.

    Source: Zhong et al., "DistServe", 2024 (arXiv:2401.09670), section 4.

    Example:
        >>> scheduler = WriteOnly()
        >>> scheduler.admit(Job(0, prompt=100, output=3, arrival=0.0, read=100))
        >>> scheduler.plan(lambda number: 100)
        Iteration(pieces=(), rows=(0,))
    """

    def plan(self, reserve: Callable[[int], int | None]) -> Iteration | None:
        """All rows, and those that have come."""
        while (job := self.begin(reserve)) is not None:
            self.writing.append(job)
        rows = tuple(job.number for job in self.writing)
        return Iteration((), rows) if rows else None


def fused_steps(requests: Iterable[tuple[int, int]]) -> int:
    """Steps of all requests (arrival, tokens) fused in time: the union of [a, a + n).

    k requests of T tokens that come every d <= T steps take (k - 1) d + T; one after another, k T.

    Args:
        requests: (arrival, tokens) of each, in steps.

    Returns:
        Steps in which anything is written.

    Source: Flover, 2023 (arXiv:2305.13484), temporal fusion.

    Example:
        >>> fused_steps((3 * place, 20) for place in range(10))
        47
    """
    total, end = 0, 0
    for arrival, tokens in sorted(requests):
        total += max(0, arrival + tokens - max(end, arrival))
        end = max(end, arrival + tokens)
    return total
