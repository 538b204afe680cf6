"""Switches other looped models are built with: each against its equation, and in decoding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.looped import (
    LoopedCache,
    LoopedConfig,
    LoopedLM,
    cache_bytes_per_sequence,
    decode_step,
    exit_loop,
    exit_loss,
    exit_probabilities,
    parameter_count,
    prefill,
    tokens_reached,
)

FLOAT32_TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
HUGINN = {
    "prelude": "full",
    "coda": "window",
    "input_injection": True,
    "loop_embedding": True,
}
OURO = {"norm_every_loop": True, "exit_gate": True, "residual_gate": False}


def build(pattern="full", loops=2, **overrides):
    """A model whose zero-initialised parameters, and the exit gate's bias, are not zero."""
    sizes = {"vocabulary": 50, "width": 16, "heads": 2, "sliding_window": 4}
    model = LoopedLM(LoopedConfig.tiny(pattern, loops, **(sizes | overrides)), rngs=nnx.Rngs(0))
    bias = None if model.exit_gate is None else model.exit_gate.bias
    for seed, parameter in enumerate((model.rho, model.loop_embedding, bias)):
        if parameter is not None:
            parameter[...] = 0.3 * jax.random.normal(jax.random.key(seed), parameter.shape)
    return model


def some_tokens(batch=2, time=12):
    return jax.random.randint(jax.random.key(1), (batch, time), 0, 50)


@jax.jit
def forward(model, tokens):
    return model(tokens, return_loops=True)


@pytest.mark.parametrize("switches", [HUGINN, OURO])
def test_prefill_and_steps_equal_the_parallel_form(switches):
    model, tokens = build("full", **switches), some_tokens()
    wanted, _ = forward(model, tokens)
    logits, cache = prefill(model, tokens[:, :7], 12)
    empty = LoopedCache.empty(model.config, 2, 12)
    assert jax.tree.map(jnp.shape, cache) == jax.tree.map(jnp.shape, empty)
    np.testing.assert_allclose(logits, wanted[:, 6], **FLOAT32_TOLERANCE)
    for position in range(7, 12):
        logits, cache = decode_step(model, tokens[:, position], cache)
        np.testing.assert_allclose(logits, wanted[:, position], **FLOAT32_TOLERANCE)
    floats = [a for a in jax.tree.leaves(cache) if jnp.issubdtype(a.dtype, jnp.floating)]
    assert sum(a.nbytes for a in floats) == 2 * cache_bytes_per_sequence(model.config, 12)


@pytest.mark.parametrize(
    "switches", [HUGINN, OURO, {"loop_embedding": True, "windows": "full -> 5 -> 2"}]
)
def test_parameter_count_equals_the_arrays(switches):
    config = LoopedConfig.tiny("gdn full", loops=3, **switches)
    model = nnx.eval_shape(lambda: LoopedLM(config, rngs=nnx.Rngs(0)))
    arrays = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert parameter_count(config) == sum(array.size for array in arrays)


def test_prelude_core_and_coda_are_their_equations():
    model, tokens = build(**HUGINN), some_tokens()

    @jax.jit
    def by_hand(model):
        injected, _ = model.prelude[0](model.embedding(tokens))
        h = injected
        for rho, embedding in zip(model.rho[...], model.loop_embedding[...], strict=True):
            both = jnp.concatenate([h + embedding, injected], axis=-1)
            h = model.blocks[0](model.adapter(both))[0] + rho * h
        h, _ = model.coda[0](h)
        return model.norm(h) @ model.embedding.embedding[...].T

    def squares(model):
        logits = model(tokens)
        return jnp.mean(jnp.square(logits)), logits

    gradient, logits = jax.jit(jax.grad(squares, has_aux=True))(model)
    np.testing.assert_allclose(logits, by_hand(model), **FLOAT32_TOLERANCE)
    # ... and every parameter learns.
    leaves = jax.tree_util.tree_leaves_with_path(gradient)
    assert [jax.tree_util.keystr(path) for path, leaf in leaves if not jnp.any(leaf)] == []


