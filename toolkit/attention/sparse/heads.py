"""Functions of a head, or of a few of its tokens, applied to all; the best units of every head."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from toolkit.attention.sparse.selection import largest_indices
from toolkit.attention.sparse.selector import HEADS, Selector

TOGETHER = 512  # rows of a head


def over_blocks(step: Callable[..., Any], carry: Any, rows: Float[Array, "rows size"]) -> Any:
    """Fold `step(carry, block, places, is_new)` over a few rows at a time.

    A program that may rebuild an index asks for the memory of that in every step, whether it does
    or not; beyond 32 MiB the system hands it out page by page, which takes longer than the step.
    The last block overlaps with the one before where it must; `is_new` leaves those rows out.
    """
    count = min(TOGETHER, rows.shape[0])

    def body(number, carry):
        first = jnp.minimum(number * count, rows.shape[0] - count)
        places = first + jnp.arange(count, dtype=jnp.int32)
        block = lax.dynamic_slice_in_dim(rows, first, count)
        return step(carry, block, places, places >= number * count)

    return lax.fori_loop(0, -(-rows.shape[0] // max(count, 1)), body, carry)


def over_heads(function: Callable[..., Any], selector: Selector, *arrays: Any) -> Any:
    """Apply a function of one head to all heads of all rows; a selector's weights are by head."""
    of_row = jax.vmap(function, axis_name=HEADS)
    return jax.vmap(of_row, in_axes=(None, *[0] * len(arrays)))(selector, *arrays)


def each(method: str, selector: Selector, *arrays: Any) -> Any:
    """Call a method of a selector for all heads of all rows."""
    return over_heads(lambda own, *args: getattr(own, method)(*args), selector, *arrays)


def per_head(of_rows: Array, array: Array) -> Array:
    """One number per row as one per head of an array [batch, heads, ...]."""
    return jnp.broadcast_to(of_rows[:, None], array.shape[:2])


def like(of_heads: Array, array: Array) -> Array:
    """One number per head with the axes of an array that begins with batch and heads."""
    return of_heads.reshape(of_heads.shape + (1,) * (array.ndim - 2))


def best_units(scores: Float[Array, "batch heads sets units"], count: int) -> Array:
    """Indices of the largest scores in falling order; XLA's fast form has two axes."""
    flat = scores.reshape(-1, scores.shape[-1])
    return lax.top_k(flat, count)[1].reshape(*scores.shape[:-1], count)


def best_units_unordered(
    scores: Float[Array, "batch heads sets units"], count: int, limit: Int[Array, "batch heads"]
) -> Array:
    """Indices of as many of the largest scores as a head's limit, then ones that no unit has."""
    limit = jnp.broadcast_to(limit[..., None], scores.shape[:-1])
    index, is_unit = largest_indices(scores, count, limit)
    return jnp.where(is_unit, index, scores.shape[-1])
