"""A looped model that reads a part of its cache: all of it is dense, drafts of it lose nothing."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.looped import (
    LoopedConfig,
    LoopedLM,
    decode_step,
    generate,
    prefill,
    read_sparsely,
    sparse_reads,
)
from toolkit.looped.decoding.speculative import generate_speculatively

EXACT = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def model():
    config = LoopedConfig.tiny("window full", loops=2, vocabulary=50, width=32, heads=2)
    return LoopedLM(config, rngs=nnx.Rngs(0))


def prompt(time=40):
    return jnp.asarray(np.random.default_rng(1).integers(0, 50, (2, time), np.int32))


def test_reading_all_of_the_cache_is_dense_and_less_is_reported(model):
    logits, cache = prefill(model, prompt(), 64)
    token = logits.argmax(axis=-1).astype(jnp.int32)
    full = read_sparsely(model.config, cache, "quest:64", dense_layers=1)
    other = prefill(model, prompt(), 64)[1]
    part = read_sparsely(model.config, other, "quest:40", corrects_tail=True)
    assert type(full.loops[0][1]) is type(cache.loops[0][1])  # dense on purpose
    dense, _ = decode_step(model, token, prefill(model, prompt(), 64)[1])
    logits, full = decode_step(model, token, full)
    np.testing.assert_allclose(logits, dense, **EXACT)
    tokens, _ = sparse_reads(full)
    np.testing.assert_array_equal(tokens, [[2 * 41, 2 * 41]])
    logits, part = decode_step(model, token, part)
    tokens, bytes_read = sparse_reads(part)
    assert logits.shape == dense.shape
    assert tokens.shape == (2, 2)
    assert (tokens <= 2 * 40).all()
    assert (bytes_read > tokens * 2 * 16 * 4).all()


@pytest.mark.slow
def test_generation_reads_sparsely_by_one_word(model):
    whole = generate(model, prompt(), 6)
    np.testing.assert_array_equal(generate(model, prompt(), 6, sparse="oracle:100%"), whole)
    assert generate(model, prompt(), 6, sparse="tactic:mass=0.9").shape == (2, 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["quest:40", pytest.param("tactic:mass=0.8", marks=pytest.mark.nightly)]
)
def test_sparse_drafts_lose_nothing(words):
    config = LoopedConfig.tiny("full", loops=2, vocabulary=50, width=32, heads=2)
    model = LoopedLM(config, rngs=nnx.Rngs(0))
    found = generate_speculatively(model, model, prompt(), 16, drafts=3, sparse=words)
    np.testing.assert_array_equal(found.tokens, generate(model, prompt(), 16))
    assert (found.kept <= 3).all()


def test_what_cannot_be_read_sparsely_is_refused(model):
    _, cache = prefill(model, prompt(), 64)
    for call, what in (
        (lambda: read_sparsely(model.config, cache, "quest:40", dense_layers=2), "none is left"),
        (lambda: read_sparsely(model.config, cache, "quest:40", dense_layers=-1), "at least 0"),
        (lambda: read_sparsely(model.config, cache, "other:16"), "must be one of"),
        (lambda: read_sparsely(model.config, cache, "quest:16"), "at least 35 tokens for Quest"),
        (lambda: read_sparsely(model.config, cache, "snapkv:64"), "needs no queries of the prompt"),
        (lambda: sparse_reads(cache), "no layer reads sparsely"),
    ):
        with pytest.raises(ValueError, match=what):
            call()
