"""Log-decays and unit vectors: their equations, and gradients that stay finite at the limits."""

from inspect import signature

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64
from jax.test_util import check_grads

from toolkit.attention import MIXERS, draw_inputs, log_decay, mixer, unit_length

EXTREMES = jnp.asarray([-1e4, -200.0, 0.0, 200.0, 1e4])


def draw(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape))


@pytest.mark.parametrize("least", [None, -5.0])
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 4, 5)])
def test_log_decays_are_their_equation(shape, least):
    with enable_x64(True):
        raw, bias = draw(*shape), draw(*shape[2:])
        log_rate = draw(4) if len(shape) == 3 else draw(4)[:, None]
        shifted, rate = np.asarray(raw + bias[None, None]), np.exp(log_rate)
        wanted = -rate * np.log1p(np.exp(shifted))
        if least is not None:
            wanted = least / (1 + np.exp(-rate * shifted))

        def g(*x):
            return log_decay(*x, least=least)

        np.testing.assert_allclose(g(raw, log_rate, bias), wanted, rtol=1e-12)
        check_grads(jax.jit(g), (raw, log_rate, bias), order=2, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("least", [None, -5.0])
def test_gradients_at_the_limits_are_finite(least):
    def total(raw):
        return jnp.sum(log_decay(raw, jnp.zeros(5), least=least))

    value, gradient = jax.value_and_grad(total)(EXTREMES)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    assert np.isfinite(jax.grad(lambda x: jnp.sum(unit_length(x)))(jnp.zeros((1, 3)))).all()


def test_unit_length():
    x = draw(2, 3).astype(jnp.bfloat16)
    assert unit_length(x).dtype == jnp.bfloat16
    np.testing.assert_allclose(jnp.linalg.norm(unit_length(draw(5, 4)), axis=-1), 1, rtol=1e-5)


@pytest.mark.parametrize("length", [1e6, 1e13, 1e18])
def test_the_gradient_of_unit_length_is_right_at_any_length(length):
    x, weights = draw(4).astype(jnp.float32), jnp.arange(4, dtype=jnp.float32)
    gradient = jax.grad(lambda x: jnp.sum(weights * unit_length(x)))
    np.testing.assert_allclose(length * gradient(length * x), gradient(x), rtol=1e-4)


def test_a_vector_whose_length_overflows_is_not_a_number():
    x = jnp.asarray([[2e19, 1.0], [3.0, 4.0]])
    np.testing.assert_allclose(unit_length(x), [[np.nan] * 2, [0.6, 0.8]], rtol=1e-6)
    gradient = jax.grad(lambda x: jnp.nansum(unit_length(x)))(x)
    assert np.isfinite(gradient[1]).all()


@pytest.mark.by_family
@pytest.mark.parametrize(
    "name",
    [row.name for row in MIXERS.values() if "normalize_qk" in signature(row.step).parameters],
)
def test_queries_and_keys_are_brought_to_unit_length_inside_the_call(name):
    with enable_x64(True):
        row = mixer(name)
        q, k, *others = draw_inputs(row, 5, batch=1, key=4, value=3, dtype=jnp.float64)
        scaled, unit = (3 * q, k / 2), (unit_length(3 * q), unit_length(k / 2))
        for function in (row.function, row.reference):
            got = function(*scaled, *others, normalize_qk=True)
            wanted = jax.tree.leaves(function(*unit, *others))
            for a, b in zip(jax.tree.leaves(got), wanted, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
        token = [x[:, 0] for x in (*scaled, *others)]
        empty = row.empty_state(1, 2, 4, 3, 5, jnp.float64)
        out, _ = row.step(*token, empty, normalize_qk=True)
        np.testing.assert_allclose(out, got[0][:, 0], rtol=1e-10, atol=1e-12)


def test_wrong_arguments_are_named():
    raw = draw(2, 3, 4)
    with pytest.raises(ValueError, match=r"log_rate must fit raw \(2, 3, 4\) from the right"):
        log_decay(raw, jnp.zeros(3))
    with pytest.raises(ValueError, match="least must be below 0; got 5"):
        log_decay(raw, jnp.zeros(4), least=5.0)
