"""Gated DeltaNet beyond the contracts: states, groups, documents, gates at their limits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_results import assert_close, random_state, results, with_state

from toolkit.attention import (
    draw_inputs,
    gated_delta_net,
    gated_delta_net_reference,
    gated_delta_net_step,
    mixer,
)

FLOAT64_TOLERANCE = 1e-11
FLOAT32_TOLERANCE = 2e-5
HARD_KEYS_TOLERANCE = 1e-4
PEER_TOLERANCE = 2e-5

ROW = mixer("gdn")


def inputs_and_state(inputs):
    batch, _, heads, value = inputs[2].shape
    return [*inputs, random_state(heads, inputs[2].dtype, batch, value=value)]


def grouped(time, groups, **options):
    """Inputs whose values and gates have `groups` heads for every head of q and k."""
    inputs = draw_inputs(ROW, time, heads=2 * groups, **options)
    return [x[:, :, :2] for x in inputs[:2]] + inputs[2:]


@pytest.mark.parametrize("implementation", ["xla", "scan"])
@pytest.mark.parametrize("groups", [1, 2])
def test_initial_and_final_states_carry_gradients(implementation, groups):
    with jax.enable_x64(True):
        inputs = inputs_and_state(grouped(70, groups, dtype=jnp.float64))
        got = results(with_state(gated_delta_net), inputs, implementation=implementation, scale=0.7)
        assert_close(
            got,
            results(with_state(gated_delta_net_reference), inputs, scale=0.7),
            FLOAT64_TOLERANCE,
        )


def test_document_boundaries_anywhere_in_a_chunk():
    with jax.enable_x64(True):
        inputs = inputs_and_state(draw_inputs(ROW, 70, dtype=jnp.float64))
        # Ends of documents inside a chunk, at its edge, of one token, and a number used twice.
        first = np.repeat([4, 1, 2, 4, 9], [10, 22, 1, 30, 7])
        segment_ids = jnp.asarray(np.stack([first, np.repeat([0, 1], [64, 6])]))
        options = {"segment_ids": segment_ids}
        got = results(with_state(gated_delta_net), inputs, **options)
        assert_close(
            got,
            results(with_state(gated_delta_net_reference), inputs, **options),
            FLOAT64_TOLERANCE,
        )


def test_not_finite_values_show_in_their_own_document_only():
    q, k, v, g, beta = draw_inputs(ROW, 40, batch=1)
    segment_ids = jnp.asarray(np.repeat([0, 1], [20, 20])[None])
    run = jax.jit(partial(gated_delta_net, segment_ids=segment_ids))
    out, state = run(q, k.at[0, 5, 0].set(jnp.nan), v, g, beta)
    assert np.isnan(out[0, 5:20, 0]).all()
    assert np.isfinite(out[0, :5]).all()
    assert np.isfinite(out[0, 20:]).all()
    assert np.isfinite(out[0, :, 1]).all()
    assert np.isfinite(state).all()
    out, state = run(q, k, v.at[0, 30, 1].set(jnp.inf), g, beta)
    assert np.isfinite(out[0, :30]).all()
    assert np.isnan(state[0, 1]).all()
    out, _ = run(q, k, v, g, beta, initial_state=jnp.full((1, 2, 16, 8), jnp.nan))
    assert np.isnan(out[0, :20]).all()
    assert np.isfinite(out[0, 20:]).all()


@pytest.mark.parametrize("decay", [0.0, -30.0, -200.0, -jnp.inf])
def test_gates_at_their_limits(decay):
    """No decay at all, a nearly cleared state, and an exactly cleared one, at half the tokens."""
    inputs = inputs_and_state(draw_inputs(ROW, 45))
    inputs[3] = inputs[3].at[:, ::2].set(decay)
    got = results(with_state(gated_delta_net), inputs)
    with jax.enable_x64(True):
        exact = [x.astype(jnp.float64) for x in inputs]
        wanted = results(with_state(gated_delta_net_reference), exact)
    assert all(np.isfinite(x).all() for x in got)
    # The tolerance grows with the running sum of g, whose rounding the differences inherit.
    tolerance = FLOAT32_TOLERANCE * max(1.0, min(-decay, 87.0))
    assert_close(got, wanted, tolerance)


@pytest.mark.parametrize("correlation", [0.99, 1.0], ids=["correlated", "repeated"])
def test_correlated_keys_written_whole(correlation):
    """beta = 1, no decay: an inverse by powers fails here (test_inverse.py), the mixer does not."""
    random, shape = np.random.default_rng(0), (1, 130, 1, 64)
    q, v, own = (random.standard_normal(shape) for _ in range(3))
    common = random.standard_normal((1, 1, 1, 64))
    k = np.sqrt(correlation) * common + np.sqrt(1 - correlation) * own
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    inputs = q, k, v, np.zeros(shape[:3]), np.ones(shape[:3])
    with jax.enable_x64(True):
        wanted = gated_delta_net_reference(*map(jnp.asarray, inputs))
    for chunk in (None, 64):
        run = jax.jit(partial(gated_delta_net, chunk=chunk))
        got = run(*(jnp.asarray(x, jnp.float32) for x in inputs))
        for a, b in zip(got, wanted, strict=True):
            error = np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(b).max()
            assert error < HARD_KEYS_TOLERANCE


def test_bfloat16_keeps_its_state_in_float32():
    inputs = draw_inputs(ROW, 20, dtype=jnp.bfloat16)
    out, state = jax.jit(gated_delta_net)(*inputs)
    assert (out.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    out_t, state = gated_delta_net_step(*(x[:, 0] for x in inputs), state)
    assert (out_t.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)


def test_every_chunk_size_gives_the_same_result():
    inputs = inputs_and_state(draw_inputs(ROW, 70))
    wanted = results(with_state(gated_delta_net), inputs, chunk=16)
    for chunk in (32, 64):
        assert_close(
            results(with_state(gated_delta_net), inputs, chunk=chunk), wanted, FLOAT32_TOLERANCE
        )
    for chunk in (8, 48):
        with pytest.raises(ValueError, match=f"chunk must be a power of two .*got {chunk}"):
            gated_delta_net(*inputs[:5], chunk=chunk)


def test_the_backward_pass_keeps_chunk_states_not_token_states():
    """Temporary memory of forward and backward, against one state a token in the token scan."""
    inputs = draw_inputs(ROW, 1024, batch=1, key=64, value=64)

    def temporary_bytes(implementation):
        def loss(*x):
            return jnp.sum(gated_delta_net(*x, implementation=implementation)[0])

        compiled = jax.jit(jax.grad(loss, argnums=range(5))).lower(*inputs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    token_states = 1024 * 2 * 64 * 64 * 4
    assert temporary_bytes("xla") < token_states / 4
    assert temporary_bytes("scan") > token_states


def test_wrong_states_and_lengths_are_named():
    inputs = draw_inputs(ROW, 4)
    with pytest.raises(ValueError, match=r"initial_state .*must have shape \(2, 2, 16, 8\)"):
        gated_delta_net(*inputs, initial_state=jnp.zeros((2, 2, 8, 16)))
    with pytest.raises(ValueError, match="at least one token"):
        gated_delta_net(*(x[:, :0] for x in inputs))
    with pytest.raises(ValueError, match="q_t must have 3 axes"):
        gated_delta_net_step(*inputs, jnp.zeros((2, 2, 16, 8)))
    with pytest.raises(ValueError, match=r"beta is a writing strength .*got -1 to 3"):
        gated_delta_net(*inputs[:4], inputs[4].at[0, 0].set(jnp.asarray([-1.0, 3.0])))


@pytest.mark.oracle
@pytest.mark.parametrize("time", [63, 130])
def test_equal_to_transformers(time):
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    inputs = inputs_and_state(draw_inputs(ROW, time))
    out, state = jax.jit(gated_delta_net)(*inputs[:5], initial_state=inputs[5])
    q, k, v, g, beta, initial = (torch.tensor(np.asarray(x)) for x in inputs)
    peer = modeling.torch_chunk_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=initial, output_final_state=True
    )
    assert_close((out, state), peer, PEER_TOLERANCE)
