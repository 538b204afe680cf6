"""The fading memories beyond the contracts: one as another, states, limits, long sequences."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_results import assert_close, random_state, results, with_state

from toolkit.attention import (
    draw_inputs,
    gated_linear_attention,
    gated_linear_attention_reference,
    hgrn2,
    linear_attention,
    mamba2,
    mamba2_reference,
    mixer,
    retention,
    retention_log_decay,
)

FLOAT64_TOLERANCE = 1e-11
FLOAT32_TOLERANCE = 2e-5

GLA, MAMBA2 = mixer("gla"), mixer("mamba2")


def over_channels(g, key=16):
    return jnp.broadcast_to(g[..., None], (*g.shape, key))


def test_retention_is_gated_linear_attention_with_a_constant_gate():
    with jax.enable_x64(True):
        tokens = draw_inputs(mixer("retention"), 70, dtype=jnp.float64)
        g = jnp.broadcast_to(retention_log_decay(2)[None, None], tokens[0].shape[:3])
        assert_close(jnp.exp(g[0, 0]), [1 - 2**-5, 1 - 2**-6], FLOAT64_TOLERANCE)
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
    with jax.enable_x64(True):
        q, k, v, g, dt = draw_inputs(MAMBA2, 70, dtype=jnp.float64)
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
    with jax.enable_x64(True):
        inputs = draw_inputs(mixer("hgrn2"), 70, dtype=jnp.float64)
        wanted = results(lambda q, v, g: gated_linear_attention(q, 1 - jnp.exp(g), v, g), inputs)
        assert_close(results(hgrn2, inputs), wanted, FLOAT64_TOLERANCE)


@pytest.mark.parametrize("implementation", ["xla", "scan"])
@pytest.mark.parametrize("row", [MAMBA2, GLA], ids=["mamba2", "gla"])
def test_states_and_grouped_values_carry_gradients(row, implementation):
    with jax.enable_x64(True):
        inputs = draw_inputs(row, 70, heads=4, dtype=jnp.float64)
        inputs = [x[:, :, :2] for x in inputs[:2]] + inputs[2:]
        inputs.append(random_state(4, inputs[0].dtype))
        # Ends of documents inside a chunk, at its edge, of one token, and a number used twice.
        first = np.repeat([4, 1, 2, 4, 9], [10, 22, 1, 30, 7])
        segment_ids = jnp.asarray(np.stack([first, np.repeat([0, 1], [64, 6])]))
        options = {"segment_ids": segment_ids, "scale": 0.7}
        got = results(with_state(row.function), inputs, implementation=implementation, **options)
        wanted = results(with_state(row.reference), inputs, **options)
        assert_close(got, wanted, FLOAT64_TOLERANCE)


def test_not_finite_gates_show_in_their_own_document_only():
    q, k, v, g = draw_inputs(GLA, 40, batch=1)
    run = jax.jit(partial(gated_linear_attention, segment_ids=jnp.repeat(jnp.arange(2), 20)[None]))
    out, state = run(q, k, v, g.at[0, 5, 0, 3].set(jnp.nan))
    assert np.isnan(out[0, 5:20, 0]).all()
    assert np.isfinite(out[0, :5]).all()
    assert np.isfinite(out[0, 20:]).all()
    assert np.isfinite(out[0, :, 1]).all()
    assert np.isfinite(state).all()


@pytest.mark.parametrize("row", [MAMBA2, GLA], ids=["mamba2", "gla"])
def test_gates_at_their_limits(row):
    """No decay at all, a nearly cleared state, and an exactly cleared one, at half the tokens."""
    inputs = draw_inputs(row, 45)
    got_of = jax.jit(partial(results, row.function))
    wanted_of = jax.jit(partial(results, row.reference))
    for decay in (0.0, -30.0, -200.0, -jnp.inf):
        inputs[3] = inputs[3].at[:, ::2].set(decay)
        got = got_of(inputs)
        with jax.enable_x64(True):
            wanted = wanted_of([x.astype(jnp.float64) for x in inputs])
        assert all(np.isfinite(x).all() for x in got)
        # The tolerance grows with the running sum of g, whose rounding the differences inherit.
        assert_close(got, wanted, FLOAT32_TOLERANCE * max(1.0, min(-decay, 87.0)))


def test_every_chunk_size_gives_the_same_result():
    inputs = draw_inputs(GLA, 70)
    wanted = gated_linear_attention_reference(*inputs)
    for chunk in (16, 64):
        got = jax.jit(partial(gated_linear_attention, chunk=chunk))(*inputs)
        assert_close(got, wanted, FLOAT32_TOLERANCE)
    for chunk in (8, 48):
        with pytest.raises(ValueError, match=f"chunk must be a power of two .*got {chunk}"):
            gated_linear_attention(*inputs, chunk=chunk)


def test_the_backward_pass_keeps_chunk_states_not_token_states():
    inputs = draw_inputs(GLA, 1024, batch=1, key=64, value=64)

    def temporary_bytes(implementation):
        def loss(*x):
            return jnp.sum(gated_linear_attention(*x, implementation=implementation)[0])

        compiled = jax.jit(jax.grad(loss, argnums=range(4))).lower(*inputs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    token_states = 1024 * 2 * 64 * 64 * 4
    assert temporary_bytes("xla") < token_states / 4
    assert temporary_bytes("scan") > token_states


def test_bfloat16_keeps_its_state_in_float32():
    inputs = draw_inputs(MAMBA2, 20, dtype=jnp.bfloat16)
    for function in (mamba2, mamba2_reference):
        out, state = jax.jit(function)(*inputs)
        assert (out.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    out_t, state = MAMBA2.step(*(x[:, 0] for x in inputs), state)
    assert (out_t.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)


def test_wrong_sizes_are_named():
    q, k, v, g = draw_inputs(GLA, 4)
    with pytest.raises(ValueError, match=r"initial_state .*must have shape \(2, 2, 16, 8\)"):
        gated_linear_attention(q, k, v, g, initial_state=jnp.zeros((2, 2, 8, 16)))
    with pytest.raises(ValueError, match="at least one token"):
        gated_linear_attention(*(x[:, :0] for x in (q, k, v, g)))
    with pytest.raises(ValueError, match=r"g .*must have shape \(2, 4, 2, 16\)"):
        hgrn2(q, v, g[..., :8])
    with pytest.raises(ValueError, match=r"g must have 4 axes"):
        hgrn2(q, v, g[..., 0])
