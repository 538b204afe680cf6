"""A trace through the engine, by the clock on the wall or by one that a cost formula moves.

By a virtual clock the engine keeps its scheduler and its arrays, and only the duration of a turn
comes from a formula: what a simulator says of the same trace must then be the same to the bit.
"""

import time
from collections.abc import Callable, Sequence

from toolkit._checks import checked
from toolkit.serving.engine import Engine
from toolkit.serving.requests import Progress, Request, TracedRequest, requests_of
from toolkit.serving.runs import Run, Turn, Work
from toolkit.serving.scheduler import Iteration

LONGEST_SLEEP = 0.002  # seconds, so that a button can stop the run


@checked
def replay(
    engine: Engine, trace: Sequence[TracedRequest], *,
    requests: Sequence[Request] | None = None, seconds: Callable[[Work], float] | None = None,
    skips_idle: bool = False, should_stop: Callable[[], bool] = lambda: False,
) -> Run[Progress]:  # fmt: skip
    """Serve a trace, each request when it arrives.

    Args:
        engine: without other requests; `warm` it first, or its programs are compiled in the run.
        trace: arrivals in ascending order.
        requests: prompts and options of the entries; None draws prompts of the trace's lengths.
        seconds: duration of a turn (modelled); None measures it here.
        skips_idle: jump to the next arrival instead of waiting for it; for an engine whose `clock`
            is `time.process_time`, which on a shared machine leaves out what others take.
        should_stop: looked at between turns; requests that go on are cancelled.

    Returns:
        Times of every request and of every turn.

    Cost: with `seconds` as fast as the model runs, else as long as the trace takes.

    Source: Agrawal et al., "Vidur", 2024 (arXiv:2405.05465), section 4, which replaces durations.

    Example:
        >>> from flax import nnx
        >>> from toolkit.looped import LoopedConfig, LoopedLM
        >>> model = LoopedLM(LoopedConfig.tiny("full", width=16, heads=2), rngs=nnx.Rngs(0))
        >>> engine = Engine(model, capacity=16, page=4)
        >>> replay(engine, [TracedRequest(0.5, 3, 2)], seconds=lambda work: 0.25).turns[-1].end
        1.0
    """
    arrivals = [entry.arrival for entry in trace]
    if arrivals != sorted(arrivals) or any(arrival < 0 for arrival in arrivals):
        raise ValueError("trace: arrivals must ascend from 0")
    if engine.is_busy:
        raise ValueError("engine: it has other requests; wanted one without")
    if requests is None:
        requests = requests_of(trace, engine.config.vocabulary)
    if len(requests) != len(trace):
        raise ValueError(f"requests: got {len(requests)}, wanted {len(trace)}, as in the trace")
    for request in requests:
        engine.check(request)
    clock, turns, numbers = engine.clock, [], []
    now, start, skipped = 0.0, clock(), 0.0
    engine.clock = (lambda: clock() - start + skipped) if seconds is None else (lambda: now)
    try:
        while (len(numbers) < len(trace) or engine.is_busy) and not should_stop():
            while len(numbers) < len(trace) and arrivals[len(numbers)] <= engine.clock():
                place = len(numbers)
                numbers.append(engine.submit(requests[place], arrivals[place]))
            began = engine.clock()
            iteration = engine.plan()
            if iteration is None:
                wait = arrivals[len(numbers)] - began
                if seconds is not None:
                    now = arrivals[len(numbers)]
                elif skips_idle:
                    skipped += max(0.0, wait)
                else:
                    time.sleep(max(0.0, min(wait, LONGEST_SLEEP)))
                continue
            work = engine.work(iteration)
            now += 0.0 if seconds is None else seconds(work)
            engine.run(iteration)
            turns.append(Turn(began, engine.clock(), work, _by_place(iteration, numbers[0])))
        for number in numbers:
            engine.cancel(number)
        return Run([engine.collect(number) for number in numbers], turns)
    finally:
        engine.clock = clock


def _by_place(iteration: Iteration, first: int) -> Iteration:
    pieces = tuple((number - first, tokens) for number, tokens in iteration.pieces)
    return Iteration(pieces, tuple(number - first for number in iteration.rows))
