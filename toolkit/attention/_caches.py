"""What the caches of softmax and sparse attention share: a length per row, room, and writing.

A row holds the tokens of one document, the last that was read into it: token p of the document is
in slot p, or in slot p % capacity of a ring, which forgets the oldest. What other slots hold never
shows. A token that finds no room is dropped, and the outputs of that row are NaN until it is freed;
`toolkit.checking()` refuses it with a ValueError.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from toolkit._checks import axes_of, check_shape, reads_values
from toolkit._kinds import check_integers, shown
from toolkit.attention._attend import CAUSAL, Mask, Window, bounded, packed, positions_in_documents
from toolkit.attention._shapes import SegmentIds
from toolkit.attention.execution.cores import over_cores

Cache = TypeVar("Cache", bound=Any)


class Rows:
    """What can be done with single rows of a cache, all of whose arrays begin with `batch`."""

    length: Int[Array, "batch"]

    def free(self, rows: Int[Array, "rows"] | Bool[Array, "batch"]) -> Self:
        """Forget the tokens of some rows, so that other sequences can take their place."""
        return replace(self, length=cleared(self.length, rows))  # type: ignore[type-var]

    def insert(self, rows: Int[Array, "rows"], other: Self) -> Self:
        """Put the rows of `other`, a cache of the same capacity, in place of some rows."""
        check_rows(rows, self.length.shape[0])
        check_other(self, rows, other)
        return jax.tree.map(lambda old, new: old.at[rows].set(new), self, other)

    def truncate(self, lengths: Int[Array, "batch"]) -> Self:
        """Keep the first `lengths` tokens of every row; a row that holds no more stays as it is."""
        check_integers("lengths", lengths)
        check_shape("lengths", lengths, self.length.shape, "batch")
        kept = jnp.minimum(bounded(lengths, 0, 2**31 - 1), self.length)
        return replace(self, length=kept)  # type: ignore[type-var]

    def restore(self, earlier: Sequence[Self], which: Int[Array, "batch"]) -> Self:
        """Go back to an earlier state, row b to that of earlier[which[b]].

        The caches in `earlier` are those from which this one came by adding tokens.
        """
        return self.truncate(picked([cache.length for cache in earlier], which))


def picked(
    arrays: Sequence[Shaped[Array, "batch *rest"]], which: Int[Array, "batch"]
) -> Shaped[Array, "batch *rest"]:
    """Row b of arrays[which[b]]."""
    rows = jnp.arange(which.shape[0], dtype=which.dtype)
    return jnp.stack(arrays).at[which, rows].get(mode="promise_in_bounds")


def cleared(array: Shaped[Array, "batch *rest"], rows: Array) -> Shaped[Array, "batch *rest"]:
    """An array of a cache with zeros in some rows, named by number or by True and False."""
    check_rows(rows, array.shape[0])
    if rows.dtype != bool:
        return array.at[rows].set(0)
    return jnp.where(rows.reshape(-1, *(1,) * (array.ndim - 1)), jnp.zeros_like(array), array)


def check_rows(rows: Any, batch: int) -> None:
    """Refuse anything but a list of rows; inside `checking()`, also rows that the cache lacks."""
    if not hasattr(rows, "ndim") or rows.ndim != 1:
        raise TypeError(f"rows must be an array of row numbers [rows]; got {shown(rows)}.")
    if rows.dtype == bool and rows.shape[0] != batch:
        raise ValueError(f"rows, of True and False, must be {batch}; got {rows.shape[0]}.")
    if rows.dtype == bool:
        return
    check_integers("rows", rows)
    if not rows.size or not reads_values(rows):
        return
    least, most = int(rows.min()), int(rows.max())
    if least < -batch or most >= batch:
        raise ValueError(f"rows must be those of a cache of {batch}; got {least} to {most}.")


def check_other(cache: Any, rows: Any, other: Any) -> None:
    """Refuse to insert anything but a cache of the same kind with as many rows as are replaced."""
    if not isinstance(other, type(cache)):
        raise TypeError(f"other must be a {type(cache).__name__}; got {type(other).__name__}.")
    if rows.dtype == bool:
        raise TypeError("rows must be the numbers of rows, one per row of other; got bool.")
    count = rows.shape[0]
    arrays = zip(*map(jax.tree_util.tree_leaves_with_path, (cache, other)), strict=False)
    if jax.tree.structure(cache) != jax.tree.structure(other):
        raise TypeError(
            "other must hold the same arrays: of one model, both caches quantised, or neither."
        )
    for (path, own), (_, new) in arrays:
        wanted = (count, *own.shape[1:])
        if (new.shape, new.dtype) != (wanted, own.dtype):
            name = "other" + jax.tree_util.keystr(path)
            wanted = shown(jax.ShapeDtypeStruct(wanted, own.dtype))
            raise ValueError(f"{name} must be {wanted}; got {shown(new)}.")


def check_lengths(cache: Any) -> None:
    """Refuse, inside `checking()`, a cache with a row of negative length."""
    if not reads_values(cache.length):
        return
    least = int(np.asarray(cache.length).min())
    if least < 0:
        raise ValueError(f"cache.length must be at least 0 in every row; got {least}.")


def check_room(cache: Any, time: int, segment_ids: SegmentIds | None = None) -> None:
    """Refuse more tokens than a row can hold; inside `checking()`, more than a row has room for."""
    check_lengths(cache)
    length, wanted = 0, time if segment_ids is None else 0
    if reads_values(cache.length, segment_ids):
        after = np.asarray(length_after(cache.length, segment_ids, time))
        row = int(after.argmax())
        length, wanted = int(np.asarray(cache.length)[row]), int(after[row])
    if wanted > cache.capacity:
        raise ValueError(
            f"a row of the cache holds {length} of {cache.capacity} tokens and cannot take "
            f"{time} more; free it, or make the cache with a larger capacity."
        )


def length_after(
    length: Int[Array, "batch"], segment_ids: SegmentIds | None, time: int
) -> Int[Array, "batch"]:
    """Tokens of the document that each row holds after `time` new ones."""
    if segment_ids is None:
        return length + time
    return positions_in_documents(segment_ids, length)[:, -1] + 1


def put(array: Array, new: Array, slot: Int[Array, "batch"], axis: int) -> Array:
    """The array with one `new` entry in a slot of every row; one that it lacks is left out."""
    axis %= array.ndim

    def by_place(array, new, slot):
        place: list[Any] = [slice(None)] * array.ndim
        place[0], place[axis] = jnp.arange(slot.shape[0], dtype=slot.dtype), slot
        return array.at[tuple(place)].set(new, mode="drop")

    def by_mask(array, new, slot):
        is_there = lax.broadcasted_iota(slot.dtype, array.shape, axis) == slot.reshape(
            -1, *(1,) * (array.ndim - 1)
        )
        return jnp.where(is_there, jnp.expand_dims(new, axis).astype(array.dtype), array)

    # XLA on CPUs writes into bfloat16 or 8-bit floats by way of a float32 copy of all of the array.
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    has_copy = is_float and array.dtype.name not in ("float16", "float32", "float64")
    on_cpu = by_mask if has_copy else by_place
    return lax.platform_dependent(array, new, slot, cpu=on_cpu, default=by_place)


def write_token(cache: Cache, slot: Int[Array, "batch"], *, axis: int, **new: Array) -> Cache:
    """Write one `new` token into a slot of every row; a row without that slot stays as it was.

    Every length grows by one, even if there was no room.
    """
    stored = _stored(cache, new)

    def write():
        return {name: put(array, new[name], slot, axis) for name, array in stored.items()}

    # Inside a conditional, since XLA copies the result of a bare update, once for the reads that
    # follow and once for the result, which takes twenty times as long as the step.
    arrays = lax.cond((slot < cache.capacity).any(), write, lambda: stored)
    return replace(cache, **arrays, length=cache.length + 1)


def cut_as_arrays_are(
    function: Callable[..., tuple[Any, ...]], arrays: Sequence[Any], cache: Any,
    heads: tuple[int | None, ...], heads_out: tuple[int, ...],
) -> tuple[Any, ...]:  # fmt: skip
    """Call function(*arrays, cache), whose last output is the new cache.

    Where arrays are cut along explicit axes of a mesh, each device takes its own rows and heads;
    `heads` and `heads_out` are those of `over_cores`.
    """
    leaves, tree = jax.tree.flatten(cache)
    axes = [
        1 if any(name.endswith("heads") for name in axes_of(type(cache), field.name)) else None
        for field in fields(cache)
        if getattr(cache, field.name) is not None and not field.metadata.get("static")
    ]

    def share(*arguments):
        tokens, rows = arguments[: len(arrays)], arguments[len(arrays) :]
        *outputs, cache = function(*tokens, tree.unflatten(rows))
        return *outputs, *jax.tree.leaves(cache)

    every = over_cores(None, share, (*arrays, *leaves), (*heads, *axes), (*heads_out, *axes))
    return *every[: len(heads_out)], tree.unflatten(every[len(heads_out) :])


class Continued(NamedTuple):
    """A cache with new tokens, and the keys that their queries attend to."""

    # what the cache holds by name, on the axis of keys that `mask` covers
    arrays: dict[str, Array]
    mask: Mask  # which of the old and new tokens on that axis the queries see
    cache: Any  # the new cache


def continue_rows(
    cache: Any, segment_ids: SegmentIds | None, *, axis: int, window: Window = CAUSAL, **new: Array
) -> Continued:
    """Append several tokens to every row; the first document of `segment_ids` continues the row's.

    Where one document fills up slot after slot, the keys are the cache itself; otherwise they are
    what it held, oldest first, and the new tokens.
    """
    stored, length, capacity = _stored(cache, new), cache.length, cache.capacity
    is_ring = window[0] is not None
    time = next(iter(new.values())).shape[axis]
    after = length_after(length, segment_ids, time)
    if segment_ids is None and not is_ring:
        write = jax.vmap(partial(_write_piece, axis=axis))
        arrays = {name: write(array, new[name], length) for name, array in stored.items()}
        mask = Mask(window, length, 0, after)
        return Continued(arrays, mask, replace(cache, **arrays, length=after))
    # Of a document that is too long the first tokens stay in their slots, save in a ring.
    before, end, excess = length, after, jnp.zeros_like(after)
    if not is_ring:
        before, end = (jnp.minimum(x, capacity) for x in (length, after))
        excess = jnp.clip(after - capacity, 0, time)
    roll = jax.vmap(lambda array, shift: jnp.roll(array, shift, axis))
    cut = jax.vmap(lambda x, start: lax.dynamic_slice_in_dim(x, start, capacity, axis))
    arrays, kept = {}, {}
    for name, array in stored.items():
        whole = jnp.concatenate([roll(array, -before), new[name]], axis)
        kept[name] = roll(cut(whole, time - excess), end)
        if not is_ring and jnp.issubdtype(whole.dtype, jnp.floating):
            # The document that goes on lacks the tokens for which there was no room.
            lacks = (length > capacity).reshape(-1, *(1,) * (whole.ndim - 1))
            at = lax.broadcasted_iota(jnp.int32, whole.shape, axis % whole.ndim)
            whole = jnp.where(lacks & (at < capacity), jnp.nan, whole)
        arrays[name] = whole
    documents = packed(segment_ids)
    if documents is not None:
        old = jnp.ones((length.shape[0], capacity), jnp.int32)
        documents = documents._replace(key=jnp.concatenate([old, documents.key], axis=1))
    mask = Mask(window, capacity, capacity - jnp.minimum(length, capacity), None, documents)
    return Continued(arrays, mask, replace(cache, **kept, length=after))


def _write_piece(array: Array, new: Array, start: Array, *, axis: int) -> Array:
    """Consecutive tokens written into one row from a slot on; those past the last are dropped."""
    # XLA shifts a slice that does not fit back to where it does; what precedes `start` there stays.
    time = new.shape[axis]
    first = jnp.minimum(start, array.shape[axis] - time)
    index = lax.broadcasted_iota(start.dtype, new.shape, axis % new.ndim)
    there = lax.dynamic_slice_in_dim(array, first, time, axis)
    written = jnp.where(index < start - first, there, jnp.roll(new, start - first, axis))
    return lax.dynamic_update_slice_in_dim(array, written, first, axis)


def show_overflow(out: Array, cache: Any) -> Array:
    """NaN in place of the outputs of rows whose tokens found no room in the cache."""
    has_room = cache.length <= cache.capacity
    return jnp.where(has_room.reshape(-1, *(1,) * (out.ndim - 1)), out, jnp.nan)


def _stored(cache, new):
    return {name: getattr(cache, name) for name in new if getattr(cache, name) is not None}
