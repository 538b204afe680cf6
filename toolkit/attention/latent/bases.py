r"""Other bases for the latents of a layer, folded into its weights so that its function stays.

RMSNorm without gain commutes with an orthogonal U, since |c U| = |c|. With the gain gamma moved
into what reads the latents,

    W_c <- W_c U      K_h <- U^T diag(gamma) K_h      V_h <- U^T diag(gamma) V_h      gain <- 1

is the same layer, whose latents are c U. A basis T that is not orthogonal multiplies the latents
after their norm, and T^-1 what reads them. All of it is done once, in float64, on the host.

Source: Tang et al. (2025), arXiv:2508.15881 (TPLA), proposition 1 and equation 17.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from toolkit._checks import check_shape, checked
from toolkit._kinds import check_floating
from toolkit.attention._checks import check_count
from toolkit.attention.latent.config import LatentConfig
from toolkit.attention.latent.weights import LatentWeights, rms_norm

MOST = 2**13
"""A basis holds the square of as many numbers."""


@checked
def fold(
    weights: LatentWeights, basis: Float[Array, "latent kept"] | np.ndarray | None = None
) -> LatentWeights:
    """The same layer with the gain of its latents in the weights, and the latents in another basis.

        K_h <- T^-1 diag(gamma) K_h        V_h <- T^-1 diag(gamma) V_h        gain <- 1

    Args:
        weights: the layer's; not traced.
        basis: T [latent, latent], invertible, with one basis vector per column. An
            orthogonal one is folded into the projection; any other multiplies the latents after
            their norm, and is kept in `basis`. None: only the gain is folded.

    Returns:
        Weights of the same function, whose `latent_norm` is 1.

    Raises:
        ValueError: the basis has no inverse.

    Cost: 2 latent^2 FLOPs per column of what reads and writes latents, in float64.

    Source: Tang et al. (2025), arXiv:2508.15881, equation 17.

    Example:
        >>> config = LatentConfig(
        ...     width=8, heads=2, latent_size=4, key_size=4, rope_size=2, value_size=4)
        >>> weights = LatentWeights.random(config, jax.random.key(0))
        >>> fold(weights, hadamard_basis(4)).basis is None
        True
    """
    gain, dtype = np.asarray(weights.latent_norm, np.float64), weights.key_up.dtype
    down, inverse, after = np.asarray(weights.latent_down, np.float64), np.eye(len(gain)), None
    if basis is not None:
        check_shape("basis", jnp.asarray(basis), (len(gain),) * 2, "latent kept")
        check_floating("basis", jnp.asarray(basis))
        matrix = np.asarray(basis, np.float64)
        if not np.isfinite(matrix).all() or np.linalg.cond(matrix) > 1e8:
            raise ValueError("basis must be invertible; its condition number is above 1e8.")
        inverse = np.linalg.inv(matrix)
        is_orthogonal = np.abs(matrix.T @ matrix - np.eye(len(gain))).max() < 1e-5
        if is_orthogonal and weights.basis is None:
            down = down @ matrix
        else:
            before = np.eye(len(gain)) if weights.basis is None else np.asarray(weights.basis)
            after = jnp.asarray((gain[:, None] * before) @ matrix, dtype)
    if weights.basis is not None and after is None:
        after = jnp.asarray(gain[:, None] * np.asarray(weights.basis), dtype)
    scaled = inverse if after is not None else inverse * gain

    def read(up):
        return jnp.asarray(np.einsum("kr,rhv->khv", scaled, np.asarray(up, np.float64)), dtype)

    return replace(
        weights,
        latent_down=jnp.asarray(down, dtype),
        latent_norm=jnp.ones(len(gain), dtype),
        key_up=read(weights.key_up),
        value_up=read(weights.value_up),
        basis=after,
    )


@checked
def hadamard_basis(size: int, key: Array | None = None) -> np.ndarray:
    """Hadamard's matrix in Sylvester's order, with unit columns and rows of random signs.

        U_ij = s_i (-1)^popcount(i & j) / sqrt(size)

    It spreads energy evenly over contiguous slices, but does not help to split a softmax.

    Args:
        size: a power of two, at most 8,192.
        key: random key of the signs; None: all +1.

    Returns:
        An orthogonal matrix [size, size], float64.

    Source: Tang et al. (2025), arXiv:2508.15881, section 3.3.

    Example:
        >>> hadamard_basis(2).round(3).tolist()
        [[0.707, 0.707], [0.707, -0.707]]
    """
    _check_size(size)
    if size & (size - 1):
        raise ValueError(f"size must be a power of two; got {size}.")
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    signs = (
        np.ones(size)
        if key is None
        else 2.0 * np.asarray(jax.random.bernoulli(key, 0.5, (size,))) - 1
    )
    return signs[:, None] * matrix / np.sqrt(size)


@checked
def random_basis(size: int, key: Array) -> np.ndarray:
    """Draw an orthogonal matrix uniformly.

        U = Q sign(diag R) of the QR decomposition of a normal matrix

    Args:
        size: of the latents.
        key: random key.

    Returns:
        [size, size], float64.

    Source: Mezzadri (2007), arXiv:math-ph/0609050.

    Example:
        >>> random_basis(3, jax.random.key(0)).shape
        (3, 3)
    """
    _check_size(size)
    q, r = np.linalg.qr(np.asarray(jax.random.normal(key, (size, size)), np.float64))
    return q * np.sign(np.diag(r))


@checked
def principal_basis(
    latents: Float[Array, "*tokens latent"], *, is_centred: bool = False
) -> np.ndarray:
    """Principal components of latents, those of most energy first.

        U = eigenvectors of sum_j c_j c_j^T, by falling eigenvalue

    Cut into contiguous slices, the first holds most of what scores depend on.

    Args:
        latents: normalised latents of a calibration text, see `calibration_latents`.
        is_centred: subtract their mean first; energies, and RMSNorm, are those around zero.

    Returns:
        An orthogonal matrix [latent, latent], float64.

    Raises:
        ValueError: some latents are not finite.

    Cost: 2 latent^2 FLOPs per token and an eigendecomposition.

    Source: Tang et al. (2025), arXiv:2508.15881, section 3.4.

    Example:
        >>> principal_basis(jnp.array([[0.0, 2.0], [1.0, 0.0]])).round().tolist()
        [[0.0, 1.0], [1.0, 0.0]]
    """
    rows = np.asarray(latents, np.float64).reshape(-1, latents.shape[-1])
    _check_size(rows.shape[1])
    if not len(rows) or not np.isfinite(rows).all():
        raise ValueError(
            f"latents must be finite, of one token at least; got shape {latents.shape}."
        )
    rows = rows - rows.mean(axis=0) if is_centred else rows
    _, vectors = np.linalg.eigh(rows.T @ rows)
    vectors = vectors[:, ::-1]
    largest = np.abs(vectors).argmax(axis=0)  # a sign for each that does not depend on the platform
    return vectors * np.sign(vectors[largest, np.arange(len(vectors))])


@checked
def calibration_latents(
    x: Float[Array, "*tokens width"], weights: LatentWeights, config: LatentConfig
) -> Float[Array, "*tokens latent"]:
    """The normalised latents of a stream without their gain, as a folded layer caches them.

        c / RMS(c),  c = x W_c

    Args:
        x: what the layer reads, normalised as for `mla`.
        weights: the layer's, folded or not.
        config: its sizes.

    Returns:
        The latents, of mean square one.

    Example:
        >>> config = LatentConfig(
        ...     width=8, heads=2, latent_size=4, key_size=4, rope_size=2, value_size=4)
        >>> weights = LatentWeights.random(config, jax.random.key(0))
        >>> calibration_latents(jnp.ones((3, 8)), weights, config).shape
        (3, 4)
    """
    check_shape(
        "x", x, (*x.shape[:-1], config.width), " ".join(["tokens"] * (x.ndim - 1)) + " width"
    )
    latents = rms_norm(x @ weights.latent_down, config.epsilon)
    return latents if weights.basis is None else latents @ weights.basis


def _check_size(size: Any) -> None:
    check_count("size", size, 1)
    if size > MOST:
        raise ValueError(f"size must be at most {MOST}; got {size}.")
