"""The small model that several tests of looped models look into."""

import jax
from flax import nnx

from toolkit.looped import LoopedConfig, LoopedLM


def small(pattern, loops=2, seed=0, **overrides):
    """A model whose residual gates are not at their zero start."""
    sizes = {
        "vocabulary": 50,
        "width": 16,
        "heads": 2,
        "options": {"window": {"sliding_window": 4}},
    }
    config = LoopedConfig.tiny(pattern, loops, **(sizes | overrides))
    model = LoopedLM(config, rngs=nnx.Rngs(seed))
    model.rho[...] = 0.3 * jax.random.normal(jax.random.key(seed), model.rho.shape)
    return model


def some_tokens(batch=1, time=12):
    return jax.random.randint(jax.random.key(1), (batch, time), 0, 50)
