"""What a run leaves: its turns, the times of its requests, and the measures of both."""

from collections.abc import Callable, Sequence
from typing import Annotated, Generic, NamedTuple, TypeVar

import numpy as np

from toolkit._annotations import Positive
from toolkit._checks import checked
from toolkit.serving.requests import Timed, TracedRequest
from toolkit.serving.scheduler import Iteration

AnyTimed = TypeVar("AnyTimed", bound=Timed)
SETTLED = 0.03  # by how much goodput may change with twice the requests


class Work(NamedTuple):
    """What an iteration computes, as costs depend on it.

    Attributes:
        pieces: (new tokens, tokens before them) of each program that reads a prompt further.
        contexts: tokens of each row that writes, prompt and text.

    Example:
        >>> Work(pieces=((64, 0),), contexts=(101, 52)).contexts
        (101, 52)
    """

    pieces: tuple[tuple[int, int], ...]
    contexts: tuple[int, ...]


class Turn(NamedTuple):
    """One iteration of a run.

    Attributes:
        start, end: seconds since the run began.
        work: what it did.
        iteration: of which requests, by their places in the trace.
        instance: which of several engines ran it.
        taken: (request, tokens) of its cache while it ran (simulated runs).
        evicted: requests that lost their cache before it, to read all of it again.

    Example:
        >>> Turn(0.0, 0.5, Work(pieces=(), contexts=(5,)), Iteration((), (0,))).end
        0.5
    """

    start: float
    end: float
    work: Work
    iteration: Iteration
    instance: int = 0
    taken: tuple[tuple[int, int], ...] = ()
    evicted: tuple[int, ...] = ()

    @property
    def used(self) -> int:
        """Tokens of the cache that were taken."""
        return sum(tokens for _, tokens in self.taken)


class Run(NamedTuple, Generic[AnyTimed]):
    """What became of a trace.

    Attributes:
        requests: one per entry of the trace; times in seconds since the run began.
        turns: every iteration.

    Example:
        >>> Run(requests=[], turns=[]).turns
        []
    """

    requests: list[AnyTimed]
    turns: list[Turn]

    @property
    def throughput(self) -> float:
        """Tokens written per second, from the first arrival to the last token."""
        start = min(request.arrival for request in self.requests)
        end = max(request.times[-1] for request in self.requests)
        return sum(len(request.times) for request in self.requests) / (end - start)


@checked
def attainment(
    run: Run, *, first_token: float = np.inf, per_token: float = np.inf, largest_gap: float = np.inf
) -> float:
    """The share of requests that keep all bounds; a request of one token has no gaps to bound.

    Args:
        run: finished.
        first_token: most seconds to the first token (TTFT).
        per_token: most mean seconds between tokens (TPOT).
        largest_gap: most seconds between any two tokens.

    Returns:
        A share in [0, 1].

    Source: Zhong et al., "DistServe", 2024 (arXiv:2401.09670), section 2, without the last bound.

    Example:
        >>> from toolkit.serving import Progress, Request
        >>> run = Run([Progress(Request((5,), 2), 0.0, times=[0.5, 0.75])], [])
        >>> attainment(run, first_token=1.0), attainment(run, largest_gap=0.2)
        (1.0, 0.0)
    """
    bounds = {"first_token": first_token, "per_token": per_token, "largest_gap": largest_gap}
    tight = {name: bound for name, bound in bounds.items() if bound < np.inf}
    kept = [
        not any(getattr(request, name) > bound for name, bound in tight.items())
        for request in run.requests
    ]
    return float(np.mean(kept))


class Goodput(NamedTuple):
    """The rate that is served well.

    Attributes:
        rate: requests per second.
        requests: of the trace.
        is_settled: whether half of the trace gives the same rate within 3 %; an overloaded queue
            needs time to fail, and a short trace reports too much.

    Example:
        >>> Goodput(rate=2.0, requests=2500, is_settled=True).rate
        2.0
    """

    rate: float
    requests: int
    is_settled: bool


@checked
def goodput(
    serve: Callable[[Sequence[TracedRequest]], Run], trace: Sequence[TracedRequest],
    highest: float, *,
    share: float = 0.9, tolerance: Annotated[float, Positive()] = 0.01, first_token: float = np.inf,
    per_token: float = np.inf, largest_gap: float = np.inf,
) -> Goodput:  # fmt: skip
    """The highest rate at which a share of the requests keeps all bounds, by bisection.

        goodput = sup{rate : attainment(serve(trace at rate)) >= share}

    Every rate has the same arrivals, scaled, so that two systems differ by what they do alone.

    Args:
        serve: runs a trace.
        trace: arrivals at one request per second on average.
        highest: requests per second that it surely cannot keep up with.
        share: of the requests.
        tolerance: of the rate, relative.
        first_token, per_token, largest_gap: as in `attainment`, of which one is finite.

    Raises:
        ValueError: `highest` is kept up with.

    Cost: about 20 runs of the trace.

    Source: Zhong et al., "DistServe", 2024 (arXiv:2401.09670), section 4.

    Example:
        >>> trace = [TracedRequest(float(second), 10, 1) for second in range(200)]
        >>> serve = lambda trace: simulate(trace, [Instance(Scheduler(), lambda work: 0.1)])
        >>> round(goodput(serve, trace, 100.0, first_token=0.15).rate, 1)
        10.0
    """
    bounds = {"first_token": first_token, "per_token": per_token, "largest_gap": largest_gap}

    def is_kept(rate: float, count: int) -> bool:
        scaled = [entry._replace(arrival=entry.arrival / rate) for entry in trace[:count]]
        return attainment(serve(scaled), **bounds) >= share

    def best(count: int, low: float, high: float) -> float:
        while high - low > tolerance * high:
            middle = (low + high) / 2
            low, high = (middle, high) if is_kept(middle, count) else (low, middle)
        return low

    if is_kept(highest, len(trace)):
        raise ValueError(f"highest: {highest:g} requests per second are kept up with; wanted more")
    rate = best(len(trace), 0.0, highest)
    # The verdict on half of the trace needs no second search.
    is_settled = rate > 0 and not is_kept(rate * (1 + SETTLED), len(trace) // 2)
    return Goodput(rate, len(trace), is_settled)
