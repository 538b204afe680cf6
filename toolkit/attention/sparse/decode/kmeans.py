"""k-means of the keys of one head: Lloyd's iterations of static shape, without restarts."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from toolkit.attention.execution.precision import accumulator


def nearest(
    rows: Float[Array, "rows size"], centroids: Float[Array, "clusters size"], is_used
) -> Int[Array, "rows"]:
    """The centroid in use that is nearest to each row, in Euclidean distance."""
    half = jnp.where(is_used, jnp.square(centroids).sum(axis=1) / 2, jnp.inf)
    return jnp.argmin(half[None] - rows @ centroids.T, axis=1).astype(jnp.int32)


def k_means(
    rows: Float[Array, "rows size"],
    is_row: Bool[Array, "rows"],
    clusters: int,
    iterations: int,
    count: Int[Array, ""] | int,
) -> tuple[Float[Array, "clusters size"], Int[Array, "rows"]]:
    """Centroids of the first `count` of `clusters` clusters, and the cluster of every row.

    Centroids start at rows spread evenly over the real ones; an emptied cluster keeps its centroid.
    """
    rows = rows.astype(accumulator(rows.dtype))
    is_used = jnp.arange(clusters) < count
    real = jnp.cumsum(is_row, dtype=jnp.int32)
    # The row in the middle of each of `count` equal shares of the real rows.
    share = (2 * jnp.arange(clusters, dtype=jnp.float32) + 1) / jnp.float32(
        2 * jnp.maximum(count, 1)
    )
    wanted = jnp.floor(share * real[-1].astype(jnp.float32)).astype(jnp.int32) + 1
    first = rows[jnp.minimum(jnp.searchsorted(real, wanted), rows.shape[0] - 1)]

    def step(_, centroids):
        own = jnp.where(is_row, nearest(rows, centroids, is_used), clusters)
        members = jax.nn.one_hot(own, clusters, dtype=rows.dtype)
        sizes = members.sum(axis=0)[:, None]
        return jnp.where(sizes > 0, members.T @ rows / jnp.maximum(sizes, 1), centroids)

    centroids = lax.fori_loop(0, iterations, step, jnp.where(is_used[:, None], first, 0))
    return centroids, nearest(rows, centroids, is_used)
