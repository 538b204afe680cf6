"""How a rate is chosen from its probes: the rules and the judges on losses made up."""

from pathlib import Path

import numpy as np
import pytest

from toolkit.experiments import load_experiment
from toolkit.experiments.kit.experiment import Workspace
from toolkit.experiments.kit.records import read_runs, results_of
from toolkit.experiments.kit.results import Results
from toolkit.experiments.kit.verdicts import power
from toolkit.experiments.peaks import experiment as peaks
from toolkit.experiments.peaks.experiment import ENDS, RUNS, SETTINGS, SHORT, WHOLE
from toolkit.experiments.peaks.rules import (
    BEST,
    CHANCE,
    DIVERGED,
    HALVES,
    MIDDLE,
    PROCESS,
    RATES,
    SAME,
    SEARCH,
    chosen_rate,
)

EXPERIMENT = load_experiment("peaks")
DECADES = np.log10(RATES)


def valley(best, points, noise=0.0, seed=0):
    """Losses of each rate [rates, points] around a best one, with noise of each point."""
    drawn = np.random.default_rng(seed).normal(size=(len(RATES), points))
    return 1 + 0.3 * (DECADES - np.log10(best))[:, None] ** 2 + noise * drawn


def chosen(rule, best, noise=0.0, seed=0, budget=300):
    return chosen_rate(rule, budget, valley(best, 6, noise, seed), valley(best, 3), seed)


def test_every_rule_but_the_middle_finds_a_clear_valley():
    for rule in (SEARCH, PROCESS, BEST, SAME, HALVES):
        assert chosen(rule, 2e-2) == pytest.approx(2e-2, rel=0.3), rule
    assert chosen("the middle", 2e-2) == MIDDLE
    assert chosen(CHANCE, 2e-2) != chosen(CHANCE, 2e-2, seed=1)


def test_where_probes_are_noise_the_search_stays_nearer_to_the_middle():
    def decades(rule):
        rates = [chosen(rule, MIDDLE, noise=10.0, seed=seed) for seed in range(30)]
        return np.abs(np.log10(np.divide(rates, MIDDLE))).mean()

    assert decades(SEARCH) < 0.25 < 0.5 < min(decades(BEST), decades(PROCESS))


def test_diverged_probes_are_never_chosen():
    probes = valley(0.3, 6)
    probes[DECADES > -2] = DIVERGED
    for rule in (SEARCH, BEST, PROCESS, HALVES):
        assert chosen_rate(rule, 300, probes, probes[:, :3], 0) < 1.1e-2


def made_up(probe_best):
    """Runs are best at 2e-2, probes at a rate."""
    outcome = {WHOLE: valley(2e-2, 1)[:, 0], SHORT: valley(2e-2, 1)[:, 0] + 0.3,
               RUNS: valley(2e-2, 1)[:, 0], ENDS: valley(probe_best, 16),
               HALVES: valley(1e-4, 8)}  # fmt: skip
    return Results({label: dict.fromkeys(range(15), outcome) for label in SETTINGS})


def words(results):
    """Of the claims but the first, whose fits of processes take seconds."""
    return [claim.verdict(results, 5).word for claim in EXPERIMENT.claims[1:]]


def test_claims_are_judged_by_factors():
    assert words(made_up(2e-2)) == ["no difference that matters", "contradicted", "seen", "seen"]
    # The control: probes that mislead are worse than chance.
    assert set(words(made_up(0.9))) == {"void"}


def test_the_planned_seeds_see_a_lead_of_a_fifth():
    excess = (np.log(1.21) / np.log(4) - peaks.MATTERS) / 0.065
    assert round(100 * power(peaks.SEEDS, excess, claims=len(EXPERIMENT.claims))) == 84
    assert {claim.seeds for claim in EXPERIMENT.claims} == {peaks.SEEDS}


def test_what_the_page_on_searches_says_of_the_record():
    path = Path(__file__).parents[2] / "data/experiments/peaks.jsonl"
    results = results_of(read_runs(path, EXPERIMENT), EXPERIMENT)
    assert {len(results.samples(label, RUNS)) for label in SETTINGS} == {15}
    assert len(SETTINGS) == 8 * 3
    assert peaks.FIRST_SEED == 80
    for label in SETTINGS:  # a quarter of the steps is worse everywhere, or factors mean nothing
        whole, quarter = (results.curves(label, name).mean(0).min() for name in (WHOLE, SHORT))
        assert quarter > whole
    verdicts = EXPERIMENT.verdicts(results)
    words = ["not shown", "seen", "not shown", "not shown", "seen"]
    assert [verdict.word for verdict in verdicts] == words
    assert {SETTINGS[label].budget for label in SETTINGS} == {300, 1000, 4000}
    noisy = tuple(label for label, setting in SETTINGS.items() if setting.batch_size == 1)
    for rule, labels, factor in (
        (SEARCH, tuple(SETTINGS), 1.39), (PROCESS, tuple(SETTINGS), 1.54),
        (SEARCH, noisy, 1.55), (BEST, noisy, 2.12), (HALVES, tuple(SETTINGS), 1.47),
    ):  # fmt: skip
        found = 4 ** peaks._log_factors(results, rule, labels).mean()
        assert found == pytest.approx(factor, abs=0.006), rule
    assert (verdicts[0].agreeing, verdicts[3].agreeing) == (15, 11)
    assert 100 * (4 ** np.array(verdicts[0].interval) - 1) == pytest.approx([7, 13], abs=0.5)
    assert np.log(1.1) / np.log(4) == pytest.approx(peaks.MATTERS)


@pytest.mark.nightly
def test_a_short_run_has_a_loss_for_every_rate(tmp_path):
    workspace = Workspace(tmp_path, lambda share: None)
    outcome = peaks.execute(peaks.PeakSetting("tabular", 40, 1), 1, workspace)
    assert [len(outcome[name]) % len(RATES) for name in outcome] == [0] * 5
    assert min(outcome[WHOLE]) < min(outcome[SHORT])
