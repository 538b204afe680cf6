r"""Inverse of a unit lower triangular matrix, accurate for keys that break the usual shortcuts.

A delta rule on a chunk of C tokens needs T = (I + A)^-1 with A strictly lower triangular. Three
ways are in use:

* `solve_triangular`: accurate, but sequential, slow in batches, and a batch of them can hang the
  CPU backend of jaxlib 0.10;
* the product (I - A)(I + A^2)(I + A^4)...: fast, but it forms powers of A. For repeated keys A
  is all ones below the diagonal, the powers reach 2^C and cancel to nothing: NaN in float32;
* forward substitution in blocks, as here: columns one after another in 16 x 16 blocks, then
  blocks merged by matrix products. No powers appear, so it is as accurate as a solve.
"""

from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from toolkit._kinds import check_floating

# Substitution is sequential in its columns; 16 keeps that short and leaves the rest to matmuls.
BLOCK = 16

SOLUTION = "solution of a chunk"


def _eliminate_columns(a: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    """Forward substitution, a column at a time, for all matrices of the batch.

    Once row j of X is final, a_ij times it leaves every row i below: X <- X - a_j x_j. Each step
    is one update of whole matrices, which compiles to far less code than a row at a time.
    """
    x = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
    for j in range(a.shape[-1] - 1):
        x = x - a[..., :, j, None] * x[..., j, None, :]
    return x


def _inverse(a: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    size = a.shape[-1]
    if size <= BLOCK or size % 2:
        return _eliminate_columns(_below(a))
    half = size // 2
    both = _inverse(jnp.stack([a[..., :half, :half], a[..., half:, half:]]))
    top, bottom = both[0], both[1]
    corner = -_product(bottom, a[..., half:, :half], top)
    upper = jnp.concatenate([top, jnp.zeros_like(top)], axis=-1)
    lower = jnp.concatenate([corner, bottom], axis=-1)
    return jnp.concatenate([upper, lower], axis=-2)


@jax.custom_jvp
def unit_lower_inverse(a: Float[Array, "*batch n n"]) -> Float[Array, "*batch n n"]:
    r"""Inverse of I + A for strictly lower triangular A.

        T = (I + A)^-1,        dT = -T strict_tril(dA) T

    The hand-written derivative costs two products and never differentiates the substitution.

    Args:
        a: [..., n, n]; only the entries below the diagonal are read.

    Returns:
        [..., n, n], unit lower triangular.

    Cost:
        n^3 multiply-adds per matrix for n = 16, half of n^3 for 32, a third beyond; 15 column steps
        one after another and log2(n / 16) merges.

    Source:
        Forward substitution is classical; blocks of 16 for delta rules follow Yang et al.,
        "Parallelizing Linear Transformers with the Delta Rule over Sequence Length"
        (arXiv:2406.06484), section 3.2.

    Example:
        >>> unit_lower_inverse(jnp.asarray([[0.0, 0.0], [2.0, 0.0]])).tolist()
        [[1.0, 0.0], [-2.0, 1.0]]
    """
    if not hasattr(a, "ndim"):
        raise TypeError(f"a must be an array; got {type(a).__name__}.")
    check_floating("a", a)
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise ValueError(f"a must be square matrices [..., n, n]; got shape {tuple(a.shape)}.")
    return _inverse(a)


@unit_lower_inverse.defjvp
def _inverse_jvp(primals, tangents):
    inverse = unit_lower_inverse(*primals)
    return inverse, -_product(inverse, _below(tangents[0]), inverse)


@jax.custom_jvp
def solve(inverse: Array, a: Array, right: Array) -> Array:
    """X = T R, where T = (I + A)^-1 is known; dX = T (dR - dA X) needs no derivative of T.

    `jax.checkpoint` knows X as `SOLUTION`.
    """
    return checkpoint_name(_product(inverse, right), SOLUTION)


@solve.defjvp
def _solve_jvp(primals, tangents):
    inverse, _, right = primals
    _, d_a, d_right = tangents
    solution = checkpoint_name(_product(inverse, right), SOLUTION)
    return solution, _product(inverse, d_right - _product(_below(d_a), solution))


def _below(a: Array) -> Array:
    """Strictly below the diagonal. The mask is a constant: an iota would be a kernel to compile."""
    return jnp.where(np.tri(a.shape[-1], k=-1, dtype=bool), a, 0)


def _product(*factors: Array) -> Array:
    return reduce(partial(jnp.matmul, precision=lax.Precision.HIGHEST), factors)
