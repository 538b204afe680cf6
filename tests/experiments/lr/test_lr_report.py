"""The arithmetic of the comparison, on numbers known beforehand."""

import re
import statistics
from pathlib import Path

import numpy as np
import pytest

from toolkit.experiments import load_experiment
from toolkit.experiments.kit.records import read_runs, results_of
from toolkit.experiments.kit.results import MissingResultError, Results
from toolkit.experiments.kit.verdicts import LEAST_SEEDS
from toolkit.experiments.lr.evaluation import EVALUATION
from toolkit.experiments.lr.experiment import AREA_THAT_MATTERS, BUDGETS, LONG_BUDGET, _cells
from toolkit.experiments.lr.methods import AUTOLRS_FREE, METHODS, ORACLE_GRID, PEAK, autolrs
from toolkit.experiments.lr.report import (
    DEFAULT,
    GOAL,
    REFERENCE,
    Cell,
    _compared,
    budget_factor,
    cells,
    factors_of,
    headline,
    judge_costs_no_more,
    judge_profile,
    paired_difference,
    profile,
    profile_area,
    report,
)
from toolkit.lr import AutoLRS, ask, init

EXACT = 1e-12
ROOT = Path(__file__).parents[3]


def losses(mean, spread=0.01):
    return [mean + spread * shift for shift in (-2, -1, 0, 1, 2)]


def cell(ours, rival=1.1, quarter=1.2, budget=1000):
    found = {REFERENCE: losses(1.0), DEFAULT: ours, "random search": losses(rival)}
    return Cell("char-lm", budget, found, losses(quarter))


def test_a_factor_is_one_at_the_budget_and_four_at_its_quarter():
    assert budget_factor(1.0, 1.0, 1.2) == 1
    assert budget_factor(1.2, 1.0, 1.2) == 4
    assert budget_factor(1.1, 1.0, 1.2) == pytest.approx(2, abs=EXACT)
    assert budget_factor(0.9, 1.0, 1.2) == pytest.approx(0.5, abs=EXACT)
    with pytest.raises(ValueError, match="quarter"):
        budget_factor(1.0, 1.0, 1.0)


def test_the_area_is_the_integral_of_the_profile():
    factors = [0.7, 1.0, 1.3, 2.5, 3.9, 4.0, np.inf]
    ratios = np.linspace(1, 4, 300_001)
    middle = profile(factors, (ratios[1:] + ratios[:-1]) / 2)
    assert profile_area(factors) == pytest.approx(middle.mean(), abs=1e-5)
    assert profile_area([1.0, 2.5, np.inf]) == pytest.approx(0.5, abs=EXACT)
    np.testing.assert_allclose(profile(factors, (1, 2, 4)), np.array([2, 3, 6]) / 7)


def test_pairing_takes_out_what_seeds_have_in_common():
    gap = paired_difference([1.1, 2.1, 5.1], [1.0, 2.0, 5.0])
    assert (gap.mean, gap.low, gap.high) == pytest.approx((0.1, 0.1, 0.1))
    noisy = paired_difference([1.0, 1.4, 0.9], [1.0, 1.0, 1.0])
    assert noisy.low <= 0 <= noisy.mean <= noisy.high
    with pytest.raises(ValueError, match="second"):
        paired_difference([1.0], [1.0, 2.0])


def test_cells_that_more_budget_does_not_help_tell_nothing():
    assert cell(losses(1.0)).is_telling
    flat = cell(losses(1.0), quarter=1.0)
    assert not flat.is_telling
    assert factors_of(DEFAULT, [cell(losses(1.1)), flat]) == {"char-lm 1000": pytest.approx(2)}
    with pytest.raises(MissingResultError, match="no cell"):
        judge_profile([flat], "random search")


def test_costs_are_paired_by_seed():
    margins, words = judge_costs_no_more([cell(losses(1.0)), cell(losses(1.1), budget=4000)])
    np.testing.assert_allclose(margins, -0.25, atol=EXACT)
    assert words == "geometric mean of the factors: 1.41 1.41 1.41 1.41 1.41"


