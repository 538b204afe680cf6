"""The rule: which margins make a claim seen, contradicted, not shown; when it is void."""

from pathlib import Path

import numpy as np
import pytest

from toolkit.experiments import (
    Claim,
    MissingResultError,
    Results,
    above,
    below,
    load_experiment,
    power,
)
from toolkit.experiments.kit.records import read_runs, results_of
from toolkit.experiments.kit.verdicts import fails, interval, seen_excess
from toolkit.experiments.sparse.claims import CLAIMS, SEEDS_OF_ERROR


def judged(margins, claims=1, **options):
    claim = Claim("a is right", lambda results: (margins, "numbers"), **options)
    return claim.verdict(Results({}), claims)


@pytest.mark.parametrize(
    ("margins", "smallest", "word"),
    [
        ([1, 1.1, 0.9, 1, 1], 0, "seen"),
        ([1, 1.1, 0.9, 1, 1], 0.8, "seen"),
        ([1, 1.1, 0.9, 1, 1], 1, "not shown"),
        ([1, 1.1, 0.9, 1, 1], 1.5, "no difference that matters"),
        ([0.1, -0.1, 0, 0.1, -0.1], 0.5, "no difference that matters"),
        ([0.1, -0.1, 0, 0.1, -0.1], 0, "not shown"),
        ([-1, -1.1, -0.9, -1, -1], 0.5, "contradicted"),
        # One seed that disagrees decides nothing, and neither do five that agree by chance.
        ([9, 9, 9, 9, 9, 9, 8, 9, 9, -1e-9], 0, "seen"),
        ([1, 1, 1, 1, 30], 0, "not shown"),
        ([0, 0, 0, 0, 0], 0, "not shown"),
        ([9, 9, 9, 9], 0, "not shown"),
        ([1, 1, 1, 1, np.nan], 0, "not shown"),
        ([], 0, "not shown"),
    ],
)
def test_the_interval_of_the_mean_decides(margins, smallest, word):
    verdict = judged(margins, smallest=smallest)
    assert verdict.word == word
    assert verdict.seeds == len(margins)


def test_the_interval_is_students():
    from scipy.stats import ttest_1samp

    margins = np.array([0.3, 0.5, 0.1, 0.9, 0.4, 0.2])
    expected = ttest_1samp(margins, 0).confidence_interval(0.95)
    np.testing.assert_allclose(judged(margins).interval, expected)
    together = ttest_1samp(margins, 0).confidence_interval(1 - 0.05 / 10)
    np.testing.assert_allclose(judged(margins, claims=10).interval, together)


def test_fewer_seeds_than_planned_give_no_verdict():
    assert judged([1.0, 1.1] * 4, seeds=9).word == "not shown"
    assert judged([1.0, 1.1] * 5, seeds=9).word == "seen"
    assert judged([1.0], seeds=1).word == "not shown"  # one has no interval


SEEDS = (5, 6, 8, 10, 14, 20, 30)


@pytest.mark.parametrize("effect", [0.5, 1.0, 2.0])
def test_power_never_falls_with_seeds(effect):
    found = [power(seeds, effect) for seeds in SEEDS]
    assert found == sorted(found)
    # Control: by the rule that all must agree, it does fall.
    draws = np.random.default_rng(0).normal(effect, 1, (4000, SEEDS[-1]))
    by_agreement = [np.mean((draws[:, :seeds] > 0).all(1)) for seeds in SEEDS]
    assert by_agreement == sorted(by_agreement, reverse=True)
    assert by_agreement[-1] < by_agreement[0]


def test_ten_seeds_see_one_deviation_and_chance_is_not_seen():
    assert power(10, 1.0) > 0.79
    assert power(5, 1.0) < 0.5
    assert 0.015 < power(5, 0.0) < 0.035  # half of 5 %: on one side
    assert power(10, 1.0, claims=10) < power(10, 1.0)
    assert power(SEEDS_OF_ERROR, 0.87, claims=len(CLAIMS), draws=500) > 0.8


@pytest.mark.parametrize(("seeds", "claims"), [(5, 1), (5, 61), (20, 1), (30, 10)])
def test_what_a_record_can_have_missed_is_what_it_sees_in_four_of_five(seeds, claims):
    effect = seen_excess(seeds, claims=claims)
    assert power(seeds, effect, claims=claims) == pytest.approx(0.8, abs=0.02)
    margins = effect * np.random.default_rng(0).permutation(np.linspace(-1, 1, seeds))
    missed = judged(list(margins))
    wanted = seen_excess(seeds) * margins.std(ddof=1)
    assert f"; a mean of {wanted:.2g} is seen in 80% of such records; " in f"; {missed.numbers}"


def test_a_second_look_sees_what_is_not_there_more_often():
    from scipy.stats import ttest_1samp

    draws = np.random.default_rng(0).normal(size=(100_000, 24))
    first, second = (
        ttest_1samp(draws[:, :seeds], 0, axis=1, alternative="greater").pvalue < 0.025
        for seeds in (12, 24)
    )
    assert [interval(row)[0] > 0 for row in draws[:100]] == second[:100].tolist()
    assert first.mean() == pytest.approx(0.025, abs=0.002)
    assert (first | second).mean() == pytest.approx(0.042, abs=0.002)


