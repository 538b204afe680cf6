"""Decode-time state and writing: prefill and steps equal the parallel form; sampling is exact."""

import itertools
import math
import threading
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_programs import counted_programs
from flax import nnx

from toolkit import checking
from toolkit.looped import (
    PRESETS,
    LoopedCache,
    LoopedConfig,
    LoopedLM,
    cache_bytes_per_sequence,
    cache_bytes_per_token,
    decode_step,
    extend,
    generate,
    pad_prompts,
    prefill,
    sample_token,
    stream,
    truncated_logits,
)
from toolkit.looped.mixing import LAYERS
from toolkit.testing.layers import everywhere

STEP_TOLERANCE: Any = {"rtol": 1e-5, "atol": 1e-5}
BFLOAT16_ERROR = 0.05  # of the norm of the logits
QUANTISED_ERROR = 0.02
PATTERNS = ("full", "window", "gdn", "gdn window full", "retention mamba2 rwkv7")


def build(pattern, loops=2, options=None, **overrides) -> Any:
    sizes = {"vocabulary": 50, "width": 32, "heads": 2} | overrides
    config = LoopedConfig.tiny(pattern, loops, **sizes, options=options or {})
    config = config.with_options(window={"sliding_window": 4})
    model: Any = LoopedLM(config, rngs=nnx.Rngs(0))
    model.rho[...] = 0.3 * jax.random.normal(jax.random.key(0), model.rho.shape)
    return model


def some_tokens(batch=2, time=16) -> Any:
    return np.random.default_rng(1).integers(0, 50, (batch, time), np.int32)


@jax.jit
def forward(model, tokens):
    return model(tokens)


@pytest.mark.slow
def test_a_quantised_cache_is_a_quarter_and_writes_almost_the_same_logits():
    options = {"key_value_heads": 1, "head_size": 64}
    model = build("full window", options=everywhere(**options))
    small = build("full window", options=everywhere(**options, quantised_cache=True))
    bytes_of = [cache_bytes_per_token(m.config) for m in (model, small)]
    assert bytes_of == [2 * 2 * 64 * 4, 2 * 2 * (64 + 4)]  # of two loops
    tokens = some_tokens()
    wanted = forward(model, tokens)
    logits, cache = prefill(small, tokens[:, :9], capacity=16)
    for time in range(9, 16):
        logits, cache = decode_step(small, tokens[:, time], cache)
        error = jnp.linalg.norm(logits - wanted[:, time]) / jnp.linalg.norm(wanted[:, time])
        assert 0 < error < QUANTISED_ERROR
    assert generate(small, tokens[:, :4], length=5).shape == (2, 5)


@pytest.mark.parametrize(
    ("pattern", "prompt"),
    # Prompts shorter and longer than the window of 4 and the convolution's tail of 3.
    [("full", 1), ("gdn window", 2), ("gdn window full", 9), ("retention rwkv7", 5)],
)
def test_prefill_and_steps_equal_the_parallel_form(pattern, prompt):
    model, tokens = build(pattern, options=everywhere(key_value_heads=1)), some_tokens()
    wanted = np.asarray(forward(model, tokens))
    logits, cache = prefill(model, tokens[:, :prompt], 16)
    assert jax.tree.map(jnp.shape, cache) == jax.tree.map(
        jnp.shape, LoopedCache.empty(model.config, 2, 16)
    )
    np.testing.assert_allclose(logits, wanted[:, prompt - 1], **STEP_TOLERANCE)
    for position in range(prompt, 16):
        logits, cache = decode_step(model, tokens[:, position], cache)
        np.testing.assert_allclose(logits, wanted[:, position], **STEP_TOLERANCE)


PROMPTS = [[5, 3, 8, 1, 9, 7, 2, 6, 4], [4, 2], [11, 3, 5, 8, 13]]


EVERY_WORD = FIRST, *OTHERS = [
    "rwkv7 retention linear gla",
    "gdn mamba2 kda hgrn2",
    "delta comba gdn2 delta_product",
    "full window mla nsa dsa moba",
    "nope conv channel_mix lightning hybrid",
    "fox path efla mesa pkda log_mamba2 log_gdn mamba3",
    "csa hca qsa shared_window value_embedding",
    "relative relative_window grouped_latent mlra grouped_tied",
]


def test_every_word_is_tried():
    assert {word for pattern in EVERY_WORD for word in pattern.split()} == set(LAYERS)