def test_the_norm_closes_every_loop():
    model, tokens = build(**OURO, norm_epsilon=1e-12), some_tokens()
    logits, hidden = forward(model, tokens)
    np.testing.assert_allclose(jnp.mean(hidden**2, axis=-1), 1.0, **FLOAT32_TOLERANCE)
    # The head takes no second norm.
    table = model.embedding.embedding[...]
    np.testing.assert_allclose(logits, hidden[-1] @ table.T, **FLOAT32_TOLERANCE)


def test_a_prelude_adds_to_the_reach():
    config = LoopedConfig.tiny("window", 3, sliding_window=5, prelude="window")
    assert tokens_reached(config) == 1 + 4 + 3 * 4
    assert tokens_reached(dataclasses.replace(config, coda="full")) is None


# Exits.


def test_exit_probabilities_are_the_chances_of_stopping():
    model, tokens = build(loops=3, **OURO), some_tokens()
    _, hidden = forward(model, tokens)
    p = np.asarray(exit_probabilities(model, hidden))
    stop = np.asarray(jax.nn.sigmoid(model.exit_gate(hidden)[..., 0]))
    wanted = [stop[0], (1 - stop[0]) * stop[1], (1 - stop[0]) * (1 - stop[1])]
    np.testing.assert_allclose(p, wanted, **FLOAT32_TOLERANCE)
    np.testing.assert_allclose(p.sum(0), 1.0, **FLOAT32_TOLERANCE)


def test_exit_loss_is_expected_loss_less_entropy():
    model, tokens = build(loops=3, **OURO), some_tokens()
    targets = jnp.roll(tokens, -1, axis=1)
    _, hidden = forward(model, tokens)
    p = np.asarray(exit_probabilities(model, hidden))
    likelihood = np.asarray(jax.nn.softmax(model.head(hidden)))
    chosen = np.take_along_axis(likelihood, np.asarray(targets)[None, ..., None], -1)[..., 0]
    wanted = np.mean(np.sum(p * (-np.log(chosen) + 0.3 * np.log(p)), axis=0))
    loss = jax.jit(
        jax.value_and_grad(lambda model: exit_loss(model, tokens, targets, entropy_weight=0.3))
    )
    value, gradient = loss(model)
    np.testing.assert_allclose(value, wanted, **FLOAT32_TOLERANCE)
    assert jnp.any(gradient.exit_gate.kernel[...])
    # A gate that is sure of one loop leaves that loop's loss, and gradients stay finite.
    for bias, loop in ((200.0, 0), (-200.0, 2)):
        model.exit_gate.bias[...] = jnp.array([bias])
        value, gradient = loss(model)
        np.testing.assert_allclose(value, np.mean(-np.log(chosen[loop])), **FLOAT32_TOLERANCE)
        assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(gradient))


def test_exit_loop():
    p = jnp.array([[0.5, 0.1, 0.3], [0.2, 0.1, 0.3], [0.3, 0.8, 0.4]])
    assert exit_loop(p, 0.5).tolist() == [0, 2, 1]
    assert exit_loop(p, 0.7).tolist() == [1, 2, 2]
    assert exit_loop(p, 1.0).tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="threshold"):
        exit_loop(p, 0.0)


def test_exits_need_a_gate():
    model, tokens = build(), some_tokens()
    with pytest.raises(ValueError, match="exit_gate=True"):
        exit_probabilities(model, jnp.zeros((2, 1, 1, 16)))
    with pytest.raises(ValueError, match="targets"):
        exit_loss(model, tokens, tokens[:, 1:], entropy_weight=0.1)


@pytest.mark.parametrize(
    ("switches", "words"),
    [
        ({"prelude": "full mamba"}, ["prelude", "'mamba'"]),
        ({"coda": None}, ["coda", "None"]),
        ({"coda": "full", "exit_gate": True}, ["exit_gate", "coda 'full'"]),
        ({"coda": "full", "norm_every_loop": True}, ["norm_every_loop", "coda"]),
    ],
)
def test_bad_switches_are_named(switches, words):
    with pytest.raises(ValueError, match=words[0]) as error:
        LoopedConfig.tiny(**switches)
    for word in words:
        assert word in str(error.value)
