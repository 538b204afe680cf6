"""Pipelines of unequal stages: exact against a longest path, and never faster than is possible."""

import dataclasses
import graphlib
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.planning import Strategy, pipeline_seconds, predict
from toolkit.schedules import Durations, one_forward_one_backward, simulate

ROUNDING = 1e-9  # relative, of sums of a few thousand numbers
TOO_FAST = 0.05


def longest_path(forward, backward, hops, microbatches):
    """The end of 1F1B's last task at each stage: the longest path through the graph of its tasks.

    Warm-up, pairs and cool-down are written out; nothing of the mended code is used.
    """
    count, weight, before = len(forward), {}, {}
    for stage in range(count):
        ahead = min(count - 1 - stage, microbatches)
        order = [("F", i) for i in range(ahead)]
        for i in range(ahead, microbatches):
            order += [("F", i), ("B", i - ahead)]
        order += [("B", i) for i in range(microbatches - ahead, microbatches)]
        for position, (kind, i) in enumerate(order):
            task = kind, i, stage
            weight[task] = forward[stage] if kind == "F" else backward[stage]
            edges = before[task] = {}
            if position:
                edges[*order[position - 1], stage] = 0
            if kind == "F" and stage:
                edges["F", i, stage - 1] = hops[stage - 1]
            if kind == "B" and stage < count - 1:
                edges["B", i, stage + 1] = hops[stage]
    end = {}
    for task in graphlib.TopologicalSorter(before).static_order():
        start = max((end[other] + hop for other, hop in before[task].items()), default=0)
        end[task] = start + weight[task]
    return [end["B", microbatches - 1, stage] for stage in range(count)]


def galvatron(stages, m):
    """The closed form that stood here, in which a slow stage in the middle is free: a control."""
    count, waves = len(stages), min(len(stages) - 1, m - 1)
    filled = max(waves * stages[0] / 3, sum(stages[1:]) / 3)
    drained = max(waves * 2 * stages[0] / 3, sum(stages[1:]) * 2 / 3)
    return max(
        sum(stages) + stages[-1] * (m - 1), filled + drained + stages[0] * max(0, m + 1 - count)
    )


def drawn(seed):
    rng = random.Random(seed)
    stages = [rng.choice([1, 1, 2, 4, rng.uniform(0.5, 5)]) for _ in range(rng.randint(1, 8))]
    return stages, rng.randint(1, 40)


def test_random_cases_are_exact_where_the_closed_form_is_not():
    too_fast = 0
    for seed in range(400):
        stages, m = drawn(seed)
        thirds = [c / 3 for c in stages]
        wanted = max(longest_path(thirds, [2 * c for c in thirds], [0] * len(stages), m))
        assert pipeline_seconds(stages, m) == pytest.approx(wanted, rel=ROUNDING)
        too_fast += galvatron(stages, m) < (1 - TOO_FAST) * wanted
    assert too_fast > 100


@given(st.lists(st.tuples(*[st.floats(0.01, 10)] * 4), min_size=1, max_size=7), st.integers(1, 60))
@settings(max_examples=80, deadline=None)
def test_any_stages_and_hops(rows, m):
    f, b, hops, late = map(list, zip(*rows, strict=True))
    stages = [x + y for x, y in zip(f, b, strict=True)]
    sent = [c + x for c, x in zip(stages, late, strict=True)]
    ends = longest_path(f, b, hops, m)
    wanted = max(end + x for end, x in zip(ends, late, strict=True))
    found = pipeline_seconds(stages, m, forward=f, hops=hops[:-1], last=sent)
    assert found == pytest.approx(wanted, rel=ROUNDING)
    alone = pipeline_seconds(stages, m, forward=f, hops=hops[:-1])
    assert alone >= max(m * max(stages), sum(stages) + 2 * sum(hops[:-1])) * (1 - ROUNDING)
    slower = [c + 0.5 for c in stages]
    assert pipeline_seconds(slower, m, forward=f, hops=hops[:-1]) >= alone


