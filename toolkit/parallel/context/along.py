"""Whole models over sharded sequences: what their mixing layers do.

While a loss is traced under a layout that shards time, `sequence_attention` and its siblings
communicate across devices. Everything else in a model works token by token.
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
    """How time is sharded: the method, the mesh with the axis "context", and the batch axes."""

    mesh: Mesh
    method: Any
    batch_axis: str | tuple[str, ...] | None


_ALONG: ContextVar[Along | None] = ContextVar("along", default=None)


@contextlib.contextmanager
def attending(along: Along | None) -> Iterator[None]:
    """Set how code traced in the `with` block attends; None: sequences are whole."""
    token = _ALONG.set(along)
    try:
        yield
    finally:
        _ALONG.reset(token)


def cuts_time() -> bool:
    """Whether sequences are sharded in the code being traced."""
    return _ALONG.get() is not None


def sequence_attention(
    q: Float[Array, "batch time heads key"], k: Float[Array, "batch time key_value_heads key"],
    v: Float[Array, "batch time key_value_heads value"], *,
    sliding_window: int | None, segment_ids: Int[Array, "batch time"] | None,
    initial_state: Any, sinks: Float[Array, "heads"] | None = None,
    logits_soft_cap: float | None = None,
) -> tuple[Float[Array, "batch time heads value"], Any]:  # fmt: skip
    """`softmax_attention`, across devices if the sequence is sharded."""
    how = {"sliding_window": sliding_window, "segment_ids": segment_ids}
    along = _along(initial_state)
    if along is None:
        own = {"sinks": sinks, "logits_soft_cap": logits_soft_cap}
        return softmax_attention(q, k, v, initial_state=initial_state, **own, **how)
    for name, value in (("sinks", sinks), ("logits_soft_cap", logits_soft_cap)):
        if value is not None:
            raise ValueError(
                f"{name}: layout {along.method!r} cuts time, and has no {name}; wanted None"
            )
    mesh, method, batch_axis = along
    return context_attention(q, k, v, mesh, method, batch_axis=batch_axis, **how), None


def sequence_mixer(
    name: str, inputs: tuple[Array, ...], *,
    segment_ids: Int[Array, "batch time"] | None,
    initial_state: Any,
) -> tuple[Float[Array, "batch time heads value"], Any]:  # fmt: skip
    """A linear-time mixer by the name of its row, across devices if the sequence is sharded."""
    along = _along(initial_state)
    if along is None:
        how = {"segment_ids": segment_ids, "initial_state": initial_state}
        return MIXERS[name].function(*inputs, **how)
    mesh, _, batch_axis = along
    out = context_mixer(name, inputs, mesh, batch_axis=batch_axis, segment_ids=segment_ids)
    return out, None


def sequence_look_back(
    function: Callable[..., tuple[Array, Any]], x: Float[Array, "batch time channels"],
    *weights: Array | None, reach: int, segment_ids: Int[Array, "batch time"] | None,
    initial_state: Any,
) -> tuple[Float[Array, "batch time channels"], Any]:  # fmt: skip
    """function(x, *weights), which looks `reach` tokens back, across devices if needed."""
    along = _along(initial_state)
    if along is None or not reach:
        how = {"segment_ids": segment_ids, "initial_state": initial_state}
        return function(x, *weights, **how)
    mesh, _, batch_axis = along
    where = {"axis": CONTEXT_AXIS, "batch_axis": batch_axis, "segment_ids": segment_ids}
    return look_back(function, x, weights, reach, mesh, **where), None


def sequence_latents(
    x: Float[Array, "batch time width"], weights: LatentWeights, config: LatentConfig, *,
    segment_ids: Int[Array, "batch time"] | None,
    initial_state: Any,
) -> tuple[Float[Array, "batch time width"], Any]:  # fmt: skip
    """`mla`, across devices if the sequence is sharded."""
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
    """ValueError for a layer that needs whole sequences if they are sharded."""
    along = _ALONG.get()
    if along is not None and not can_cut_time:
        raise ValueError(
            f"pattern: {word!r} layers need whole sequences, and layout {along.method!r} cuts "
            "time; layers of softmax, latent or linear attention, whose state is one matrix, "
            "can do that"
        )