@pytest.mark.parametrize(
    "pattern",
    [
        FIRST,
        *(pytest.param(pattern, marks=pytest.mark.nightly) for pattern in OTHERS),
    ],
)
def test_prompts_of_different_lengths_decode_together(pattern):
    options = everywhere(key_value_heads=1, block_size=2, selected_tokens=4)
    model = build(pattern, loops=1, options=options)
    tokens, lengths = pad_prompts(PROMPTS)
    # Whatever fills a row up must not show.
    time = tokens.shape[1]
    is_filling = np.arange(time) < time - lengths[:, None]
    tokens = jnp.where(is_filling, 17, tokens)
    logits, cache = prefill(model, tokens, 16, lengths=lengths)
    together = [logits]
    following = some_tokens(batch=3, time=4)
    for position in range(4):
        logits, cache = decode_step(model, following[:, position], cache)
        together.append(logits)
    together = np.stack(together)
    for row, prompt in enumerate(PROMPTS):
        # Filled up behind, where it is not seen, so that all three are one program.
        text = np.zeros((1, 13), np.int32)
        text[0, : len(prompt) + 4] = [*prompt, *following[row]]
        wanted = forward(model, text)[0, len(prompt) - 1 : len(prompt) + 4]
        np.testing.assert_allclose(together[:, row], wanted, **STEP_TOLERANCE)


@pytest.mark.nightly
@pytest.mark.parametrize("pattern", EVERY_WORD)
def test_generation_from_prompts_of_different_lengths(pattern):
    model = build(pattern, options=everywhere(key_value_heads=1, block_size=2, selected_tokens=4))
    tokens, lengths = pad_prompts(PROMPTS)
    written = generate(model, tokens, 6, lengths=lengths)
    for row, prompt in enumerate(PROMPTS):
        alone = generate(model, jnp.asarray([prompt]), 6)
        np.testing.assert_array_equal(written[row], alone[0])


@pytest.mark.slow
def test_a_row_takes_in_the_next_text_while_the_others_go_on():
    model = build("full window gdn retention", loops=1)
    greedy: Any = lambda logits: np.array(jnp.argmax(logits, axis=-1), np.int32)  # noqa: E731
    tokens, lengths = pad_prompts(PROMPTS)
    wanted = [
        np.asarray(generate(model, tokens[row : row + 1], 6, lengths=lengths[row : row + 1]))[0]
        for row in range(3)
    ]
    programs: Any = jax.jit(LoopedCache.insert), jax.jit(LoopedCache.free)
    insert, free = programs
    logits, cache = prefill(model, tokens[:2], 64, lengths=lengths[:2])
    token, written = greedy(logits), [[], [], []]
    owners = [0, 1]
    for time in range(9):
        for row, owner in enumerate(owners):
            written[owner].append(token[row])
        logits, cache = decode_step(model, token, cache)
        token = greedy(logits)
        if time == 2:
            # The second text ends here; the third begins in its row, at another length.
            one = jnp.array([1], jnp.int32)
            logits, text = prefill(model, tokens[2:], 64, lengths=lengths[2:])
            cache = insert(free(cache, one), one, text)
            token[1], owners[1] = greedy(logits)[0], 2
    for text, alone, count in zip(written, wanted, (9, 3, 6), strict=True):
        assert len(text) == count
        np.testing.assert_array_equal(text[:6], alone[:count])
    assert insert._cache_size() == free._cache_size() == 1


def test_rows_that_do_not_fit_are_refused_and_may_be_named_by_a_mask():
    config = LoopedConfig.tiny("full gdn", loops=1, width=16, heads=2)
    cache, text, longer = (
        LoopedCache.empty(config, n, room) for n, room in ((2, 8), (1, 8), (1, 9))
    )
    one, other = jnp.array([1]), cast(Any, text.loops)
    for call, error, message in (
        (lambda: cache.free(jnp.array([2])), ValueError, "rows must be those of a cache of 2"),
        (lambda: cache.insert(jnp.array([5]), text), ValueError, "rows must be those of a cache"),
        (lambda: cache.insert(jnp.arange(2), text), ValueError, r"other\.loops.* must be float32"),
        (lambda: cache.insert(one, longer), ValueError, r"other\.loops.*keys must be float32"),
        (lambda: cache.insert(one, other), TypeError, "other must be a LoopedCache"),
    ):
        with checking(), pytest.raises(error, match=message):
            call()
    full = jax.tree.map(jnp.ones_like, cache)
    for rows in (one, jnp.array([False, True])):
        for array in jax.tree.leaves(full.free(rows))[2:]:  # keys and values are not seen any more
            assert array[0].all()
            assert not array[1].any()


