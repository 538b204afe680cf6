"""Whole models over a sequence in parts: what their softmax layers do, and what others are told.

A layout says that time is cut; while a loss under it is traced, `sequence_attention` attends across
devices. All else that a transformer does is done token by token, and lies as its tokens do.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from toolkit.attention import softmax_attention
from toolkit.parallel.context.attention import context_attention

CONTEXT_AXIS = "context"
METHODS = ("ring", "zigzag", "ulysses")


class Along(NamedTuple):
    """How time is cut: by which method, over the axis "context" of which mesh; what cuts rows."""

    mesh: Mesh
    method: Any
    batch_axis: str | tuple[str, ...] | None


_ALONG: ContextVar[Along | None] = ContextVar("along", default=None)


@contextlib.contextmanager
def attending(along: Along | None) -> Iterator[None]:
    """What is traced here attends so; None: every device has whole sequences."""
    token = _ALONG.set(along)
    try:
        yield
    finally:
        _ALONG.reset(token)


def sequence_attention(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time key_value_heads key"],
    v: Float[Array, "batch time key_value_heads value"],
    *,
    sliding_window: int | None,
    segment_ids: Int[Array, "batch time"] | None,
    initial_state: Any,
) -> tuple[Float[Array, "batch time heads value"], Any]:
    """`softmax_attention`, over the devices that share a sequence if any do."""
    how = {"sliding_window": sliding_window, "segment_ids": segment_ids}
    along = _ALONG.get()
    if along is None:
        return softmax_attention(q, k, v, initial_state=initial_state, **how)
    if initial_state is not None:
        raise ValueError(f"layout {along.method!r} cuts time: a cache goes with whole sequences")
    mesh, method, batch_axis = along
    return context_attention(q, k, v, mesh, method, batch_axis=batch_axis, **how), None


def check_word(word: str, can_cut_time: bool) -> None:
    """ValueError for a layer that needs whole sequences where they lie in parts."""
    along = _ALONG.get()
    if along is not None and not can_cut_time:
        raise ValueError(
            f"pattern: {word!r} layers need whole sequences, and layout {along.method!r} cuts "
            'time; "full" and "window" layers do without'
        )
