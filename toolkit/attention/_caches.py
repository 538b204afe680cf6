"""What the caches of softmax and sparse attention share: checks, room, and the writing of tokens.

A token that finds no room is an error: ValueError when the length is known, NaN output from then
on under `jax.jit`.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from toolkit.attention._checks import check_same_dtype, check_shapes

Cache = TypeVar("Cache", bound=Any)


def check_cache(cache: Any, kind: type, sizes: Mapping[str, int], k: Array) -> None:
    """Refuse a cache of another kind, or one that does not fit the `sizes` or the dtype of k."""
    if not isinstance(cache, kind):
        raise TypeError(f"the state must be a {kind.__name__}; got {type(cache).__name__}.")
    arrays = {field.name: getattr(cache, field.name) for field in fields(cache)}
    known = {axis: sizes[axis] for axis in sizes if axis != "time"}
    check_shapes(kind, arrays, known, prefix="cache.")
    check_same_dtype(k=k, cache_keys=cache.keys)


def check_room(cache: Any, time: int) -> None:
    """Refuse tokens that a cache of known length cannot hold, or one of any length."""
    try:
        length = int(cache.length)
    except jax.errors.ConcretizationTypeError:
        length = 0
    if length + time > cache.capacity:
        raise ValueError(
            f"the cache holds {length} of {cache.capacity} tokens and cannot take {time} more; "
            "make it with a larger capacity."
        )


def write_tokens(cache: Cache, slot: Int[Array, ""], *, axis: int, **new: Array) -> Cache:
    """The cache with `new` tokens from `slot` on, or with nothing new if they do not fit there.

    Its length grows by the new tokens even if they did not fit.
    """
    time = next(iter(new.values())).shape[axis]
    held = {name: getattr(cache, name) for name in new if getattr(cache, name) is not None}

    def write():
        return {
            name: lax.dynamic_update_slice_in_dim(array, new[name], slot, axis)
            for name, array in held.items()
        }

    # Inside a conditional: of a bare update XLA makes a second copy for the reads that follow, and
    # one for the result, which triples the time of a step.
    arrays = lax.cond(slot + time <= cache.capacity, write, lambda: held)
    return replace(cache, **arrays, length=cache.length + time)


def show_overflow(out: Array, cache: Any) -> Array:
    """NaN in place of outputs whose tokens found no room in the cache."""
    return jnp.where(cache.length <= cache.capacity, out, jnp.nan)
