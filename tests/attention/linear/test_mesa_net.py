"""MesaNet: the least squares that it solves, how fast its iterations reach them, and its limits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64

from toolkit.attention import MesaState, draw_inputs, mesa_net, mesa_net_step, mixer
from toolkit.bench.mixers.matrix_products import matrix_flops

FLOAT64_TOLERANCE = 1e-11
BOUND_SLACK = 1.01  # rounding


def drawn(time, key=6, **how):
    return draw_inputs(mixer("mesa"), time, batch=1, heads=1, key=key, value=3, **how)


def by_least_squares(q, k, v, g, beta, penalty):
    """The ridge regression of all values so far on their keys, by a QR of the stacked rows."""
    q, k, v, g, beta, penalty = (np.asarray(x, np.float64)[0, :, 0] for x in (
        q, k, v, g, beta, penalty))  # fmt: skip
    out = []
    for t in range(len(q)):
        decay = np.array([np.exp(np.sum(g[s + 1 : t + 1])) for s in range(t + 1)])
        weight = np.sqrt(decay * beta[: t + 1])[:, None]
        rows = np.concatenate([weight * k[: t + 1], np.diag(np.sqrt(penalty[t]))])
        targets = np.concatenate([weight * v[: t + 1], np.zeros((k.shape[1], v.shape[1]))])
        fitted, *_ = np.linalg.lstsq(rows, targets, rcond=None)
        out.append(fitted.T @ q[t])
    return np.stack(out)


def test_its_outputs_are_those_of_the_fitted_map():
    with enable_x64(True):
        inputs = drawn(21, dtype=jnp.float64)
        out, _ = mesa_net(*inputs)
        np.testing.assert_allclose(
            out[0, :, 0], by_least_squares(*inputs), rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE
        )


@pytest.mark.parametrize("iterations", [1, 4, 8])
def test_iterations_converge_as_documented(iterations):
    """In the norm of the system; the control is that so few iterations are not yet exact."""
    with enable_x64(True):
        key = 24
        q, k, v, g, beta, penalty = drawn(50, key=key, dtype=jnp.float64)
        v = jnp.broadcast_to(jnp.eye(key)[None, :, None], (1, key, 1, key))  # shows x itself
        q, k, g, beta, penalty = (x[:, :key] for x in (q, k, g, beta, penalty))
        run = partial(mesa_net, q, k, v, g, beta, penalty)
        got, exact = run(iterations=iterations)[0], run(iterations=4 * key)[0]
        G = run()[1].covariance[0, 0]
        ratio = np.sqrt(1 + np.linalg.norm(G, 2) / np.min(penalty))
        # At the last token: S^T e for S = sum of decayed k_s e_s^T weighs the error by keys.
        error = np.linalg.norm((got - exact)[0, -1, 0])
        size = np.linalg.norm(exact[0, -1, 0])
        bound = 2 * ratio * ((ratio - 1) / (ratio + 1)) ** iterations
        assert 1e-9 < error / size < BOUND_SLACK * bound


def test_no_query_and_no_penalty_are_what_they_must_be():
    """A zero right-hand side has a finite gradient; a penalty of 0 or less gives NaN."""
    q, k, v, g, beta, penalty = drawn(5)
    gradients = jax.grad(lambda *x: jnp.sum(mesa_net(*x)[0]), range(6))(
        0 * q, k, v, g, beta, penalty
    )
    assert all(np.isfinite(x).all() for x in gradients)
    for wrong in (0.0, -1.0):
        spoilt = penalty.at[0, 2, 0, 1].set(wrong)
        out, _ = mesa_net(q, k, v, g, beta, spoilt)
        assert np.isfinite(out[0, :2]).all()
        assert np.isnan(out[0, 2:]).all()
        state = MesaState(jnp.zeros((1, 1, 6, 6)), jnp.zeros((1, 1, 6, 3)))
        out_t, _ = mesa_net_step(*(x[:, 2] for x in (q, k, v, g, beta, spoilt)), state)
        assert np.isnan(out_t).all()


def test_with_a_large_penalty_it_is_gated_linear_attention():
    q, k, v, g, beta, penalty = drawn(21)
    large = 1e6 * jnp.ones_like(penalty)
    out, _ = mesa_net(q, k, v, g, beta, large, scale=1e6)
    wanted, _ = mixer("mamba2").function(q, k, v, g, beta)
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)


def test_flops_of_a_sequence_are_those_of_the_formula():
    """Of matrix products, iterations included."""
    row, sizes = mixer("mesa"), (1, 64, 2, 32, 32)
    inputs = draw_inputs(row, 64, batch=1, heads=2, key=32, value=32)
    counted = matrix_flops(lambda *x: row.function(*x, chunk=32), *inputs)
    assert counted == pytest.approx(row.forward_flops(*sizes, chunk=32), rel=0.1)
