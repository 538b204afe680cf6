"""Every word of a pattern alike: one layer, whole and token by token, packed, causal, trained."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiers import by_night

from toolkit import looped
from toolkit.attention import MIXERS
from toolkit.looped.mixing import LAYERS
from toolkit.testing import layers

PARTED = ("grouped_latent", "mlra", "grouped_tied")
OF_NO_ROW = (
    "nope", "conv", "channel_mix", "lightning", "hybrid", "shared_window", "relative",
    "relative_window", *PARTED,
)  # fmt: skip
WORDS = (*MIXERS, *OF_NO_ROW)
NOT_IN_TEST_LOOPED_MODEL = [word for word in WORDS if word not in ("full", "window", "gdn")]


def test_every_mixer_has_a_layer():
    assert set(LAYERS) - {"mla", "value_embedding", *OF_NO_ROW} == set(MIXERS)


# By day tests/attention asks the same of every mixer; here on a layer of each family.
@pytest.mark.by_family
@pytest.mark.parametrize("word", WORDS)
def test_prefill_and_steps_equal_the_parallel_form(word):
    layers.prefill_and_steps_equal_the_parallel_form(word)


@pytest.mark.by_family
@pytest.mark.parametrize("word", WORDS)
def test_neither_the_future_nor_another_document_is_seen(word):
    layers.neither_the_future_nor_another_document_is_seen(word)


@pytest.mark.by_family
@pytest.mark.parametrize("word", NOT_IN_TEST_LOOPED_MODEL)
def test_a_training_step(word):
    layers.a_training_step(word)


@pytest.mark.by_family
@pytest.mark.parametrize("word", NOT_IN_TEST_LOOPED_MODEL)
def test_bfloat16_is_near_float32(word):
    layers.bfloat16_is_near_float32(word)


def test_decays_start_away_from_their_limits():
    """Rates below 16 whose logarithm is finite, time steps between 1e-3 and 1e-1."""
    config = dataclasses.replace(layers.small(), width=512, heads=64)

    @partial(jax.jit, static_argnums=0)
    def initial_rate_and_step(layer):
        made = layer(config, rngs=nnx.Rngs(0))
        return jnp.exp(made.log_rate[...]), jax.nn.softplus(made.step_bias[...])

    for word, lowest in [("gdn", 0.01), ("mamba2", 1.0), ("kda", 1.0), ("delta_product", 0.01)]:
        rate, step = initial_rate_and_step(LAYERS[word])
        assert jnp.all((rate > 0.99 * lowest) & (rate < 16.1))
        assert jnp.all((step > 0.9e-3) & (step < 1.1e-1))


def test_a_rotated_head_has_pairs():
    with pytest.raises(ValueError, match=r"retention\.key_size is 5; it must be even"):
        layers.small().with_options(retention={"key_size": 5})


@pytest.mark.slow
@pytest.mark.parametrize("pattern", by_night(["rwkv7 comba"], ["gdn full", "rwkv7 comba"]))
def test_recurrent_layers_run_without_jit(pattern):
    config = looped.LoopedConfig.tiny(pattern, loops=1, width=16, heads=2, vocabulary=12)
    model = looped.LoopedLM(config, rngs=nnx.Rngs(0))
    tokens = jnp.array([[1, 2, 3, 4]])
    wanted = model(tokens)[:, -1]
    with jax.disable_jit():
        _, cache = looped.prefill(model, tokens[:, :3], 8)
        found, _ = looped.decode_step(model, tokens[:, 3], cache)
    np.testing.assert_allclose(found, wanted, **layers.STEP_TOLERANCE)
