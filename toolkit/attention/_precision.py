"""The precision in which the token mixers add up."""

import jax.numpy as jnp
from jax import Array, lax


def accumulator(dtype):
    """The dtype of scores, exponentials and sums: float32, or float64 for float64 inputs."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def precise_einsum(equation: str, *operands: Array) -> Array:
    """einsum in the operands' own precision.

    Tensor cores and TPUs would round float32 operands; the inverse of a delta rule amplifies that.
    """
    return jnp.einsum(equation, *operands, precision=lax.Precision.HIGHEST)
