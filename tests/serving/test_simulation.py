"""The simulator meets closed forms, golden time lines, and its own laws."""

import dataclasses
import itertools

import numpy as np
import pytest

from toolkit.looped import LoopedConfig
from toolkit.serving import (
    Instance,
    IterationCost,
    Pools,
    PrefillFirst,
    Scheduler,
    Static,
    TracedRequest,
    Work,
    WriteOnly,
    attainment,
    fit_cost,
    goodput,
    opt_13b_on_a100,
    planned_cost,
    simulate,
    vary,
)

# (arrival, prompt, output) in milliseconds; what a separate prototype found for 2 slots, and for
# 4 with chunks: first tokens, ends, iterations.
SIX = ((0, 100, 3), (5, 50, 2), (30, 200, 4), (31, 20, 1), (200, 64, 5), (200, 64, 5))
GOLDEN = [
    (Static, 2, (20, 79.03, 79.03, 131.6, 222.8, 222.8),
     (44.03, 93.55, 119.6, 131.6, 276.12, 276.12), 13),
    (PrefillFirst, 2, (20, 35, 78.52, 105.55, 222.8, 222.8),
     (93.55, 48.52, 131.6, 105.55, 276.12, 276.12), 13),
    (lambda: Scheduler(64), 4, (32.8, 51.11, 102.54, 102.54, 216.4, 246.11),
     (70.84, 70.84, 141.6, 102.54, 272.77, 296.12), 16),
]  # fmt: skip


def milliseconds(work):
    read = sum(new for new, _ in work.pieces)
    return 10 + 0.1 * read + len(work.contexts) + 0.01 * sum(work.contexts)


def traced(rows) -> list[TracedRequest]:
    return [TracedRequest(*row) for row in rows]


def random_trace(count, seed, gap=8.0) -> list[TracedRequest]:
    draw = np.random.default_rng(seed)
    arrivals = np.cumsum(draw.exponential(gap, count)).tolist()
    sizes = draw.integers(1, (60, 20), (count, 2)).tolist()
    return traced([(arrival, *size) for arrival, size in zip(arrivals, sizes, strict=True)])


@pytest.mark.parametrize(("scheduler", "slots", "first", "end", "count"), GOLDEN)
def test_the_golden_six_have_their_time_lines(scheduler, slots, first, end, count):
    run = simulate(traced(SIX), [Instance(scheduler(), milliseconds, slots)])
    assert [r.times[0] for r in run.requests] == pytest.approx(first)
    assert [r.times[-1] for r in run.requests] == pytest.approx(end)
    assert len(run.turns) == count


def test_queues_wait_as_their_closed_forms_say():
    draw = np.random.default_rng(0)
    arrivals = np.cumsum(draw.exponential(0.2, 8000)).tolist()
    deterministic = traced([(arrival, 1, 1) for arrival in arrivals])
    run = simulate(deterministic, [Instance(PrefillFirst(), lambda work: 0.1, slots=1)])
    mean = np.mean([r.first_token for r in run.requests])
    assert mean == pytest.approx(0.15, rel=0.03)  # M/D/1 at half load: D + rho D / (2 (1 - rho))
    assert mean != pytest.approx(0.2, rel=0.1)  # the control, M/M/1
    # Batch service: ceil(n / B) waves of (fixed + B P token) + (O - 1)(fixed + B row).
    cost = IterationCost(fixed=0.01, per_token=0.001, per_row=0.002)
    for kind in (Static, PrefillFirst):
        run = simulate(traced([(0.0, 64, 20)] * 12), [Instance(kind(), cost, slots=4)])
        assert run.turns[-1].end == pytest.approx(1.824)
        assert len(run.turns) == 60


def instances() -> dict[str, list[Instance]]:
    how = {"slots": 4, "room": 100}
    split = (Instance(PrefillFirst(), milliseconds, role="prefill"),
             Instance(WriteOnly(), milliseconds, 4, 100, role="decode"))  # fmt: skip
    return {
        "chunked": [Instance(Scheduler(16), milliseconds, **how)],
        "static": [Instance(Static(), milliseconds, **how)],
        "evicting": [Instance(Scheduler(16), milliseconds, **how, reserves="written")],
        "two": [Instance(PrefillFirst(), milliseconds, **how) for _ in range(2)],
        "split": list(split),
    }


