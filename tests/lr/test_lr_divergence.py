"""What a search calls divergence: not batches that differ, but a loss that is not finite."""

import warnings
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from toolkit.experiments.lr.workloads import workload
from toolkit.lr import ProbeThenDecay, search

X = jax.random.normal(jax.random.key(0), (8, 16, 4))
DATA = {"x": X, "y": X @ jnp.array([1.0, -2.0, 0.5, 3.0])}
ZEROS = jnp.zeros(4)


def loss_fn(weights, batch):
    return jnp.mean((batch["x"] @ weights - batch["y"]) ** 2)


def test_batches_of_very_different_losses_are_no_divergence():
    """The first batch is easy, the others are noise: nothing diverges, so nothing is lost."""
    noise = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    noise[0] *= 0.1
    for options in ({}, {"validation": lambda w: jnp.sum(w**2)}, {"searcher": without_probes}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nothing is probed
            found = search(loss_fn, ZEROS, {"x": X, "y": noise}, budget=600, **options)
        probed = int(found.table["steps"].sum())
        assert found.ledger.kept_steps == found.ledger.gradient_evaluations - probed


without_probes = partial(ProbeThenDecay, search_fraction=0.0)


@pytest.mark.parametrize("size", [np.nan, np.inf])
def test_a_validation_loss_that_is_not_finite_is_a_divergence_and_loses_nothing(size):
    """Training that diverges is made again at lower rates, whether it is validated or not."""

    def batches(step):
        return jax.tree.map(lambda leaf: leaf[step % 8], DATA), step

    def loss(weights, drawn):
        return loss_fn(weights, drawn[0]) * jnp.where(drawn[1] == 250, size, 1.0)

    validation = lambda w: loss_fn(w, jax.tree.map(lambda leaf: leaf[0], DATA))  # noqa: E731
    found = search(loss, ZEROS, batches, budget=600, validation=validation)
    assert "steps of training diverged" in found.reason
    assert found.ledger.kept_steps > 200
    overflown = search(
        loss_fn, ZEROS, DATA, budget=600, validation=lambda w: jnp.float32(size) * w[0] ** 2
    )
    assert overflown.reason.endswith("no training was kept")


def test_probes_that_only_collect_gradients_choose_nothing():
    optimizer = optax.MultiSteps(optax.adamw(1.0), 20)
    found = search(loss_fn, ZEROS, DATA, optimizer=optimizer, budget=600, lr_range=(1e-4, 1.0))
    assert found.reason.startswith(
        "probes of 20 steps leave open which rate is best: 0.01, towards the middle of lr_range"
    )
    assert max(found.progress.controller.rates) == pytest.approx(1e-2, rel=0.15)


def test_a_well_trained_model_is_tuned_further():
    """Its batches have losses that differ by orders of magnitude, the first one of the smallest."""
    scale = np.float32([1e-3, 1, 0.3, 1, 0.1, 1, 0.03, 1])[:, None]
    noisy = {"x": X, "y": DATA["y"] + scale * np.random.default_rng(0).normal(size=(8, 16))}
    trained = search(loss_fn, ZEROS, noisy, budget=1000).progress.state
    tuned = search(loss_fn, None, noisy, budget=600, start=trained)
    assert "diverged" not in tuned.reason


def test_what_cannot_be_searched_is_refused_in_one_line():
    searching = partial(search, loss_fn, batches=DATA, budget=60)
    with pytest.raises(ValueError, match=r"^params: got None, which only a TrainState"):
        searching(params=None)
    with pytest.raises(ValueError, match=r"^params: got a tree without arrays"):
        searching(params={})
    with pytest.raises(ValueError, match=r"^validation must return a scalar .* float32\[4\]"):
        searching(params=ZEROS, validation=lambda w: w)
    with pytest.raises(TypeError, match=r"^searcher: must make a dataclass of constants; got 'it'"):
        searching(params=ZEROS, searcher=lambda lr_range, budget: "it")
    for batch in ("a text", [np.array("a text")]):
        with pytest.raises(ValueError, match=r"^batches: .* is no array for jax"):
            search(loss_fn, ZEROS, iter([{"x": batch}]), budget=60)
    numbers = {"lr_range": (np.float32(1e-3), np.float32(0.1)), "budget": np.int64(60)}
    assert search(loss_fn, ZEROS, DATA, **numbers).ledger.gradient_evaluations == 60


def test_a_model_state_with_random_keys_may_be_given_again():
    def loss(weights, key, batch):
        return loss_fn(weights, batch), jax.random.split(key)[0]

    trained = search(loss, ZEROS, DATA, model_state=jax.random.key(0), budget=300).progress.state
    search(loss, None, DATA, model_state=trained.model_state, start=trained, budget=100)
    with pytest.raises(ValueError, match=r"^model_state: differs from that of start"):
        search(loss, None, DATA, model_state=jax.random.key(0), start=trained, budget=100)


def test_losses_too_coarse_for_a_low_rate_mislead_no_search():
    """Of losses near 2.3 bfloat16 tells those apart that differ by .016."""
    random = np.random.default_rng(0)
    rows, weights = random.normal(size=(64, 64, 20)), random.normal(size=(20, 10))
    data = {"x": jnp.asarray(rows, jnp.bfloat16), "y": jnp.argmax(jnp.asarray(rows @ weights), -1)}

    def loss(weights, batch):
        logits = batch["x"] @ weights.astype(jnp.bfloat16)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    found = search(loss, jnp.zeros((20, 10)), data, budget=300, optimizer=optax.sgd(1.0))
    ends = [float(loss(w, jax.tree.map(lambda leaf: leaf[0], data)))
            for w in (jnp.zeros((20, 10)), found.params)]  # fmt: skip
    assert ends[1] < 0.3 * ends[0]


@pytest.mark.slow
def test_with_batches_of_one_the_rate_does_not_go_too_high():
    """Once most examples are fitted, the next few say nothing of those that are not."""
    x, y = pytest.importorskip("sklearn.datasets").load_wine(return_X_y=True)
    x = jnp.asarray((x - x.mean(0)) / x.std(0), jnp.float32)

    def of_labels(weights, batch):
        logits = batch[0] @ weights["kernel"] + weights["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    ends, start = [], {"kernel": jnp.zeros((13, 3)), "bias": jnp.zeros(3)}
    # The control: the rates that the best of four points chooses.
    high = partial(ProbeThenDecay, search_fraction=0.0)
    ways = ({}, {"searcher": high, "lr_range": (2.0, 5.0)})
    for seed in range(6):
        order = np.random.default_rng(seed).permutation(len(x))
        train, test = ((x[rows], jnp.asarray(y[rows])) for rows in np.split(order, (98,)))
        one = jax.tree.map(lambda leaf: leaf[:, None], train)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nothing is probed
            found = [search(of_labels, start, one, budget=301, **options) for options in ways]
        ends.append([float(of_labels(each.params, test)) for each in found])
    began, (searched, too_high) = float(of_labels(start, test)), np.transpose(ends)
    assert searched.max() < 0.6 * began < began < np.median(too_high)


@dataclass(frozen=True)
class Heedless(ProbeThenDecay):
    """The control: keeps whatever is finite."""

    def keeps(self, controller, request, losses):
        return bool(np.isfinite(losses).all())


@pytest.mark.slow
def test_a_run_that_breaks_down_midway_goes_on_lower():
    """A perceptron on a table at too high a rate: three starts that forget all after a while."""
    problem, ends = workload("tabular"), []
    for seed in (0, 5, 6):
        params, drawn = problem.init(jax.random.key(seed)), (problem.data, jnp.uint32(seed))
        for searcher in (ProbeThenDecay, Heedless):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that nothing is probed
                found = search(
                    problem.loss, params, drawn, budget=1000, lr_range=(0.3 / 10, 0.3 * 10),
                    searcher=partial(searcher, search_fraction=0.0), optimizer=optax.adam(1.0),
                    sample=lambda data, step: problem.sample(data[0], step, data[1]),
                )  # fmt: skip
            ends.append(float(problem.loss(found.params, problem.test)))
    heeding, heedless = np.median(np.reshape(ends, (3, 2)), axis=0)
    assert heeding < heedless / 50