def test_the_profile_is_paired_by_seed_on_cells_where_both_ran():
    margins, words = judge_profile([cell(losses(1.05), rival=1.1)], "random search")
    np.testing.assert_allclose(margins, profile_area([2**0.5]) - 2 / 3, atol=EXACT)
    assert words.startswith("areas, 1 cells: probe then decay 0.862 0.862")
    with pytest.raises(MissingResultError, match="Prodigy"):
        judge_profile([cell(losses(1.0))], "Prodigy + cosine")


def test_the_report_shows_what_was_not_run():
    outcomes = {
        f"char-lm {budget}: {REFERENCE}": {seed: {"test loss": loss} for seed, loss in enumerate(x)}
        for budget, x in ((250, losses(1.2)), (1000, losses(1.0)))
    }
    outcomes[f"char-lm 1000: {DEFAULT}"] = {seed: {"test loss": 1.1} for seed in range(5)}
    found = cells(Results(outcomes), ["char-lm", "looped"], [1000, 4000])
    assert len(found) == 4
    text = report(found)
    assert "looped 4000 evaluations: not run" in text
    assert f"  {DEFAULT:24}   1.1000 +- 0.0000    2.00" in text
    assert f"  {'AutoLRS':24}           missing" in text
    assert f"  {DEFAULT:24}  0.667     0.00     0.00    1.00    1.00      1" in text


def test_what_rates_alone_cost_and_what_autolrs_gains_by_its_own_count():
    grid, seeds = len(ORACLE_GRID), 5
    by_rate = [[1.0 + 0.1 * abs(place - 5) for place in range(grid)]] * seeds
    found = {REFERENCE: losses(1.0), DEFAULT: losses(1.15), AUTOLRS_FREE: losses(0.9)}
    peaks = [ORACLE_GRID[6]] * seeds
    made = Cell("char-lm", 1000, found, losses(1.2), peaks, by_rate)
    assert made.factor_of_peaks() == pytest.approx(2)  # half of what a quarter of the budget costs
    assert made.factor(DEFAULT) == pytest.approx(4**0.75)
    text = report([made])
    assert re.search(r"char-lm 1000 +2\.83 +2\.00 +3\.2 to 3\.2", text)
    assert "as in its paper: a speed-up of 2.00" in headline([made])


