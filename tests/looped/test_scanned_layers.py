"""Layers that repeat are traced once: the same values and gradients, a program that stays short."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.language import next_byte_loss
from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.looped.scanned import repeats

TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}  # float32, of sums in another order
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
@pytest.mark.parametrize(
    ("pattern", "options"),
    [
        ("gla full " * 3, {"loops": 2}),
        ("window " * 6, {"feed_forwards": "moe", "prelude": "full"}),
    ],
)
def test_values_gradients_and_the_tree_are_those_of_layers_one_by_one(pattern, options):
    config = LoopedConfig.tiny(pattern, width=8, heads=1, **options)
    how = {"balance": 0.01} if "feed_forwards" in options else {}
    found = []
    for is_scanned in (False, True):
        lowered, params = gradient(config, is_scanned=is_scanned, **how)
        found.append(lowered.compile()(params, (TOKENS, TOKENS)))
    assert "while" in lowered.as_text()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), *found)


@pytest.mark.slow
def test_the_program_of_a_deep_model_grows_only_by_the_stack_of_its_parameters():
    short, long = (LoopedConfig.tiny("gdn full " * n, width=8, heads=1) for n in (3, 9))
    assert lines(long, is_scanned=True) < 1.25 * lines(short, is_scanned=True)
    assert lines(long, is_scanned=False) > 2 * lines(short, is_scanned=False)  # the control


def test_layers_that_share_more_than_the_stream_are_not_scanned():
    config = LoopedConfig.tiny("full " * 6, width=8, heads=1, ladder_residual=True)
    assert lines(config, is_scanned=True) == lines(config, is_scanned=False)
