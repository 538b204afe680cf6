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

    Float32 is multiplied in full, since tensor cores and TPUs would round it. Half precision is
    multiplied as the device prefers and added in float32: bfloat16 in bfloat16 on TPUs and NVIDIA
    GPUs, float16 in TF32 on NVIDIA GPUs; `jax.default_matmul_precision("highest")` asks for more.
    """
    return lax.Precision.HIGHEST if jnp.finfo(dtype).bits >= 32 else half_precision(dtype)


def half_precision(dtype) -> Precision:
    """The same for half precision alone; float32 is multiplied as JAX does by default."""
    is_chosen = jax.config.jax_default_matmul_precision is not None  # pyright: ignore
    return BFLOAT16_PRODUCTS if dtype == jnp.bfloat16 and not is_chosen else None


def precise_einsum(
    equation: str, *operands: Array, precision: Precision = lax.Precision.HIGHEST
) -> Array:
    """einsum in the operands' own precision, unless told otherwise; in the precision of sums."""
    if precision is BFLOAT16_PRODUCTS:
        return _einsum_of_bfloat16(equation, *operands)
    return _einsum(equation, precision, *operands)


def _einsum(equation: str, precision: Precision, *operands: Array) -> Array:
    precise = accumulator(operands[0].dtype)
    return jnp.einsum(equation, *operands, precision=precision, preferred_element_type=precise)


# Compiled as one, or an eager call would compile its branches anew every time.
@partial(jax.jit, static_argnums=0, inline=True)
def _einsum_of_bfloat16(equation: str, *operands: Array) -> Array:
    own = partial(_einsum, equation, None)
    return lax.platform_dependent(*operands, cuda=partial(_rounded, equation), default=own)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _rounded(equation: str, *operands: Array) -> Array:
    return _einsum(equation, BFLOAT16_PRODUCTS, *operands)


@_rounded.defjvp
def _rounded_jvp(equation, primals, tangents):
    # Gradients multiply as exactly as the product did: the algorithm stays, where a cast would not.
    # Cotangents are float32, and so are operands beside them until they are multiplied.
    def wide(*operands):
        operands = (x.astype(accumulator(x.dtype)) for x in operands)
        return _einsum(equation, BFLOAT16_PRODUCTS, *operands)

    return _rounded(equation, *primals), jax.jvp(wide, primals, tangents)[1]
