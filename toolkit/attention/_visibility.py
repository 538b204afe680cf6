"""Which keys a query sees: the one definition that every form of softmax attention shares."""

from typing import NamedTuple

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

    Args:
        query: indices of queries on the keys' axis, to broadcast against `key`.
        key: indices of keys.
        extent: which keys exist.
        is_causal: a query sees no key after itself.
        sliding_window: how many keys a query sees on one side, itself included; None for all.

    Returns:
        True where the query sees the key.
    """
    visible = (key >= extent.key_start) & (key < extent.key_stop)
    if is_causal:
        visible &= key <= query
    if sliding_window is not None:
        visible &= (query - key < sliding_window) & (key - query < sliding_window)
    return visible
