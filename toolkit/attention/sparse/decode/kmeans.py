"""k-means of the keys of one head: Lloyd's iterations of static shape, without restarts."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from toolkit.attention.execution.precision import accumulator
from toolkit.attention.sparse.heads import over_blocks


def nearest(
    rows: Float[Array, "rows size"], centroids: Float[Array, "clusters size"], is_used
) -> Int[Array, "rows"]:
    """The centroid in use that is nearest to each row, in Euclidean distance; of equals the first.

    Two minima take half the time of an `argmin`, which XLA for CPUs does not vectorise.
    """
    half = jnp.where(is_used, jnp.square(centroids).sum(axis=1) / 2, jnp.inf)
    far = half[None] - rows @ centroids.T
    number = jnp.arange(far.shape[1], dtype=jnp.int32)
    is_nearest = far == far.min(axis=1, keepdims=True)
    return jnp.where(is_nearest, number, far.shape[1] - 1).min(axis=1)


nearest_of_parts = jax.vmap(nearest, in_axes=(0, 0, None))


def k_means(
    rows: Float[Array, "rows channels"], is_row: Bool[Array, "rows"], clusters: int,
    iterations: int, count: Int[Array, ""] | int, parts: int = 1,
) -> tuple[Float[Array, "parts clusters size"], Int[Array, "parts rows"]]:  # fmt: skip
    """Centroids of the first `count` of `clusters` clusters, and the cluster of every row, in each
    of some equal parts of the channels.

    Centroids start at rows spread evenly over the real ones; an emptied cluster keeps its centroid.
    """
    precise = accumulator(rows.dtype)
    is_used = jnp.arange(clusters) < count
    real = jnp.cumsum(is_row, dtype=jnp.int32)
    # The row in the middle of each of `count` equal shares of the real rows.
    share = (2 * jnp.arange(clusters, dtype=jnp.float32) + 1) / jnp.float32(
        2 * jnp.maximum(count, 1)
    )
    wanted = jnp.floor(share * real[-1].astype(jnp.float32)).astype(jnp.int32) + 1
    places = jnp.minimum(jnp.searchsorted(real, wanted), rows.shape[0] - 1)

    def split(rows):
        return rows.astype(precise).reshape(rows.shape[0], parts, -1).swapaxes(0, 1)

    def improve(_, centroids):
        def add(sums, block, places, is_new):
            block = split(block)
            own = nearest_of_parts(block, centroids, is_used)
            own = jnp.where(is_new & is_row[places], own, clusters)
            members = jax.nn.one_hot(own, clusters, dtype=precise, axis=1)
            return sums[0] + members @ block, sums[1] + members.sum(axis=2)

        none = jnp.zeros_like(centroids)
        sums, sizes = over_blocks(add, (none, none[..., 0]), rows)
        sizes = sizes[..., None]
        return jnp.where(sizes > 0, sums / jnp.maximum(sizes, 1), centroids)

    first = jnp.where(is_used[:, None], split(rows[places]), 0)
    centroids = lax.fori_loop(0, iterations, improve, first)

    def assign(own, block, places, is_new):
        found = nearest_of_parts(split(block), centroids, is_used)
        return lax.dynamic_update_slice_in_dim(own, found, places[0], axis=1)

    return centroids, over_blocks(assign, jnp.zeros((parts, rows.shape[0]), jnp.int32), rows)