@pytest.mark.parametrize("name", instances())
def test_requests_tokens_and_room_are_conserved(name):
    trace = random_trace(60, seed=1)
    run = simulate(trace, instances()[name], seconds_per_token_sent=0.5)
    assert [len(r.times) for r in run.requests] == [entry.output for entry in trace]
    for request in run.requests:
        assert [request.arrival, *request.times] == sorted([request.arrival, *request.times])
    for place in {turn.instance for turn in run.turns}:
        own = [turn for turn in run.turns if turn.instance == place]
        assert all(a.end <= b.start for a, b in itertools.pairwise(own))
    assert all(turn.used <= 100 for turn in run.turns if turn.instance or name != "split")
    evicted = sum(len(turn.evicted) for turn in run.turns)
    assert (evicted > 0) == (name == "evicting")
    read = sum(new for turn in run.turns for new, _ in turn.work.pieces)
    assert (read > sum(entry.prompt for entry in trace)) == (name == "evicting")
    again = simulate(trace, instances()[name], seconds_per_token_sent=0.5)
    assert run == again
    # Twice the times, twice the results.
    slow = [dataclasses.replace(each, cost=lambda work: 2 * milliseconds(work))
            for each in instances()[name]]  # fmt: skip
    doubled = [entry._replace(arrival=2 * entry.arrival) for entry in trace]
    later = simulate(doubled, slow, seconds_per_token_sent=1.0)
    assert [r.times[-1] for r in later.requests] == pytest.approx(
        [2 * r.times[-1] for r in run.requests]
    )


def test_more_room_for_chunks_helps_the_prompt_and_stalls_the_others():
    """Eight rows that write, and one prompt of 1,000."""
    cost = IterationCost(0.010, 0, 1e-4, 0, 0, 1e-3, 1e-5)
    found = []
    for scheduler in (*map(Scheduler, (128, 256, 512)), PrefillFirst()):
        trace = traced([(0.0, 1, 60)] * 8 + [(0.1, 1000, 2)])
        run = simulate(trace, [Instance(scheduler, cost)])
        found.append((run.requests[-1].first_token, max(r.largest_gap for r in run.requests[:8])))
    first, gaps = zip(*found, strict=True)
    assert list(first) == sorted(first, reverse=True)
    assert list(gaps) == sorted(gaps)
    assert gaps[-1] > 3 * gaps[0]


def test_a_fitted_cost_is_found_again_and_its_spread_is_kept():
    cost = IterationCost(0.01, 0.002, 1e-4, 1e-7, 0.003)
    run = simulate(random_trace(100, seed=2, gap=0.02), [Instance(Scheduler(16), cost, slots=4)])
    fitted = fit_cost(run.turns)
    assert max(abs(fitted(turn.work) - cost(turn.work)) for turn in run.turns) < 1e-6
    noisy = [turn._replace(end=turn.start + cost(turn.work) * (1 + turn.start % 0.5))
             for turn in run.turns]  # fmt: skip
    varied = vary(cost, noisy, seed=1)
    ratios = [varied(turn.work) / cost(turn.work) for turn in run.turns]
    assert np.std(ratios) == pytest.approx(0.14, abs=0.03)
    with pytest.raises(ValueError, match="turns: got 2"):
        fit_cost(run.turns[:2])


def test_costs_of_chips_grow_as_they_should():
    config = LoopedConfig.tiny("full full", 1, width=512, heads=8)
    cost = planned_cost(config, "h100:1")
    one, many, read = Work((), (1000,)), Work((), (1000,) * 64), Work(((4096, 0),), ())
    assert 0 < cost(one) < cost(many)
    assert cost(one) < cost(read) < cost(Work(((8192, 0),), ())) / 2
    assert planned_cost(config, "h100:2")(many) == pytest.approx(cost(many) / 2)
    mixture = planned_cost(LoopedConfig.tiny("full", feed_forwards="moe", heads=4), "h100:1")
    assert 0 < mixture(one) < mixture(many)
    assert opt_13b_on_a100(one) == pytest.approx(0.0205955)


