"""Which keys a query sees: the one definition that every form of softmax attention shares."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from toolkit.attention._shapes import SegmentIds


class Extent(NamedTuple):
    """Where queries and keys lie on one time axis; traced, so a cache grows without compiling.

    One number for all rows of a batch, or one for each.

    Attributes:
        query_start: index of the first query on the keys' axis.
        key_start: first key that exists; 0 unless there is a window, whose ring may be part full.
        key_stop: one past the last key that exists.
    """

    query_start: Int[Array, "..."] | int
    key_start: Int[Array, "..."] | int
    key_stop: Int[Array, "..."] | int


# How many keys a query sees before and after its own place; None for all of them.
Window = tuple[int | None, int | None]


def seen_window(is_causal: bool, sliding_window: int | None) -> Window:
    """The window in which a token sees `sliding_window` tokens on a side, itself included."""
    reach = None if sliding_window is None else sliding_window - 1
    return reach, 0 if is_causal else reach


class Segments(NamedTuple):
    """Document numbers of queries and keys; a query sees the keys of its own document only."""

    query: Int[Array, "batch query_time"]
    key: Int[Array, "batch key_time"]


def sees(
    query: Int[Array, "*times"], key: Int[Array, "*times"], extent: Extent, window: Window
) -> Bool[Array, "*times"]:
    """Whether the query at index `query` sees the key at index `key`, whatever their documents."""
    left, right = window
    visible = (key >= extent.key_start) & (key < extent.key_stop)
    if left is not None:
        visible &= query - key <= left
    if right is not None:
        visible &= key - query <= right
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


def positions_in_documents(
    segment_ids: SegmentIds, length: Int[Array, "batch"] | int = 0
) -> Int[Array, "batch time"]:
    """Place of every token in its document, of whose first one `length` tokens came before."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    is_first = jnp.diff(run_numbers(segment_ids), axis=1, prepend=1) > 0
    begins = lax.cummax(jnp.where(is_first, index, 0), axis=1)
    before = jnp.broadcast_to(jnp.asarray(length, jnp.int32), segment_ids.shape[:1])[:, None]
    return index - begins + jnp.where(begins == 0, before, 0)
