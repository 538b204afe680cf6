"""Every contender through one loop, and the ones with a closed form against it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from toolkit.lr import CONTENDERS, contender, shape_rates, warmup_stable_decay_schedule

STEPS = 60
EXACT = 1e-5  # relative, float32
PARAMS = {"w": jnp.array([1.0, -1.0]), "b": jnp.float32(0.5)}


def loss_fn(params):
    return jnp.sum(params["w"] ** 2) + params["b"] ** 2


def train(rival, steps=STEPS):
    transformation = rival.transformation

    @jax.jit
    def step(carry, _):
        params, state = carry
        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, state = transformation.update(gradients, state, params, value=loss)
        return (optax.apply_updates(params, updates), state), loss

    start = (PARAMS, transformation.init(PARAMS))
    (params, state), losses = jax.lax.scan(step, start, length=steps)
    return rival.evaluation_params(state, params), np.asarray(losses)


@pytest.mark.parametrize("name", CONTENDERS)
def test_every_contender_goes_through_the_same_loop(name):
    rival = contender(name, STEPS, None if CONTENDERS[name].default_rate else 0.05)
    params, losses = train(rival)
    assert jax.tree.structure(params) == jax.tree.structure(PARAMS)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    assert losses.shape == (STEPS,)
    assert loss_fn(params) < losses[0]


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd", "wsd_sqrt"])
def test_schedules_make_the_updates_of_their_shape(name):
    """On a linear loss with plain steps the parameter is the sum of the rates."""
    transformation = contender(name, STEPS, 0.3, optimizer=optax.sgd(1.0)).transformation
    state, position, positions = transformation.init(jnp.float32(0)), 0.0, []
    for _ in range(STEPS):
        update, state = transformation.update(jnp.float32(-1), state, value=jnp.float32(0))
        position += float(update)
        positions.append(position)
    expected = np.cumsum(0.3 * shape_rates(name, STEPS, 3))
    np.testing.assert_allclose(positions, expected, rtol=EXACT)


@pytest.mark.parametrize(("shape", "cooldown"), [("linear", "linear"), ("sqrt", "sqrt")])
def test_shapes_agree_with_the_schedules(shape, cooldown):
    name = {"linear": "wsd", "sqrt": "wsd_sqrt"}[shape]
    schedule = warmup_stable_decay_schedule(
        1.0, 100, warmup_steps=10, cooldown_steps=20, shape=cooldown
    )
    np.testing.assert_allclose(
        jax.vmap(schedule)(np.arange(100)), shape_rates(name, 100, 10), rtol=EXACT, atol=1e-7
    )
    line = warmup_stable_decay_schedule(1.0, 100, warmup_steps=10, cooldown_steps=90)
    np.testing.assert_allclose(
        jax.vmap(line)(np.arange(100)), shape_rates("linear", 100, 10), rtol=EXACT
    )
    cosine = optax.cosine_decay_schedule(1.0, 100)
    np.testing.assert_allclose(
        jax.vmap(cosine)(np.arange(100)), shape_rates("cosine", 100), rtol=EXACT, atol=1e-6
    )


def test_schedule_free_is_evaluated_at_its_average():
    rival = contender("schedule_free", STEPS, 0.05)
    state = rival.transformation.init(PARAMS)
    assert rival.evaluation_params(state, PARAMS)["w"].shape == (2,)
    params, _ = train(rival)
    # The iterates swing around zero; their average is closer.
    assert loss_fn(params) < 0.6 * loss_fn(PARAMS)


def test_the_plateau_rule_sees_the_loss():
    rival = contender("reduce_on_plateau", 200, 0.1, optimizer=optax.sgd(1.0))
    state = rival.transformation.init(jnp.float32(0))
    sizes = []
    for _ in range(40):
        update, state = rival.transformation.update(jnp.float32(-1), state, value=jnp.float32(1.0))
        sizes.append(float(update))
    assert sizes[-1] < 0.6 * sizes[9]


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: contender("adagrad", 10), "adagrad"),
        (lambda: contender("linear", 10), "needs a rate"),
        (lambda: contender("linear", 10, -1.0), "rate"),
        (lambda: contender("prodigy", 1), "steps"),
        (lambda: shape_rates("cubic", 10), "cubic"),
        (lambda: shape_rates("linear", 10, 10), "warmup_steps"),
    ],
)
def test_wrong_arguments_are_named(make, word):
    with pytest.raises(ValueError, match=word):
        make()
