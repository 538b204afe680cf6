"""Log-linear attention: levels as a Fenwick tree finds them, dense products, long pasts."""

import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64

from toolkit.attention import (
    draw_inputs,
    gated_delta_net,
    log_linear_gated_delta_net,
    log_linear_mamba2,
    mamba2,
    mixer,
)
from toolkit.bench.mixers.matrix_products import matrix_flops

FLOAT64_TOLERANCE = 1e-11
FLOPS_TOLERANCE = 0.15
TIME = 45  # longer than a chunk, and no power of two
FUNCTIONS = {"log_mamba2": log_linear_mamba2, "log_gdn": log_linear_gated_delta_net}


def drawn(name, levels=8):
    return draw_inputs(
        mixer(name), TIME, batch=1, heads=1, key=6, value=3, levels=levels, dtype=jnp.float64
    )


def fenwick_levels(t, levels):
    """Of tokens 0 to t: t itself, then spans that the lowest bits of what is left cut off."""
    found, end = np.zeros(t + 1, int), t
    while end:
        span = end & -end
        found[end - span : end] = min(span.bit_length(), levels - 1)
        end -= span
    return found


def by_products(name, q, k, v, g, strength, weights):
    """Every pair of tokens by the product of all transitions between them."""
    q, k, v, g, strength, weights = (
        np.asarray(x, np.float64)[0, :, 0] for x in (q, k, v, g, strength, weights)
    )
    size, out = k.shape[1], []
    for t in range(TIME):
        level, row, total = fenwick_levels(t, weights.shape[1]), q[t].copy(), 0
        for s in range(t, -1, -1):
            total = total + weights[t, level[s]] * (row @ k[s]) * strength[s] * v[s]
            erased = strength[s] * np.outer(k[s], k[s]) if name == "log_gdn" else 0
            row = row @ (np.exp(g[s]) * (np.eye(size) - erased))
        out.append(total)
    return np.stack(out) * (size**-0.5 if name == "log_gdn" else 1)


@pytest.mark.parametrize("levels", [1, 3, 8])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_the_sum_over_levels_of_all_pairs(name, levels):
    """Also where the last level holds much more than twice as much as the one before."""
    with enable_x64(True):
        inputs = drawn(name, levels)
        out, state = FUNCTIONS[name](*inputs)
        np.testing.assert_allclose(
            out[0, :, 0],
            by_products(name, *inputs),
            rtol=FLOAT64_TOLERANCE,
            atol=FLOAT64_TOLERANCE,
        )
        assert state.levels.shape == (1, 1, levels, 6, 3)
        assert state.count.tolist() == [[TIME]]
        held = np.abs(state.levels[0, 0]).max(axis=(1, 2)) > 0
        np.testing.assert_array_equal(
            held, np.isin(np.arange(levels), fenwick_levels(TIME - 1, levels))
        )


@pytest.mark.parametrize(("name", "plain"), [("log_mamba2", mamba2), ("log_gdn", gated_delta_net)])
def test_equal_weights_give_the_method_back(name, plain):
    """And the sum of all levels is its state."""
    with enable_x64(True):
        *inputs, weights = drawn(name)
        out, state = FUNCTIONS[name](*inputs, jnp.ones_like(weights))
        wanted, final = plain(*inputs)
        got = (out, state.levels.sum(axis=2))
        for a, b in zip(got, (wanted, final), strict=True):
            np.testing.assert_allclose(a, b, rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE)


def test_levels_are_told_by_the_weights():
    with enable_x64(True):
        *inputs, weights = drawn("log_gdn")
        _, state = log_linear_gated_delta_net(*inputs, weights)
        with pytest.raises(ValueError, match=r"initial_state.levels .*must have shape .*5"):
            log_linear_gated_delta_net(*inputs, weights[..., :5], initial_state=state)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_flops_of_a_sequence_are_those_of_the_formula(name):
    row, sizes = mixer(name), (1, 64, 2, 32, 32)
    inputs = draw_inputs(row, 64, batch=1, heads=2, key=32, value=32)
    counted = matrix_flops(lambda *x: row.function(*x, chunk=32), *inputs)
    assert counted == pytest.approx(row.forward_flops(*sizes, chunk=32), rel=FLOPS_TOLERANCE)
