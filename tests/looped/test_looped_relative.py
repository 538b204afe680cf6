"""Attention with learned biases by distance: exact in float64, whole and token by token."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from float64 import enable_x64

from toolkit.looped import LoopedConfig, LoopedLM, decode_step, prefill

FLOAT64_TOLERANCE = 1e-12


@pytest.mark.slow
def test_float64_is_float64_in_every_part():
    with enable_x64(True):
        sizes = {"width": 32, "heads": 4, "vocabulary": 50, "dtype": "float64"}
        config = LoopedConfig.tiny("relative relative_window", loops=2, **sizes)
        model = LoopedLM(config, rngs=nnx.Rngs(0))
        tokens = jnp.array(np.random.default_rng(0).integers(0, 50, (1, 7)))
        wanted = model(tokens)
        _, cache = prefill(model, tokens[:, :1], capacity=7)
        for place in range(1, 7):
            logits, cache = decode_step(model, tokens[:, place], cache)
            np.testing.assert_allclose(logits, wanted[:, place], atol=FLOAT64_TOLERANCE, rtol=0)
