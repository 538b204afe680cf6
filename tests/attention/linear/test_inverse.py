"""The inverse of I + A on the keys that break shortcuts: correlated and repeated ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64

from toolkit.attention import unit_lower_inverse

FLOAT32_TOLERANCE = 1e-4
FLOAT64_TOLERANCE = 1e-10


def delta_matrix(correlation, beta, size, batch=3):
    """A_ij = beta k_i . k_j below the diagonal, for unit keys with the given correlation."""
    random = np.random.default_rng(0)
    common = random.standard_normal((batch, 1, 64))
    own = random.standard_normal((batch, size, 64))
    k = np.sqrt(correlation) * common + np.sqrt(1 - correlation) * own
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    return np.tril(beta * k @ k.swapaxes(-1, -2), -1)


def power_inverse(a):
    """(I - A)(I + A^2)(I + A^4)...: exact on paper, and the wrong way on hard keys."""
    eye = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
    inverse, power = eye - a, a @ a
    for _ in range(a.shape[-1].bit_length() - 2):
        inverse, power = inverse @ (eye + power), power @ power
    return inverse


def exact_inverse(a):
    return np.linalg.inv(np.eye(a.shape[-1]) + a)


def relative_error(got, wanted):
    return np.abs(np.asarray(got, np.float64) - wanted).max() / np.abs(wanted).max()


@pytest.mark.parametrize("size", [1, 7, 16, 32, 48, 64, 128])
def test_equal_to_the_dense_inverse(size):
    with enable_x64(True):
        a = delta_matrix(0.5, 1.0, size)
        got = jax.jit(unit_lower_inverse)(jnp.asarray(a))
        np.testing.assert_allclose(got, exact_inverse(a), atol=FLOAT64_TOLERANCE)


@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("correlation", [0.99, 1.0], ids=["correlated", "repeated"])
@pytest.mark.parametrize("size", [64, 128])
def test_hard_keys(correlation, beta, size):
    a = delta_matrix(correlation, beta, size)
    cotangent = np.random.default_rng(1).standard_normal(a.shape)
    inverse, backward = jax.vjp(unit_lower_inverse, jnp.asarray(a, jnp.float32))
    wanted = exact_inverse(a)
    transposed = wanted.swapaxes(-1, -2)
    wanted_gradient = -np.tril(transposed @ cotangent @ transposed, -1)
    assert relative_error(inverse, wanted) < FLOAT32_TOLERANCE
    (gradient,) = backward(jnp.asarray(cotangent, jnp.float32))
    assert relative_error(gradient, wanted_gradient) < FLOAT32_TOLERANCE


@pytest.mark.parametrize(("correlation", "beta"), [(0.99, 1.0), (1.0, 1.0), (1.0, 2.0)])
def test_powers_fail_on_the_same_keys(correlation, beta):
    """Why the file does not use them. Powers of A reach 2^C and cancel to nothing in float32."""
    a = delta_matrix(correlation, beta, 128)
    powers = power_inverse(jnp.asarray(a, jnp.float32))
    assert not relative_error(powers, exact_inverse(a)) < 1.0
    if beta == 2.0:
        assert np.isnan(powers).any()


def test_gradient_equals_differentiating_a_dense_inverse():
    with enable_x64(True):
        a = jnp.asarray(delta_matrix(0.5, 1.5, 32))
        eye = jnp.broadcast_to(jnp.eye(32), a.shape)
        got = jax.grad(lambda a: jnp.sum(jnp.sin(unit_lower_inverse(a))))(a)
        wanted = jax.grad(lambda a: jnp.sum(jnp.sin(jnp.linalg.inv(eye + jnp.tril(a, -1)))))(a)
        np.testing.assert_allclose(got, wanted, atol=FLOAT64_TOLERANCE)
