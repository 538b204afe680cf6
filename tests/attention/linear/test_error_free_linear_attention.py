"""Error-free linear attention: its differential equation by matrix exponentials, and long keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64
from scipy.linalg import expm

from toolkit.attention import delta_net, draw_inputs, error_free_linear_attention, mixer
from toolkit.testing.states import assert_close

FLOAT64_TOLERANCE = 1e-11
FLOAT32_TOLERANCE = 2e-5


def drawn(time, **how):
    return draw_inputs(mixer("efla"), time, batch=1, heads=1, key=6, value=3, **how)


def by_matrix_exponentials(q, k, v, beta):
    """dS/dt = -k k^T S + k v^T for a time beta per token: one linear system, of S and of ones."""
    q, k, v, beta = (np.asarray(x, np.float64)[0, :, 0] for x in (q, k, v, beta))
    key, value = k.shape[-1], v.shape[-1]
    state, out = np.zeros((key, value)), []
    for q_t, k_t, v_t, beta_t in zip(q, k, v, beta, strict=True):
        system = np.zeros((key + value, key + value))
        system[:key, :key], system[:key, key:] = -np.outer(k_t, k_t), np.outer(k_t, v_t)
        state = (expm(beta_t * system) @ np.concatenate([state, np.eye(value)]))[:key]
        out.append(state.T @ q_t / np.sqrt(key))
    return np.stack(out), state


@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 20.0])
def test_it_solves_the_differential_equation(size):
    with enable_x64(True):
        q, k, v, beta = drawn(20, dtype=jnp.float64)
        k = size * k
        out, state = error_free_linear_attention(q, k, v, beta)
        wanted = by_matrix_exponentials(q, k, v, beta)
        assert_close((out[0, :, 0], state[0, 0]), wanted, FLOAT64_TOLERANCE)


def test_gradients_of_short_keys_keep_their_digits():
    """The quotient's derivative alone would be a difference of two large equal numbers."""
    q, k, v, beta = drawn(20)

    def gradients(*inputs):
        return jax.grad(lambda *x: jnp.sum(error_free_linear_attention(*x)[0]), (1, 3))(*inputs)

    got = gradients(q, 1e-3 * k, v, beta)
    with enable_x64(True):
        wanted = gradients(*(x.astype(jnp.float64) for x in (q, 1e-3 * k, v, beta)))
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=FLOAT32_TOLERANCE * np.abs(b).max())


def test_of_short_keys_it_is_the_delta_rule():
    q, k, v, beta = drawn(20)
    got = error_free_linear_attention(q, 1e-3 * k, v, beta)
    assert_close(got, delta_net(q, 1e-3 * k, v, beta), FLOAT32_TOLERANCE)


def test_long_keys_do_not_expand_the_state():
    """The control is one Euler step of the same equation."""
    q, k, v, beta = drawn(20)
    _, state = error_free_linear_attention(q, 3 * k, v, beta)
    _, euler = delta_net(q, 3 * k, v, beta)
    assert np.abs(state).max() < 10 < 1e6 < np.abs(euler).max()
