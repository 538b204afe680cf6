"""Rates of Muon's and Adam's groups: what each search chooses, and how claims are judged."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.experiments import load_experiment, muon
from toolkit.experiments.kit.records import read_runs, results_of
from toolkit.experiments.kit.results import Results
from toolkit.experiments.muon import (
    ADAM,
    BY_PAIR,
    CHANCE,
    JOINT,
    MUON,
    ONE,
    THRICE,
    TURNS,
    WORKLOADS,
)

EXPERIMENT = load_experiment("muon")


def test_the_ratio_scales_what_adam_trains_and_nothing_else():
    optimizer, key = muon.grouped(), jax.random.key(0)
    hidden, vector = jax.random.normal(key, (4, 4)), jnp.ones(4)
    params = {"hidden": hidden, "head": jnp.ones((4, 2)), "bias": vector}
    state = optimizer.init(params)
    plain, _ = optimizer.update(params, state, params)
    thrice, after = optimizer.update(params, {**state, "ratio": jnp.float32(3.0)}, params)
    np.testing.assert_array_equal(thrice["hidden"], plain["hidden"])
    for name in ("head", "bias"):
        assert (plain[name] < -0.9).all()
        np.testing.assert_allclose(thrice[name], 3 * plain[name])
    assert after["ratio"] == 3
    assert jnp.sqrt(jnp.mean(plain["hidden"] ** 2)) == pytest.approx(0.2, rel=0.2)


def test_each_search_chooses_by_what_it_may_see():
    """A valley at Muon's fourth rate and Adam's sixth; same rates are best at the fourth, too."""
    rows, columns = np.meshgrid(range(len(MUON)), range(len(ADAM)), indexing="ij")
    losses = (rows - 3.0) ** 2 + 0.6 * (columns - 5.0) ** 2
    ends = np.repeat(losses.reshape(-1, 1), 4, axis=1)
    found = muon._chosen(ends, losses, losses + 0.1, np.random.default_rng(0))
    assert found[ONE] == losses[3, 4] == 0.6
    assert found[THRICE] == losses[3, 5] == 0
    assert found[TURNS] == found[JOINT] == 0.1
    assert found[CHANCE] > 0.1
    # A pair that looks best in probes and is not: only the joint search takes it.
    misled = ends.copy()
    misled[np.ravel_multi_index((0, 0), losses.shape)] = -1
    found = muon._chosen(misled, losses, losses + 0.1, np.random.default_rng(0))
    assert found[JOINT] == losses[0, 0] + 0.1
    assert found[TURNS] == 0.1


@pytest.mark.parametrize(("joint", "word"), [
    (0.9, "seen"), (0.99, "no difference that matters"), (1.1, "contradicted"),
])  # fmt: skip
def test_claims_on_groups_are_judged_against_one_rate(joint, word):
    noise = 1e-3 * np.random.default_rng(0).normal(size=muon.SEEDS)

    def runs(chance):
        return {seed: {ONE: 1.0, THRICE: 1.0, TURNS: 1.0, JOINT: joint + at, CHANCE: chance + at}
                for seed, at in enumerate(noise)}  # fmt: skip

    judged = EXPERIMENT.verdicts(Results(dict.fromkeys(WORKLOADS, runs(2.0))))
    assert judged[0].word == word
    # The control: where chance does as well as a search, nothing is said.
    void = EXPERIMENT.verdicts(Results(dict.fromkeys(WORKLOADS, runs(0.5))))
    assert {verdict.word for verdict in void} == {"void"}


def test_what_the_page_on_searches_says_of_pairs():
    path = Path(__file__).parents[2] / "data/experiments/muon.jsonl"
    results = results_of(read_runs(path, EXPERIMENT), EXPERIMENT)
    gains, at_the_top = {}, {}
    for name in WORKLOADS:
        pairs = results.curves(name, BY_PAIR).reshape(-1, len(MUON), len(ADAM))
        same = np.diagonal(pairs, muon.SAME, 1, 2)
        gains[name] = same.mean(0).min() - pairs.mean(0).min()
        at_the_top[name] = int((same[:, -1] == results.samples(name, ONE)).sum())
    found = [gains[name] for name in ("sets", "autoencoder", "gru", "graphs", "field")]
    assert found == pytest.approx([0.013, 0.004, 0, 0, 0], abs=5e-4)
    assert np.mean(found) == pytest.approx(0.003, abs=5e-4)
    assert at_the_top["gru"] == 7
    assert (len(MUON) * len(ADAM), len(WORKLOADS), muon.STEPS, muon.MATTERS) == (42, 5, 300, 0.02)
    verdicts = EXPERIMENT.verdicts(results)
    assert {verdict.word for verdict in verdicts} == {"void"}
    joint, turns, thrice = (verdict.interval for verdict in verdicts)
    assert np.mean(joint) == pytest.approx(-0.024, abs=5e-4)
    assert turns == pytest.approx((-0.004, 0.003), abs=5e-4)
    assert thrice == pytest.approx((0.017, 0.083), abs=5e-4)
    assert verdicts[2].agreeing == muon.SEEDS == 10
    by_chance, thrice = (
        results.paired(ONE, ["gru"]) - results.paired(name, ["gru"]) for name in (CHANCE, THRICE)
    )
    assert by_chance.mean() > 0
    assert thrice.sum() > 0.5 * (muon._gain(THRICE)(results)[0] * len(WORKLOADS)).sum()
