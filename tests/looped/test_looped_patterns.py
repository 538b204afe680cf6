"""Placements of layers, windows that differ by loop, LT2's models by name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.looped import (
    PRESETS,
    LoopedConfig,
    LoopedLM,
    cache_bytes_per_sequence,
    decode_step,
    parameter_count,
    prefill,
)
from toolkit.looped.patterns import (
    back_loaded,
    bookend,
    by_loop,
    front_loaded,
    interleave,
    random_placement,
    vote,
    with_windows,
)
from toolkit.looped.theory import tokens_reached

FLOAT32_TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
GRADIENT_TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def build(pattern="full full", loops=2, **overrides):
    sizes = {
        "vocabulary": 50,
        "width": 16,
        "heads": 2,
        "options": {"window": {"sliding_window": 4}},
    }
    model = LoopedLM(LoopedConfig.tiny(pattern, loops, **(sizes | overrides)), rngs=nnx.Rngs(0))
    model.rho[...] = 0.3 * jax.random.normal(jax.random.key(0), model.rho.shape)
    return model


def some_tokens(batch=2, time=12):
    return jax.random.randint(jax.random.key(1), (batch, time), 0, 50)


@jax.jit
def forward(model, tokens):
    return model(tokens)


def positions(placement, word="full"):
    return [i for i, other in enumerate(placement.split()) if other == word]


def test_placements_of_the_paper():
    assert positions(interleave(20)) == [4, 9, 14, 19]
    assert positions(interleave(21)) == [4, 9, 14, 19]
    assert positions(bookend(20)) == [0, 1, 18, 19]
    assert positions(bookend(15)) == [0, 1, 14]
    assert positions(front_loaded(20)) == [0, 1, 2, 3]
    assert positions(back_loaded(20)) == [16, 17, 18, 19]
    assert interleave(6, "512", "full", ratio=(2, 1)) == "512 512 full 512 512 full"
    assert interleave(3, ratio=(0, 1)) == "full full full"


@pytest.mark.parametrize("place", [interleave, bookend, front_loaded, back_loaded])
def test_all_placements_have_one_budget(place):
    for layers in (1, 5, 14, 20):
        for ratio in ((4, 1), (1, 1), (12, 1), (1, 0), (0, 1)):
            words = place(layers, ratio=ratio).split()
            assert len(words) == layers
            assert words.count("full") == interleave(layers, ratio=ratio).split().count("full")
    assert LoopedConfig(pattern=place(5), heads=4).layers.count("full") == 1
    with pytest.raises(ValueError, match="layers 0"):
        place(0)
    with pytest.raises(ValueError, match=r"ratio \(0, 0\)"):
        place(4, ratio=(0, 0))


def test_random_placements():
    drawn = [random_placement(20, "512", seed=seed) for seed in range(200)]
    assert drawn[3] == random_placement(20, "512", seed=3)
    assert {len(positions(placement)) for placement in drawn} == {4}
    often = np.bincount(np.concatenate([positions(p) for p in drawn]), minlength=20)
    assert often.min() > 20  # 40 expected
    assert often.max() < 65


@pytest.mark.parametrize(
    ("windows", "words"),
    [
        ("8 -> 4 -> 2", ["1 or 2 parts", "8 -> 4 -> 2"]),
        ("8 4 2", ["1 or 2 words"]),
        ("8 -> wide", ["'wide'"]),
        ("0", ["'0'"]),
        ("", ["words"]),
    ],
)
def test_bad_windows_are_named(windows, words):
    with pytest.raises(ValueError, match="windows") as error:
        LoopedConfig.tiny("full window full", 2, windows=windows)
    for word in words:
        assert word in str(error.value)
    with pytest.raises(ValueError, match='no "full" layer'):
        LoopedConfig.tiny("gdn", windows="8")


def test_windows_of_every_loop():
    config = LoopedConfig.tiny("full window gdn full", 3, options={"window": {"sliding_window": 9}})
    assert config.loop_windows == ((None, 9, None, None),) * 3
    assert not config.loops_differ
    config = dataclasses.replace(config, windows=by_loop(["full", "8 4", "2"]))
    assert config.loop_windows == ((None, 9, None, None), (8, 9, None, 4), (2, 9, None, 2))
    assert config.loops_differ
    uniform = dataclasses.replace(config, windows="8")
    assert uniform.loop_windows == ((8, 9, None, 8),) * 3
    assert not uniform.loops_differ


def test_a_narrowed_full_layer_is_a_window_layer():
    window = build("window full", windows=None)
    narrowed = build("full full", windows="4 full")
    np.testing.assert_array_equal(forward(window, some_tokens()), forward(narrowed, some_tokens()))


def test_written_out_loops_equal_the_scan():
    """Windows of 12 and of 13 tokens are the same to 12 tokens, but not to `loops_differ`."""
    tokens = some_tokens()
    loss = jax.jit(jax.value_and_grad(lambda model: jnp.mean(jnp.square(model(tokens)))))
    value, gradient = loss(build("full", windows="full"))
    written_out, switched = (build("full", windows="12 -> 13", remat=r) for r in (False, True))
    assert written_out.config.loops_differ
    logits = forward(written_out, tokens)
    np.testing.assert_allclose(value, jnp.mean(jnp.square(logits)), **FLOAT32_TOLERANCE)
    # Recomputed, they are a scan over a switch.
    other, others = loss(switched)
    np.testing.assert_allclose(value, other, **FLOAT32_TOLERANCE)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(a, b, **GRADIENT_TOLERANCE)


def test_prefill_and_steps_with_windows_that_differ_by_loop():
    model, tokens = build("full", windows="full -> 3"), some_tokens()
    wanted = forward(model, tokens)
    logits, cache = prefill(model, tokens[:, :7], 12)
    np.testing.assert_allclose(logits, wanted[:, 6], **FLOAT32_TOLERANCE)
    for position in range(7, 12):
        logits, cache = decode_step(model, tokens[:, position], cache)
        np.testing.assert_allclose(logits, wanted[:, position], **FLOAT32_TOLERANCE)
    room = [layers[0].keys.shape[-1] for layers in cache.loops]
    assert room == [12, 3]
    floats = [a for a in jax.tree.leaves(cache) if jnp.issubdtype(a.dtype, jnp.floating)]
    assert sum(a.nbytes for a in floats) == 2 * cache_bytes_per_sequence(model.config, 12)


def test_reach_adds_up_over_loops():
    model, tokens = build("full", windows="3 -> 5"), some_tokens(time=14)
    assert tokens_reached(model.config) == 1 + 2 + 4
    assert tokens_reached(dataclasses.replace(model.config, windows="3 -> full")) is None
    changed = jnp.any(
        forward(model, tokens) != forward(model, tokens.at[:, 2].add(1) % 50), axis=(0, 2)
    )
    np.testing.assert_array_equal(changed, (np.arange(14) >= 2) & (np.arange(14) < 2 + 7))


def test_a_vote_averages_placements():
    model, tokens = build("full full full", loops=1), some_tokens()
    placements = [random_placement(3, "2", seed=seed, ratio=(2, 1)) for seed in (0, 1)]
    wanted = [forward(with_windows(model, windows), tokens) for windows in placements]
    assert placements[0] != placements[1]
    assert model.config.windows is None
    ours = jax.jit(lambda model: vote(model, tokens, placements))(model)
    np.testing.assert_allclose(ours, (wanted[0] + wanted[1]) / 2, **FLOAT32_TOLERANCE)
    with pytest.raises(ValueError, match="placements is empty"):
        vote(model, tokens, [])


# Parameters in billions, from the sizes LT2 publishes.
PUBLISHED = {
    "lt2-looped-600m": 0.40,
    "lt2-sparse-600m": 0.40,
    "lt2-linear-600m": 0.48,
    "lt2-looped-1.3b": 1.29,
    "lt2-sparse-1.3b": 1.29,
    "lt2-linear-1.3b": 1.46,
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    config = PRESETS[name]
    # One layer of each kind: the arrays of dozens take long to name, and they are alike.
    kinds = dict.fromkeys(zip(config.layers, config.feed_forward_words, strict=True))
    words = (" ".join(each) for each in zip(*kinds, strict=True))
    short = dataclasses.replace(
        config, **dict(zip(("pattern", "feed_forwards"), words, strict=True))
    )
    model = nnx.eval_shape(lambda: LoopedLM(short, rngs=nnx.Rngs(0)))
    arrays = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert sum(array.size for array in arrays) == parameter_count(short)
    parameters = parameter_count(config)
    if name in PUBLISHED:
        assert parameters / 1e9 == pytest.approx(PUBLISHED[name], abs=0.005)
    if name.endswith("tiny"):
        assert parameters < 1.5e6
    assert config.loops == (1 if "moe" in config.feed_forward_words else 4)