@pytest.mark.parametrize("hop", [0.0, 0.3, 7.0])
def test_many_microbatches_are_not_cut_short(hop):
    """Rounds that repeat are added up; hops longer than stages repeat after several rounds only."""
    for seed in range(6):
        stages = drawn(seed)[0]
        f, b = [c / 3 for c in stages], [2 * c / 3 for c in stages]
        hops = [hop] * (len(stages) - 1)
        wanted = max(longest_path(f, b, hops, 300))
        assert pipeline_seconds(stages, 300, hops=hops) == pytest.approx(wanted, rel=ROUNDING)
    assert pipeline_seconds([1.0, 4.0, 1.0], 10**6) == pytest.approx(4e6, rel=1e-5)


@pytest.mark.parametrize("delay", [0, 2])
def test_equal_stages_take_what_their_schedule_takes(delay):
    for p, m in ((1, 3), (2, 4), (4, 8), (4, 3), (8, 16)):
        line = simulate(one_forward_one_backward(p, m), Durations(delay=delay))
        assert pipeline_seconds([3.0] * p, m, hops=[delay] * (p - 1)) == float(line.makespan)
        assert Fraction(line.makespan).denominator == 1


def test_numbers_by_hand():
    assert pipeline_seconds([3, 3, 12, 3], 16) == 198  # 16 x 12, and the way there and back
    assert pipeline_seconds([2, 2, 2, 2], 8, last=[2.5] * 4) == 22.5


def test_a_slow_stage_is_waited_for():
    """One stage of 29 layers alone takes more than the whole step once did."""
    slow = Strategy(pipeline=4, microbatches=8, stages=(1, 29, 1, 1), recompute="layer")
    found = predict("llama-3-8b", "h100:4", slow, batch=8)
    slowdown = found.constants.slowdown
    alone = found.stage_seconds(1, 1, 30).total(slowdown)
    assert found.step_seconds > alone > 0.8 * found.parts.total(slowdown)
    assert found.bubble > 0.7 * found.step_seconds
    even = predict("llama-3-8b", "h100:4", dataclasses.replace(slow, stages=()), batch=8)
    assert even.step_seconds < found.step_seconds / 2


@pytest.mark.parametrize("cut", [{}, {"stages": (9, 9, 8, 6)}, {"tensor": 2}, {"fsdp": 2}])
def test_a_predicted_step_is_its_pipelines_longest_path(cut):
    strategy = Strategy(pipeline=4, microbatches=8, recompute="elementwise", **cut)
    found = predict("llama-3-8b", f"h100:{strategy.chips}", strategy, batch=32)
    slowdown, start, f, b, update = found.constants.slowdown, 0, [], [], []
    for stage, size in enumerate(found.stages):
        part = found.stage_seconds(stage, start, start + size)
        start += size
        f.append(part.forward_total(slowdown) / 8)
        b.append((part.total(slowdown) - part.update) / 8 - f[-1])
        update.append(part.update)
    hop = found.hop_seconds
    ends = longest_path(f, b, [hop] * 3, 8)
    wanted = max(end + last for end, last in zip(ends, update, strict=True))
    assert found.step_seconds == pytest.approx(wanted, rel=ROUNDING)
    assert hop > 0


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"stages": []}, "equally long"),
        ({"hops": [1.0]}, "hops one shorter"),
        ({"forward": [1.0, 3.0, 1.0]}, "forward a part of stages"),
        ({"microbatches": 0}, "at least 1"),
        ({"microbatches": 1 << 40}, "at most"),
    ],
)
def test_what_is_no_pipeline_is_refused_in_one_line(changed, words):
    usual = {"stages": [1.0, 2.0, 1.0], "microbatches": 2} | changed
    with pytest.raises(ValueError, match=words) as refused:
        pipeline_seconds(usual.pop("stages"), usual.pop("microbatches"), **usual)
    assert "\n" not in str(refused.value)
