"""Several hyper-parameters at once: exact where the truth is known, and on one real task."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.lr import (
    NoisyQuadratic,
    effective_rate,
    joint_search,
    momentum_losses,
    shape_rates,
)

CLOSED_FORM = 1e-12  # relative
MONTE_CARLO = 0.02  # relative, of 40 000 runs
FOUND = 1.1  # times the best of a fine grid

PROBLEM = NoisyQuadratic.harmonic(1.0, 20)


def test_without_momentum_it_is_the_plain_recursion():
    rates = np.linspace(0.9, 0.1, 60)
    losses = momentum_losses(PROBLEM, rates, batches=10.0)
    plain = NoisyQuadratic.harmonic(10.0, 20)
    end, before = plain.advance(plain.start, rates)
    np.testing.assert_allclose(losses[:-1], before, rtol=CLOSED_FORM)
    np.testing.assert_allclose(losses[-1], plain.loss(end), rtol=CLOSED_FORM)


def test_momentum_alone_has_a_closed_form():
    """Without noise a coordinate is a linear recursion of order two, whose roots are known."""
    one = NoisyQuadratic([1.0], [0.0], [4.0])
    rate, momentum = 0.1, 0.5
    roots = np.roots([1.0, rate - 1 - momentum, momentum])
    # p_t = a r1^t + b r2^t with p_0 = 2 and p_1 = (1 - rate) p_0
    a, b = np.linalg.solve([[1, 1], roots], [2.0, 2.0 * (1 - rate)])
    steps = np.arange(41)
    positions = (a * roots[0] ** steps + b * roots[1] ** steps).real
    losses = momentum_losses(one, np.full(40, rate), momentum=momentum)
    np.testing.assert_allclose(losses, positions**2 / 2, rtol=1e-10)


@pytest.mark.parametrize("optimum", [0.0, 1.5])
def test_against_many_runs(optimum):
    generator = np.random.default_rng(0)
    problem = NoisyQuadratic([1.0, 0.2], [0.5, 0.1], [1.0, 2.0])
    rates = 0.3 * shape_rates("linear", 25)
    sizes = np.linspace(1, 4, 25)
    runs = 40_000
    error = generator.normal(size=(runs, 2)) * np.sqrt(problem.start)
    velocity = np.zeros_like(error)
    for rate, size in zip(rates, sizes, strict=True):
        noise = generator.normal(size=error.shape) * np.sqrt(problem.noise / size)
        gradient = problem.curvatures * error + noise + 0.05 * (error + optimum)
        velocity = 0.8 * velocity + gradient
        error = error - rate * velocity
    sampled = (problem.curvatures * error**2).sum(1).mean() / 2
    exact = momentum_losses(
        problem, rates, momentum=0.8, weight_decay=0.05, batches=sizes, optimum=optimum
    )
    assert exact[-1] == pytest.approx(sampled, rel=MONTE_CARLO)


def test_growing_batches_beat_constant_ones_of_the_same_cost():
    rates = np.full(200, 0.5)
    constant = momentum_losses(PROBLEM, rates, batches=8.0)[-1]
    growing = momentum_losses(PROBLEM, rates, batches=np.linspace(1, 15, 200))[-1]
    assert growing < 0.75 * constant


def noisy_quadratic_task(points):
    momenta = 1 - points["one_minus_momentum"]
    rates = points["effective_rate"] * (1 - momenta)
    rows = zip(rates, momenta, points["batch"], strict=True)
    losses = []
    with np.errstate(over="ignore", invalid="ignore"):
        for rate, momentum, batch in rows:
            schedule = rate * shape_rates("linear", max(int(300 / batch), 2))
            losses.append(momentum_losses(PROBLEM, schedule, momentum=momentum, batches=batch)[-1])
    return np.array(losses)


@pytest.mark.oracle
def test_rate_momentum_and_batch_on_the_noisy_quadratic():
    pytest.importorskip("sklearn")
    space = {
        "effective_rate": (0.02, 20.0),
        "one_minus_momentum": (0.02, 1.0),
        "batch": (1.0, 50.0),
    }
    found = joint_search(noisy_quadratic_task, space)
    assert found.losses.shape == (28,)
    axes = [np.geomspace(*limits, 8) for limits in space.values()]
    grid = [axis.ravel() for axis in np.meshgrid(*axes)]
    truth = noisy_quadratic_task(dict(zip(space, grid, strict=True)))
    assert found.loss <= FOUND * np.nanmin(truth)
    assert found.loss < np.nanmin(found.losses[:16])
    again = joint_search(noisy_quadratic_task, space)
    np.testing.assert_array_equal(found.losses, again.losses)


@pytest.mark.oracle
def test_rate_momentum_and_weight_decay_on_digits():
    """Short annealed runs, all points of a round in one program; against a rate alone."""
    datasets = pytest.importorskip("sklearn.datasets")
    images, classes = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images = jnp.asarray(images[order] / 16.0, jnp.float32)
    classes = jnp.asarray(classes[order])
    train, held = slice(0, 1200), slice(1200, 1500)
    shape = jnp.asarray(shape_rates("linear", 100, 10), jnp.float32)
    keys = jax.random.split(jax.random.key(0), 2)
    params = [
        jax.random.normal(keys[0], (64, 64)) / 8,
        jax.random.normal(keys[1], (64, 10)) / 8,
    ]

    def loss_fn(params, rows, labels):
        scores = jax.nn.log_softmax(jax.nn.relu(rows @ params[0]) @ params[1])
        return -jnp.take_along_axis(scores, labels[:, None], 1).mean()

    @jax.jit
    @jax.vmap
    def run(rate, momentum, decay):
        def step(carry, inputs):
            params, velocity = carry
            index, scale = inputs
            rows = jax.random.randint(jax.random.fold_in(keys[0], index), (32,), 0, 1200)
            gradients = jax.grad(loss_fn)(params, images[train][rows], classes[train][rows])
            velocity = [
                momentum * u + g + decay * p
                for u, g, p in zip(velocity, gradients, params, strict=True)
            ]
            params = [p - rate * scale * u for p, u in zip(params, velocity, strict=True)]
            return (params, velocity), None

        start = (params, [jnp.zeros_like(p) for p in params])
        (trained, _), _ = jax.lax.scan(step, start, (jnp.arange(100), shape))
        return loss_fn(trained, images[held], classes[held])

    def evaluate(points):
        momenta = 1 - points["one_minus_momentum"]
        rates = points["effective_rate"] * (1 - momenta)
        losses = run(jnp.asarray(rates), jnp.asarray(momenta), jnp.asarray(points["decay"]))
        return np.asarray(losses)

    space = {
        "effective_rate": (1e-2, 1e2),
        "one_minus_momentum": (0.02, 1.0),
        "decay": (1e-6, 1e-1),
    }
    found = joint_search(evaluate, space)
    rates = np.geomspace(1e-2, 1e2, 28)
    alone = evaluate(
        {"effective_rate": rates, "one_minus_momentum": np.ones(28), "decay": np.full(28, 1e-6)}
    )
    assert found.loss < 1.02 * np.nanmin(alone)
    assert found.loss < 0.5


def test_effective_rate():
    np.testing.assert_allclose(effective_rate(np.array([0.1, 1.0]), 0.9), [1.0, 10.0])


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: momentum_losses(PROBLEM, [0.1], batches=0.0), "batches"),
        (lambda: momentum_losses(PROBLEM, [0.1], momentum=1.0), "momentum"),
        (lambda: joint_search(len, {"rate": (0.0, 1.0)}), "rate"),
        (lambda: joint_search(len, {"rate": (0.1, 1.0)}, points=0), "points"),
        (lambda: joint_search(lambda p: np.zeros(3), {"rate": (0.1, 1.0)}, rounds=0), "losses"),
        (
            lambda: joint_search(
                lambda p: np.full(len(p["rate"]), np.nan), {"rate": (0.1, 1.0)}, rounds=0
            ),
            "diverged",
        ),
    ],
)
def test_wrong_arguments_are_named(make, word):
    with pytest.raises(ValueError, match=word):
        make()
