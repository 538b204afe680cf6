"""Random depth: loops drawn in training, a gradient through the last few, any number afterwards."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.looped import (
    LoopedConfig,
    LoopedLM,
    decode_step,
    draw_loops,
    prefill,
    with_loops,
)

FLOAT32_TOLERANCE = 1e-5  # of the largest number: loops magnify rounding, large and small alike
STATISTICAL_TOLERANCE = 0.05  # 8,000 draws
BACKWARD = 2
HUGINN = {
    "input_injection": True,
    "random_start": True,
    "residual_gate": False,
    "backward_loops": BACKWARD,
}


def build(loops=5, **switches):
    sizes = {
        "vocabulary": 50,
        "width": 16,
        "heads": 2,
        "options": {"window": {"sliding_window": 4}},
    }
    config = LoopedConfig.tiny("full", loops, **(sizes | HUGINN | switches))
    return LoopedLM(config, rngs=nnx.Rngs(0))


def some_tokens():
    return jax.random.randint(jax.random.key(1), (2, 9), 0, 50)


def squares(model, tokens, **how):
    logits = model(tokens, **how)
    return jnp.mean(jnp.square(logits)), logits


gradient_of = jax.jit(jax.grad(squares, has_aux=True))
forward = jax.jit(lambda model, tokens, loops=None: model(tokens, loops=loops))


def assert_same(ours, wanted):
    for (path, one), other in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(wanted), strict=True
    ):
        one, other = np.asarray(one), np.asarray(other)
        gap, largest = np.max(np.abs(one - other)), np.max(np.abs(other))
        assert gap <= FLOAT32_TOLERANCE * largest, jax.tree_util.keystr(path)


def by_hand(model, tokens, key, loops):
    """The loops written out; what all but the last two read has been cut off."""
    injected, _ = model.prelude[0](model.embedding(tokens))
    h, frozen = model.start(injected, key), jax.lax.stop_gradient((model, injected))
    for tau in range(loops):
        of, shown = (model, injected) if tau >= loops - BACKWARD else frozen
        h = of.blocks[0](of.adapter(jnp.concatenate([h, shown], axis=-1)))[0]
    logits = model.head(model.coda[0](h)[0])
    return jnp.mean(jnp.square(logits)), logits


@pytest.mark.nightly
def test_the_gradient_goes_through_the_last_loops_alone():
    model, tokens, key = build(3, prelude="window", coda="full"), some_tokens(), jax.random.key(3)
    by_hand_gradient = jax.jit(jax.grad(by_hand, has_aux=True), static_argnums=3)
    for loops in (1, 3):
        wanted = by_hand_gradient(model, tokens, key, loops)
        traced = gradient_of(model, tokens, loops=jnp.asarray(loops), key=key)
        assert_same(traced, wanted)
    # As a number of the configuration, here 3, it is the same.
    assert_same(gradient_of(model, tokens, key=key), traced)


def test_all_loops_learn_otherwise():
    model, tokens, key = build(), some_tokens(), jax.random.key(3)
    short, logits = gradient_of(model, tokens, key=key)
    whole = build(backward_loops=None)
    full, same_logits = gradient_of(whole, tokens, key=key)
    assert_same(logits, same_logits)
    gap = short.adapter.kernel[...] - full.adapter.kernel[...]
    assert jnp.linalg.norm(gap) > 0.01 * jnp.linalg.norm(full.adapter.kernel[...])
    # A gradient that may go through more loops than there are goes through all.
    assert_same(gradient_of(build(backward_loops=9), tokens, key=key), (full, logits))


def test_without_noise_the_start_learns_if_no_loop_comes_before():
    model, tokens = build(random_start=False), some_tokens()
    plain = build(2, random_start=False, backward_loops=None)
    assert_same(gradient_of(model, tokens, loops=jnp.asarray(2)), gradient_of(plain, tokens))


def test_one_program_serves_every_number_of_loops():
    model, tokens = build(), some_tokens()
    before = forward._cache_size()
    for loops in (1, 3):
        traced = forward(model, tokens, jnp.asarray(loops))
        assert_same(traced, forward(with_loops(model, loops), tokens))
    assert forward._cache_size() == before + 3


def test_memory_of_training_is_that_of_the_last_loops():
    def temporary_bytes(loops):
        model = nnx.eval_shape(lambda: build(loops))
        compiled = gradient_of.lower(model, some_tokens(), key=jax.random.key(0)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(40) <= 1.05 * temporary_bytes(4)


def test_more_loops_than_trained():
    """The hidden states of 3 loops are the first of those of 6; writing agrees with reading."""
    model, tokens = build(3), some_tokens()
    longer = with_loops(model, 6)
    all_loops = jax.jit(lambda model: model(tokens, return_loops=True))
    (_, few), (logits, many) = all_loops(model), all_loops(longer)
    assert many.shape == (6, 2, 9, 16)
    assert_same(many[:3], few)
    at_8, cache = prefill(longer, tokens[:, :8], 9)
    assert_same(at_8, logits[:, 7])
    at_9, _ = decode_step(longer, tokens[:, 8], cache)
    assert_same(at_9, logits[:, 8])


def test_the_start_is_noise_of_variance_two_fifths():
    model = build(width=64)
    like = jnp.zeros((4, 100, 64))
    start = model.start(like, jax.random.key(0))
    # Cutting at three deviations takes 2.7% of the variance.
    assert jnp.var(start) == pytest.approx(0.973 * 2 / 5, rel=STATISTICAL_TOLERANCE)
    assert jnp.max(jnp.abs(start)) < 3 * (2 / 5) ** 0.5
    assert not jnp.any(model.start(like))
    tokens = some_tokens()
    (_, one), (_, other) = (gradient_of(build(), tokens, key=jax.random.key(s)) for s in (0, 1))
    assert jnp.max(jnp.abs(one - other)) > 0.01


def test_drawn_loops():
    draw = jax.jit(jax.vmap(draw_loops))
    loops = np.asarray(draw(jax.random.split(jax.random.key(0), 8_000)))
    assert loops.dtype == np.int32
    assert loops.min() >= 1
    assert loops.mean() == pytest.approx(33.0, rel=STATISTICAL_TOLERANCE)
    # A Poisson number's own variance, and that of its rate.
    spread = 32.0 + 32.0**2 * (np.exp(0.25) - 1)
    assert loops.var() == pytest.approx(spread, rel=2 * STATISTICAL_TOLERANCE)
    # Somewhat few more often than many.
    assert np.median(loops) < 31
    assert draw_loops(jax.random.key(0), 1e-6, sigma=0.0) == 1


@pytest.mark.parametrize(
    ("switches", "how", "words"),
    [
        ({}, {"loops": 0}, ["loops", "0", "at least 1"]),
        ({"backward_loops": None}, {"loops": jnp.asarray(2)}, ["backward_loops", "int"]),
        ({}, {"loops": jnp.asarray(2), "return_loops": True}, ["return_loops"]),
        ({"random_start": False}, {"key": jax.random.key(0)}, ["key", "random_start"]),
        (
            {"residual_gate": True, "loop_embedding": True, "backward_loops": None},
            {"loops": 3},
            ["loops is 3", "residual_gate and loop_embedding", "fix 5"],
        ),
        (
            {"windows": " -> ".join("34567"), "backward_loops": None},
            {"loops": 3},
            ["loops is 3", "windows"],
        ),
    ],
)
def test_what_cannot_be_run_is_named(switches, how, words):
    model = nnx.eval_shape(lambda: build(**switches))
    with pytest.raises(ValueError, match=words[0]) as error:
        jax.eval_shape(lambda model: model(some_tokens(), **how), model)
    for word in words:
        assert word in str(error.value)


def test_bad_draws_are_named():
    for mean, sigma in ((0.0, 0.5), (32.0, -1.0)):
        with pytest.raises(ValueError, match="mean"):
            draw_loops(jax.random.key(0), mean, sigma=sigma)
    with pytest.raises(ValueError, match="fix 2"):
        with_loops(nnx.eval_shape(lambda: build(2, residual_gate=True, backward_loops=None)), 3)
    config = build().config
    assert dataclasses.replace(config, loops=7) == with_loops(build(), 7).config
