"""Seeds that are trained in one program, and the experiments that train so."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from toolkit.experiments import Workspace, load_experiment, overflow, power, words
from toolkit.experiments.kit import synthetic
from toolkit.experiments.kit.results import Results
from toolkit.experiments.kit.side_by_side import SeedTrainer
from toolkit.experiments.kit.synthetic import Recipe, train, train_side_by_side
from toolkit.experiments.kit.verdicts import LEAST_SEEDS
from toolkit.experiments.tasks import WordProblem
from toolkit.looped import LoopedConfig


def test_each_seed_has_its_own_start_and_batches_and_all_their_steps():
    trainer = SeedTrainer(
        init=lambda key: jax.random.normal(key),
        loss=lambda weight, batch: (weight - batch) ** 2,
        sample=lambda seed, step: (seed + step).astype(jnp.float32),
        optimizer=optax.sgd(0.25),
        evaluate=lambda weight, seed: weight - seed,
        every=2,
    )
    found, reached, curves = trainer.train([3, 8], 5)
    assert reached == [2, 4, 5]
    for seed, weight, curve in zip((3, 8), found, curves, strict=True):
        expected, after = float(jax.random.normal(jax.random.key(seed))), []
        for step in range(5):
            expected += 0.5 * (seed + step - expected)
            after.append(expected)
        assert float(weight) == pytest.approx(expected, rel=1e-6)
        np.testing.assert_allclose(curve, np.array(after)[[1, 3, 4]] - seed, rtol=1e-5)


def test_seeds_side_by_side_end_where_each_ends_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "LOG_EVERY", 10)
    monkeypatch.setattr(synthetic, "EVALUATION_BATCH", 16)
    task = WordProblem("Z2", 6)
    model = LoopedConfig.tiny("full", vocabulary=2, width=16, heads=2, feed_forward=16)
    recipe = Recipe(model, task, steps=20, batch=4)
    together = train_side_by_side(recipe, [1, 2])
    for seed, ours in zip((1, 2), together, strict=True):
        alone = train(recipe, seed, Workspace(tmp_path / str(seed), lambda share: None))
        assert ours.numbers["step"][-1] == alone.numbers["step"][-1] == 20
        assert ours.accuracy(task, seed) == pytest.approx(alone.accuracy(task, seed), abs=0.02)
        for one, other in zip(*map(jax.tree.leaves, (ours.params, alone.params)), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)
    different = zip(*(jax.tree.leaves(one.params) for one in together), strict=True)
    assert max(float(jnp.abs(a - b).max()) for a, b in different) > 0.1


def verdicts(experiment, means, names):
    noise = 0.01 * np.random.default_rng(0).normal(size=(len(means), LEAST_SEEDS))
    outcomes = {
        label: {seed: dict.fromkeys(names, mean + row[seed]) for seed in range(LEAST_SEEDS)}
        for row, (label, mean) in zip(noise, means.items(), strict=True)
    }
    return [verdict.word for verdict in experiment.verdicts(Results(outcomes))]


def test_the_claims_on_states_that_overflow_are_judged_with_their_control():
    experiment, names = load_experiment("overflow"), (overflow.END, overflow.MEAN)
    means = dict(zip(experiment.settings, (0.1, 0.2, 0.99, 0.99, 0.99, 0.1), strict=True))
    none = "no difference that matters"
    assert verdicts(experiment, means, names) == ["seen"] * 4 + [none] * 2
    means["full"] = 0.5
    found = verdicts(experiment, means, names)
    assert (found[0], *found[4:]) == ("contradicted", "seen", "seen")
    means["window"] = 0.8
    found = verdicts(experiment, means, names)
    assert [*found[:2], *found[3:]] == ["void"] * 5
    means["gdn + full, keys of 8"] = 0.1  # nobody is known to learn what the state does not
    assert verdicts(experiment, means, names)[2] == "void"
    assert power(LEAST_SEEDS, 3.0, claims=len(experiment.claims), draws=1000) > 0.8


def test_the_claims_on_words_are_judged_with_their_controls():
    experiment, names = load_experiment("words"), (words.WITHIN, words.BEYOND)
    means = dict(zip(experiment.settings, (0.99, 0.5, 0.5, 0.99, 0.4, 0.3), strict=True))
    assert verdicts(experiment, means, names) == ["seen"] * 5
    means["parity: gdn, beta up to 1"] = 0.9
    assert verdicts(experiment, means, names)[0] == "void"
    means["S3: delta product"] = 0.4
    # Where nobody learns the words, that a model does not says nothing.
    assert verdicts(experiment, means, names)[2:] == ["contradicted", "contradicted", "void"]
    means["S3: gdn, beta up to 1"] = 0.9
    assert verdicts(experiment, means, names)[2:] == ["void"] * 3
