"""Policies: orders by expected length, branches, prefixes to forget, and replicas."""

import itertools

import numpy as np
import pytest
from scipy import stats

from toolkit.serving import (
    LogStudent,
    draw_workflows,
    first_of,
    fit_chain,
    fit_lengths,
    fused_steps,
    hit_rate,
    mix_replicas,
    placements,
    pooled_rounds,
    prune,
    reading_seconds,
    serve_in_order,
    spread_samples,
    tokens_by_least,
)

MOST = 4096
LOGNORMAL = 1e9  # degrees of freedom


def queue_of(freedom: float | None, count: int):
    """Jobs of six laws at nine tenths of the load of eight slots, as in a separate prototype."""
    draw = np.random.default_rng(0)
    location = draw.choice([3.5, 4.5, 5.5], count)
    scale = draw.choice([0.2, 1.2], count)
    noise = draw.normal(size=count) if freedom is None else draw.standard_t(freedom, count)
    lengths = np.minimum(np.ceil(np.exp(location + scale * noise)), MOST)
    arrivals = np.cumsum(draw.exponential(lengths.mean() / 0.9 / 8, count))
    laws = {pair: LogStudent(*pair, freedom or LOGNORMAL, MOST)
            for pair in itertools.product((3.5, 4.5, 5.5), (0.2, 1.2))}  # fmt: skip
    return lengths, arrivals, [laws[pair] for pair in zip(location, scale, strict=True)]


# Mean seconds from arrival to end; of TIE's claim (2.31 times per token, recorded) nothing follows.
@pytest.mark.parametrize(
    ("freedom", "wanted"),
    [
        (None, {"arrival": 591.9, "expected": 374.2, "tail": 379.3, "oracle": 279.2}),
        (3.0, {"arrival": 956.4, "expected": 591.5, "tail": 601.4, "oracle": 391.6}),
    ],
)
def test_orders_wait_as_a_prototype_found(freedom, wanted):
    lengths, arrivals, laws = queue_of(freedom, 20_000)
    tails = {law: law.tail_index(500) for law in set(laws)}
    keys = {
        "arrival": arrivals,
        "expected": np.array([law.expected for law in laws]),
        "tail": np.array([tails[law] for law in laws]),
        "oracle": lengths,
    }
    found = {name: serve_in_order(arrivals, lengths, key, 8).mean() for name, key in keys.items()}
    assert found == pytest.approx(wanted, rel=1e-3)


def test_shortest_expected_first_is_the_best_of_all_orders():
    draw = np.random.default_rng(0)
    lengths, start = draw.lognormal(3, 1, 6), np.zeros(6)
    waits = {order: serve_in_order(start, lengths, np.array(order, float), 1).mean()
             for order in itertools.permutations(range(6))}  # fmt: skip
    assert serve_in_order(start, lengths, lengths, 1).mean() == pytest.approx(min(waits.values()))
    assert max(waits.values()) > 1.3 * min(waits.values())


def test_a_law_with_heavy_tails_has_a_finite_index_that_grows_with_the_limit():
    law = LogStudent(4.5, 1.2, 3.0, MOST)
    assert law.expected == pytest.approx(321.65, abs=0.01)
    assert law.beyond(500) == pytest.approx(0.124, abs=1e-3)
    means = [LogStudent(4.5, 1.2, 3.0, most).expected for most in (512, 1024, 2048, 4096)]
    assert means == sorted(means)
    drawn = np.exp(4 + 0.6 * np.random.default_rng(0).standard_t(3, 2000))
    fitted = fit_lengths(np.clip(drawn, 1, MOST).astype(int).tolist(), MOST)
    assert fitted.location == pytest.approx(4, abs=0.05)
    assert fitted.scale == pytest.approx(0.6, abs=0.05)
    assert 2 < fitted.freedom < 5
    with pytest.raises(ValueError, match="lengths: got 2"):
        fit_lengths([1, 2], MOST)