@pytest.mark.nightly
@pytest.mark.parametrize("pattern", ["full window gdn", "retention rwkv7 mamba2", "nsa dsa"])
def test_reading_in_pieces_equals_reading_at_once(pattern):
    options = everywhere(block_size=2, selected_tokens=4)
    model, tokens = build(pattern, options=options), some_tokens(time=23)
    wanted = np.asarray(forward(model, tokens))
    logits, cache = prefill(model, tokens[:, :5], 32)
    for start, stop in ((5, 13), (13, 14), (14, 22)):
        np.testing.assert_allclose(logits, wanted[:, start - 1], **STEP_TOLERANCE)
        logits, cache = extend(model, tokens[:, start:stop], cache)
    np.testing.assert_allclose(logits, wanted[:, 21], **STEP_TOLERANCE)
    logits, _ = decode_step(model, tokens[:, 22], cache)
    np.testing.assert_allclose(logits, wanted[:, 22], **STEP_TOLERANCE)


def test_a_stop_token_ends_a_sequence():
    model, prompt = build("full"), some_tokens(time=5)
    free = np.asarray(generate(model, prompt, 40))
    stop = int(free[0, 3])
    stopped = np.asarray(generate(model, prompt, 40, stop_token=stop))
    for with_stop, without in zip(stopped, free, strict=True):
        ends = np.flatnonzero(without == stop)
        end = ends[0] if len(ends) else 40
        np.testing.assert_array_equal(with_stop[:end], without[:end])
        assert (with_stop[end:] == stop).all()


def test_a_stream_without_end():
    model, prompt = build("gdn window"), some_tokens(time=3)
    wanted = generate(model, prompt, 100)
    tokens = list(itertools.islice(stream(model, prompt, None), 100))
    np.testing.assert_array_equal(np.stack(tokens, axis=1), wanted)
    with pytest.raises(ValueError, match="grows with the text"):
        stream(build("gdn full"), prompt, None)


def test_steps_in_bfloat16():
    model, tokens = build("gdn full", loops=1, dtype="bfloat16"), some_tokens()
    wanted = np.asarray(forward(model, tokens))
    logits, cache = prefill(model, tokens[:, :9], 16)
    for position in range(9, 16):
        logits, cache = decode_step(model, tokens[:, position], cache)
        error = jnp.linalg.norm(logits - wanted[:, position])
        assert error < BFLOAT16_ERROR * jnp.linalg.norm(logits)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_cache_bytes(pattern):
    config = build(pattern, loops=3).config
    for capacity in (2, 100):
        cache = LoopedCache.empty(config, 5, capacity)
        arrays = [a for a in jax.tree.leaves(cache) if jnp.issubdtype(a.dtype, jnp.floating)]
        assert sum(a.nbytes for a in arrays) == 5 * cache_bytes_per_sequence(config, capacity)
        assert [len(layers) for layers in cache.loops] == [len(config.layers)] * 3


@pytest.mark.parametrize("pattern", PATTERNS)
def test_cache_bytes_a_token(pattern):
    config = build(pattern, loops=3).config
    longer, shorter = (LoopedCache.empty(config, 1, n) for n in (107, 100))
    grown = sum(a.nbytes for a in jax.tree.leaves(longer)) - sum(
        a.nbytes for a in jax.tree.leaves(shorter)
    )
    assert grown == 7 * cache_bytes_per_token(config)


def test_cache_bytes_of_the_paper():
    full = PRESETS["lt2-looped-1.3b"]
    assert cache_bytes_per_sequence(full, 8192) == 5 * 2**30
    hybrid = PRESETS["lt2-hybrid-1.3b"]
    # One layer in five keeps keys and values; the other four keep a state of constant size.
    growth = cache_bytes_per_sequence(hybrid, 8192) - cache_bytes_per_sequence(hybrid, 4096)
    assert growth == 5 * 2**30 // 5 // 2
    assert cache_bytes_per_token(full) == 640 * 2**10
    linear, window = PRESETS["lt2-linear-1.3b"], PRESETS["lt2-sparse-1.3b"]
    assert cache_bytes_per_sequence(linear, 8) == cache_bytes_per_sequence(linear, 100_000)
    assert cache_bytes_per_sequence(window, 2048) == cache_bytes_per_sequence(window, 100_000)


