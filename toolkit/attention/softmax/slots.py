r"""Products of one token's queries with every slot of a cache: where a decode step's time goes.

    s_hs = q_h . k_s        o_h = sum_s p_hs v_s

Both should take one read of the cache, and on CPUs their form decides whether they do. XLA packs
values that come second, and takes several times as long as a read, so they come first. Numbers of
fewer bits than the sums it writes out whole in float32, so they are widened a block at a time,
which a core keeps at hand. Derivatives are those of the plain products.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from toolkit.attention.execution.precision import accumulator

BLOCK = 512  # slots


@jax.custom_jvp
def dot_keys(
    q: Float[Array, "batch key_heads group key"], keys: Num[Array, "batch key_heads key slots"]
) -> Float[Array, "batch key_heads group slots"]:
    """Products of the queries of a group with the keys of all slots, in the precision of sums."""

    def by_blocks(q: Array, keys: Array) -> Array:
        blocks, rest = _over_blocks(lambda keys, q: _wide("gk,ks->gs", q, keys), _dot, keys, q)
        in_order = blocks.swapaxes(2, 3).reshape(*q.shape[:3], -1)
        return in_order if rest is None else jnp.concatenate([in_order, rest], axis=3)

    return lax.platform_dependent(q, keys, cpu=by_blocks if _is_long(keys) else _dot, default=_dot)


@jax.custom_jvp
def weighted_values(
    weights: Float[Array, "batch key_heads group slots"],
    values: Num[Array, "batch key_heads value slots"],
) -> Float[Array, "batch key_heads group value"]:
    """Sums of the values of all slots, in the precision of sums."""

    def by_blocks(weights: Array, values: Array) -> Array:
        blocks, rest = _over_blocks(
            partial(_wide, "vs,gs->vg"), _weighted, values, weights, cut=True
        )
        out = blocks.sum(axis=2).swapaxes(2, 3)
        return out if rest is None else out + rest

    def values_first(weights: Array, values: Array) -> Array:
        precise, values = accumulator(weights.dtype), values.astype(weights.dtype)
        out = jnp.einsum("bhvs,bhgs->bhvg", values, weights, preferred_element_type=precise)
        # Without the barrier XLA puts the values second again, for the sake of the result's axes.
        return lax.optimization_barrier(out).swapaxes(2, 3)

    on_cpu = by_blocks if _is_long(values) else values_first
    return lax.platform_dependent(weights, values, cpu=on_cpu, default=_weighted)


def _is_long(slots: Array) -> bool:
    """Whether it is read by blocks: narrow numbers, and many of them."""
    return slots.dtype.itemsize < 4 and slots.shape[3] > 2 * BLOCK


def _dot(q, keys):
    precise, keys = accumulator(q.dtype), keys.astype(q.dtype)
    return jnp.einsum("bhgk,bhks->bhgs", q, keys, preferred_element_type=precise)


def _weighted(weights, values):
    precise, values = accumulator(weights.dtype), values.astype(weights.dtype)
    return jnp.einsum("bhgs,bhvs->bhgv", weights, values, preferred_element_type=precise)


def _wide(equation: str, *operands: Array) -> Array:
    precise = jnp.promote_types(*(accumulator(x.dtype) for x in operands))
    return jnp.einsum(equation, *(x.astype(precise) for x in operands))


def _over_blocks(
    product: Callable[[Array, Array], Array], whole: Callable[[Array, Array], Array], slots: Array,
    few: Array, cut: bool = False,
) -> tuple[Array, Array | None]:  # fmt: skip
    """Products of whole blocks, [batch, key_heads, blocks, ...], and of the slots that are left.

    With `cut` the few rows have slots too, of which a block meets its own.
    """
    *heads, size, count = slots.shape
    blocks = count // BLOCK
    rows, others = (x.reshape(-1, *x.shape[2:]) for x in (slots, few))

    def block(number: Array) -> Array:
        # XLA would widen all of the array ahead of the loop if it did not depend on the block.
        array, number = lax.optimization_barrier((rows, number))
        zero, head, start = jnp.zeros_like(number), number // blocks, number % blocks * BLOCK
        piece = lax.dynamic_slice(array, (head, zero, start), (1, size, BLOCK))[0]
        place, width = (start, BLOCK) if cut else (zero, few.shape[3])
        own = lax.dynamic_slice(others, (head, zero, place), (1, few.shape[2], width))[0]
        return product(piece.astype(few.dtype), own)

    found = lax.map(block, jnp.arange(rows.shape[0] * blocks, dtype=jnp.int32))
    end = blocks * BLOCK
    left = slots[..., end:], few[..., end:] if cut else few
    rest = whole(left[1], left[0]) if end < count else None
    return found.reshape(*heads, blocks, *found.shape[1:]), rest


def _plain_derivatives(function: Any, product: Callable[[Array, Array], Array]) -> None:
    """The derivatives of a product, and none by integers."""

    def rule(primals, tangents):
        (few, slots), (d_few, d_slots) = primals, tangents
        tangent = product(d_few, slots)
        if jnp.issubdtype(slots.dtype, jnp.floating):
            tangent += product(few, d_slots)
        return function(*primals), tangent

    function.defjvp(rule)


_plain_derivatives(dot_keys, _dot)
_plain_derivatives(weighted_values, _weighted)
