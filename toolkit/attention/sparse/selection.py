"""Exactly the k largest of a row of scores; of equal scores the lowest index wins.

No sort. Floating-point numbers, read as unsigned integers with the sign turned round, keep their
order, so the k-th largest is found bit by bit: 32 times count how many scores reach a candidate.
Ties at that score are cut at an index found the same way. All of it is elementwise and vectorises:
measured here on one CPU core, 64 rows of 4096 scores take 3.5 ms, `lax.top_k` with k = 2048 42 ms.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from toolkit._checks import checked


@checked
def top_mask(
    scores: Float[Array, "... units"], visible: Bool[Array, "... units"], count: int
) -> Bool[Array, "... units"]:
    """The `count` visible units with the largest scores, or all of them if they are fewer.

    Of equal scores (+0 and -0 are equal) the lowest index wins. No gradient flows through a
    selection.

    Args:
        scores: [..., units].
        visible: which units may be selected, of the same shape [..., units].
        count: how many units to select, known when compiling.

    Returns:
        Which units are selected [..., units].

    Cost:
        33 + log2(units) comparisons per unit, whatever the count.

    Example:
        >>> top_mask(jnp.array([1.0, 3.0, 2.0]), jnp.ones(3, bool), 2).tolist()
        [False, True, True]
    """
    units = scores.shape[-1]
    if count >= units:
        return visible
    order = jnp.where(visible, _order(lax.stop_gradient(scores)), 0)
    bits = 8 * order.dtype.itemsize
    start = jnp.zeros_like(order, shape=(*order.shape[:-1], 1))
    least = _largest(start, bits, lambda bound: _count(order >= bound) >= count)
    above, equal = order > least, order == least
    room = count - _count(above)
    index = lax.broadcasted_iota(order.dtype, order.shape, order.ndim - 1)
    # One past the last index at which the ties, counted from the left, still fit.
    stop = _largest(start, units.bit_length(), lambda stop: _count(equal & (index < stop)) <= room)
    return visible & (above | (equal & (index < stop)))


@checked
def selected_indices(
    mask: Bool[Array, "... units"], count: int
) -> tuple[Int[Array, "... count"], Bool[Array, "... count"]]:
    """Where a mask with at most `count` true entries per row is true, ascending, and if so.

    Args:
        mask: [..., units].
        count: places to fill, known when compiling.

    Returns:
        Indices [..., count] and whether each is one [..., count].

    Cost:
        A running sum over the units, and count log2(units) comparisons.

    Example:
        >>> index, is_one = selected_indices(jnp.array([False, True, False, True]), 3)
        >>> index[:2].tolist(), is_one.tolist()
        ([1, 3], [True, True, False])
    """
    units = mask.shape[-1]
    filled = jnp.cumsum(mask, axis=-1, dtype=jnp.int32)

    def places(row):
        place = jnp.arange(1, count + 1, dtype=jnp.int32)
        index = jnp.searchsorted(row, place).astype(jnp.int32)
        return jnp.minimum(index, units - 1), place <= row[-1]

    return jnp.vectorize(places, signature="(u)->(c),(c)")(filled)


def _order(scores: Array) -> Array:
    """Unsigned integers in the order of the scores, none of them 0."""
    unsigned = jnp.uint64 if scores.dtype == jnp.float64 else jnp.uint32
    bits = lax.bitcast_convert_type(scores, unsigned)
    top = jnp.asarray(1 << (8 * bits.dtype.itemsize - 1), unsigned)
    bits = jnp.where(bits == top, 0, bits)  # -0 becomes 0
    return jnp.where(bits >= top, ~bits, bits | top)


def _largest(start: Array, bits: int, holds: Callable[[Array], Array]) -> Array:
    """The largest number below 2 ** bits for which `holds`; it holds up to there and not beyond."""
    one = jnp.ones((), start.dtype)

    def add_bit(step, number):
        candidate = number | (one << (bits - 1 - step).astype(start.dtype))
        return jnp.where(holds(candidate), candidate, number)

    return lax.fori_loop(0, bits, add_bit, start)


def _count(mask: Array) -> Array:
    return mask.sum(axis=-1, keepdims=True, dtype=jnp.int32)
