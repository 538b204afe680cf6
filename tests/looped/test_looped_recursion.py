"""Mixture-of-Recursions: loops that each token takes as often as a router says."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from toolkit.language.losses import loss_of_recursion
from toolkit.looped import (
    LoopedCache,
    LoopedConfig,
    LoopedLM,
    decode_step,
    decode_until_exit,
    extend,
    generate,
    generate_speculatively,
    parameter_count,
    prefill,
    read_sparsely,
    recursion_depths,
    recursion_loss,
)
from toolkit.looped.blocks import run_blocks
from toolkit.looped.mixing.streaming import streaming
from toolkit.looped.recursion.loss import _chosen_loops

CLOSE = {"rtol": 2e-5, "atol": 2e-5}
TIME = 9


def build(kind, **changes):
    how: dict[str, Any] = {"vocabulary": 40, "width": 16, "heads": 2, "residual_gate": False}
    how |= {"recursion": kind, "coda": "full"}
    how |= {"loops": 3} | changes
    model = LoopedLM(LoopedConfig.tiny("full", **how), rngs=nnx.Rngs(0))
    if model.router is not None:
        kernel = model.router.kernel
        kernel[...] = 3 * jax.random.normal(jax.random.key(3), kernel.shape)
    return model


def some_tokens(batch=2, time=TIME):
    return jax.random.randint(jax.random.key(1), (batch, time), 0, 40)


@pytest.fixture(params=[pytest.param("expert", marks=pytest.mark.slow), "token"])
def model(request):
    return build(request.param)


def by_hand(model, tokens):
    """One row, token by token: a loop sees the tokens that take it, at their places."""
    router, block = model.router, model.blocks
    theta = np.asarray(router.kernel[...])
    start = np.asarray(model.embedding(tokens))[0]
    h, taking, depths = start.copy(), np.arange(tokens.shape[1]), np.zeros(tokens.shape[1], int)
    shares = np.asarray(jax.nn.softmax(jnp.asarray(start @ theta), axis=-1))
    for loop in range(model.config.loops):
        scores = 1 / (1 + np.exp(-h @ theta[:, loop]))
        if loop:
            goes_on = scores > 0.5 if router.kind == "expert" else shares.argmax(-1) >= loop
            taking = taking[goes_on[taking]]
        if not len(taking):
            break
        depths[taking] += 1
        places = jnp.asarray(taking, jnp.int32)[None]
        out = np.asarray(run_blocks(block, jnp.asarray(h[taking])[None], positions=places)[0])[0]
        if router.kind == "expert":
            h[taking] += 0.1 * scores[taking, None] * out
        else:
            is_last = (shares.argmax(-1)[taking] == loop)[:, None]
            h[taking] = np.where(is_last, start[taking] + shares.max(-1)[taking, None] * out, out)
    h = run_blocks(model.coda, jnp.asarray(h)[None])[0]
    return np.asarray(model.head(h))[0], depths


def test_it_is_its_equation(model):
    tokens = some_tokens()
    found, depths = model(tokens), recursion_depths(model, tokens)
    assert len(np.unique(depths)) > 1
    for row in range(2):
        wanted, counted = by_hand(model, tokens[row : row + 1])
        np.testing.assert_array_equal(depths[row], counted)
        np.testing.assert_allclose(found[row], wanted, **CLOSE)
    # A model whose tokens take all loops is another one.
    plain = build(None)
    for name in ("embedding", "blocks", "coda", "norm"):
        setattr(plain, name, getattr(model, name))
    assert jnp.abs(plain(tokens) - found).max() > 0.1


@pytest.mark.slow
def test_decoding_is_the_parallel_form(model):
    tokens = some_tokens()
    run = jax.jit(lambda model, tokens, ids: model(tokens, segment_ids=ids))
    wanted = run(model, tokens, jnp.zeros((2, TIME), int))
    later = run(model, tokens.at[:, 6].add(1), jnp.zeros((2, TIME), int))
    np.testing.assert_array_equal(later[:, :6], wanted[:, :6])
    ids = jnp.asarray([[0] * TIME, [0] * 4 + [1] * (TIME - 4)])
    packed = run(model, tokens, ids)
    np.testing.assert_allclose(packed[0], wanted[0], **CLOSE)
    other = run(model, tokens.at[1, :4].add(1), ids)
    # To rounding: tokens that leave a loop make place, and sums are of other terms then.
    np.testing.assert_allclose(packed[1, 4:], other[1, 4:], **CLOSE)
    assert jnp.abs(packed[1, 4:] - wanted[1, 4:]).max() > 1e-2
    # Rows of different lengths: the second lacks its first three tokens.
    _, cache = prefill(model, tokens[:, :5], 16, lengths=np.array([5, 2]))
    logits, cache = extend(model, tokens[:, 5:7], cache)
    np.testing.assert_allclose(logits[0], wanted[0, 6], **CLOSE)
    for place in range(7, TIME):
        logits, cache = decode_step(model, tokens[:, place], cache)
        np.testing.assert_allclose(logits[0], wanted[0, place], **CLOSE)
    alone = run(model, jnp.tile(tokens[1:, 3:], (2, 1)), jnp.zeros((2, TIME - 3), int))
    np.testing.assert_allclose(logits[1], alone[1, -1], **CLOSE)
    # Caches hold the tokens that took a loop, in the memory that was there.
    depths = recursion_depths(model, tokens)[0]
    held = [int(layers[0].length[0]) for layers in cache.loops]
    assert held == [int((depths > loop).sum()) for loop in range(3)]
    assert held[0] == TIME > held[-1]
    empty = LoopedCache.empty(model.config, 2, 16)
    assert jax.tree.map(jnp.shape, cache) == jax.tree.map(jnp.shape, empty)
    assert generate(model, tokens, 3).shape == (2, 3)


@pytest.mark.slow
def test_training_chooses_by_rank_and_every_parameter_learns(model):
    tokens, config = some_tokens(), model.config
    targets = jnp.roll(tokens, -1, 1)

    @jax.jit
    def loss(model):
        return recursion_loss(model, tokens, targets, router_weight=0.01)

    value, gradient = jax.jit(jax.value_and_grad(loss))(model)
    leaves = jax.tree_util.tree_leaves_with_path(gradient)
    assert [jax.tree_util.keystr(path) for path, leaf in leaves if not jnp.any(leaf)] == []
    model.config = dataclasses.replace(config, remat=True)
    again, recomputed = jax.jit(jax.value_and_grad(loss))(model)
    np.testing.assert_allclose(again, value, rtol=1e-6)
    for wanted, found in zip(*map(jax.tree.leaves, (gradient, recomputed)), strict=True):
        scale = float(jnp.abs(wanted).max())
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * scale)
    model.config = config
    count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert parameter_count(config) == count
    parts, batch = nnx.split(model), (tokens, targets)
    default = recursion_loss(model, tokens, targets)
    np.testing.assert_allclose(loss_of_recursion(*parts, batch), default, rtol=1e-6)
    if config.recursion == "token":
        with_balance = recursion_loss(model, tokens, targets, router_weight=1.0)
        plain = optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets).mean()
        np.testing.assert_allclose(loss(model) - plain, (with_balance - plain) / 100, rtol=1e-3)


@pytest.mark.slow
def test_chosen_loops_are_those_of_the_threshold_where_these_are_the_best():
    """One half of the tokens takes the second of two loops, by rank or by the threshold."""
    model = build("expert", loops=2)
    for seed in range(200):
        tokens = jax.random.randint(jax.random.key(seed), (1, 4), 0, 40)
        if recursion_depths(model, tokens).sum() == 6:
            break
    chosen = jax.jit(lambda model, tokens: _chosen_loops(model, model.embedding(tokens), None)[0])
    h, _ = run_blocks(model.coda, chosen(model, tokens))
    np.testing.assert_allclose(model.head(h), model(tokens), **CLOSE)
    # By rank, a later token changes what becomes of an earlier one.
    changed = [chosen(model, tokens.at[0, 3].set(other))[0, :3] for other in range(12)]
    assert max(float(jnp.abs(h[:3] - changed[0]).max()) for h in changed) > 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"residual_gate": True}, "residual_gate and recursion"),
        ({"recursion": "both"}, "recursion"),
        ({"pattern": "full gdn"}, "'gdn' layers cannot leave tokens out"),
        ({"options": {"full": {"quantised_cache": True}}}, "quantised_cache=False"),
        ({"backward_loops": 1}, "turn recursion off"),
        ({"feed_forwards": "moe"}, 'without "moe"'),
        ({"windows": "4"}, "windows and recursion"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, message):
    how = {"residual_gate": False, "recursion": "expert"} | changes
    with pytest.raises(ValueError, match=message):
        LoopedConfig.tiny(how.pop("pattern", "full"), 2, **how)


def test_uses_without_a_meaning_are_refused():
    model, tokens = build("token"), some_tokens()
    cache = LoopedCache.empty(model.config, 2, 16)
    with pytest.raises(ValueError, match="decides already"):
        decode_until_exit(model, tokens[:, 0], cache, exit="kl:0.1")
    with pytest.raises(ValueError, match="not read sparsely"):
        read_sparsely(model.config, cache, "window:4")
    with pytest.raises(ValueError, match="recursion"):
        generate_speculatively(model, model, tokens, 4)
    places = model.embedding(tokens), (None,)
    with pytest.raises(ValueError, match="wanted caches of keys and values"):
        model.loop(model.start(places[0]), None, caches=places[1])
    with streaming(2, model.config), pytest.raises(ValueError, match="not available for recursion"):
        model(tokens[:, :8])
    with pytest.raises(ValueError, match="no router of loops"):
        recursion_loss(build(None), tokens, tokens, router_weight=0.1)
