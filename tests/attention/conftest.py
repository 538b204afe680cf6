"""Attention tests forbid implicit promotion of dtypes and ranks, and draw inputs for any mixer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

GATES = {
    "g": lambda random, shape: -random.exponential(0.3, shape),
    "beta": lambda random, shape: random.uniform(0.0, 2.0, shape),
    "dt": lambda random, shape: random.uniform(0.1, 1.0, shape),
}


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def draw_inputs():
    """(row, time, ...) -> [*inputs, *gates] valid for that row of `MIXERS`."""

    def draw(row, time, *, dtype=jnp.float32, batch=2, heads=2, key=16, value=8, seed=0):
        random = np.random.default_rng(seed)
        shape = (batch, time, heads)
        q, k = (random.standard_normal((*shape, key)) for _ in range(2))
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        arrays = {"q": q, "k": k, "v": random.standard_normal((*shape, value))}
        for name in row.gates:
            gate_shape = (*shape, key) if name in row.channel_gates else shape
            arrays[name] = GATES[name](random, gate_shape)
        return [jnp.asarray(arrays[name], dtype) for name in (*row.inputs, *row.gates)]

    return draw
