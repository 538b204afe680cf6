"""Switches other looped models are built with: each against its equation, and in decoding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.looped import (
    PRESETS,
    LoopedCache,
    LoopedConfig,
    LoopedLM,
    cache_bytes_per_sequence,
    decode_step,
    exit_loop,
    exit_loss,
    exit_probabilities,
    match_parameters,
    parameter_count,
    prefill,
    tokens_reached,
)
from toolkit.looped.layers import rotary_embedding
from toolkit.testing.layers import everywhere

FLOAT32_TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
HUGINN = {
    "prelude": "full",
    "coda": "window",
    "input_injection": True,
    "loop_embedding": True,
}
OURO = {
    "norm_every_loop": True,
    "exit_gate": True,
    "residual_gate": False,
    "sandwich_norm": True,
    "tied_embedding": False,
}
QWEN = {
    "options": everywhere(query_key_norm=True, rotary_fraction=0.5, output_gate=True)
    | {"gdn": {"heads": 4, "key_size": 8}},
}
GROUPS = {"residual_group": 2}


def build(pattern="full", loops=2, **overrides):
    """A model whose zero-initialised parameters, and the exit gate's bias, are not zero."""
    sizes = {
        "vocabulary": 50,
        "width": 16,
        "heads": 2,
        "options": {"window": {"sliding_window": 4}},
    }
    model = LoopedLM(LoopedConfig.tiny(pattern, loops, **(sizes | overrides)), rngs=nnx.Rngs(0))
    bias = None if model.exit_gate is None else model.exit_gate.bias
    gamma = None if model.group_residual is None else model.group_residual.gamma
    for seed, parameter in enumerate((model.rho, model.loop_embedding, bias, gamma)):
        if parameter is not None:
            parameter[...] = 0.3 * jax.random.normal(jax.random.key(seed), parameter.shape)
    for name, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if name[-1] == "scale":
            noise = jax.random.normal(jax.random.key(len(str(name))), parameter.shape)
            parameter[...] = 1 + 0.3 * noise
    return model


def some_tokens(batch=2, time=12):
    return jax.random.randint(jax.random.key(1), (batch, time), 0, 50)


@jax.jit
def forward(model, tokens):
    return model(tokens, return_loops=True)


@pytest.mark.parametrize(
    ("pattern", "switches"),
    [("full", HUGINN), ("full", OURO), ("gdn full", QWEN), ("full window full", GROUPS)],
)
def test_prefill_and_steps_equal_the_parallel_form(pattern, switches):
    model, tokens = build(pattern, **switches), some_tokens()
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
    "switches", [HUGINN, OURO, QWEN, GROUPS, {"loop_embedding": True, "windows": "full -> 5 -> 2"}]
)
def test_parameter_count_equals_the_arrays(switches):
    config = LoopedConfig.tiny("gdn full gdn", loops=3, **switches)
    model = nnx.eval_shape(lambda: LoopedLM(config, rngs=nnx.Rngs(0)))
    arrays = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert parameter_count(config) == sum(array.size for array in arrays)
    plain = LoopedConfig.tiny("full full full")
    assert parameter_count(match_parameters(config, plain)) == pytest.approx(
        parameter_count(plain), rel=0.01
    )


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
    unit = hidden / model.norm.scale[...]
    np.testing.assert_allclose(jnp.mean(unit**2, axis=-1), 1.0, **FLOAT32_TOLERANCE)
    # The head takes no second norm, and has a table of its own.
    table = model.unembedding[...]
    assert jnp.max(jnp.abs(table - model.embedding.embedding[...])) > 0.1
    np.testing.assert_allclose(logits, hidden[-1] @ table.T, **FLOAT32_TOLERANCE)


def test_sandwich_norms_are_their_equation():
    model, tokens = build("full", loops=1, **OURO), some_tokens()
    block, h = model.blocks[0], model.embedding(tokens)

    @jax.jit
    def by_hand(block, h):
        h += block.mixer_end_norm(block.mixer(block.mixer_norm(h))[0])
        return h + block.feed_forward_end_norm(block.feed_forward(block.feed_forward_norm(h)))

    _, hidden = forward(model, tokens)
    np.testing.assert_allclose(hidden[0], model.norm(by_hand(block, h)), **FLOAT32_TOLERANCE)


def test_groups_add_their_input():
    """Groups of two and the layer that is left, each with its own scalar, the same in all loops."""
    model, tokens = build("full window full", **GROUPS), some_tokens()

    @jax.jit
    def by_hand(model):
        h, (first, last) = model.embedding(tokens), model.group_residual.gamma[...]
        for rho in model.rho[...]:
            start = h
            h = model.blocks[1](model.blocks[0](h)[0])[0] + first * h
            h = model.blocks[2](h)[0] + last * h + rho * start
        return h

    np.testing.assert_allclose(forward(model, tokens)[1][-1], by_hand(model), **FLOAT32_TOLERANCE)
    # At the start of training there is no group.
    assert not jnp.any(LoopedLM(model.config, rngs=nnx.Rngs(0)).group_residual.gamma[...])


def test_only_a_fraction_of_the_channels_turns():
    x = jax.random.normal(jax.random.key(0), (5, 2, 8))
    turned = rotary_embedding(x, jnp.arange(5), theta=100.0, fraction=0.5)
    wanted = rotary_embedding(x[..., :4], jnp.arange(5), theta=100.0)
    np.testing.assert_array_equal(turned[..., :4], wanted)
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])


def test_published_sizes_of_ouro():
    # 24 and 48 layers, and two tables of 49,152 tokens.
    assert parameter_count(PRESETS["ouro-1.4b"]) == pytest.approx(1.434e9, rel=1e-3)
    assert parameter_count(PRESETS["ouro-2.6b"]) == pytest.approx(2.667e9, rel=1e-3)
    assert cache_bytes_per_sequence(PRESETS["ouro-1.4b"], 1) == 4 * 24 * 2 * 2048 * 2


def test_a_prelude_adds_to_the_reach():
    config = LoopedConfig.tiny(
        "window", 3, prelude="window", options={"window": {"sliding_window": 5}}
    )
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
        ({"residual_group": 0}, ["residual_group", "0", "at least 1"]),
        (
            {"options": {"full": {"rotary_fraction": 0.3}}},
            ["rotary_fraction", "0.3", "32 channels"],
        ),
        ({"options": {"full": {"rotary_fraction": 0}}}, ["full.rotary_fraction", "(0, 1]"]),
        ({"options": {"gdn": {"heads": 3, "value_heads": 4}}}, ["gdn.value_heads 4", "heads 3"]),
        ({"random_start": True}, ["random_start", "input_injection"]),
        ({"backward_loops": 2}, ["backward_loops", "residual_gate"]),
    ],
)
def test_bad_switches_are_named(switches, words):
    with pytest.raises(ValueError, match=words[0]) as error:
        LoopedConfig.tiny(**switches)
    for word in words:
        assert word in str(error.value)
