"""Small layers of latent attention and random streams, for tests of several rooms."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from toolkit.attention.latent import LatentConfig, LatentWeights, Yarn

YARN = Yarn(factor=8.0, original_length=32, beta_fast=8.0, mscale=0.7, mscale_all_dim=0.9)
SIZES = {"width": 24, "heads": 8, "latent_size": 16, "key_size": 6, "rope_size": 4, "value_size": 5}


def small(**changes):
    return LatentConfig(**(SIZES | {"query_latent_size": 12, "yarn": YARN} | changes))


def drawn(config, seed=0):
    """Weights in the current precision, whose gains differ from one."""
    rng = np.random.default_rng(seed)
    weights = LatentWeights.random(config, jax.random.key(seed), float)
    norm = rng.uniform(0.5, 1.5, config.latent_size)
    return replace(weights, latent_norm=jnp.asarray(norm, float))


def stream(config, batch=2, time=7, seed=1):
    x = np.random.default_rng(seed).normal(size=(batch, time, config.width))
    return jnp.asarray(x, float)


def distance(a, b):
    """Relative difference of two arrays."""
    a, b = np.asarray(a), np.asarray(b)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
