"""Attention tests forbid implicit promotion of dtypes and ranks, and draw inputs for any mixer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

STEPS = 2  # corrections a token, for the rows that make several


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


GATES = {
    "g": lambda random, shape: -random.exponential(0.3, shape),
    "beta": lambda random, shape: random.uniform(0.0, 2.0, shape),
    "dt": lambda random, shape: random.uniform(0.1, 1.0, shape),
    "removal_key": lambda random, shape: unit(random.standard_normal(shape)),
    "rate": lambda random, shape: random.uniform(0.0, 1.0, shape),
    "compressed_gate": lambda random, shape: random.uniform(0.0, 1.0, shape),
    "selected_gate": lambda random, shape: random.uniform(0.0, 1.0, shape),
    "window_gate": lambda random, shape: random.uniform(0.0, 1.0, shape),
    "index_q": lambda random, shape: random.standard_normal(shape),
    "index_k": lambda random, shape: random.standard_normal(shape),
    "index_weights": lambda random, shape: random.standard_normal(shape),
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

        def array(name):
            steps = (STEPS,) if name in row.step_inputs else ()
            shape = (batch, time, heads, *steps)
            if name in ("q", "k"):
                return unit(random.standard_normal((*shape, key)))
            if name == "v":
                return random.standard_normal((*shape, value))
            if name == "index_k":  # one for all heads
                return GATES[name](random, (batch, time, key))
            return GATES[name](random, (*shape, key) if name in row.channel_gates else shape)

        return [jnp.asarray(array(name), dtype) for name in (*row.inputs, *row.gates)]

    return draw
