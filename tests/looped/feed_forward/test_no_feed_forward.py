"""Blocks without a feed-forward layer: the mixer alone, counted, decoded and trained alike."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.looped import LoopedConfig, LoopedLM, decode_step, parameter_count, prefill
from toolkit.planning import Strategy, predict
from toolkit.testing import layers

CONFIG = LoopedConfig.tiny(
    "conv full", loops=2, width=16, heads=2, vocabulary=20, feed_forwards="none swiglu"
)
OTHERS = [{}, {"sandwich_norm": True}, {"pre_norm": False, "sandwich_norm": True},
          {"ladder_residual": True}, {"parallel_residual": True, "shared_norm": True}]  # fmt: skip


def model_of(**fields):
    return layers.drawn(
        lambda: LoopedLM(dataclasses.replace(CONFIG, **fields), rngs=nnx.Rngs(0)), seed=1
    )


@pytest.mark.parametrize("fields", OTHERS)
def test_parameters_are_counted(fields):
    model = model_of(**fields)
    held = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert parameter_count(model.config) == held


def test_a_block_is_its_mixer():
    block = model_of().blocks[0]
    h = jnp.asarray(layers.some_inputs())
    out, _ = block(h)
    np.testing.assert_array_equal(out, h + block.mixer(block.mixer_norm(h))[0])
    assert block.feed_forward_norm is None


@pytest.mark.parametrize("fields", [{}, {"ladder_residual": True}])
def test_steps_equal_the_whole(fields):
    model = model_of(**fields)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 20, (2, 7)))
    wanted = model(tokens)
    logits, cache = prefill(model, tokens[:, :5], 7)
    np.testing.assert_allclose(logits, wanted[:, 4], **layers.STEP_TOLERANCE)
    for t in (5, 6):
        logits, cache = decode_step(model, tokens[:, t], cache)
        np.testing.assert_allclose(logits, wanted[:, t], **layers.STEP_TOLERANCE)


def test_a_ladder_passes_what_the_mixer_read():
    """The next block reads the stream as it was before the only sub-layer of this one."""
    first, second = model_of(ladder_residual=True).blocks
    h = jnp.asarray(layers.some_inputs())
    (after, behind), _ = first(h, behind=h)
    np.testing.assert_array_equal(behind, h)
    assert not np.array_equal(second(after, behind=behind)[0][0], second(after, behind=after)[0][0])


def test_a_plan_refuses_what_it_does_not_model():
    with pytest.raises(ValueError, match="feed_forwards='none swiglu' is not modelled"):
        predict(CONFIG, "v5e", Strategy(), batch=1)
