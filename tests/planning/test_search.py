"""The search: counts of trees, knapsack values and cuts, all against other ways."""

import dataclasses
import itertools

import numpy as np
import pytest

from toolkit.planning import (
    Strategy,
    assign_layers,
    balance_stages,
    cut_evenly,
    decision_trees,
    load_plan,
    predict,
    save_plan,
    search_order,
)


@pytest.mark.parametrize(
    ("chips", "counts"),
    [(8, (34, 22, 68, 44)), (16, (73, 37, 146, 74)), (32, (136, 56, 272, 112)),
     (64, (229, 79, 458, 158))],
)  # fmt: skip
def test_counts_of_the_papers(chips, counts):
    found = [
        len(decision_trees(chips, mixed_data=mixed, recompute=recompute))
        for recompute in (False, True)
        for mixed in (True, False)
    ]
    assert tuple(found) == counts


@pytest.mark.parametrize(
    ("budget", "seconds"),
    [(7, np.inf), (8, 10.0), (10, 9.2), (14, 7.2), (16, 6.0), (18, 5.7), (20, 5.2), (24, 4.0)],
)
def test_knapsack_of_the_specification(budget, seconds):
    switch = 0.2 * (1 - np.eye(3))
    found = assign_layers([[6, 4, 2]] * 4, [[1, 1.5, 2.5]] * 4, budget=budget, switch=switch)
    assert (found.seconds if found else np.inf) == pytest.approx(seconds)


def test_knapsack_equals_brute_force():
    rng = np.random.default_rng(0)
    for _ in range(20):
        memory = rng.integers(0, 6, (4, 3))
        seconds, switch = rng.random((4, 3)), rng.random((3, 3))
        best = min(
            (
                sum(seconds[i, s] for i, s in enumerate(path))
                + sum(switch[a, b] for a, b in itertools.pairwise(path))
                for path in itertools.product(range(3), repeat=4)
                if sum(memory[i, s] for i, s in enumerate(path)) <= 9
            ),
            default=np.inf,
        )
        found = assign_layers(memory, seconds, budget=9, switch=switch)
        assert (found.seconds if found else np.inf) == pytest.approx(best)
        if found:
            assert sum(memory[i, s] for i, s in enumerate(found.choices)) <= 9


def test_cuts_equal_brute_force():
    rng = np.random.default_rng(1)
    for _ in range(20):
        weights = list(rng.integers(1, 9, 7).astype(float))
        stages = int(rng.integers(1, 5))
        heaviest = min(
            max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *cuts, 7)))
            for cuts in itertools.combinations(range(1, 7), stages - 1)
        )
        sizes = cut_evenly(weights, stages)
        ends = np.cumsum((0, *sizes))
        assert ends[-1] == 7
        assert max(sum(weights[a:b]) for a, b in itertools.pairwise(ends)) == heaviest


def test_balanced_stages_equal_brute_force():
    """The fastest cut that fits, and of those the one that fills its fullest stage least."""
    rng, refused = np.random.default_rng(2), 0
    for _ in range(30):
        stages, limit = int(rng.integers(1, 5)), float(rng.integers(8, 20))
        seconds = rng.integers(1, 6, 7).astype(float)
        memory = rng.integers(1, 7, 7) * np.arange(stages, 0, -1.0)[:, None]
        best = min(
            (
                (max(seconds[a:b].sum() for a, b in parts), max(held))
                for cuts in itertools.combinations(range(1, 7), stages - 1)
                for parts in [list(itertools.pairwise((0, *cuts, 7)))]
                for held in [[memory[k, a:b].sum() for k, (a, b) in enumerate(parts)]]
                if max(held) <= limit
            ),
            default=None,
        )
        sizes = balance_stages(seconds, memory, limit=limit)
        refused += best is None
        if best is None or sizes is None:
            assert best is sizes is None
            continue
        parts = list(itertools.pairwise(np.cumsum((0, *sizes))))
        assert max(seconds[a:b].sum() for a, b in parts) == best[0]
        assert max(memory[k, a:b].sum() for k, (a, b) in enumerate(parts)) == best[1]
    assert 0 < refused < 30


def test_an_order_is_searched_for_unlike_stages_and_kept_in_the_plan(tmp_path):
    pytest.importorskip("ortools")
    strategy = Strategy(tensor=8, pipeline=4, microbatches=8, stages=(6, 12, 8, 6))
    found = predict("llama-3-8b", "h200:32", strategy, batch=32)
    better = search_order(found, seconds=2.0)
    assert better.fits
    assert better.step_seconds < 0.95 * found.step_seconds
    assert better.strategy.is_listed
    assert better.strategy.is_split
    assert "a schedule of its own" in str(better.strategy)
    least = max(part.total(found.constants.slowdown) for part in found.busy)
    assert least <= better.step_seconds <= better.lockstep_seconds
    save_plan(better, tmp_path / "plan.json")
    saved = load_plan(tmp_path / "plan.json")
    assert saved.strategy == better.strategy
    assert saved.prediction.step_seconds == better.step_seconds
    table = better.strategy.schedule
    first, *rest = table.split(",")
    for wrong, words in (
        (",".join(rest), "F0@0 is missing"),
        (table.replace("0F0,", "", 1).replace("0I0,", "0I0,0F0,", 1), "waits for ever"),
        (table.replace("3F", "2F"), "stage 2 is on devices 2 and 3"),
        ("\n".join(table.splitlines()[:3]), "wanted pipeline 4"),
    ):
        assert wrong != table
        with pytest.raises(ValueError, match=words) as refused:
            dataclasses.replace(better.strategy, schedule=wrong)
        assert "\n" not in str(refused.value)
    assert first == "0F0"