# Time and tokens with 4 of 4, of 8, and 2 of 8 branches, at mean length 1.
@pytest.mark.parametrize(
    ("law", "wanted"),
    [
        (stats.expon(), ((2.0833, 4), (0.6345, 4), (0.2679, 2))),
        (stats.lognorm(1, scale=np.exp(-0.5)), ((2.2081, 4), (0.5716, 3.740), (0.2906, 2.208))),
        (stats.pareto(2.5, scale=0.6), ((1.6026, 4), (0.7801, 5.920), (0.6699, 5.321))),
        (stats.uniform(0, 2), ((1.6, 4), (0.8889, 5.778), (0.4444, 3.333))),
    ],
    ids=["exponential", "lognormal", "Pareto", "uniform"],
)
def test_branches_take_the_time_and_tokens_of_their_order_statistics(law, wanted):
    for (branches, least), pair in zip(((4, 4), (8, 4), (8, 2)), wanted, strict=True):
        assert first_of(law, branches, least) == pytest.approx(pair, abs=1e-3)
    drawn = np.sort(law.rvs((20_000, 8), random_state=0), axis=1)
    tokens = np.minimum(drawn, drawn[:, 3:4]).sum(axis=1)
    assert tokens.mean() == pytest.approx(wanted[1][1], abs=4 * tokens.std() / 20_000**0.5)


def test_samples_go_where_the_longest_wait_is():
    laws = [stats.expon(scale=scale) for scale in (1, 2, 4)]
    found = spread_samples(laws, 2, 12)
    times = [{n: first_of(law, n, 2)[0] for n in range(2, 9)} for law in laws]

    def slowest(counts):
        return max(time[count] for time, count in zip(times, counts, strict=True))

    every = [c for c in itertools.product(range(2, 9), repeat=3) if sum(c) == 12]
    assert slowest(found) == pytest.approx(min(map(slowest, every)))
    assert slowest([4, 4, 4]) > slowest(found)
    with pytest.raises(ValueError, match="budget: got 5"):
        spread_samples(laws, 2, 5)


def test_pruned_branches_cost_fewer_tokens_and_enough_are_left():
    lengths = [4, 9, 9, 9]
    none = prune(lambda branch, step: 0.0, lengths, 2, every=2, bar=-1.0, most=4)
    some = prune(lambda branch, step: 0.0, lengths, 2, every=2, bar=0.5, most=4)
    assert none == (31, 9, [0, 1])
    assert some[0] < none[0]
    assert len(some[2]) == 2


def test_prediction_beats_recency_and_none_beats_the_future():
    draw = np.random.default_rng(0)
    chain = draw.dirichlet(np.full(6, 0.35), 6)
    past = draw_workflows(chain, 60, 12, 6, np.random.default_rng(1))
    calls, learnt = draw_workflows(chain, 60, 12, 6, draw), fit_chain(past, 6)
    for slots in (4, 8, 16):
        lru, best = (hit_rate(calls, slots, policy) for policy in ("lru", "belady"))
        predicted = hit_rate(calls, slots, "predicted", learnt)
        conservative = hit_rate(calls, slots, "conservative", learnt)
        assert lru < predicted < best
        assert conservative < best
    everything = len({call[:2] for call in calls})
    whole = {hit_rate(calls, everything, policy, chain) for policy in
             ("lru", "predicted", "conservative", "belady")}  # fmt: skip
    assert whole == {1 - everything / len(calls)}
    for seed in range(20):
        some = draw_workflows(chain, 8, 6, 3, np.random.default_rng(seed))
        best = hit_rate(some, 4, "belady")
        assert all(best >= hit_rate(some, 4, p, chain) for p in ("lru", "predicted"))
    # One workflow around a cycle, and a horizon as long: prediction is Belady's.
    cycle = np.roll(np.eye(5), 1, axis=1)
    around = draw_workflows(cycle, 1, 40, 1, np.random.default_rng(0))
    assert hit_rate(around, 3, "predicted", cycle, horizon=5) == hit_rate(around, 3, "belady")
    assert hit_rate(around, 3, "lru") == 0  # the control
    with pytest.raises(ValueError, match="chain: its rows"):
        hit_rate(calls, 4, "predicted", 2 * chain)


