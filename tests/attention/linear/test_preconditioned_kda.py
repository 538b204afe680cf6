"""Preconditioned KDA: the paper's recurrence in NumPy, and what its stretching does."""

import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64

from toolkit.attention import draw_inputs, kimi_delta_attention, mixer, preconditioned_kda

FLOAT64_TOLERANCE = 1e-11
CENTER = -0.2


def drawn(time, **how):
    return draw_inputs(mixer("pkda"), time, batch=1, heads=1, key=6, value=3, **how)


def by_recurrence(q, k, v, g, beta, fading, weight, *, center, epsilon):
    """With the center of log A in its place, token by token."""
    q, k, v, g, beta, fading, weight = (
        np.asarray(x, np.float64)[0, :, 0] for x in (q, k, v, g, beta, fading, weight)
    )
    squares, memory, out = np.zeros(k.shape[1]), np.zeros((k.shape[1], v.shape[1])), []
    for t in range(len(q)):
        squares = np.exp(fading[t]) * squares + weight[t] * k[t] ** 2
        distance = np.log(squares + epsilon) - center
        stretched = k[t] * np.exp(-np.log(1.5) * distance / (1 + np.abs(distance)))
        memory = np.exp(g[t])[:, None] * memory
        memory = memory + beta[t] * np.outer(stretched, v[t] - memory.T @ k[t])
        out.append(memory.T @ q[t] / np.sqrt(k.shape[1]))
    return np.stack(out), squares, memory


def test_it_is_the_recurrence_of_the_paper():
    """Whose center is a factor of the weights, and of epsilon."""
    with enable_x64(True):
        *inputs, weight = drawn(37, dtype=jnp.float64)
        factor = np.exp(-CENTER)
        out, state = preconditioned_kda(*inputs, factor * weight, epsilon=1e-6 * factor)
        wanted = by_recurrence(*inputs, weight, center=CENTER, epsilon=1e-6)
        got = (out[0, :, 0], state.curvature[0, 0] / factor, state.memory[0, 0])
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE)


def test_where_all_is_stretched_alike_it_is_kda_with_longer_writes():
    """log A = 0 stretches nothing; a vanishing A stretches by almost 3/2, a huge one by 2/3."""
    with enable_x64(True):
        q, k, v, g, beta, fading, weight = drawn(21, dtype=jnp.float64)
        for epsilon, factor in ((1.0, 1.0), (1e-300, 1.5 ** (690.8 / 691.8))):
            out, _ = preconditioned_kda(q, k, v, g, beta, fading, 0 * weight, epsilon=epsilon)
            wanted, _ = preconditioned_kda(
                q, k, v, g, factor * beta, fading, 0 * weight, epsilon=1.0
            )
            np.testing.assert_allclose(out, wanted, rtol=1e-6)
        plain, _ = kimi_delta_attention(q, k, v, g, beta)
        out, _ = preconditioned_kda(q, k, v, g, beta, fading, 0 * weight, epsilon=1.0)
        np.testing.assert_allclose(out, plain, rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE)


def test_a_fading_above_zero_or_a_negative_weight_is_nan_from_there_on():
    *inputs, fading, weight = drawn(7)
    for spoilt in (
        (fading.at[0, 3, 0].set(0.5), weight),
        (fading, weight.at[0, 3, 0].set(-1.0)),
    ):
        out, _ = preconditioned_kda(*inputs, *spoilt)
        assert np.isfinite(out[0, :3]).all()
        assert np.isnan(out[0, 3]).all()


@pytest.mark.parametrize("epsilon", [0.0, -1.0])
def test_what_has_no_logarithm_is_refused(epsilon):
    inputs = draw_inputs(mixer("pkda"), 3)
    with pytest.raises(ValueError, match="epsilon must be finite and above zero"):
        preconditioned_kda(*inputs, epsilon=epsilon)