def test_what_the_page_on_searches_says_of_the_record():
    experiment = load_experiment("lr")
    lines = read_runs(ROOT / "data/experiments/lr.jsonl", experiment)
    results = results_of(lines, experiment)
    found = _cells(results)
    factors = factors_of(DEFAULT, found)
    assert (len(EVALUATION), AREA_THAT_MATTERS, GOAL) == (10, 0.05, 1.1)
    assert len(factors) == 29
    assert [sum(factor <= most for factor in factors.values()) for most in (GOAL, 1.5)] == [7, 19]
    assert factors["autoencoder 1000"] == pytest.approx(14, abs=0.5)
    wide = {"autoencoder 300": 5.6, "sets 300": 3.0, "sets 4000": 3.0, "gru 4000": 4.6}
    assert {name: factors[name] for name in wide} == pytest.approx(wide, abs=0.05)
    causes = {cell.name: cell.factor_of_peaks() for cell in found if cell.name in factors}
    medians = [statistics.median(each.values()) for each in (factors, causes)]
    assert medians == pytest.approx([1.29, 1.35], abs=0.006)
    words = [verdict.word for verdict in experiment.verdicts(results)]
    assert words[:5] == ["contradicted", "seen", "seen", "not shown", "not shown"]
    assert words[5:] == ["contradicted", "not shown", "seen", "not shown", "not shown"]
    prodigy = experiment.verdicts(results)[6]
    assert prodigy.agreeing == 5
    assert prodigy.interval == pytest.approx((0.01, 0.35), abs=0.005)
    (broken,) = (cell for cell in found if cell.name == "gru 4000")
    ends = broken.losses[DEFAULT]
    assert [min(ends), max(ends)] == pytest.approx([1.20, 1.30], abs=0.005)
    means = [np.mean(broken.losses[name]) for name in (REFERENCE, "linear, fixed rate")]
    assert means == pytest.approx([1.20, 1.25], abs=0.005)
    ran = [cell for cell in found if DEFAULT in cell.losses]
    budgets = (*BUDGETS, LONG_BUDGET)
    assert budgets == (300, 1000, 4000, 16_000)
    assert [sum(cell.budget == each for cell in ran) for each in budgets] == [10, 10, 10, 2]
    cut = {f"{shape} (oracle)" for shape in ("cosine", "WSD linear", "WSD 1-sqrt", "constant",
                                             "Schedule-Free")}  # fmt: skip
    for cell in ran:
        assert set(METHODS) - set(cell.losses) == (cut if cell.budget > 1000 else set())
        assert all(len(each) == 5 for each in cell.losses.values())
    ours = profile_area(factors.values())
    assert round(ours, 2) == 0.76
    leads = {
        method: ours - profile_area(factors_of(method, found).values())
        for method, row in METHODS.items()
        if row.kind != "oracle" and method != DEFAULT
    }
    fixed = ("linear, fixed rate", "Schedule-Free, fixed")
    assert [round(leads.pop(name), 2) for name in ("random probes", *fixed)] == [0.12, 0.06, 0.12]
    assert round(min(leads.values()), 2) == 0.21
    at_300 = [
        profile_area(
            [cell.factor(name) for cell in found if cell.budget == 300 and cell.is_telling]
        )
        for name in (DEFAULT, *fixed)
    ]
    assert [round(area, 2) for area in at_300] == [0.71, 0.71, 0.72]
    overfitting = {cell.budget: cell for cell in found if cell.name.startswith("diabetes")}
    assert not any(cell.is_telling for cell in overfitting.values())
    for budget, place in ((300, 24), (1000, 28)):
        means = {name: np.mean(each) for name, each in overfitting[budget].losses.items()}
        assert [sorted(means, key=means.get).index(DEFAULT) + 1, len(means)] == [place, 29]
    swept = min(means[f"sweep of 9, {shape}"] for shape in ("linear", "cosine", "WSD linear"))
    assert [means[DEFAULT], swept] == pytest.approx([0.50, 0.32], abs=0.005)
    count = _compared(found, (AUTOLRS_FREE,))
    assert "0.08 over" in headline(found)
    assert f"of {len(count)} cells, from 0.00 to 0.90" in headline(found)
    assert (len(count), sum(cell.factor(AUTOLRS_FREE) > 4 for cell in count)) == (29, 22)
    # Twice the cells' budgets, as the search is free.
    for budget, steps in ((600, 5), (2000, 10), (8000, 40), (32_000, 160)):
        searcher = autolrs((1e-5, 1.0), budget)
        assert ask(searcher, init(searcher)).rates.shape == (1, steps)
    assert AutoLRS.paper((1e-5, 1.0), 100_000).first_stage == 10 * 100
    done = {(line["label"], line["seed"]) for line in lines}
    left, whole = ([experiment.work(setting) for setting in experiment.settings.values()
                    for seed in range(LEAST_SEEDS)
                    if every or (setting.label, seed) not in done]
                   for every in (False, True))  # fmt: skip
    assert round(experiment.minutes * sum(left) / sum(whole)) == 116


def test_the_oracles_grid_brackets_its_best_rate_in_every_cell():
    experiment = load_experiment("lr")
    results = results_of(read_runs(ROOT / "data/experiments/lr.jsonl", experiment), experiment)
    for cell in _cells(results):
        if REFERENCE in cell.losses:
            best = results.samples(f"{cell.name}: {REFERENCE}", PEAK)[0]
            assert ORACLE_GRID[0] < best < ORACLE_GRID[-1]
