"""The rules that only add, beyond the contracts: one as another, and their own arguments."""

import jax
import jax.numpy as jnp
import pytest
from float64 import enable_x64

from toolkit.attention import (
    draw_inputs,
    gated_linear_attention,
    hgrn2,
    linear_attention,
    mamba2,
    mixer,
    retention,
    retention_log_decay,
)
from toolkit.testing.states import assert_close, results

FLOAT64_TOLERANCE = 1e-11
FLOAT32_TOLERANCE = 2e-5


def over_channels(g, key=16):
    return jnp.broadcast_to(g[..., None], (*g.shape, key))


def test_retention_is_gated_linear_attention_with_a_constant_gate():
    with enable_x64(True):
        tokens = draw_inputs(mixer("retention"), 70, dtype=jnp.float64)
        g = jnp.broadcast_to(retention_log_decay(2)[None, None], tokens[0].shape[:3])
        assert_close(jnp.exp(g[0, 0]), jnp.asarray([1 - 2**-5, 1 - 2**-6]), FLOAT64_TOLERANCE)
        got = results(retention, tokens)
        wanted = results(lambda *x: gated_linear_attention(*x, over_channels(g)), tokens)
        assert_close(got, wanted, FLOAT64_TOLERANCE)


def test_retention_takes_other_rates():
    tokens = draw_inputs(mixer("retention"), 20)
    exact = jax.jit(linear_attention)(*tokens)
    assert_close(retention(*tokens, log_decay=jnp.zeros(2)), exact, FLOAT32_TOLERANCE)
    with pytest.raises(ValueError, match=r"log_decay .*must have shape \(2,\)"):
        retention(*tokens, log_decay=jnp.zeros(3))


def test_linear_attention_and_mamba2_are_scalar_decays():
    """Mamba-2 with time step 1 and no decay is linear attention; with decay, equal channels."""
    with enable_x64(True):
        q, k, v, g, dt = draw_inputs(mixer("mamba2"), 70, dtype=jnp.float64)
        scale = q.shape[-1] ** -0.5
        plain = results(
            lambda *x: mamba2(*x, jnp.zeros_like(g), jnp.ones_like(dt), scale=scale), [q, k, v]
        )
        assert_close(results(linear_attention, [q, k, v]), plain, FLOAT64_TOLERANCE)

        def by_channels(q, k, v, g, dt):
            return gated_linear_attention(q, k, dt[..., None] * v, over_channels(g), scale=1.0)

        inputs = [q, k, v, g, dt]
        assert_close(results(mamba2, inputs), results(by_channels, inputs), FLOAT64_TOLERANCE)


def test_hgrn2_ties_the_key_to_the_gate():
    with enable_x64(True):
        inputs = draw_inputs(mixer("hgrn2"), 70, dtype=jnp.float64)
        wanted = results(lambda q, v, g: gated_linear_attention(q, 1 - jnp.exp(g), v, g), inputs)
        assert_close(results(hgrn2, inputs), wanted, FLOAT64_TOLERANCE)


def test_wrong_sizes_are_named():
    q, v, g = draw_inputs(mixer("hgrn2"), 4)
    with pytest.raises(ValueError, match=r"g .*must have shape \(2, 4, 2, 16\)"):
        hgrn2(q, v, g[..., :8])
    with pytest.raises(ValueError, match=r"g must have 4 axes"):
        hgrn2(q, v, g[..., 0])
