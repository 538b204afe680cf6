"""The precision in which softmax attention adds up."""

import jax.numpy as jnp


def accumulator(dtype):
    """The dtype of scores, exponentials and sums: float32, or float64 for float64 inputs."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32
