"""Traces through the engine: a virtual clock gives the golden time lines, the wall's its own."""

import itertools

import numpy as np
import pytest
from flax import nnx

from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.serving import (
    Engine,
    Instance,
    PrefillFirst,
    Request,
    Scheduler,
    Static,
    TracedRequest,
    replay,
    simulate,
)

# (arrival, prompt, output) in milliseconds, and what a separate simulation of the same rules
# found for chunked prefill in 4 slots: first tokens, ends, iterations, by budget.
SIX = ((0, 100, 3), (5, 50, 2), (30, 200, 4), (31, 20, 1), (200, 64, 5), (200, 64, 5))
GOLDEN = {
    64: (
        (32.8, 51.11, 102.54, 102.54, 216.4, 246.11),
        (70.84, 70.84, 141.6, 102.54, 272.77, 296.12),
        16,
    ),
    128: (
        (20, 37.01, 82.54, 82.54, 222.8, 222.8),
        (63.14, 63.14, 121.6, 82.54, 276.12, 276.12),
        12,
    ),
}


def milliseconds(work):
    """The cost of the golden time lines."""
    read = sum(new for new, _ in work.pieces)
    return 10 + 0.1 * read + len(work.contexts) + 0.01 * sum(work.contexts)


@pytest.fixture(scope="module")
def model():
    return LoopedLM(LoopedConfig.tiny("full", 1, width=16, heads=2), rngs=nnx.Rngs(0))


def engine_of(model, budget=None):
    return Engine(model, slots=4, capacity=256, page=16, scheduler=Scheduler(budget))


@pytest.mark.parametrize("budget", GOLDEN)
def test_the_golden_six_have_their_time_line(model, budget):
    trace = [TracedRequest(*entry) for entry in SIX]
    run = replay(engine_of(model, budget), trace, seconds=milliseconds)
    first, end, iterations = GOLDEN[budget]
    assert [r.times[0] for r in run.requests] == pytest.approx(first)
    assert [r.times[-1] for r in run.requests] == pytest.approx(end)
    assert len(run.turns) == iterations
    assert run == replay(engine_of(model, budget), trace, seconds=milliseconds)
    other = replay(engine_of(model, budget // 2), trace, seconds=milliseconds)
    assert [r.times[0] for r in other.requests] != pytest.approx(first)  # the control


def test_requests_and_tokens_are_conserved_and_turns_follow_each_other(model):
    draw = np.random.default_rng(0)
    arrivals = np.cumsum(draw.exponential(8.0, 20))
    sizes = draw.integers(1, (60, 20), (20, 2)).tolist()
    trace = [TracedRequest(a, *both) for a, both in zip(arrivals.tolist(), sizes, strict=True)]
    run = replay(engine_of(model, 32), trace, seconds=milliseconds)
    # The simulator, without a model, has the same time line to the bit.
    simulated = simulate(trace, [Instance(Scheduler(32), milliseconds, slots=4, page=16)])
    assert [r.times for r in run.requests] == [r.times for r in simulated.requests]
    assert [turn[:4] for turn in run.turns] == [turn[:4] for turn in simulated.turns]
    assert [len(r.tokens) for r in run.requests] == [entry.output for entry in trace]
    for request, entry in zip(run.requests, trace, strict=True):
        assert entry.arrival <= request.times[0]
        assert request.times == sorted(request.times)
    assert all(a.end <= b.start for a, b in itertools.pairwise(run.turns))
    read = sum(new for turn in run.turns for new, _ in turn.work.pieces)
    assert read == sum(entry.prompt for entry in trace)
    steps = sum(len(turn.work.contexts) for turn in run.turns)
    assert steps == sum(entry.output - 1 for entry in trace)  # the first comes of the prompt
    # Little's law is an identity over a finished run.
    spans = [(r.arrival, r.times[-1]) for r in run.requests]
    events = sorted([(a, 1) for a, _ in spans] + [(e, -1) for _, e in spans])
    area, present = 0.0, 0
    for (time, change), (until, _) in itertools.pairwise(events):
        present += change
        area += present * (until - time)
    assert area == pytest.approx(sum(e - a for a, e in spans), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PrefillFirst, Static])
def test_other_shapes_of_a_batch_run_in_the_engine_as_in_the_simulator(model, kind):
    trace = [TracedRequest(*entry) for entry in SIX]
    engine = Engine(model, slots=2, capacity=256, page=16, scheduler=kind())
    run = replay(engine, trace, seconds=milliseconds)
    simulated = simulate(trace, [Instance(kind(), milliseconds, slots=2, page=16)])
    assert [r.times for r in run.requests] == [r.times for r in simulated.requests]


def test_by_the_walls_clock_requests_wait_for_their_arrival(model):
    engine = engine_of(model)
    run = replay(engine, [TracedRequest(0.0, 5, 3), TracedRequest(0.3, 5, 3)])
    assert run.requests[1].times[0] >= 0.3
    assert [len(r.times) for r in run.requests] == [3, 3]
    stopped = replay(engine, [TracedRequest(1e6, 5, 3)], should_stop=lambda: True)
    assert stopped.requests == []
    assert not engine.is_busy


def test_a_bad_trace_is_refused(model):
    engine = engine_of(model)
    for trace, how, words in [
        ([TracedRequest(1.0, 2, 2), TracedRequest(0.0, 2, 2)], {}, "trace: arrivals"),
        ([TracedRequest(-1.0, 2, 2)], {}, "trace: arrivals"),
        ([TracedRequest(0.0, 250, 20)], {}, "length: got 250"),
        ([TracedRequest(0.0, 2, 2)], {"requests": []}, "requests: got 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            replay(engine, trace, **how)
    engine.submit(Request((1,), 1))
    with pytest.raises(ValueError, match="engine: it has other requests"):
        replay(engine, [])
