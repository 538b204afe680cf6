"""Whole models over a sequence in parts: what their mixing layers do, and what others are told.

A layout says that time is cut; while a loss under it is traced, `sequence_attention` and the others
reach across devices. All else that a model does is done token by token, and lies as its tokens do.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from toolkit.attention import MIXERS, softmax_attention
from toolkit.attention.latent import LatentConfig, LatentWeights, mla
from toolkit.parallel.context.attention import context_attention
from toolkit.parallel.context.halo import look_back
from toolkit.parallel.context.latents import context_latents
from toolkit.parallel.context.states import context_mixer

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


def cuts_time() -> bool:
    """Whether what is traced here has parts of sequences on its devices."""
    return _ALONG.get() is not None


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
    along = _along(initial_state)
    if along is None:
        return softmax_attention(q, k, v, initial_state=initial_state, **how)
    mesh, method, batch_axis = along
    return context_attention(q, k, v, mesh, method, batch_axis=batch_axis, **how), None


def sequence_mixer(
    name: str,
    inputs: tuple[Array, ...],
    *,
    segment_ids: Int[Array, "batch time"] | None,
    initial_state: Any,
) -> tuple[Float[Array, "batch time heads value"], Any]:
    """A linear-time mixer by the name of its row, likewise."""
    along = _along(initial_state)
    if along is None:
        how = {"segment_ids": segment_ids, "initial_state": initial_state}
        return MIXERS[name].function(*inputs, **how)
    mesh, _, batch_axis = along
    out = context_mixer(name, inputs, mesh, batch_axis=batch_axis, segment_ids=segment_ids)
    return out, None


def sequence_look_back(
    function: Callable[..., tuple[Array, Any]],
    x: Float[Array, "batch time channels"],
    *weights: Array | None,
    reach: int,
    segment_ids: Int[Array, "batch time"] | None,
    initial_state: Any,
) -> tuple[Float[Array, "batch time channels"], Any]:
    """function(x, *weights), which sees `reach` tokens back, likewise."""
    along = _along(initial_state)
    if along is None or not reach:
        how = {"segment_ids": segment_ids, "initial_state": initial_state}
        return function(x, *weights, **how)
    mesh, _, batch_axis = along
    where = {"axis": CONTEXT_AXIS, "batch_axis": batch_axis, "segment_ids": segment_ids}
    return look_back(function, x, weights, reach, mesh, **where), None


def sequence_latents(
    x: Float[Array, "batch time width"],
    weights: LatentWeights,
    config: LatentConfig,
    *,
    segment_ids: Int[Array, "batch time"] | None,
    initial_state: Any,
) -> tuple[Float[Array, "batch time width"], Any]:
    """`mla`, likewise."""
    along = _along(initial_state)
    if along is None:
        how = {"segment_ids": segment_ids, "initial_state": initial_state}
        return mla(x, weights, config, **how)
    mesh, _, batch_axis = along
    where = {"axis": CONTEXT_AXIS, "batch_axis": batch_axis, "segment_ids": segment_ids}
    return context_latents(x, weights, config, mesh, **where), None


def _along(initial_state: Any) -> Along | None:
    along = _ALONG.get()
    if along is not None and initial_state is not None:
        raise ValueError(f"layout {along.method!r} cuts time: a cache goes with whole sequences")
    return along


def check_word(word: str, can_cut_time: bool) -> None:
    """ValueError for a layer that needs whole sequences where they lie in parts."""
    along = _ALONG.get()
    if along is not None and not can_cut_time:
        raise ValueError(
            f"pattern: {word!r} layers choose among the tokens of whole sequences, and layout "
            f"{along.method!r} cuts time; layers of softmax, latent or linear attention can do that"
        )
