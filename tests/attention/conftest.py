"""Attention tests forbid implicit promotion of dtypes and ranks, and draw inputs for any mixer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def draw_inputs():
    """(row, time, ...) -> [q, k, v, *gates] valid for that row of `MIXERS`."""

    def draw(row, time, *, dtype=jnp.float32, batch=2, heads=2, key=16, value=8, seed=0):
        random = np.random.default_rng(seed)
        shape = (batch, time, heads)
        q, k = (random.standard_normal((*shape, key)) for _ in range(2))
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        gates = {
            "g": -random.exponential(0.3, shape),
            "beta": random.uniform(0.0, 2.0, shape),
        }
        arrays = [q, k, random.standard_normal((*shape, value)), *(gates[x] for x in row.gates)]
        return [jnp.asarray(x, dtype) for x in arrays]

    return draw
