"""Which keys a query sees: the one definition that every form of softmax attention shares."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from toolkit.attention._shapes import SegmentIds


class Extent(NamedTuple):
    """Where queries and keys lie on one time axis; traced, so a cache grows without compiling.

    Attributes:
        query_start: index of the first query on the keys' axis.
        key_start: first key that exists; 0 unless there is a window, whose ring may be part full.
        key_stop: one past the last key that exists.
    """

    query_start: Int[Array, ""] | int
    key_start: Int[Array, ""] | int
    key_stop: Int[Array, ""] | int


class Segments(NamedTuple):
    """Document numbers of queries and keys; a query sees the keys of its own document only."""

    query: Int[Array, "batch query_time"]
    key: Int[Array, "batch key_time"]


def sees(
    query: Int[Array, "*times"],
    key: Int[Array, "*times"],
    extent: Extent,
    *,
    is_causal: bool,
    sliding_window: int | None,
) -> Bool[Array, "*times"]:
    """Whether the query at index `query` sees the key at index `key`, whatever their documents.

    `sliding_window` is how many keys a query sees on one side, itself included; None for all.
    """
    visible = (key >= extent.key_start) & (key < extent.key_stop)
    if is_causal:
        visible &= key <= query
    if sliding_window is not None:
        visible &= (query - key < sliding_window) & (key - query < sliding_window)
    return visible


def run_numbers(segment_ids: SegmentIds) -> SegmentIds:
    """Documents are runs of equal numbers: 1 for the first run of a sequence, 2 for the next."""
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    return 1 + jnp.pad(jnp.cumsum(changes, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def packed(segment_ids: SegmentIds | None) -> Segments | None:
    """Documents of a sequence without a cache, where queries and keys are the same tokens."""
    if segment_ids is None:
        return None
    numbers = run_numbers(segment_ids)
    return Segments(numbers, numbers)


def documents_after(
    length: Int[Array, ""],
    start: Int[Array, "batch"] | None,
    segment_ids: SegmentIds | None,
    shape: tuple[int, int],
    first_query: Int[Array, ""] | int,
    keys: int,
) -> tuple[Segments | None, Int[Array, "batch"] | None]:
    """Documents of new tokens and of those a cache holds, and where the last one begins.

    The first document of the new tokens continues the one that the cache remembers. It is number
    1, those that follow count on, and 0 is what the cache has forgotten.

    `start` counts the tokens before the document that the cache remembers (None for no tokens),
    `shape` is (batch, new tokens), `keys` the length of the keys' axis, on which `first_query` is
    the first new token. Returns the documents and the new `start`; None, None for one document.
    """
    if segment_ids is None and start is None:
        return None, None
    batch, time = shape
    query = jnp.ones((batch, time), jnp.int32)
    if segment_ids is not None:
        query = run_numbers(segment_ids)
    is_first = jnp.diff(query, axis=1, prepend=query[:, :1]) > 0
    positions = length - first_query + jnp.arange(keys, dtype=jnp.int32)
    start = jnp.zeros(batch, jnp.int32) if start is None else start
    remembered = (positions[None] >= start[:, None]).astype(jnp.int32)
    key = lax.dynamic_update_slice_in_dim(remembered, query, first_query, axis=1)
    new = length + jnp.arange(time, dtype=jnp.int32)
    last = jnp.where(is_first, new[None], 0).max(axis=1)
    return Segments(query, key), jnp.maximum(start, last)
