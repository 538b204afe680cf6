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
SOURCES: dict[str, Any] = {"attention_residual": 2, "raw_sources": True, "coda": "full"}
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_learns_and_recomputation_changes_nothing(name):
    model, tokens = build(name), some_tokens()

    def loss(model):
        return jnp.mean(jnp.square(model(tokens)))

    gradient = jax.jit(jax.grad(loss))
    plain = gradient(model)
    leaves = jax.tree_util.tree_leaves_with_path(plain)
    assert [jax.tree_util.keystr(path) for path, leaf in leaves if not jnp.any(leaf)] == []
    if name == "messages":  # another number of loops, which is traced, and a part of the gradient
        short = dataclasses.replace(model.config, backward_loops=2, loops=4)
        model.config = short
        traced = jax.jit(lambda model, loops: model(tokens, loops=loops))(model, jnp.int32(3))
        np.testing.assert_allclose(traced, model(tokens, loops=3), **CLOSE)
        model.config = dataclasses.replace(short, backward_loops=None, loops=3)
        np.testing.assert_allclose(traced, model(tokens), **CLOSE)
    model.config = dataclasses.replace(model.config, remat=True)
    for wanted, found in zip(jax.tree.leaves(plain), jax.tree.leaves(gradient(model)), strict=True):
        scale = float(jnp.abs(wanted).max())
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * scale)


@pytest.mark.parametrize("is_raw", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_attention_residuals_are_their_equation(is_raw):
    """Two groups of one layer; every sub-layer reads a softmax mean over the sums so far."""
    sizes = {"vocabulary": 40, "width": 16, "heads": 2, "residual_gate": False}
    how: dict[str, Any] = {"attention_residual": 1, "raw_sources": is_raw}
    model = LoopedLM(LoopedConfig.tiny("full full", **sizes, **how), rngs=nnx.Rngs(0))
    first, last = model.blocks
    ends = (first.connections.feed_forward, last.connections.mixer, last.connections.feed_forward)
    queries = [end.residual.query for end in ends] + [last.connections.end.query]
    for seed, query in enumerate(queries):
        query[...] = 2 * jax.random.normal(jax.random.key(seed), query.shape)

    def mean(query, *sources):
        stacked = np.stack([np.asarray(source) for source in sources])
        unit = stacked / np.sqrt(np.square(stacked).mean(-1, keepdims=True) + 1e-6)
        scores = np.einsum("d,sbtd->sbt", np.asarray(query[...]), unit) / 4.0
        shares = np.exp(scores) / np.exp(scores).sum(0)
        return jnp.asarray(np.einsum("sbt,sbtd->btd", shares, stacked if is_raw else unit))

    def mixed(block, x):
        return block.mixer(block.mixer_norm(x))[0]

    def fed(block, x):
        return block.feed_forward(block.feed_forward_norm(x))

    tokens = some_tokens(1, 5)
    start = model.embedding(tokens)
    one = mixed(first, start)
    one = one + fed(first, mean(queries[0], start, one))
    two = mixed(last, mean(queries[1], start, one))
    two = two + fed(last, mean(queries[2], start, one, two))
    wanted = model.head(mean(queries[3], start, one, two))
    np.testing.assert_allclose(model(tokens), wanted, **CLOSE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"streams": 1}, "streams is 1"),
        ({"streams": 2, "attention_residual": 1}, "exclude each other"),
        ({"streams": 2, "ladder_residual": True}, "ladder_residual and streams"),
        ({"attention_residual": 1, "residual_group": 1}, "residual_group and attention_residual"),
        ({"raw_sources": True}, "raw_sources without attention_residual"),
        ({"message_rank": 2}, "message_rank without attention_residual"),
        (MESSAGES | {"residual_gate": True}, "residual_gate and message_rank"),
        (MESSAGES | {"attention_residual": 2}, "prelude has 1 layers"),
        (MESSAGES | {"pattern": "full gdn"}, "'gdn' layers read one input"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LoopedConfig.tiny(**({"pattern": "full full"} | changes))
