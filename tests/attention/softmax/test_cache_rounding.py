"""What a quantised cache rounds: by factors of its channels, and in formats of 8 bits."""

import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.attention import KVCache, quantisation_error, softmax_attention, softmax_attention_step
from toolkit.attention.softmax.rounding import quantised

OUTLIER_ERROR = 0.03  # with one channel of the keys fifty times as large as the others
FLOAT8_ERROR = 0.06
BATCH, HEADS, SIZE, TIME, LARGE = 2, 2, 32, 100, 3


def draw(time=TIME):
    rng = np.random.default_rng(0)
    shape = BATCH, time, HEADS, SIZE
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in "qkv"]


def empty(capacity, **options):
    return KVCache.empty(BATCH, HEADS, SIZE, SIZE, capacity, is_quantised=True, **options)


def error_of(out, wanted):
    return jnp.linalg.norm(out - wanted) / jnp.linalg.norm(wanted)


def test_a_large_channel_of_the_keys_costs_the_others_no_precision():
    """With one scale per token alone it leaves them few steps: that is the control."""
    q, k, v = draw()
    q, k = q.at[..., LARGE].divide(50), k.at[..., LARGE].multiply(50)
    assert (quantisation_error(q, k, v) < OUTLIER_ERROR).all()
    numbers, scales = quantised(k.transpose(0, 2, 3, 1), "int8")
    rounded = (numbers.astype(scales.dtype) * scales[:, :, None]).transpose(0, 3, 1, 2)
    wanted = softmax_attention(q, k, v)[0]
    assert error_of(softmax_attention(q, rounded, v)[0], wanted) > 2 * OUTLIER_ERROR


def test_channels_have_their_factors_from_the_first_tokens_of_a_row():
    q, k, v = draw()
    large = k.at[..., LARGE].multiply(50)
    _, cache = softmax_attention(q, large, v, initial_state=empty(2 * TIME))
    factors = cache.key_channels
    assert (factors.argmax(axis=2) == LARGE).all()
    assert (factors[..., LARGE] > 20).all()
    assert (factors.at[..., LARGE].set(1) < 5).all()
    # Later tokens keep them; a row that was emptied begins anew.
    _, later = softmax_attention(q, k, v, initial_state=cache)
    np.testing.assert_array_equal(later.key_channels, factors)
    for fewer in (cache.free(jnp.array([0])), cache.truncate(jnp.array([0, 5]))):
        _, anew = softmax_attention(q, k, v, initial_state=fewer)
        assert (anew.key_channels[0] < 5).all()
        np.testing.assert_array_equal(anew.key_channels[1], factors[1])


def test_what_is_not_finite_spoils_no_factor():
    q, k, v = draw()
    k = k.at[:, 2, :, 5].set(jnp.nan).at[:, 4].set(jnp.inf)
    _, cache = softmax_attention(q, k, v, initial_state=empty(TIME))
    assert (cache.key_channels < 5).all()
    _, nothing = softmax_attention(q, 0 * v, v, initial_state=empty(TIME))
    assert (nothing.key_channels == 1).all()


def test_a_cache_may_hold_floating_point_of_8_bits():
    inputs = draw(40)
    cache = empty(40, number_format="float8_e4m3fn")
    assert cache.keys.dtype == cache.values.dtype == jnp.float8_e4m3fn
    wanted, _ = softmax_attention(*inputs)
    out, cache = softmax_attention(*(x[:, :30] for x in inputs), initial_state=cache)
    outs = [out]
    for time in range(30, 40):
        out, cache = softmax_attention_step(*(x[:, time] for x in inputs), cache)
        outs.append(out[:, None])
    assert 0 < error_of(jnp.concatenate(outs, axis=1), wanted) < FLOAT8_ERROR
    assert (quantisation_error(*inputs, number_format="float8_e4m3fn") < FLOAT8_ERROR).all()
    with pytest.raises(ValueError, match="number_format must be one of 'int8'"):
        empty(8, number_format="int4")
