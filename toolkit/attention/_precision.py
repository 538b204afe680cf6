"""The precision in which the token mixers add up."""

import jax.numpy as jnp
from jax import Array, lax


def accumulator(dtype):
    """The dtype of scores, exponentials and sums: float32, or float64 for float64 inputs."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def product_precision(dtype) -> lax.Precision | None:
    """How exactly the products of tokens of a dtype are made.

    Float32 in full: tensor cores and TPUs would round it. Of half precision as the device prefers
    (bfloat16 on TPUs, TF32 on NVIDIA GPUs, added in float32); who wants more says so with
    `jax.default_matmul_precision("highest")`.
    """
    return lax.Precision.HIGHEST if jnp.finfo(dtype).bits >= 32 else None


def precise_einsum(
    equation: str, *operands: Array, precision: lax.Precision | None = lax.Precision.HIGHEST
) -> Array:
    """einsum in the operands' own precision, unless told otherwise."""
    return jnp.einsum(equation, *operands, precision=precision)
