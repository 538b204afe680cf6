"""Models whose backward pass goes through each block piece by piece of the text (StreamBP).

    with streaming(8, model.config):
        loss = ...

Every block then keeps what it read and nothing else; going back, it computes an eighth of its
tokens at a time again. Softmax layers read the keys before a piece and no others; recurrent layers
keep their state between pieces; layers that choose tokens, and latent attention, mix all tokens
again at once, and pieces begin after that.

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
    """Into how many pieces the text of each block is cut, and the sizes of the model."""

    chunks: int
    config: LayerConfig


_STREAMING: ContextVar[Streaming | None] = ContextVar("streaming", default=None)


@contextlib.contextmanager
def streaming(chunks: int, config: LayerConfig | None = None) -> Iterator[None]:
    """Blocks that are traced here go back through the text in so many pieces; 1: all at once."""
    token = _STREAMING.set(Streaming(chunks, config) if config and chunks > 1 else None)
    try:
        yield
    finally:
        _STREAMING.reset(token)


def is_streaming() -> bool:
    """Whether blocks that are called here should stream."""
    return _STREAMING.get() is not None


def stream_block(
    block: Any, h: Float[Array, "batch time width"], *, window: int | None
) -> Float[Array, "batch time width"]:
    """A block of a model on whole sequences, to be gone back through in pieces."""
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
            mixed = block.mixer.rows(block.mixer_norm(h), lo, window=window)
            return block.finish(h[:, lo:], mixed)

        return stream_backward(rows, chunks=how.chunks)(params, h)

    def finish(params: Any, both: Array, lo: int) -> Array:
        return nnx.merge(graph, params).finish(*jnp.split(both[:, lo:], 2, axis=-1))

    mixed = jax.checkpoint(lambda params, h: nnx.merge(graph, params).mix(h)[0])(params, h)
    both = jnp.concatenate([h, mixed], axis=-1)
    return stream_backward(finish, chunks=how.chunks)(params, both)


def _recurrent(block: Any, h: Array, how: Streaming) -> Array:
    """Piece after piece; what is kept of each is what it read, and the state before it."""
    batch, time, width = h.shape

    @jax.checkpoint
    def piece(cache: Any, h: Array) -> tuple[Any, Array]:
        mixed, cache = block.mix(h, cache=cache)
        return cache, block.finish(h, mixed)

    pieces = jnp.moveaxis(h.reshape(batch, how.chunks, time // how.chunks, width), 1, 0)
    _, out = jax.lax.scan(piece, block.mixer.empty_cache(how.config, batch, time), pieces)
    return jnp.moveaxis(out, 0, 1).reshape(h.shape)
