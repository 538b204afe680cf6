"""A wrong call is refused in one line that names the argument, whatever the mixer."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from toolkit import checking
from toolkit.attention import (
    MIXERS,
    BlockCache,
    IndexedCache,
    KVCache,
    draw_inputs,
    gated_linear_attention,
    indexer_loss,
    mamba2,
    merge_attention,
    mixer,
    native_sparse_attention,
    native_sparse_attention_reference,
    retention,
    retention_log_decay,
    rwkv7,
    softmax_attention,
    softmax_attention_reference,
    unit_lower_inverse,
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
    refused(lambda: gated_linear_attention(q, k, v, g), ValueError, "g must have 4 axes")
    *others, rate = draw_inputs(mixer("rwkv7"), 4)
    message = r"rate is .* must be in \[0, 1\]; got .* to 1.5"
    with checking():
        refused(lambda: mamba2(q, k, v, g, -dt), ValueError, "dt is a time step and must be >= 0")
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


def test_arguments_that_no_annotation_describes():
    q, k, v = draw_inputs(mixer("full"), 4)
    call = functools.partial(softmax_attention, q, k, v)
    number = "query_offset must be one number, or one per sequence"
    refused(lambda: call(query_offset=jnp.zeros((2, 1), int)), ValueError, number)
    refused(lambda: call(query_offset=1 << 40), ValueError, "query_offset must be within")
    for key in (jnp.ones(2), jax.random.split(jax.random.key(0))):
        dropped = functools.partial(call, dropout_rate=0.5, dropout_key=key)
        refused(dropped, ValueError, "dropout_key must be one random key")
    for name in ("logits_soft_cap", "dropout_rate"):
        traced = jax.jit(lambda number, name=name: call(**{name: number}))
        refused(lambda traced=traced: traced(0.5), TypeError, f"{name} must be known when compil")
    refused(lambda: retention_log_decay(0), ValueError, "heads must be at least 1; got 0")
    refused(lambda: unit_lower_inverse(jnp.ones((3, 4))), ValueError, "a must be square")
    rows, index = draw_inputs(mixer("dsa"), 4), {"selected_tokens": 0}
    refused(lambda: indexer_loss(*rows[:2], *rows[3:], **index), ValueError, "selected_tokens must")


def test_parts_that_do_not_fit_each_other():
    out, residual = jnp.ones((1, 4, 2, 3)), jnp.ones((1, 4, 2))
    refused(lambda: merge_attention(out), TypeError, "a part must be a pair")
    refused(lambda: merge_attention((out, out)), ValueError, "the residual of a part must have")
    halves = (out, residual), (out[:, :2], residual[:, :2])
    refused(lambda: merge_attention(*halves), ValueError, "must have one shape")


CACHES = {
    "softmax": KVCache.empty,
    "blocks": functools.partial(BlockCache.empty, block_size=2),
    "indexed": functools.partial(IndexedCache.empty, index_size=3),
}


@pytest.mark.parametrize("name", CACHES)
def test_rows_that_a_cache_does_not_have(name):
    empty = functools.partial(CACHES[name], key_value_heads=1, key_size=4, value_size=4)
    cache, one, place = empty(2, capacity=8), empty(1, capacity=8), jnp.array([1])
    for rows in (0, [0], jnp.asarray(0)):
        refused(lambda rows=rows: cache.free(rows), TypeError, "rows must be an array of row")
    for rows in (jnp.array([2]), jnp.array([-3])):
        with checking():
            refused(lambda rows=rows: cache.free(rows), ValueError, "rows must be those of a")
            refused(lambda rows=rows: cache.insert(rows, one), ValueError, "must be those of a")
    refused(lambda: cache.free(jnp.array([0.5])), TypeError, "rows must be integers")
    refused(lambda: cache.insert(jnp.arange(2), one), ValueError, "other.keys must be float32.2, ")
    refused(lambda: cache.insert(place, None), TypeError, "other must be a ")
    for other in (empty(1, capacity=9), empty(1, capacity=8, dtype=jnp.bfloat16)):
        refused(lambda other=other: cache.insert(place, other), ValueError, "other.keys must be")
    refused(lambda: empty(1, capacity=1.5), TypeError, "capacity of .* must be an int; got 1.5")
    refused(lambda: empty(1, capacity=8, dtype=int), TypeError, "dtype must be floating point")
    refused(lambda: cache.free(jnp.array([True])), ValueError, "rows, of True and False, must be 2")


@pytest.mark.parametrize("name", ["full", "window", "moba", "dsa"])
def test_a_cache_that_holds_fewer_than_no_tokens(name):
    row = mixer(name)
    inputs = draw_inputs(row, 2)
    cache = row.empty_state(2, 2, 16, 8, 300, jnp.float32, **row.options)
    cache = replace(cache, length=jnp.array([0, -1]))
    message = "cache.length must be at least 0 in every row; got -1"
    token = [x[:, 0] for x in inputs]
    call = functools.partial(row.function, *inputs, initial_state=cache, **row.options)
    with checking():
        refused(lambda: row.step(*token, cache, **row.options), ValueError, message)
        refused(call, ValueError, message)


@pytest.mark.by_family
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("time", [20, 160])
def test_a_transpose_of_what_is_no_linear_program(name, time):
    row = mixer(name)
    inputs = draw_inputs(row, time, batch=1)
    place = row.names.index("v")

    def of_values(v):
        return row.function(*inputs[:place], v, *inputs[place + 1 :], **row.options)[0]

    transpose = jax.linear_transpose(of_values, inputs[place])
    out = jax.eval_shape(of_values, inputs[place])
    message = r"linear_transpose of a mixer is not .* use jax.vjp\(function, zeros\)\[1\]"
    refused(lambda: transpose(jnp.ones(out.shape)), NotImplementedError, message)


def test_a_quantised_cache_takes_in_quantised_ones_alone():
    cache = KVCache.empty(1, 1, 4, 4, capacity=8, is_quantised=True)
    other = KVCache.empty(1, 1, 4, 4, capacity=8)
    refused(lambda: cache.insert(jnp.array([0]), other), TypeError, "both caches quantised")


@pytest.mark.parametrize("value", ["pallas", 16])
@pytest.mark.parametrize("name", ["comba", "rwkv7", "gdn2", "efla"])
def test_a_keyword_that_a_step_does_not_have_is_named(name, value):
    row = MIXERS[name]
    inputs = [x[:, 0] for x in draw_inputs(row, 1)]
    state = row.empty_state(2, 2, 16, 8, 1, jnp.float32)
    message = f"{row.step.__name__}.* unexpected keyword argument 'implementation'"
    refused(lambda: row.step(*inputs, state, implementation=value), TypeError, message)
