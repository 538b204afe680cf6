"""Models with mixtures of experts: every way of running them gives what one call gives."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiers import by_night

from toolkit.conversion import upcycled
from toolkit.experts import balance_loss, pooled_statistics, updated_choice_bias
from toolkit.looped import (
    LoopedConfig,
    LoopedLM,
    active_parameter_count,
    decode_step,
    extend,
    load_model,
    match_parameters,
    parameter_count,
    prefill,
    save_model,
)
from toolkit.looped.feed_forward import ChoiceBias
from toolkit.training import TrainState, adamw, make_train_step
from toolkit.training.step import _cast_matrices

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
TIME, PROMPT = 12, 7
MOE = {
    "experts": 8,
    "hidden": 12,
    "shared_hidden": 10,
    "shared_gate": True,
    "scores": "sigmoid",
    "groups": 4,
    "chosen_groups": 2,
    "choice_bias": True,
    "router_bias": True,
    "biases": True,
    "activation": "clamped",
}


def configured(pattern="gdn full", feed_forwards="swiglu moe", loops=2, moe=MOE, **fields):
    return LoopedConfig.tiny(
        pattern,
        loops,
        width=16,
        heads=2,
        vocabulary=32,
        feed_forwards=feed_forwards,
        options={"moe": moe},
        **fields,
    )


@pytest.fixture(scope="module")
def model():
    return made(configured())


def made(config):
    model = LoopedLM(config, rngs=nnx.Rngs(0))
    # Routers that differ much between tokens, and biases that are not 0.
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    pairs = zip(leaves, keys, strict=True)
    moved = [x + 0.1 * jax.random.normal(key, x.shape) for x, key in pairs]
    return nnx.merge(graph, jax.tree.unflatten(tree, moved))


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, TIME)))


call = jax.jit(LoopedLM.__call__)


def test_prefill_and_steps_are_the_parallel_form(model):
    wanted = call(model, TOKENS)
    logits, cache = prefill(model, TOKENS[:, :4], TIME)
    np.testing.assert_allclose(logits, wanted[:, 3], **CLOSE)
    logits, cache = extend(model, TOKENS[:, 4:PROMPT], cache)
    np.testing.assert_allclose(logits, wanted[:, PROMPT - 1], **CLOSE)
    for position in range(PROMPT, TIME):
        logits, cache = decode_step(model, TOKENS[:, position], cache)
        np.testing.assert_allclose(logits, wanted[:, position], **CLOSE)


def test_neither_the_future_nor_another_document_is_seen(model):
    run = jax.jit(lambda tokens, ids: model(tokens, segment_ids=ids))
    ids = jnp.broadcast_to(jnp.arange(TIME) // 5, TOKENS.shape)
    wanted = run(TOKENS, ids)
    future = run(TOKENS.at[:, 8:].set(1), ids)
    np.testing.assert_array_equal(future[:, :8], wanted[:, :8])
    past = run(TOKENS.at[:, :5].set(1), ids)
    np.testing.assert_array_equal(past[:, 5:], wanted[:, 5:])
    assert (past[:, :5] != wanted[:, :5]).any()


def test_routing_comes_back_from_every_loop_and_adds_up():
    """Of prelude, loops and coda, in that order; the output is that of a call."""
    config = configured("full window", "moe swiglu moe moe", 3, prelude="full", coda="full")
    model = made(config)
    h, routing = jax.jit(lambda m, t: m.with_routing(t))(model, TOKENS)
    np.testing.assert_allclose(model.head(h), call(model, TOKENS), **CLOSE)
    assert [layer.loads.shape for layer in routing] == [(1, 2, 8), (3, 2, 8), (1, 2, 8)]
    for layer in routing:
        assert (layer.loads.sum(-1) == 2 * TIME).all()
        assert (layer.tokens == TIME).all()
    loops = np.asarray(routing[1].loads)
    assert (loops[0] != loops[1]).any()


@pytest.mark.slow
@pytest.mark.parametrize("windows", by_night(["full -> 4"], [None, "full -> 4"]))
def test_recomputed_loops_route_alike(windows):
    """With `remat` the statistics and gradients are those without, in a scan and written out."""

    def run(remat):
        model = made(configured("gdn full", "moe moe", remat=remat, windows=windows))

        def loss(model):
            h, routing = model.with_routing(TOKENS)
            total = sum(balance_loss(pooled_statistics(layer)) for layer in routing)
            return model.head(h).std() + total, routing

        return jax.jit(jax.grad(loss, has_aux=True))(model)

    (plain, routing), (again, other) = run(False), run(True)
    np.testing.assert_allclose(
        jax.tree.leaves(routing)[0], jax.tree.leaves(other)[0], rtol=0, atol=0
    )
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "switch", [{"ladder_residual": True}, {"sandwich_norm": True}, {"residual_group": 1}]
)
def test_switches_of_a_block(switch):
    model = made(configured(**switch))
    h, _ = jax.jit(lambda m, t: m.with_routing(t))(model, TOKENS)
    np.testing.assert_allclose(model.head(h), call(model, TOKENS), **CLOSE)
    logits, cache = prefill(model, TOKENS[:, :-1], TIME)
    logits, cache = decode_step(model, TOKENS[:, -1], cache)
    np.testing.assert_allclose(logits, call(model, TOKENS)[:, -1], **CLOSE)


def test_counts_of_parameters(model):
    config = model.config
    counted = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert parameter_count(config) == counted
    each = 3 * 16 * 12 + 2 * 12 + 16
    assert counted - active_parameter_count(config) == (8 - 2) * each
    dense = dataclasses.replace(config, feed_forwards="swiglu", options={})
    assert parameter_count(dense) == active_parameter_count(dense)


def test_a_file_holds_the_choice_bias_too(model, tmp_path):
    save_model(model, tmp_path / "model.safetensors")
    again = load_model(tmp_path / "model.safetensors")
    assert again.config == model.config
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (model, again)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert jax.tree.leaves(nnx.state(again, ChoiceBias))[0].any()


def test_the_choice_bias_is_no_parameter_and_has_no_gradient(model):
    assert len(jax.tree.leaves(nnx.state(model, ChoiceBias))) == 1
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    assert not any("choice_bias" in map(str, path) for path, _ in nnx.to_flat_state(params))

    def loss(rest):
        return nnx.merge(graph, params, rest)(TOKENS).std()

    gradient = jax.jit(jax.grad(loss))(rest)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_a_bias_that_is_moved_after_steps_evens_the_loads():
    """The statistics of loops and sequences are added first."""
    model = made(configured("full", "moe", moe={**MOE, "groups": 1, "chosen_groups": 1}))
    bias = model.blocks[0].feed_forward.router.choice_bias

    @nnx.jit
    def loads(model):
        return pooled_statistics(model.with_routing(TOKENS)[1][0], 2).loads

    before = loads(model)
    for _ in range(100):
        bias.set_value(updated_choice_bias(bias[...], loads(model), 0.02))
    assert loads(model).max() < before.max()
    assert loads(model).std() < 0.5 * before.std()


@pytest.mark.slow
def test_training_lowers_loss_and_balance_loss():
    graph, params = nnx.split(
        LoopedLM(configured("full", "moe", moe={"hidden": 12}), rngs=nnx.Rngs(0))
    )

    def loss(params, batch):
        model = nnx.merge(graph, params)
        h, routing = model.with_routing(batch)
        logits = model.head(h)[:, :-1]
        own = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()
        return own + 0.1 * balance_loss(pooled_statistics(routing[0], 2))

    optimizer = adamw(1e-2)
    step = make_train_step(loss, optimizer, compute_dtype=jnp.bfloat16)
    state, losses = TrainState.create(params, optimizer), []
    for _ in range(30):
        state, metrics = step(state, TOKENS)
        losses.append(float(metrics["loss"][-1]))
    assert losses[-1] < 0.8 * losses[0]


def test_mixed_precision_leaves_routers_alone(model):
    params = nnx.state(model, nnx.Param)
    cast = _cast_matrices(params, jnp.bfloat16)["blocks"][1]["feed_forward"]
    assert cast["router"]["kernel"][...].dtype == jnp.float32
    assert cast["experts"]["gate"][...].dtype == jnp.bfloat16


@pytest.mark.slow
def test_an_upcycled_model_computes_what_the_dense_one_does():
    dense = made(dataclasses.replace(configured(), feed_forwards="swiglu", options={}))
    sparse = upcycled(dense, experts=4, layers=[1], rngs=nnx.Rngs(3))
    assert sparse.config.feed_forwards == "swiglu moe"
    np.testing.assert_allclose(call(sparse, TOKENS), call(dense, TOKENS), **CLOSE)
    assert parameter_count(sparse.config) == sum(
        x.size for x in jax.tree.leaves(nnx.state(sparse, nnx.Param))
    )
    with pytest.raises(ValueError, match="layers must be some of 0 to 1; got"):
        upcycled(dense, layers=[2], rngs=nnx.Rngs(3))
    with pytest.raises(ValueError, match="every layer must be 'swiglu'"):
        upcycled(sparse, rngs=nnx.Rngs(3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"feed_forwards": "swiglu moe moe"}, "has 3 words; write one for all layers, or 4"),
        ({"feed_forwards": "mixture"}, "names the unknown layer 'mixture'; write words out of"),
        ({"options": {"moe": {"experts": 4}}}, "options name 'moe', and feed_forwards 'swiglu'"),
        ({"feed_forwards": "moe", "options": {"moe": {"chosen": 9}}}, "moe.chosen must be at most"),
        (
            {"feed_forwards": "moe", "options": {"moe": {"chosen": 1}}},
            "moe.chosen 1 with normalise",
        ),
        ({"feed_forwards": "moe", "options": {"moe": {"groups": 3}}}, "moe.groups must divide"),
        (
            {"feed_forwards": "moe", "options": {"moe": {"scale": 0.0}}},
            "moe.scale must be positive",
        ),
        (
            {"feed_forwards": "moe", "options": {"moe": {"shared_gate": True}}},
            "give moe.shared_hidden too",
        ),
        ({"feed_forwards": "moe", "options": {"moe": {"expert": 4}}}, "moe.expert is no option"),
    ],
)
def test_a_wrong_configuration_is_refused_in_one_line(fields, message):
    with pytest.raises(ValueError, match=message) as refusal:
        LoopedConfig(**fields)
    assert "\n" not in str(refusal.value)


def test_what_does_not_know_mixtures_says_so(model):
    dense = LoopedLM(LoopedConfig.tiny(width=16, heads=2), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match='a model with routing has a "moe" layer'):
        dense.with_routing(TOKENS)
    with pytest.raises(ValueError, match="models are matched by the size of SwiGLU layers"):
        match_parameters(model.config, 10_000)