def test_goodput_is_found_and_short_traces_say_so():
    draw = np.random.default_rng(0)
    arrivals = np.cumsum(draw.exponential(1.0, 500)).tolist()
    trace = traced([(arrival, 10, 1) for arrival in arrivals])

    def serve(trace, seconds=0.1):
        return simulate(trace, [Instance(PrefillFirst(), lambda work: seconds, slots=1)])

    found = goodput(serve, trace, 30.0, first_token=0.5, tolerance=0.02)
    # Half the cost at least doubles it: the same arrivals, scaled.
    fast = goodput(lambda t: serve(t, 0.05), trace, 30.0, first_token=0.5, tolerance=0.02)
    assert 7 < found.rate < 10
    assert fast.rate >= 1.95 * found.rate
    overloaded = goodput(serve, trace[:40], 30.0, first_token=0.5, tolerance=0.02)
    assert overloaded.rate > 1.05 * found.rate  # too few to fail
    with pytest.raises(ValueError, match="highest: 1 requests"):
        goodput(serve, trace, 1.0, first_token=0.5)


@pytest.mark.nightly
def test_pools_have_the_goodput_of_the_prototype():
    """Four chips; the bound on every gap changes who wins (rates of a separate prototype)."""
    draw, n = np.random.default_rng(0), 2500
    arrivals = np.cumsum(draw.exponential(1, n)).tolist()
    prompts = np.clip(draw.lognormal(np.log(300), 0.6, n), 8, 2000).astype(int).tolist()
    outputs = np.clip(draw.lognormal(np.log(120), 0.8, n), 2, 800).astype(int).tolist()
    trace = traced(zip(arrivals, prompts, outputs, strict=True))

    def cost(work):
        fixed = 20.0 if work.pieces or work.contexts else 0.0
        read = 0.1 * sum(new for new, _ in work.pieces)
        return (fixed + read + 6e-4 * sum(work.contexts) + 0.04 * len(work.contexts)) / 1e3

    def best(pools, **bounds):
        def serve(trace):
            own = pools.instances({1: cost}, batch=1024, chunk=512)
            return simulate(trace, own, seconds_per_token_sent=0.8192e6 / 300e9)

        return goodput(serve, trace, 60.0, first_token=0.25, **bounds).rate

    pools = (
        Pools("joint", (4,), (1,)),
        Pools("chunked", (4,), (1,)),
        Pools("split", (2, 2), (1, 1)),
    )
    wanted = {"per_token": (20.6, 24.4, 20.5), "largest_gap": (0.9, 18.6, 18.4)}
    for (name, rates), bound in zip(wanted.items(), (0.05, 0.08), strict=True):
        found = [best(each, **{name: bound}) for each in pools]
        assert found == pytest.approx(rates, rel=0.05, abs=0.1)


def test_what_cannot_be_simulated_is_refused_in_one_line():
    plain = [Instance(Scheduler(), milliseconds, slots=2, room=50)]
    refused = [
        (traced([(1.0, 1, 1), (0.0, 1, 1)]), plain, "trace: arrivals"),
        (traced([(0.0, 0, 1)]), plain, "trace: request 0 has 0"),
        (traced([(0.0, 40, 11)]), plain, "room: request 0 needs a slot and 51"),
        (traced([(0.0, 1, 1)]), [], "instances: got roles"),
        (traced([(0.0, 1, 1)]), [Instance(Scheduler(), milliseconds, role="prefill")], "roles"),
    ]
    for trace, own, words in refused:
        with pytest.raises(ValueError, match=words):
            simulate(trace, own)
    assert attainment(simulate(traced([(0.0, 1, 1)]), plain), per_token=1.0) == 1.0
