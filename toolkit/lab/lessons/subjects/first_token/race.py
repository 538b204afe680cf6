"""A learner's scheduler, raced against first come, first served and an oracle."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from toolkit.lab.lessons.drawing import draw_bars
from toolkit.lab.lessons.outline import Show, WrongAnswer, ask
from toolkit.serving import Instance, Iteration, Job, Scheduler, TracedRequest, simulate

SLOTS, BUDGET = 4, 64
KINDS = (8, 80)  # expected tokens of an answer and of a story
FASTER = 0.8  # of the mean time of first come, first served


@functools.cache
def race_trace() -> tuple[tuple[TracedRequest, ...], tuple[int, ...]]:
    """Requests faster than four slots serve, and the expected length of each one's kind."""
    draw = np.random.default_rng(5)
    kinds = draw.choice(KINDS, 60, p=(0.7, 0.3))
    lengths = np.maximum(1, draw.gamma(4, kinds / 4)).astype(int)
    arrivals, prompts = np.cumsum(draw.exponential(0.06, 60)), draw.integers(20, 200, 60)
    rows = zip(arrivals.tolist(), prompts.tolist(), lengths.tolist(), strict=True)
    return tuple(TracedRequest(*row) for row in rows), tuple(kinds.tolist())


def race(scheduler: Scheduler) -> float:
    """Mean seconds from arrival to end; a turn takes 10 ms and 0.1 ms per token that is read."""

    def cost(work: Any) -> float:
        return 0.01 + 1e-4 * sum(new for new, _ in work.pieces)

    run = simulate(race_trace()[0], [Instance(scheduler, cost, SLOTS)])
    return float(np.mean([request.completion for request in run.requests]))


class _Yours(Scheduler):
    """A scheduler whose plan is a learner's; it knows a text's kind, not its length."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(BUDGET)
        self.function = function

    def plan(self, reserve: Callable[[int], int | None]) -> Iteration | None:
        begun = set[int]()

        def take(number: int) -> int | None:
            found = reserve(number)
            begun.update([number] if found is not None else [])
            return found

        expected = race_trace()[1]
        queue = sorted(job.number for *_, job in self.waiting)
        by_number = {job.number: job for *_, job in self.waiting}
        waiting, reading, writing = (
            [dataclasses.replace(job, output=expected[job.number]) for job in jobs]
            for jobs in ([by_number[number] for number in queue], self.reading, self.writing)
        )
        if not waiting and not reading and not writing:
            return None
        value = ask(self.function, waiting, reading, writing, BUDGET, take)
        if not isinstance(value, tuple) or len(value) != 2:
            raise WrongAnswer("plan must return two lists: pieces and rows.")
        pieces, rows = [tuple(piece) for piece in value[0]], list(value[1])
        self._check(pieces, rows, begun, writing)
        if not pieces and not rows:
            raise WrongAnswer("Nothing was planned although a request waits: it starves.")
        self.waiting = [each for each in self.waiting if each[1] not in begun]
        self.reading += [by_number[number] for number in queue if number in begun]
        return Iteration(tuple(pieces), tuple(rows))

    def _check(
        self, pieces: list[tuple[int, int]], rows: list[int], begun: set[int], writing: list[Job]
    ) -> None:
        if sorted(rows) != sorted(job.number for job in writing):
            raise WrongAnswer("Rows that write must all have their token in every turn: no stall.")
        left = {job.number: job.prompt - job.read for job in self.reading}
        left |= {job.number: job.prompt for *_, job in self.waiting if job.number in begun}
        if begun - {number for number, _ in pieces}:
            raise WrongAnswer("A request was reserved and not read: its slot stands empty.")
        for number, tokens in pieces:
            if number not in left:
                raise WrongAnswer(f"Request {number} has no slot: reserve(number) returned None.")
            if not 1 <= tokens <= left[number]:
                raise WrongAnswer(
                    f"A piece of {tokens} tokens of request {number}: wanted 1 to {left[number]}."
                )
        if (total := sum(tokens for _, tokens in pieces) + len(rows)) > BUDGET:
            raise WrongAnswer(f"{total} tokens in a turn of {BUDGET}: rows count, too.")


def judge_plan(plan: Callable[..., Any], show: Show) -> str:
    """Race the learner's scheduler against first come, first served and the oracle."""
    yours, first = race(_Yours(plan)), race(Scheduler(BUDGET))
    oracle = race(Scheduler(BUDGET, order=lambda job: (job.output, job.number)))
    names = ["first come, first served", "yours", "oracle"]
    show(draw_bars(names, [first, yours, oracle], [oracle] * 3, xlabel="mean seconds to the end"))
    if yours > FASTER * first:
        raise WrongAnswer(
            f"It runs, in {yours:.2f} s on average; first come, first served takes {first:.2f}, an "
            f"oracle {oracle:.2f}. Which of the waiting frees its slot soonest?"
        )
    return (
        f"Right: {yours:.2f} s on average instead of {first:.2f}; an oracle that knows every "
        f"length takes {oracle:.2f}."
    )
