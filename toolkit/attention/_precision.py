"""The precision in which the token mixers add up."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax


def accumulator(dtype):
    """The dtype of scores, exponentials and sums: float32, or float64 for float64 inputs."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


# On NVIDIA GPUs, where the default is TF32 at half the rate.
BFLOAT16_PRODUCTS = lax.DotAlgorithmPreset.BF16_BF16_F32
Precision = lax.Precision | lax.DotAlgorithmPreset | None


def product_precision(dtype) -> Precision:
    """How exactly the products of tokens of a dtype are made.

    Float32 in full: tensor cores and TPUs would round it. Of half precision as the device prefers,
    added in float32: bfloat16 in bfloat16 on TPUs and NVIDIA GPUs, float16 in TF32 on those; who
    wants more says so with `jax.default_matmul_precision("highest")`.
    """
    if jnp.finfo(dtype).bits >= 32:
        return lax.Precision.HIGHEST
    is_chosen = jax.config.jax_default_matmul_precision is not None  # pyright: ignore
    return BFLOAT16_PRODUCTS if dtype == jnp.bfloat16 and not is_chosen else None


def precise_einsum(
    equation: str, *operands: Array, precision: Precision = lax.Precision.HIGHEST
) -> Array:
    """einsum in the operands' own precision, unless told otherwise."""
    if precision is not BFLOAT16_PRODUCTS:
        return jnp.einsum(equation, *operands, precision=precision)
    # Gradients multiply as exactly as the product did: the algorithm stays, where a cast would not.
    rounded, own = (partial(jnp.einsum, equation, precision=x) for x in (precision, None))
    return lax.platform_dependent(*operands, cuda=rounded, default=own)
