"""Layers that repeat are traced once: the same values and gradients, a program that stays short."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from float64 import enable_x64

from toolkit.language import next_byte_loss
from toolkit.looped import LoopedConfig, LoopedLM, extend, load_model, prefill, save_model
from toolkit.looped.scanned import repeats, scanned_layers

TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}  # float32, of sums in another order
EXACT = {"rtol": 1e-10, "atol": 1e-12}
UNIT = "window window window full "
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 256, (1, 7)), jnp.int32)


def gradient(config, *, is_scanned, **how):
    graph, params = nnx.split(LoopedLM(config, rngs=nnx.Rngs(0)))
    loss = functools.partial(next_byte_loss, graph, scan_layers=is_scanned, **how)
    lowered = jax.jit(jax.value_and_grad(loss)).lower(params, (TOKENS, TOKENS))
    return lowered, params


def lines(*arguments, **how):
    return gradient(*arguments, **how)[0].as_text().count("\n")


def test_units_are_found_from_the_left():
    assert repeats("abab" + "ccccc" + "d") == [
        (0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 1, 5), (9, 1, 1),
    ]  # fmt: skip
    assert repeats("aaab" * 3 + "b") == [(0, 4, 3), (12, 1, 1)]
    assert repeats("a" * 4) == [(n, 1, 1) for n in range(4)]  # too few to be worth a stack


@pytest.mark.slow
def test_values_gradients_and_the_tree_are_those_of_layers_one_by_one():
    options = {"feed_forwards": "moe", "prelude": "full"}
    config = LoopedConfig.tiny("window " * 6, width=8, heads=1, **options)
    found = []
    for is_scanned in (False, True):
        lowered, params = gradient(config, is_scanned=is_scanned, balance=0.01)
        found.append(lowered.compile()(params, (TOKENS, TOKENS)))
    assert "while" in lowered.as_text()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), *found)


@pytest.mark.slow
def test_a_scan_of_a_unit_is_exact_and_trains_a_model_that_others_read(tmp_path):
    with enable_x64(True):
        config = LoopedConfig.tiny(
            UNIT * 2 + "window", 2, width=8, heads=1, coda="full", remat=True, dtype="float64"
        )
        found = []
        for is_scanned in (False, True):
            lowered, params = gradient(config, is_scanned=is_scanned)
            found.append(lowered.compile()(params, (TOKENS, TOKENS)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **EXACT), *found)
    model = LoopedLM(dataclasses.replace(config, dtype="float32"), rngs=nnx.Rngs(0))
    moved = jax.tree.map(
        lambda p, g: np.asarray(p, "f4") - np.asarray(g, "f4"), params, found[1][1]
    )
    nnx.update(model, moved)
    save_model(model, tmp_path / "trained.safetensors")
    read = nnx.state(load_model(tmp_path / "trained.safetensors"))
    jax.tree.map(np.testing.assert_array_equal, read, nnx.state(model))


@pytest.mark.slow
def test_layers_of_other_windows_keep_them():
    def logits(windows, is_scanned):
        config = LoopedConfig.tiny("full " * 6, 2, width=8, heads=1, windows=windows)
        with scanned_layers(is_scanned):
            return jax.jit(lambda model: model(TOKENS))(LoopedLM(config, rngs=nnx.Rngs(0)))

    windows = "2 2 2 2 2 4 -> full"
    unrolled = logits(windows, False)
    np.testing.assert_allclose(logits(windows, True), unrolled, **TOLERANCE)
    assert np.abs(logits("2 -> full", True) - unrolled).max() > 1e-3  # the control


@pytest.mark.slow
def test_prompts_are_read_by_a_scan_into_the_same_caches():
    model = LoopedLM(LoopedConfig.tiny(UNIT * 2, width=8, heads=1), rngs=nnx.Rngs(0))

    def read(is_scanned):
        with scanned_layers(is_scanned):
            _, cache = prefill(model, TOKENS[:, :4], 8)
            return extend(model, TOKENS[:, 4:], cache)

    unrolled = read(False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), read(True), unrolled)
    # One scan is that of the loops.
    for is_scanned, scans in ((False, 1), (True, 2)):
        with scanned_layers(is_scanned):
            program = jax.make_jaxpr(lambda model: prefill(model, TOKENS, 8))(model)
        assert str(program).count("scan[") == scans


@pytest.mark.slow
def test_the_program_of_a_deep_model_grows_only_by_the_stack_of_its_parameters():
    short, long = (LoopedConfig.tiny(UNIT * n, width=8, heads=1) for n in (2, 6))
    assert lines(long, is_scanned=True) < 1.25 * lines(short, is_scanned=True)
    assert lines(long, is_scanned=False) > 2 * lines(short, is_scanned=False)  # the control


def test_layers_that_share_more_than_the_stream_are_not_scanned():
    config = LoopedConfig.tiny("full " * 6, width=8, heads=1, ladder_residual=True)
    assert lines(config, is_scanned=True) == lines(config, is_scanned=False)
