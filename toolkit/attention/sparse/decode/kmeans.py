"""k-means of the keys of one head: Lloyd's iterations of static shape, without restarts."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

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
    number = jnp.arange(far.shape[1], dtype=far.dtype)[None]
    is_nearest = far == far.min(axis=1, keepdims=True)
    return jnp.where(is_nearest, number, far.shape[1] - 1).min(axis=1).astype(jnp.int32)


nearest_of_parts = jax.vmap(nearest, in_axes=(0, 0, None))


def k_means(
    rows: Float[Array, "rows channels"], first: Int[Array, ""] | int, end: Int[Array, ""] | int,
    clusters: int, iterations: int, count: Int[Array, ""] | int, parts: int = 1,
) -> tuple[Float[Array, "parts clusters size"], Int[Array, "parts rows"]]:  # fmt: skip
    """Centroids of the first `count` of `clusters` clusters, and the cluster of every row, in each
    of some equal parts of the channels; only rows from `first` on that come before `end` count.

    Centroids start at rows spread evenly over these; an emptied cluster keeps its centroid.
    """
    precise = accumulator(rows.dtype)
    is_used = jnp.arange(clusters) < count
    # The row in the middle of each of `count` equal shares of the rows.
    share = (2 * jnp.arange(clusters, dtype=jnp.float32) + 1) / jnp.float32(
        2 * jnp.maximum(count, 1)
    )
    inside = jnp.floor(share * jnp.maximum(end - first, 0).astype(jnp.float32))
    middle = jnp.clip(first + inside.astype(jnp.int32), 0, rows.shape[0] - 1)

    def split(rows):
        return rows.astype(precise).reshape(rows.shape[0], parts, -1).swapaxes(0, 1)

    def improve(number, found):
        centroids, own = found

        def add(found, block, places, is_new):
            sums, sizes, own = found
            block = split(block)
            nearest = nearest_of_parts(block, centroids, is_used)
            own = lax.dynamic_update_slice_in_dim(own, nearest, places[0], axis=1)
            is_row = is_new & (places >= first) & (places < end)
            nearest = jnp.where(is_row, nearest, clusters)
            block = jnp.where(is_row[None, :, None], block, 0)  # rows past the end may be NaN
            members = jax.nn.one_hot(nearest, clusters, dtype=precise, axis=1)
            return sums + members @ block, sizes + members.sum(axis=2), own

        none = jnp.zeros_like(centroids)
        sums, sizes, own = over_blocks(add, (none, none[..., 0], own), rows)
        sizes = sizes[..., None]
        moves = (sizes > 0) & (number < iterations)
        return jnp.where(moves, sums / jnp.maximum(sizes, 1), centroids), own

    # The last pass only assigns; a loop of its own would compile for as long as this one.
    start = jnp.where(is_used[:, None], split(rows[middle]), 0)
    none = jnp.zeros((parts, rows.shape[0]), jnp.int32)
    return lax.fori_loop(0, iterations + 1, improve, (start, none))
