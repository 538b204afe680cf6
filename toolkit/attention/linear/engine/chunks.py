"""Sequences cut into chunks of tokens: padding, rows of heads, and where documents begin.

The chunked engine works on [chunks, rows, C, ...], where a row is one head of one
sequence and C is the number of tokens in a chunk; the mixers take [batch, time, heads, ...].
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

from toolkit.attention.linear.engine.decays import Documents


def cut(
    x: Shaped[Array, "batch time heads *rest"], size: int, padding: str = "constant"
) -> Shaped[Array, "chunks rows C *rest"]:
    """Cut the time into chunks of `size` tokens, padded at the end (with zeros, or "edge")."""
    batch, time = x.shape[:2]
    count = -(-time // size)
    widths = [(0, 0), (0, count * size - time)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, widths, mode=padding).reshape(batch, count, size, *x.shape[2:])
    x = jnp.moveaxis(x, (1, 3), (0, 2))
    return x.reshape(count, -1, size, *x.shape[4:])


def join(
    x: Float[Array, "chunks rows C value"], batch: int, time: int
) -> Float[Array, "batch time heads value"]:
    """Undo `cut`: back to whole sequences, without the padding."""
    count, rows, size, value = x.shape
    x = jnp.moveaxis(x.reshape(count, batch, rows // batch, size, value), (0, 2), (1, 3))
    return x.reshape(batch, count * size, rows // batch, value)[:, :time]


def cut_documents(starts: Bool[Array, "batch time"], heads: int, size: int) -> Documents:
    """Number documents, which begin at `starts`, for every token and every chunk's state."""
    numbers = jnp.cumsum(starts, axis=1)[..., None]
    # Padding belongs to the last document, so that its state survives to the end.
    token = cut(jnp.broadcast_to(numbers, (*starts.shape, heads)), size, "edge")
    return Documents(token, jnp.concatenate([token[:1, :, 0], token[:-1, :, -1]]))