def test_a_control_that_does_not_fail_makes_a_claim_void():
    right = lambda margins: lambda results: (margins, "numbers")  # noqa: E731
    sure = [1, 1.1, 0.9, 1, 1]
    claim = Claim("a is right", right(sure), control=right(sure))
    assert claim.verdict(Results({})).word == "seen"
    for margins in ([1, -1, 1, -1, 1], [-1, -1, -1.1, -1, -1], [1, 1.1, 1]):
        verdict = Claim("a is right", right(sure), control=right(margins)).verdict(Results({}))
        assert verdict.word == "void"
        assert "the control is not seen to fail" in str(verdict)
    assert fails(right(sure))(Results({}))[0].tolist() == [-1, -1.1, -0.9, -1, -1]


def test_runs_of_two_commits_give_no_verdict():
    outcomes = {
        label: {seed: {"loss": loss + 0.01 * seed} for seed in range(5)}
        for label, loss in (("a", 1.0), ("b", 2.0), ("c", 3.0))
    }
    commits = {label: dict.fromkeys(range(5), "one") for label in "ab"}
    commits["c"] = dict.fromkeys(range(5), "two")
    results = Results(outcomes, commits)
    assert Claim("a", below("loss", ["a"], 1.5)).verdict(results).word == "seen"
    assert Claim("a", below("loss", ["a"], ["b"])).verdict(results).word == "seen"
    verdict = Claim("c", above("loss", ["c"], 1.5)).verdict(results)
    assert verdict.word == "seen"
    mixed = Claim("c", above("loss", ["c"], ["a", "b"])).verdict(results)
    assert mixed.word == "not shown"
    assert "from runs of one and two, to be run again on one" in str(mixed)
    # Nor may a control be of another commit than its claim.
    for commit, word in (("one", "seen"), ("two", "not shown")):
        commits["c"] = dict.fromkeys(range(5), commit)
        control = fails(below("loss", ["c"], 2.5))
        claim = Claim("a", below("loss", ["a"], ["b"]), control=control)
        assert claim.verdict(Results(outcomes, commits)).word == word


@pytest.mark.parametrize("left_out", ["a", "b", "c"])
def test_a_seed_left_out_gives_no_verdict(left_out):
    outcomes = {
        label: {seed: {"loss": loss + 0.01 * seed} for seed in range(7)}
        for label, loss in (("a", 1.0), ("b", 2.0), ("c", 3.0), ("another", 4.0))
    }
    control = fails(below("loss", ["c"], 2.5))
    claim = Claim("a", below("loss", ["a"], ["b"]), control=control)
    del outcomes["another"][2]  # which the claim does not look at
    del outcomes[left_out][6]  # as while it runs
    assert claim.verdict(Results(outcomes)).word == "seen"
    del outcomes[left_out][3]
    verdict = claim.verdict(Results(outcomes))
    assert verdict.word == "not shown"
    assert f"{left_out} lacks seed 3; loss: a" in str(verdict)


def test_runs_on_the_manuals_of_two_pythons_give_no_verdict():
    experiment = load_experiment("parity")
    path = Path(__file__).parents[2] / "data/experiments/parity.jsonl"
    lines = read_runs(path, experiment)
    verdicts = [experiment.verdicts(results_of(lines, experiment))]
    for line in lines:
        if line["seed"] == 3:
            line["environment"]["versions"]["python"] = "3.12.0"
    verdicts.append(experiment.verdicts(results_of(lines, experiment)))
    words = [{verdict.word for verdict in found} for found in verdicts]
    assert words == [{"seen"}, {"not shown"}]
    assert "on Python 3.11 and " in str(verdicts[1][0])


def test_three_seeds_are_said_to_be_three():
    verdict = Claim("a is right", lambda results: ([1, -1, 1], "a 1 0 1")).verdict(Results({}))
    assert str(verdict) == (
        "not shown    a is right (3 seeds)\n             2 of 3 seeds bear it out; a 1 0 1"
    )


def test_settings_are_paired_by_seed():
    def results(**found):
        return Results({
            label: {seed: {"loss": loss} for seed, loss in runs.items()}
            for label, runs in found.items()
        })  # fmt: skip

    found = results(a={0: 1.0, 2: 5.0, 1: 3.0}, b={1: 4.0, 2: 7.0, 3: 0.0}, c={1: 9.0, 2: 6.0})
    np.testing.assert_array_equal(found.paired("loss", ["a", "b"]), [[3, 5], [4, 7]])
    margins, words = below("loss", ["a"], ["b", "c"])(found)
    np.testing.assert_array_equal(margins, [1, 1])
    assert words == "loss: a 3.00 5.00, b 4.00 7.00, c 9.00 6.00"
    np.testing.assert_array_equal(above("loss", ["b", "c"], ["a"])(found)[0], [1, 1])
    np.testing.assert_array_equal(above("loss", ["b", "a"], 4.0)(found)[0], [-1, 1])
    np.testing.assert_array_equal(below("loss", ["b", "a"], 6.0)(found)[0], [2, -1])
    with pytest.raises(MissingResultError, match="no seed has 'loss' of all of a, d"):
        results(a={0: 1.0}, d={1: 1.0}).paired("loss", ["a", "d"])
