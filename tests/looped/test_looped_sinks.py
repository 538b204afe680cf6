"""Attention layers with sinks, an output bias and wavelengths of YaRN."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit._compat import set_value
from toolkit.conversion import student_from
from toolkit.looped import (
    LoopedConfig,
    LoopedLM,
    decode_step,
    prefill,
    read_sparsely,
)

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 9)))
OWN = {"sinks": True, "output_bias": True}
YARN = {"rotary_factor": 4.0, "rotary_rule": "yarn", "rotary_original_length": 8}


def made(pattern="full window", **options):
    words = dict.fromkeys(pattern.split(), options)
    return LoopedLM(LoopedConfig.tiny(pattern, width=16, heads=2, options=words), rngs=nnx.Rngs(0))


def test_steps_see_the_sinks_that_a_sequence_sees():
    model = made(**OWN, **YARN)
    plain = jax.jit(LoopedLM.__call__)(model, TOKENS)
    for block in model.blocks:
        set_value(block.mixer.sinks, jnp.array([1.0, -1.0]))
        set_value(block.mixer.output.bias, jnp.arange(16.0) / 8)
    wanted = jax.jit(LoopedLM.__call__)(model, TOKENS)
    assert jnp.abs(wanted - plain).max() > 0.01
    logits, cache = prefill(model, TOKENS[:, :-1], 9)
    np.testing.assert_allclose(logits, wanted[:, -2], **CLOSE)
    logits, cache = decode_step(model, TOKENS[:, -1], cache)
    np.testing.assert_allclose(logits, wanted[:, -1], **CLOSE)


@pytest.mark.parametrize("pattern", ["nsa", "moba", "fox"])
def test_layers_without_sinks_refuse_them(pattern):
    with pytest.raises(ValueError, match=f"{pattern}.sinks: only"):
        LoopedConfig.tiny(pattern, width=16, heads=2, options={pattern: {"sinks": True}})


def test_what_would_lose_sinks_refuses_them():
    model = made("full", **OWN)
    _, cache = prefill(model, TOKENS, 16)
    with pytest.raises(ValueError, match="layers with sinks are not read sparsely"):
        read_sparsely(model.config, cache, "window:4")
    with pytest.raises(ValueError, match="has none to start from them"):
        student_from(model, "gdn", rngs=nnx.Rngs(1))
    other = dataclasses.replace(model.config, pattern="full full")
    teacher = LoopedLM(other, rngs=nnx.Rngs(0))
    student = student_from(teacher, "window full", rngs=nnx.Rngs(1))
    assert student.config.window.sinks


def test_two_norms_of_queries_exclude_each_other():
    with pytest.raises(ValueError, match="exclude each other"):
        made("full", query_key_norm=True, projection_norm=True)
