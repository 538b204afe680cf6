"""Which keys a query sees: the one definition that every form of softmax attention shares."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int


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


def documents_after(
    length: Int[Array, ""],
    start: Int[Array, "batch"] | None,
    segment_ids: Int[Array, "batch time"] | None,
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
    is_first = jnp.zeros((batch, time), bool)
    if segment_ids is not None:
        is_first = is_first.at[:, 1:].set(segment_ids[:, 1:] != segment_ids[:, :-1])
    query = 1 + jnp.cumsum(is_first, axis=1, dtype=jnp.int32)
    positions = length - first_query + jnp.arange(keys, dtype=jnp.int32)
    start = jnp.zeros(batch, jnp.int32) if start is None else start
    remembered = (positions[None] >= start[:, None]).astype(jnp.int32)
    key = lax.dynamic_update_slice_in_dim(remembered, query, first_query, axis=1)
    new = length + jnp.arange(time, dtype=jnp.int32)
    last = jnp.where(is_first, new[None], 0).max(axis=1)
    return Segments(query, key), jnp.maximum(start, last)
