"""Prefill in pieces and decode step by step: the cache changes where numbers live, not which."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64 import enable_x64

from toolkit import checking
from toolkit.attention.softmax.cache import KVCache, softmax_attention_step
from toolkit.attention.softmax.quantisation import quantisation_error
from toolkit.attention.softmax.reference import softmax_attention_reference
from toolkit.attention.softmax.softmax_attention import softmax_attention

FLOAT32_TOLERANCE = 2e-6
FLOAT64_TOLERANCE = 1e-12

BATCH, HEADS, KEY_HEADS, KEY, VALUE = 2, 4, 2, 8, 6
IMPLEMENTATIONS = ["dense", "blockwise"]

# As one program; eagerly each of its steps would be one.
reference = jax.jit(
    softmax_attention_reference,
    static_argnames=("is_causal", "sliding_window", "logits_soft_cap", "return_residual"),
)


def draw(time, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (HEADS, KEY), (KEY_HEADS, KEY), (KEY_HEADS, VALUE)
    return [jnp.asarray(rng.standard_normal((BATCH, time, *shape)), dtype) for shape in shapes]


def empty(capacity, dtype=jnp.float32):
    return KVCache.empty(BATCH, KEY_HEADS, KEY, VALUE, capacity, dtype)


def piece(arrays, start, stop):
    return [array[:, start:stop] for array in arrays]


def assert_same_tokens(got, wanted):
    """In every slot that holds a token, and there are as many."""
    np.testing.assert_array_equal(got.length, wanted.length)
    is_held = np.arange(got.capacity) < np.asarray(got.length)[:, None]
    for name in ("keys", "values"):
        arrays = (np.where(is_held[:, None, None], getattr(x, name), 0) for x in (got, wanted))
        np.testing.assert_array_equal(*arrays)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("sliding_window", "capacity"), [(None, 48), (10, 10), (10, 17)])
def test_pieces_and_steps_equal_the_parallel_form(implementation, sliding_window, capacity):
    with enable_x64(True):
        inputs = draw(41, np.float64)
        wanted, _ = reference(*inputs, sliding_window=sliding_window)
        prefill = jax.jit(
            partial(softmax_attention, sliding_window=sliding_window, implementation=implementation)
        )
        step = jax.jit(partial(softmax_attention_step, sliding_window=sliding_window))
        cache, outs = empty(capacity, jnp.float64), []
        for start, stop in ((0, 13), (13, 26)):
            out, cache = prefill(*piece(inputs, start, stop), initial_state=cache)
            outs.append(out)
        for time in range(26, 41):
            out, cache = step(*(array[:, time] for array in inputs), cache)
            outs.append(out[:, None])
        assert cache.length.tolist() == [41, 41]
        np.testing.assert_allclose(
            jnp.concatenate(outs, axis=1), wanted, rtol=0, atol=FLOAT64_TOLERANCE
        )


@pytest.mark.parametrize("sliding_window", [None, 7])
def test_steps_with_every_option_equal_the_reference(sliding_window):
    with enable_x64(True):
        inputs = draw(19, np.float64)
        options = {
            "logits_soft_cap": 2.0,
            "alibi_slopes": jnp.asarray([0.5, 0.25, 0.1, 0.0]),
            "sliding_window": sliding_window,
            "return_residual": True,
        }
        more = jnp.asarray(np.random.default_rng(5).normal(size=(2, 19, 4, 9)))
        tokens = {"relative_bias": more[..., 1:], "sinks": more[..., 0]}
        wanted, _, wanted_residual = reference(*inputs, **tokens, **options)
        step = jax.jit(partial(softmax_attention_step, **options))
        cache = empty(19 if sliding_window is None else 7, jnp.float64)
        for time in range(19):
            own = {name: array[:, time] for name, array in tokens.items()}
            out, cache, residual = step(*(array[:, time] for array in inputs), cache, **own)
            np.testing.assert_allclose(out, wanted[:, time], atol=FLOAT64_TOLERANCE)
            np.testing.assert_allclose(residual, wanted_residual[:, time], atol=FLOAT64_TOLERANCE)


@pytest.mark.parametrize("sliding_window", [None, 7])
def test_cache_and_output_equal_the_reference(sliding_window):
    inputs, more = draw(12), draw(9, seed=1)
    capacity = 30 if sliding_window is None else 7
    cache = wanted_cache = empty(capacity)
    for arrays in (inputs, more):
        out, cache = softmax_attention(*arrays, sliding_window=sliding_window, initial_state=cache)
        wanted, wanted_cache = softmax_attention_reference(
            *arrays, sliding_window=sliding_window, initial_state=wanted_cache
        )
        np.testing.assert_allclose(out, wanted, rtol=0, atol=FLOAT32_TOLERANCE)
        assert_same_tokens(cache, wanted_cache)


@pytest.mark.parametrize("sliding_window", [None, 7])
def test_documents_in_a_cache_equal_the_reference(sliding_window):
    documents = (
        jnp.asarray([[0] * 4 + [1] * 8, [0] * 12]),
        jnp.asarray([[5] * 9, [0] * 5 + [1] * 4]),
    )
    cache = wanted_cache = empty(30 if sliding_window is None else 7)
    for seed, segment_ids in enumerate(map(jnp.asarray, documents)):
        arrays, options = draw(segment_ids.shape[1], seed=seed), {"sliding_window": sliding_window}
        options |= {"segment_ids": segment_ids}
        more = np.random.default_rng(seed).normal(size=(2, segment_ids.shape[1], 4, 6))
        more = jnp.asarray(more, jnp.float32)
        options |= {"relative_bias": more[..., 1:], "sinks": more[..., 0]}
        out, cache = softmax_attention(*arrays, initial_state=cache, **options)
        wanted, wanted_cache = softmax_attention_reference(
            *arrays, initial_state=wanted_cache, **options
        )
        np.testing.assert_allclose(out, wanted, rtol=0, atol=FLOAT32_TOLERANCE)
        assert_same_tokens(cache, wanted_cache)
    # A row remembers its last document, from slot 0 on: 8 + 9 tokens of one, 4 of the other.
    assert cache.length.tolist() == [17, 4]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tokens_of_a_piece_may_see_each_other_when_not_causal(implementation):
    inputs = draw(20)
    _, cache = softmax_attention(*piece(inputs, 0, 12), initial_state=empty(32))
    out, _ = softmax_attention(
        *piece(inputs, 12, 20), is_causal=False, initial_state=cache, implementation=implementation
    )
    wanted, _ = reference(*inputs, is_causal=False)
    np.testing.assert_allclose(out, wanted[:, 12:], rtol=0, atol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sliding_window", [None, 8])
def test_nan_in_slots_without_a_token_never_shows(implementation, sliding_window):
    inputs = draw(9)
    clean = empty(16)
    dirty = replace(clean, keys=clean.keys * jnp.nan, values=clean.values * jnp.nan)

    @jax.jit
    def run(arrays, cache):
        first, cache = softmax_attention(
            *piece(arrays, 0, 5),
            sliding_window=sliding_window,
            initial_state=cache,
            implementation=implementation,
        )
        token = (array[:, 5] for array in arrays)
        second, _ = softmax_attention_step(*token, cache, sliding_window=sliding_window)
        return first, second

    for got, wanted in zip(run(inputs, dirty), run(inputs, clean), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=FLOAT32_TOLERANCE)


def test_gradient_flows_through_the_prefilled_cache():
    inputs = draw(20)

    def in_pieces(*arrays):
        _, cache = softmax_attention(*piece(arrays, 0, 12), initial_state=empty(24))
        out, _ = softmax_attention(
            *piece(arrays, 12, 20), initial_state=cache, implementation="blockwise"
        )
        return (out**2).sum()

    def at_once(*arrays):
        return (reference(*arrays)[0][:, 12:] ** 2).sum()

    for got, wanted in zip(
        jax.jit(jax.grad(in_pieces, (0, 1, 2)))(*inputs),
        jax.grad(at_once, (0, 1, 2))(*inputs),
        strict=True,
    ):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=10 * FLOAT32_TOLERANCE)


def test_overflow_is_an_error_where_no_row_has_room_or_values_are_checked():
    inputs = draw(5)
    with pytest.raises(ValueError, match="larger capacity"):
        softmax_attention(*inputs, initial_state=empty(4))
    _, full = softmax_attention(*inputs, initial_state=empty(5))
    token = [array[:, 0] for array in inputs]
    assert jnp.isnan(softmax_attention_step(*token, full)[0]).all()
    with checking(), pytest.raises(ValueError, match="larger capacity"):
        softmax_attention_step(*token, full)


def test_overflow_is_nan_under_jit_and_stays_so():
    inputs = draw(5)
    token = [array[:, 0] for array in inputs]
    prefill = jax.jit(lambda cache, *arrays: softmax_attention(*arrays, initial_state=cache))
    step = jax.jit(softmax_attention_step)
    out, cache = prefill(empty(5), *inputs)
    assert jnp.isfinite(out).all()
    assert jnp.isnan(prefill(cache, *inputs)[0]).all()
    for _ in range(2):
        keys = cache.keys
        out, cache = step(*token, cache)
        assert jnp.isnan(out).all()
        np.testing.assert_array_equal(cache.keys, keys)


def test_a_donated_cache_is_written_in_place_and_steps_compile_once():
    step = jax.jit(softmax_attention_step, donate_argnames="cache")
    token = [array[:, 0] for array in draw(1)]
    cache = empty(4096)
    compiled = step.lower(*token, cache).compile()
    cache_bytes = cache.nbytes
    assert compiled.memory_analysis().alias_size_in_bytes >= cache_bytes
    copies = [line for line in compiled.as_text().splitlines() if " copy(" in line]
    assert not any(f"{VALUE},4096]" in line or f"{KEY},4096]" in line for line in copies)
    for _ in range(3):
        _, cache = step(*token, cache)
    assert step._cache_size() == 1
    assert cache.length.tolist() == [3, 3]


def test_step_in_bfloat16_stays_close():
    token = [array[:, 0].astype(jnp.bfloat16) for array in draw(1)]
    out, cache = softmax_attention_step(*token, empty(8, jnp.bfloat16))
    assert out.dtype == cache.keys.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, jnp.repeat(token[2], HEADS // KEY_HEADS, axis=1))


def test_step_under_vmap():
    token = [array[:, 0] for array in draw(1)]
    _, cache = softmax_attention_step(*token, empty(4))
    stack = jax.tree.map(lambda array: jnp.stack([array, array]), (token, cache))
    out, _ = jax.vmap(lambda token, cache: softmax_attention_step(*token, cache))(*stack)
    wanted, _ = softmax_attention_step(*token, cache)
    np.testing.assert_allclose(out[1], wanted, rtol=0, atol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("sliding_window", [None, 6])
def test_every_row_has_a_length_of_its_own(sliding_window):
    """Rows of 9 and 4 tokens go on together as each does alone, and one is freed and taken over."""
    inputs, lengths = draw(20), np.array([9, 4])
    capacity = 24 if sliding_window is None else 6
    options = {"sliding_window": sliding_window}
    wanted, _ = reference(*inputs, **options)
    # What fills the shorter row up in front is a document of its own.
    aligned = [jnp.stack([x[0, :9], jnp.roll(x[1, :9], 5, axis=0)]) for x in inputs]
    segment_ids = jnp.asarray(np.arange(9) >= 9 - lengths[:, None], jnp.int32)
    _, cache = softmax_attention(
        *aligned, segment_ids=segment_ids, initial_state=empty(capacity), **options
    )
    assert cache.length.tolist() == [9, 4]
    step = jax.jit(partial(softmax_attention_step, **options))
    tokens = lambda length: [x[jnp.arange(2), length] for x in inputs]  # noqa: E731
    for _ in range(3):
        before = cache.length
        out, cache = step(*tokens(before), cache)
        for row in range(2):
            np.testing.assert_allclose(
                out[row], wanted[row, before[row]], rtol=0, atol=FLOAT32_TOLERANCE
            )
    more = [jnp.stack([x[row, n : n + 5] for row, n in enumerate((12, 7))]) for x in inputs]
    for implementation in IMPLEMENTATIONS:
        out, _ = softmax_attention(
            *more, initial_state=cache, implementation=implementation, **options
        )
        for row, n in enumerate((12, 7)):
            np.testing.assert_allclose(
                out[row], wanted[row, n : n + 5], rtol=0, atol=FLOAT32_TOLERANCE
            )
    told = jax.jit(KVCache.free)(cache, jnp.array([False, True]))
    cache = cache.free(jnp.array([1]))
    assert cache.length.tolist() == told.length.tolist() == [12, 0]
    _, other = softmax_attention(
        *(x[1:, :2] for x in inputs),
        initial_state=KVCache.empty(1, KEY_HEADS, KEY, VALUE, capacity),
        **options,
    )
    cache = cache.insert(jnp.array([1]), other)
    out, cache = step(*tokens(cache.length), cache)
    for row, n in enumerate((12, 2)):
        np.testing.assert_allclose(out[row], wanted[row, n], rtol=0, atol=FLOAT32_TOLERANCE)
    assert step._cache_size() == 1


def test_a_row_without_room_is_nan_alone():
    inputs = draw(6)
    _, cache = softmax_attention(*piece(inputs, 0, 5), initial_state=empty(5))
    cache = cache.free(jnp.array([0]))
    out, cache = jax.jit(softmax_attention_step)(*(x[:, 5] for x in inputs), cache)
    assert jnp.isfinite(out[0]).all()
    assert jnp.isnan(out[1]).all()
    message = "holds 6 of 5 tokens and cannot take 1 more"
    with checking(), pytest.raises(ValueError, match=message):
        softmax_attention_step(*(x[:, 5] for x in inputs), cache)


# Rounding to the 255 steps of a token: numbers are off by half a step at most, and the outputs of
# Gaussian keys and values by about 1/150 of their norm.
QUANTISED_ERROR = 0.015


@pytest.mark.parametrize("sliding_window", [None, 7])
def test_a_quantised_cache_holds_what_a_float_cache_holds(sliding_window):
    inputs, options = draw(20), {"sliding_window": sliding_window}
    capacity = 20 if sliding_window is None else 7
    wanted, _ = reference(*inputs, **options)
    small = KVCache.empty(BATCH, KEY_HEADS, KEY, VALUE, capacity, is_quantised=True)
    assert small.keys.dtype == small.values.dtype == jnp.int8
    out, cache = softmax_attention(*piece(inputs, 0, 12), initial_state=small, **options)
    outs = [out]
    for time in range(12, 20):
        out, cache = softmax_attention_step(*(x[:, time] for x in inputs), cache, **options)
        outs.append(out[:, None])
    got = jnp.concatenate(outs, axis=1)
    assert 0 < jnp.linalg.norm(got - wanted) < QUANTISED_ERROR * jnp.linalg.norm(wanted)
    _, exact = softmax_attention(*inputs, initial_state=empty(capacity), **options)
    for got, step, wanted in (
        (cache.keys, cache.key_scales[:, :, None] * cache.key_channels[..., None], exact.keys),
        (cache.values, cache.value_scales[:, :, None], exact.values),
    ):
        assert (jnp.abs(got.astype(step.dtype) * step - wanted) <= 0.5001 * step).all()
    error = quantisation_error(*inputs, **options)
    assert error.shape == (HEADS,)
    assert (error > 0).all()
    assert (error < QUANTISED_ERROR).all()


def test_what_a_quantised_cache_rounds_has_no_derivative():
    q, k, v = draw(3)
    cache = KVCache.empty(BATCH, KEY_HEADS, KEY, VALUE, 4, is_quantised=True)

    def loss(q, k, v):
        out, held = softmax_attention(q, k, v, initial_state=cache)
        return jnp.sum(out) + jnp.sum(softmax_attention_step(q[:, 0], k[:, 0], v[:, 0], held)[0])

    assert jnp.isfinite(jax.jit(jax.grad(loss))(q, k, v)).all()
    for place in (1, 2):
        with pytest.raises(NotImplementedError, match="rounds have no derivative; use a cache"):
            jax.jit(jax.grad(loss, argnums=place))(q, k, v)


def bad_calls():
    q, k, v = (array[:, 0] for array in draw(1))
    many = draw(3)
    step, parallel = softmax_attention_step, softmax_attention
    small = KVCache.empty(BATCH, KEY_HEADS, KEY + 1, VALUE, 8)
    return [
        (lambda: step(q[None], k, v, empty(8)), ValueError, "q_t must have 3 axes"),
        (lambda: step(q, k[:, :1], v, empty(8)), ValueError, "v_t .* must have shape"),
        (lambda: step(q[:, :3], k, v, empty(8)), ValueError, "multiple"),
        (lambda: step(q, k, v, small), ValueError, "cache.keys"),
        (lambda: step(q, k, v, empty(8, jnp.bfloat16)), TypeError, "share one dtype"),
        (lambda: step(q, k, v, empty(8), sliding_window=9), ValueError, "capacity"),
        (lambda: step(q, k, v, empty(8), sliding_window=0), ValueError, "at least 1"),
        (lambda: parallel(*many, initial_state=small), ValueError, "initial_state.keys"),
        (lambda: KVCache.empty(1, 1, 4, 4, 0), ValueError, "capacity"),
    ]


@pytest.mark.parametrize("number", range(len(bad_calls())))
def test_bad_input_is_refused_in_words(number):
    call, error, message = bad_calls()[number]
    with pytest.raises(error, match=message):
        call()


def test_no_cache_may_be_given_by_name():
    inputs = draw(3)
    wanted, nothing = softmax_attention(*inputs)
    out, cache = softmax_attention(*inputs, initial_state=None)
    assert nothing is None
    assert cache is None
    np.testing.assert_array_equal(out, wanted)
