"""The entries of blocks that new tokens may see, which of them are picked, and one softmax over
them and a window."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from toolkit.attention._attend import positions_in_documents, run_numbers
from toolkit.attention._caches import length_after
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.softmax.merge import combine, with_sinks
from toolkit.attention.sparse.compressed.cache import CompressedCache
from toolkit.attention.sparse.selection import top_mask
from toolkit.attention.sparse.train.indexer import index_scores


class Entries(NamedTuple):
    """Earlier entries and those of the new tokens."""

    keys: Array  # [batch, key_value_heads, entries, key]
    values: Array  # [batch, key_value_heads, entries, value]
    index_keys: Array | None  # [batch, entries, index] or None
    # index of the last of an entry's tokens among the new ones, -1 if it is an earlier one; a place
    # without an entry has the number of tokens
    last: Int[Array, "batch entries"]
    documents: tuple[Any, Any]  # of queries and entries, or None and None


def entries_seen(
    rows, segment_ids, cache, block_size
) -> tuple[Entries, Any, CompressedCache | None]:
    """The entries that new tokens may see; which tokens lack some; and the cache with the new."""
    batch, time = rows["block_keys"].shape[:2]
    length = jnp.zeros(batch, jnp.int32) if cache is None else cache.length
    index = jnp.arange(time, dtype=jnp.int32)[None]
    document = None if segment_ids is None else run_numbers(segment_ids)
    place = length[:, None] + index
    if segment_ids is not None:
        place = positions_in_documents(segment_ids, length)
    ends = jnp.sort(jnp.where((place + 1) % block_size == 0, index, time), axis=1)
    last = lax.slice_in_dim(ends, 0, -(-time // block_size), axis=1)
    at = jnp.minimum(last, time - 1)

    def taken(array):
        return jnp.take_along_axis(array, at.reshape(*at.shape, *(1,) * (array.ndim - 2)), axis=1)

    new = {name: taken(array) for name, array in rows.items() if array is not None}
    of_new = None if document is None else taken(document)
    named = {name: x.swapaxes(1, 2) if x.ndim == 4 else x for name, x in new.items()}
    lacks = None
    if cache is not None:
        old = {name: getattr(cache, name) for name in new}
        blocks = old["block_keys"].shape[2]
        named = {name: jnp.concatenate([old[name], x], axis=-2) for name, x in named.items()}
        is_old = jnp.arange(blocks, dtype=jnp.int32)[None] < length[:, None] // block_size
        slot = jnp.where(last < time, taken(place) // block_size, blocks)
        lacks = jnp.broadcast_to(length[:, None] > cache.capacity, place.shape)
        if document is not None and of_new is not None:
            slot = jnp.where(of_new == document[:, -1:], slot, blocks)
            of_new = jnp.concatenate([jnp.ones((batch, blocks), of_new.dtype), of_new], axis=1)
            lacks &= document == 1
        last = jnp.concatenate([jnp.where(is_old, -1, time), last], axis=1)
        row = jnp.arange(batch, dtype=jnp.int32)[:, None]
        kept = {
            name: x.at[(row, slice(None), slot) if x.ndim == 4 else (row, slot)].set(
                new[name], mode="drop"
            )
            for name, x in old.items()
        }
        cache = cache.added(length_after(length, segment_ids, time), **kept)
    index_keys = named.get("index_keys")
    found = named["block_keys"], named["block_values"], index_keys, last, (document, of_new)
    return Entries(*found), lacks, cache


def picked_entries(index_q, index_k, index_weights, visible, count) -> tuple[Array, Array]:
    """Which entries each query selects, and whether the scores that it may see are finite."""
    scores = index_scores(index_q, index_k, index_weights)
    is_sound = (jnp.isfinite(scores) | ~visible).all(axis=-1)
    return top_mask(scores, visible, count), is_sound


def merged_parts(recent, entries, sinks) -> Array:
    """The parts of one softmax as a whole; what is not finite shows in its query alone."""
    parts, is_sound = [], jnp.ones((), bool)
    for out, residual in (recent, entries):
        sound = jnp.isfinite(out).all(axis=-1) & (residual < jnp.inf)
        wide = accumulator(out.dtype)
        out = jnp.where(sound[..., None], out, 0).astype(wide)
        parts.append((out, jnp.where(sound, residual, 0).astype(wide)))
        is_sound = is_sound & sound
    out, residual = combine(*parts)
    if sinks is not None:
        out, _ = with_sinks(out, residual, sinks)
    return jnp.where(is_sound[..., None], out, jnp.nan)
