"""Iterations as events: a trace through one or several engines, without a model.

The scheduler is the engine's own object; only durations come from a formula. Arrivals, ends of
iterations and ends of transfers stand in one heap; at equal times all happen before anything is
planned.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from toolkit._checks import checked
from toolkit.serving.programs import works
from toolkit.serving.requests import Timed, TracedRequest
from toolkit.serving.runs import Run, Turn, Work
from toolkit.serving.scheduler import Job, SchedulingPolicy


@dataclass
class Instance:
    """One engine of a simulation.

    Attributes:
        scheduler: what to read and write in each turn, of its own.
        cost: seconds of an iteration.
        slots: most requests at once, or None.
        room: tokens of the cache, or None.
        role: "prefill" sends every prompt that it has read to the "decode" instance with the
            fewest requests, whose scheduler is `WriteOnly`.
        reserves: tokens of room that a request takes: "all" takes prompt and output from the start;
            "written" what is there, and evicts the youngest request where the room runs out.
        page: of the `Engine` that is simulated, whose programs read pieces of fixed sizes; None
            reads what is planned of a prompt in one.

    Example:
        >>> Instance(Scheduler(budget=64), lambda work: 0.1, slots=4).role
        'both'
    """

    scheduler: SchedulingPolicy
    cost: Callable[[Work], float]
    slots: int | None = None
    room: int | None = None
    role: Literal["both", "prefill", "decode"] = "both"
    reserves: Literal["all", "written"] = "all"
    page: int | None = None


@dataclass
class Served(Timed):
    """A request of a simulation, with the seconds at which each of its tokens was there.

    Example:
        >>> Served(TracedRequest(0.5, 100, 1), times=[0.75]).first_token
        0.25
    """

    entry: TracedRequest
    times: list[float] = field(default_factory=list)

    @property
    def arrival(self) -> float:  # type: ignore[override]
        return self.entry.arrival


class _Engine:
    """An instance and its requests: how far they are read, and the room they take."""

    def __init__(self, instance: Instance, requests: list[Served]) -> None:
        self.instance, self.scheduler = instance, instance.scheduler
        self.requests = requests
        self.jobs: dict[int, Job] = {}
        self.read: dict[int, int] = {}
        self.taken: dict[int, int] = {}
        self.writing: set[int] = set()
        self.turn: Turn | None = None

    def admit(self, number: int) -> None:
        request = self.requests[number]
        is_sent = self.instance.role == "decode"
        # A prompt that is read again includes what was written.
        prompt = request.entry.prompt + (0 if is_sent else len(request.times))
        output = request.entry.prompt + request.entry.output - prompt
        job = Job(number, prompt, output, request.arrival, read=prompt if is_sent else 0)
        self.jobs[number], self.read[number] = job, job.read
        self.scheduler.admit(job)

    def leave(self, number: int) -> None:
        self.writing.discard(number)
        self.scheduler.leave(number)
        for kept in (self.jobs, self.read, self.taken):
            kept.pop(number, None)

    def _reserve(self, number: int) -> int | None:
        job, own = self.jobs[number], self.instance
        is_known = own.reserves == "all"
        if own.slots is not None and len(self.taken) >= own.slots:
            return None
        size = job.prompt + (job.output if is_known and own.role != "prefill" else 0)
        # Otherwise every row needs room for a token beside the prompt.
        growth = 0 if is_known else len(self.writing) + 1
        if own.room is not None and sum(self.taken.values()) + growth + size > own.room:
            return None
        self.taken[number] = size
        if own.role == "decode":
            self.writing.add(number)
        return job.read

    def _evict(self) -> tuple[int, ...]:
        """Forget the youngest requests until every row has room for a token."""
        own, evicted = self.instance, []
        while own.room is not None and own.reserves == "written" and len(self.taken) > 1:
            if sum(self.taken.values()) + len(self.writing) <= own.room:
                break
            number = max(self.taken, key=lambda number: (self.jobs[number].arrival, number))
            self.leave(number)
            self.admit(number)
            evicted.append(number)
        return tuple(evicted)

    def begin(self, now: float, place: int) -> Turn | None:
        """Plan a turn, if there is something to do."""
        evicted = self._evict()
        iteration = self.scheduler.plan(self._reserve)
        if iteration is None:
            return None
        texts = [self.requests[number] for number in iteration.rows]
        if self.instance.reserves == "written":
            for number in iteration.rows:
                self.taken[number] += 1
        parts, page = iteration.pieces, self.instance.page
        work = Work(
            tuple((tokens, self.read[number]) for number, tokens in parts)
            if page is None
            else works([(self.read[number], tokens) for number, tokens in parts], page),
            tuple(text.entry.prompt + len(text.times) for text in texts),
        )
        end, taken = now + self.instance.cost(work), tuple(self.taken.items())
        self.turn = Turn(now, end, work, iteration, place, taken, evicted)
        return self.turn

    def finish(self) -> list[int]:
        """End the turn; the requests whose prompt is to be sent on."""
        turn, self.turn = self.turn, None
        assert turn is not None
        wrote = list(turn.iteration.rows)
        for number, tokens in turn.iteration.pieces:
            self.read[number] += tokens
            if self.read[number] == self.jobs[number].prompt:
                self.writing.add(number)
                wrote.append(number)
        self.scheduler.done(turn.iteration)
        sent = []
        for number in wrote:
            request = self.requests[number]
            request.times.append(turn.end)
            goes_on = len(request.times) < request.entry.output
            if not goes_on or self.instance.role == "prefill":
                self.leave(number)
                sent += [number] if goes_on else []
        return sent


@checked
def simulate(
    trace: Sequence[TracedRequest], instances: Sequence[Instance], *,
    seconds_per_token_sent: float = 0.0, should_stop: Callable[[], bool] = lambda: False,
) -> Run[Served]:  # fmt: skip
    """Serve a trace by formulas alone (modelled); deterministic.

    A request goes to the instance with the fewest requests. One that "prefill" has read travels
    `prompt * seconds_per_token_sent`, then joins a "decode" instance at its next iteration.

    Args:
        trace: arrivals in ascending order.
        instances: engines, each with a scheduler of its own.
        seconds_per_token_sent: bytes of a token's cache over the link's bytes per second.
        should_stop: looked at between events; requests that go on are left as they are.

    Returns:
        Times of every request and of every turn.

    Cost: linear in the tokens written: about a second for 300,000.

    Source: Agrawal et al., "Vidur", 2024 (arXiv:2405.05465), section 4.

    Example:
        >>> run = simulate([TracedRequest(0.5, 3, 2)], [Instance(Scheduler(), lambda work: 0.25)])
        >>> run.requests[0].times
        [0.75, 1.0]
    """
    _check(trace, instances)
    requests = [Served(entry) for entry in trace]
    engines = [_Engine(instance, requests) for instance in instances]
    readers = [engine for engine in engines if engine.instance.role != "decode"]
    writers = [engine for engine in engines if engine.instance.role == "decode"]
    turns: list[Turn] = []
    # (time, what comes first at equal times, request or engine, whether its prompt is read)
    events = [(entry.arrival, 0, number, False) for number, entry in enumerate(trace)]
    while events and not should_stop():
        now = events[0][0]
        while events and events[0][0] == now:
            _, is_end, number, is_read = heapq.heappop(events)
            if is_end:
                for sent in engines[number].finish():
                    moving = seconds_per_token_sent * trace[sent].prompt
                    heapq.heappush(events, (now + moving, 0, sent, True))
                continue
            pool = writers if is_read else readers
            min(pool, key=lambda engine: len(engine.jobs)).admit(number)
        for place, engine in enumerate(engines):
            if engine.turn is None and (turn := engine.begin(now, place)) is not None:
                turns.append(turn)
                heapq.heappush(events, (turn.end, 1, place, False))
    if not events and any(engine.jobs for engine in engines):
        raise ValueError("scheduler: it plans nothing although requests wait")
    return Run(requests, turns)


def _check(trace: Sequence[TracedRequest], instances: Sequence[Instance]) -> None:
    arrivals = [entry.arrival for entry in trace]
    if arrivals != sorted(arrivals) or any(arrival < 0 for arrival in arrivals):
        raise ValueError("trace: arrivals must ascend from 0")
    roles = [instance.role for instance in instances]
    if not {"both", "prefill"} & {*roles} or ("prefill" in roles) != ("decode" in roles):
        raise ValueError(
            f"instances: got roles {roles}; wanted some 'both', or 'prefill' and 'decode'"
        )
    for number, (_, prompt, output) in enumerate(trace):
        if prompt < 1 or output < 1:
            raise ValueError(f"trace: request {number} has {prompt} and {output} tokens; wanted 1")
        for instance in instances:
            size = prompt + (0 if instance.role == "prefill" else output)
            if instance.slots == 0 or (instance.room is not None and size > instance.room):
                raise ValueError(
                    f"room: request {number} needs a slot and {size} tokens; got "
                    f"{instance.slots} and {instance.room}"
                )
