"""Which requests the next iteration reads and which it continues: pure, without clock or model.

The engine calls `admit` for every request, then in a loop `plan` and, once the iteration has run,
`done`; `leave` when a request has ended. A simulator can call the same object. Any object with
these four methods is a scheduler, so a policy is one class.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from toolkit._checks import checked


class Iteration(NamedTuple):
    """One turn of the engine: pieces of prompts to read, then a step for rows that write.

    Attributes:
        pieces: (request, tokens) for each prompt that is read a part further.
        rows: requests that write a token; all that can, or none.

    Example:
        >>> Iteration(pieces=((3, 64),), rows=(0, 1)).rows
        (0, 1)
    """

    pieces: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]


@dataclass
class Job:
    """A request as a scheduler sees it.

    Attributes:
        number: of the request.
        prompt: tokens to read.
        output: most tokens to write.
        arrival: seconds.
        read: tokens of the prompt in the cache.

    Example:
        >>> Job(number=0, prompt=100, output=3, arrival=0.5).read
        0
    """

    number: int
    prompt: int
    output: int
    arrival: float
    read: int = 0


class SchedulingPolicy(Protocol):
    """What the engine and the simulator need of a scheduler.

    Example:
        >>> policy: SchedulingPolicy = Scheduler(budget=64)
        >>> policy.plan(lambda number: 0) is None
        True
    """

    def admit(self, job: Job) -> None: ...
    def plan(self, reserve: Callable[[int], int | None]) -> Iteration | None: ...
    def done(self, iteration: Iteration) -> None: ...
    def leave(self, number: int) -> None: ...


class Scheduler:
    """First come, first served, with prompts read in chunks beside the rows that write.

        rows    all requests whose prompt is read
        pieces  up to `budget` - rows tokens: prompts begun before, then waiting ones by `order`

    A waiting request that finds no room is waited for, so none starves.

    Args:
        budget: tokens of an iteration, rows included; None reads whole prompts.
        order: which of the waiting requests is next, the least first, asked once per request; by
            default the first to arrive.

    Source: Agrawal et al., "Sarathi-Serve", 2024 (arXiv:2403.02310), section 4.

    Example:
        >>> scheduler = Scheduler(budget=64)
        >>> scheduler.admit(Job(0, prompt=100, output=3, arrival=0.0))
        >>> scheduler.plan(lambda number: 0)
        Iteration(pieces=((0, 64),), rows=())
    """

    @checked
    def __init__(
        self, budget: int | None = None, *, order: Callable[[Job], object] | None = None
    ) -> None:
        if budget is not None and budget < 1:
            raise ValueError(f"budget: got {budget}, wanted at least 1 token, or None")
        self.budget = budget
        self.order = order or (lambda job: (job.arrival, job.number))
        self.waiting: list[tuple[object, int, Job]] = []  # a heap: none is searched in a turn
        self.reading: list[Job] = []
        self.writing: list[Job] = []

    def admit(self, job: Job) -> None:
        """Let a request wait."""
        heapq.heappush(self.waiting, (self.order(job), job.number, job))

    def begin(self, reserve: Callable[[int], int | None]) -> Job | None:
        """The next waiting request, if it finds a slot and room; it waits no longer then."""
        if not self.waiting or (shared := reserve(self.waiting[0][1])) is None:
            return None
        *_, job = heapq.heappop(self.waiting)
        job.read = shared
        return job

    def plan(self, reserve: Callable[[int], int | None]) -> Iteration | None:
        """The next iteration, or None if there is nothing to do.

        `reserve(number)` takes a slot and room for a waiting request and returns how many tokens of
        its prompt are in the cache already, or returns None if there is no room now.
        """
        rows = tuple(job.number for job in self.writing)
        left = float("inf") if self.budget is None else self.budget - len(rows)
        # Where rows alone use up the budget, a prompt would never be read.
        left, pieces = max(left, 1), []

        def read(job: Job) -> None:
            nonlocal left
            tokens = int(min(left, job.prompt - job.read))
            pieces.append((job.number, tokens))
            left -= tokens

        for job in self.reading:
            if left > 0:
                read(job)
        while left > 0 and (job := self.begin(reserve)) is not None:
            self.reading.append(job)
            read(job)
        return Iteration(tuple(pieces), rows) if pieces or rows else None

    def done(self, iteration: Iteration) -> None:
        """An iteration has run: prompts that are read now write."""
        read = dict(iteration.pieces)
        for job in self.reading:
            job.read += read.get(job.number, 0)
        self.writing += [job for job in self.reading if job.read == job.prompt]
        self.reading = [job for job in self.reading if job.read < job.prompt]

    def leave(self, number: int) -> None:
        """A request has ended, wherever it was."""
        for jobs in (self.writing, self.reading):
            for job in jobs:
                if job.number == number:
                    jobs.remove(job)
                    return
        self.waiting = [each for each in self.waiting if each[1] != number]
        heapq.heapify(self.waiting)