def test_generate_follows_the_most_likely_token():
    model, prompt = build("full"), some_tokens(time=5)
    # Longer than one dispatch, so that the state crosses from chunk to chunk.
    written = generate(model, prompt, 40)
    assert written.shape == (2, 40)
    assert written.dtype == jnp.int32
    text = jnp.concatenate([prompt, written], axis=1)
    wanted = jnp.argmax(forward(model, text), axis=-1)[:, 4:-1]
    np.testing.assert_array_equal(written, wanted)


@pytest.mark.parametrize("how", [{}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}])
def test_stream_writes_what_generate_writes(how):
    model, prompt = build("full"), some_tokens(time=3)
    how = how and {**how, "key": jax.random.key(7)}
    written = generate(model, prompt, 11, **how)
    for size in (1, 4):
        tokens = list(stream(model, prompt, 11, tokens_per_dispatch=size, **how))
        np.testing.assert_array_equal(np.stack(tokens, axis=1), written)


def test_sampling_parameters_do_not_recompile():
    from toolkit.looped.decoding import generation
    from toolkit.looped.decoding import steps as decoding

    model, prompt, key = build("full"), some_tokens(time=3), jax.random.key(0)
    generate(model, prompt, 4, temperature=0.5, top_k=3, key=key)
    programs: list[Any] = [generation.decode_chunk, decoding._prefill]
    compiled = [program._cache_size() for program in programs]
    generate(model, prompt, 7, temperature=1.5, top_k=9, key=jax.random.key(1))
    other = build("full")
    generate(other, prompt, 40, temperature=1.0, top_k=2, key=key)
    assert [program._cache_size() for program in programs] == compiled


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"length": 0}, "length"),
        ({"length": 1.5}, "length must be an int"),
        ({"prompt": None}, "prompt must be an array"),
        ({"prompt": [[1, 2], [3]]}, "prompt must be an array"),
        ({"prompt": jnp.full((1, 3), 50)}, r"tokens must lie in \[0, 50\), the vocabulary; got 50"),
        ({"prompt": jnp.full((1, 3), -1)}, r"tokens must lie in \[0, 50\)"),
        (
            {"temperature": math.nan, "key": jax.random.key(0)},
            "temperature must be a finite number",
        ),
        (
            {"temperature": math.inf, "key": jax.random.key(0)},
            "temperature must be a finite number",
        ),
        ({"temperature": 1.0, "top_k": 1.5}, "top_k must be an int or None; got 1.5"),
        ({"stop_token": 1.5}, "stop_token must be an int or a Sequence or None; got 1.5"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 1.0}, "key"),
        ({"temperature": 1.0, "top_k": 0}, "top_k"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p"),
        ({"prompt": jnp.zeros((1, 0), jnp.int32)}, "empty"),
        ({"lengths": np.array([1, 17])}, "lengths are"),
        ({"lengths": np.array([1])}, "lengths .*must have shape"),
        ({"stop_token": 50}, "stop_token"),
    ],
)
@pytest.mark.parametrize("write", [generate, stream])
def test_bad_requests_fail_at_the_call(write, how, message):
    arguments = {"prompt": some_tokens(), "length": 3} | how
    with pytest.raises((TypeError, ValueError), match=message) as error:
        write(build("full"), **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": jnp.array(jnp.nan)}, {"temperature": 0.0}, {"top_k": 1.5}, {"top_p": 1.5}],
)
def test_sampling_refuses_numbers_that_make_no_sense(wrong):
    how = {"temperature": 1.0} | wrong
    with pytest.raises((TypeError, ValueError), match=f"{next(iter(wrong))} must"):
        sample_token(jnp.zeros((1, 5)), jax.random.key(0), **how)


def test_more_likely_tokens_than_there_are_means_all_of_them():
    how = {"temperature": 1.0, "key": jax.random.key(0)}
    some = generate(build("full"), some_tokens(), 3, top_k=10**12, **how)
    np.testing.assert_array_equal(some, generate(build("full"), some_tokens(), 3, **how))


