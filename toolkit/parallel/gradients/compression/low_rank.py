"""PowerSGD: matrices by their products with a few columns, kept from step to step."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from toolkit.parallel.gradients.compression.compressor import Compressor, Payload


def low_rank(rank: int = 4, columns: int | None = None) -> Compressor:
    """The numbers as a matrix M [m, m'], by r columns that all replicas share.

        P   = orth(mean_i M_i Q),    Q <- mean_i M_i^T P,    mean = P Q^T

    Both products are linear in M_i, so that plain sums serve. Q comes from a shared key; with
    feedback it is that of the step before, and the residual M_i - mean is against the common
    result. By itself a vector is cut into about a square.
    """
    if rank < 1:
        raise ValueError(f"rank: got {rank}, wanted at least 1")

    def sizes(n: int) -> tuple[int, int, int]:
        width = math.isqrt(n - 1) + 1 if columns is None else columns
        height = -(-n // width)
        if columns is not None and rank > min(height, width):
            raise ValueError(
                f"rank: got {rank}, wanted 1 to {min(height, width)} for a matrix of "
                f"{height} x {width}"
            )
        return height, width, min(rank, height, width)

    def start(n: int, key: Array) -> Array:
        return jax.random.normal(key, sizes(n)[1:])

    def reduced(x: Array, shared: Array, mean: Callable) -> tuple[Array, Payload]:
        height, width, _ = sizes(n := x.shape[0])
        matrix = jnp.pad(x.astype(jnp.float32), (0, height * width - n)).reshape(height, width)
        left = jnp.linalg.qr(mean(matrix @ shared))[0]
        right = mean(matrix.T @ left)
        return (left @ right.T).reshape(-1)[:n], (left, right)

    def encode(x: Array, key: Array) -> Payload:
        return reduced(x, start(x.shape[0], key), lambda product: product)[1]

    def size(n: int) -> int:
        height, width, kept = sizes(n)
        return 4 * kept * (height + width)

    def share(n: int) -> float:
        height, width, kept = sizes(n)
        return kept / min(height, width)

    return Compressor(
        f"low_rank={rank}",
        encode,
        lambda payload, n, key: (payload[0] @ payload[1].T).reshape(-1)[:n],
        size,
        share,
        None,
        "Vogels, Karimireddy and Jaggi, PowerSGD, 2019, algorithm 1",
        is_linear=True,
        start=start,
        reduced=reduced,
        of_columns=lambda columns: low_rank(rank, columns),
    )
