"""A backward pass that goes through each block in pieces of the text (StreamBP).

    with streaming(8, model.config):
        loss = ...

Every block then keeps only its input; the backward pass recomputes an eighth of its tokens at a
time. Softmax layers read only the keys up to the end of a piece; recurrent layers keep their state
between pieces; sparse and latent attention recompute the mixing for all tokens at once, and only
the rest in pieces.

Source: Luo et al., StreamBP, 2025 (arXiv:2506.03077).
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from toolkit.looped.mixing.layer import LayerConfig
from toolkit.parallel import stream_backward


class Streaming(NamedTuple):
    """The number of pieces, and the sizes of the model."""

    chunks: int
    config: LayerConfig


_STREAMING: ContextVar[Streaming | None] = ContextVar("streaming", default=None)


@contextlib.contextmanager
def streaming(chunks: int, config: LayerConfig | None = None) -> Iterator[None]:
    """Make blocks traced in the `with` block stream their backward pass in `chunks` pieces."""
    token = _STREAMING.set(Streaming(chunks, config) if config and chunks > 1 else None)
    try:
        yield
    finally:
        _STREAMING.reset(token)


def is_streaming() -> bool:
    """Whether blocks called here stream."""
    return _STREAMING.get() is not None


def stream_block(
    block: Any, h: Float[Array, "batch time width"], *, window: int | None
) -> Float[Array, "batch time width"]:
    """A block on whole sequences whose backward pass runs in pieces."""
    how = _STREAMING.get()
    assert how is not None
    if h.shape[1] % how.chunks:
        raise ValueError(f"chunks: got {how.chunks}, wanted a divisor of {h.shape[1]} tokens")
    if block.mixer.is_recurrent:
        return _recurrent(block, h, how)
    graph, params = nnx.split(block)
    if block.mixer.has_rows:

        def rows(params: Any, h: Array, lo: int) -> Array:
            block = nnx.merge(graph, params)
            mixed = block.mixer.rows(block.mixer_input(h), lo, window=window)
            return block.finish(h[:, lo:], mixed)

        return stream_backward(rows, chunks=how.chunks)(params, h)

    def finish(params: Any, both: Array, lo: int) -> Array:
        return nnx.merge(graph, params).finish(*jnp.split(both[:, lo:], 2, axis=-1))

    mixed = jax.checkpoint(lambda params, h: nnx.merge(graph, params).mix(h)[0])(params, h)
    both = jnp.concatenate([h, mixed], axis=-1)
    return stream_backward(finish, chunks=how.chunks)(params, both)


def _recurrent(block: Any, h: Array, how: Streaming) -> Array:
    """Run piece after piece; each keeps its input and the state before it."""
    batch, time, width = h.shape

    @jax.checkpoint
    def piece(cache: Any, h: Array) -> tuple[Any, Array]:
        mixed, cache = block.mix(h, cache=cache)
        return cache, block.finish(h, mixed)

    pieces = jnp.moveaxis(h.reshape(batch, how.chunks, time // how.chunks, width), 1, 0)
    _, out = jax.lax.scan(piece, block.mixer.empty_cache(how.config, batch, time), pieces)
    return jnp.moveaxis(out, 0, 1).reshape(h.shape)
