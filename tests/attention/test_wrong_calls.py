"""A wrong call is refused in one line that names the argument, whatever the mixer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.attention import (
    MIXERS,
    draw_inputs,
    gated_linear_attention,
    mamba2,
    mixer,
    native_sparse_attention,
    native_sparse_attention_reference,
    retention,
    retention_log_decay,
    rwkv7,
    softmax_attention,
    softmax_attention_reference,
)

TOLERANCE = 1e-5


def refused(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", MIXERS)
def test_empty_inputs_lists_and_eight_bits(name):
    row = mixer(name)
    inputs = draw_inputs(row, 4)
    refused(lambda: row.function(*(x[:0] for x in inputs)), ValueError, "at least one batch")
    refused(lambda: row.function(*(x[:, :0] for x in inputs)), ValueError, "at least one token")
    refused(
        lambda: row.function(inputs[0].tolist(), *inputs[1:]), TypeError, "q must be an array.*list"
    )
    small = [x.astype(jnp.float8_e4m3fn) for x in inputs]
    refused(lambda: row.function(*small), TypeError, "q must .*16 bits; got float8_e4m3fn")


def test_gates_of_another_rank_and_out_of_range():
    q, k, v, g, dt = draw_inputs(mixer("mamba2"), 4)
    refused(lambda: mamba2(q, k, v, g, dt[..., None]), ValueError, "dt must have 3 axes")
    refused(lambda: mamba2(q, k, v, g, -dt), ValueError, "dt is a time step and must be >= 0")
    refused(lambda: gated_linear_attention(q, k, v, g), ValueError, "g must have 4 axes")
    *others, rate = draw_inputs(mixer("rwkv7"), 4)
    message = r"rate is .* must be in \[0, 1\]; got .* to 1.5"
    refused(lambda: rwkv7(*others, rate.at[0, 0, 0, 0].set(1.5)), ValueError, message)


def test_sizes_that_are_no_whole_numbers():
    row = mixer("gdn")
    inputs = draw_inputs(row, 4)
    message = "chunk must be a power of two and at least 16"
    refused(lambda: row.function(*inputs, chunk=33), ValueError, message)
    message_of_type = "chunk must be an int or None; got 32.0"
    refused(lambda: row.function(*inputs, chunk=32.0), TypeError, message_of_type)
    traced = jax.jit(lambda chunk: row.function(*inputs, chunk=chunk)[0])
    refused(lambda: traced(32), ValueError, message)
    inputs = draw_inputs(mixer("nsa"), 4)
    message = "block_size must be an int; got 4.0"
    refused(lambda: native_sparse_attention(*inputs, block_size=4.0), TypeError, message)


def test_whole_numbers_of_numpy_are_taken():
    q, k, v = draw_inputs(mixer("window"), 9)
    got, _ = softmax_attention(q, k, v, sliding_window=np.int64(3))
    wanted, _ = softmax_attention(q, k, v, sliding_window=3)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("time", [20, 160])
def test_a_traced_scale_is_a_learned_temperature(time):
    q, k, v = draw_inputs(mixer("full"), time)

    def total(function, scale):
        return jnp.sum(function(q, k, v, scale=scale)[0] ** 2)

    got = jax.jit(jax.value_and_grad(lambda scale: total(softmax_attention, scale)))(0.7)
    step = 1e-2
    near = [total(softmax_attention_reference, 0.7 + sign * step) for sign in (-1, 0, 1)]
    np.testing.assert_allclose(got[0], near[1], rtol=TOLERANCE)
    np.testing.assert_allclose(got[1], (near[2] - near[0]) / (2 * step), rtol=1e-2)


def test_arguments_of_other_types_and_numbers_that_are_not_finite():
    q, k, v = draw_inputs(mixer("full"), 4)
    for name, wrong in {"scale": float("nan"), "implementation": 3, "is_causal": "no"}.items():
        call = functools.partial(softmax_attention, q, k, v, **{name: wrong})
        refused(call, (TypeError, ValueError), f"{name} must be")
    refused(lambda: softmax_attention(None, k, v), TypeError, "q must be an array; got NoneType")
    refused(lambda: retention_log_decay(1.5), TypeError, "heads must be an int; got 1.5")
    q, k, v, *_ = draw_inputs(mixer("retention"), 4)
    refused(lambda: retention(q, k, v, log_decay=1), TypeError, "log_decay must be an array")


def test_a_text_shorter_than_a_block_is_no_wrong_call():
    inputs = draw_inputs(mixer("nsa"), 5)
    out, _ = native_sparse_attention(*inputs, block_size=8)
    wanted, _ = jax.jit(functools.partial(native_sparse_attention_reference, block_size=8))(*inputs)
    np.testing.assert_allclose(out, wanted, rtol=TOLERANCE, atol=TOLERANCE)
