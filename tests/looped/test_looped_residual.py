"""Connections in place of residual additions: streams, attention residuals, messages of loops."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.looped import (
    LoopedCache,
    LoopedConfig,
    LoopedLM,
    decode_step,
    extend,
    load_model,
    parameter_count,
    prefill,
    save_model,
)

CLOSE = {"rtol": 2e-5, "atol": 2e-5}
STREAMS: dict[str, Any] = {
    "streams": 3,
    "stream_mixing_steps": 3,
    "prelude": "full",
    "coda": "full",
}
SOURCES: dict[str, Any] = {"attention_residual": 2, "coda": "full"}
MESSAGES: dict[str, Any] = {
    "attention_residual": 1, "message_rank": 3, "prelude": "full", "coda": "full",
    "residual_gate": False,
}  # fmt: skip
MODELS = {
    "streams": ("gdn", STREAMS),
    "sources": ("full full window", SOURCES),
    "messages": ("full window", MESSAGES),
}


def build(name, **overrides):
    """A model all of whose parameters are far from their start."""
    pattern, switches = MODELS[name]
    sizes = {
        "vocabulary": 40,
        "width": 16,
        "heads": 2,
        "options": {"window": {"sliding_window": 4}},
    }
    config = LoopedConfig.tiny(pattern, 3, **(sizes | switches | overrides))
    model = LoopedLM(config, rngs=nnx.Rngs(0))
    draw = np.random.default_rng(0)
    for _, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        noise = draw.normal(size=parameter.shape) * 0.3
        parameter[...] += jnp.asarray(noise, parameter.dtype)
    return model


def some_tokens(batch=2, time=11):
    return jax.random.randint(jax.random.key(1), (batch, time), 0, 40)


@pytest.mark.parametrize("name", MODELS)
def test_a_looped_model_does_all_that_it_does_otherwise(name, tmp_path):
    model, tokens = build(name), some_tokens()
    run = jax.jit(lambda model, tokens, ids: model(tokens, segment_ids=ids))
    ids = jnp.asarray([[0] * 11, [0] * 4 + [1] * 7])
    wanted = run(model, tokens, jnp.zeros((2, 11), int))
    # Documents do not see each other, and no token sees a later one.
    packed = run(model, tokens, ids)
    np.testing.assert_allclose(packed[0], wanted[0], **CLOSE)
    other = run(model, tokens.at[1, :4].add(1), ids)
    np.testing.assert_array_equal(packed[1, 4:], other[1, 4:])
    assert jnp.abs(packed[1, 4:] - wanted[1, 4:]).max() > 1e-2  # what a leak would look like
    later = run(model, tokens.at[:, 7].add(1), jnp.zeros((2, 11), int))
    np.testing.assert_array_equal(later[:, :7], wanted[:, :7])
    assert (jnp.abs(later - wanted).max((0, 2))[7:] > 1e-4).all()
    # A prompt in two pieces, then step by step.
    _, cache = prefill(model, tokens[:, :5], 16)
    logits, cache = extend(model, tokens[:, 5:8], cache)
    np.testing.assert_allclose(logits, wanted[:, 7], **CLOSE)
    for place in range(8, 11):
        logits, cache = decode_step(model, tokens[:, place], cache)
        np.testing.assert_allclose(logits, wanted[:, place], **CLOSE)
    empty = LoopedCache.empty(model.config, 2, 16)
    assert jax.tree.map(jnp.shape, cache) == jax.tree.map(jnp.shape, empty)
    # Files, and the number of parameters.
    save_model(model, tmp_path / "model")
    again = load_model(tmp_path / "model")
    assert again.config == model.config
    np.testing.assert_array_equal(run(again, tokens, ids), run(model, tokens, ids))
    count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert parameter_count(model.config) == count


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_learns_and_recomputation_changes_nothing(name):
    model, tokens = build(name), some_tokens()

    def loss(model):
        return jnp.mean(jnp.square(model(tokens)))

    gradient = jax.jit(jax.grad(loss))
    plain = gradient(model)
    leaves = jax.tree_util.tree_leaves_with_path(plain)
    assert [jax.tree_util.keystr(path) for path, leaf in leaves if not jnp.any(leaf)] == []
    model.config = dataclasses.replace(model.config, remat=True)
    for wanted, found in zip(jax.tree.leaves(plain), jax.tree.leaves(gradient(model)), strict=True):
        scale = float(jnp.abs(wanted).max())
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * scale)