def test_replicas_are_those_of_the_linear_programme():
    throughput = {1: (6, 1), 2: (13, 5), 4: (24, 14)}
    found = {each.counts: each.scale for each in mix_replicas(8, throughput, (30, 8))}
    wanted = {(0, 2, 1): 1.1438, (2, 1, 1): 1.1209, (0, 0, 2): 1.098, (0, 4, 0): 1.0236,
              (8, 0, 0): 0.6154}  # fmt: skip
    assert {counts: found[counts] for counts in wanted} == pytest.approx(wanted, abs=1e-4)
    assert next(iter(found)) == (0, 2, 1)
    for rates, counts in (((45, 1), (0, 4, 0)), ((5, 14), (0, 0, 2))):
        assert mix_replicas(8, throughput, rates)[0].counts == counts
    with pytest.raises(ValueError, match="rates: got"):
        mix_replicas(8, throughput, (1.0,))


def test_stages_and_tensor_parallelism_cross_where_the_algebra_says():
    for rate, stages, speed in ((0.5, 1.0833, 0.8333), (1.2, 1.375, 2.0)):
        assert reading_seconds(1.0, rate, stages=2) == pytest.approx(stages, abs=1e-4)
        assert reading_seconds(1.0, rate, speed=1.5) == pytest.approx(speed, abs=1e-4)
    for speed, load in ((1.3, 0.6106), (1.5, 0.9361), (1.7, 1.2571)):
        both = reading_seconds(1.0, load, stages=2), reading_seconds(1.0, load, speed=speed)
        assert both[0] == pytest.approx(both[1], abs=1e-3)
    assert reading_seconds(1.0, 1.0) == np.inf
    assert all(each.chips == 4 for each in placements(4, (1, 2, 4)))
    assert len({*placements(4, (1, 2, 4))}) == 12


def test_fused_steps_are_the_union_of_the_requests():
    draw = np.random.default_rng(0)
    arrivals = np.cumsum(draw.integers(0, 6, 40))
    lengths = draw.integers(5, 60, 40)
    assert lengths.sum() == 1375
    assert fused_steps(zip(arrivals.tolist(), lengths.tolist(), strict=True)) == 148
    assert fused_steps((3 * place, 20) for place in range(10)) == 47


def test_pools_of_equal_rows_starve_and_rows_of_their_own_length_need_none():
    prompts = sorted(np.random.default_rng(0).integers(8, 48, 200).tolist())
    how = {"acceptance": 0.7, "drafts": 5}
    # Shares of a separate prototype with draws of its own.
    wanted = {(2, 8): 0.302, (4, 8): 0.040, (4, 48): 0.162, (8, 192): 0.01}
    for (batch, window), share in wanted.items():
        found = pooled_rounds(prompts, 64, batch=batch, window=window, **how)
        assert found.grouped == pytest.approx(share, abs=0.03)
        assert found.needed <= found.rounds
        assert found.moved > 0
    # Where every draft is refused, rows stay equal and nothing moves.
    equal = pooled_rounds([8] * 16, 8, batch=4, window=16, acceptance=0.0, drafts=2)
    assert equal == (32, 1.0, 0, 32)
    least = [tokens_by_least(0.7, 5, batch) for batch in (1, 2, 4, 8, 16)]
    assert least == pytest.approx([2.9412, 1.9336, 1.3157, 1.0612, 1.0033], abs=1e-4)
    with pytest.raises(ValueError, match="window: got"):
        pooled_rounds([8], 8, batch=4, window=2, **how)