def test_bad_decode_arguments():
    model, tokens = build("full"), some_tokens()
    with pytest.raises(ValueError, match="capacity is 3"):
        prefill(model, tokens, 3)
    with pytest.raises(ValueError, match="prompt 1 has no token"):
        pad_prompts([b"a", b""])
    with pytest.raises(ValueError, match="token must have 1 axes"):
        decode_step(model, tokens, LoopedCache.empty(model.config, 2, 16))
    with pytest.raises(ValueError, match="capacity is 0"):
        LoopedCache.empty(model.config, 2, 0)
    with pytest.raises(ValueError, match="tokens_per_dispatch"):
        stream(model, tokens, 3, tokens_per_dispatch=0)


def test_overflow_is_not_silent():
    model, tokens = build("full", loops=1), some_tokens()
    logits, cache = prefill(model, tokens[:, :3], 4)
    logits, cache = decode_step(model, tokens[:, 3], cache)
    assert jnp.all(jnp.isfinite(logits))
    logits, cache = decode_step(model, tokens[:, 4], cache)
    assert jnp.all(jnp.isnan(logits))


PROBABILITIES = np.array([0.1, 0.4, 0.05, 0.25, 0.2])


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ({}, PROBABILITIES),
        ({"temperature": 0.5}, PROBABILITIES**2),
        ({"top_k": 2}, [0, 0.4, 0, 0.25, 0]),
        ({"top_k": 9}, PROBABILITIES),
        ({"top_p": 0.3}, [0, 0.4, 0, 0, 0]),
        ({"top_p": 0.6}, [0, 0.4, 0, 0.25, 0]),
        ({"top_p": 0.8}, [0, 0.4, 0, 0.25, 0.2]),
        ({"top_p": 1.0}, PROBABILITIES),
        # Top-p counts mass after top-k: 0.4 / 0.65 alone reaches 0.6.
        ({"top_k": 2, "top_p": 0.6}, [0, 0.4, 0, 0, 0]),
    ],
)
def test_truncated_distribution(how, wanted):
    logits = jnp.log(jnp.stack([PROBABILITIES, PROBABILITIES[::-1]]))
    kept = jax.nn.softmax(truncated_logits(logits, **how))
    wanted = np.asarray(wanted) / np.sum(wanted)
    np.testing.assert_allclose(kept, [wanted, wanted[::-1]], rtol=1e-5, atol=1e-7)


def test_ties_fall_to_the_earlier_token():
    logits = jnp.zeros((1, 6))
    assert np.isfinite(truncated_logits(logits, top_k=2)).tolist() == [[True] * 2 + [False] * 4]
    assert np.isfinite(truncated_logits(logits, top_p=0.4)).tolist() == [[True] * 3 + [False] * 3]
    assert sample_token(logits).tolist() == [0]


def test_drawn_frequencies():
    logits = jnp.tile(jnp.log(PROBABILITIES), (20_000, 1))
    drawn = sample_token(logits, jax.random.key(0), temperature=1.0, top_k=3)
    frequencies = np.bincount(drawn, minlength=5) / drawn.size
    wanted = np.array([0, 0.4, 0, 0.25, 0.2]) / 0.85
    np.testing.assert_allclose(frequencies, wanted, atol=0.015)
    with pytest.raises(ValueError, match="key"):
        sample_token(logits, temperature=1.0)


def test_streams_side_by_side_and_closed_early_do_not_disturb_each_other():
    model, tokens = build("gdn full"), some_tokens(batch=1)
    prompts = [tokens[:, :5], tokens[:, 5:10]]
    wanted = [np.asarray(generate(model, prompt, length=40)) for prompt in prompts]
    threads = threading.active_count()
    streams: Any = [stream(model, prompt, length=40) for prompt in prompts]
    first, second = streams
    for time in range(9):
        assert next(first) == wanted[0][:, time]
        assert next(second) == wanted[1][:, time]
    first.close()
    rest = np.concatenate(list(second))
    np.testing.assert_array_equal(rest, wanted[1][0, 9:])
    assert threading.active_count() == threads


def test_prompts_of_a_bucket_of_lengths_share_their_programs():
    model, tokens = build("full", loops=1), some_tokens(batch=1, time=17)

    def programs_of(length):
        with counted_programs() as programs:
            np.asarray(generate(model, tokens[:, :length].copy(), 4))
        return len(programs)

    assert programs_of(5) > 2
    # At most the prompt's own copy, of one operation.
    assert max(programs_of(length) for length in (3, 9, 16)) <= 1
    assert programs_of(17) > 2  # the next bucket
