"""What the references of attention to blocks have in common, as matrices [time, time].

A block goes by the index of its last token, and every other index stands for no block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from toolkit.attention._attend import run_numbers
from toolkit.attention._shapes import SegmentIds


class Places(NamedTuple):
    """Where queries and tokens stand, and what follows for every pair of them."""

    query: Int[Array, "1 time 1"]  # index of the query
    token: Int[Array, "1 1 time"]  # index of the token
    in_document: Int[Array, "batch time"]  # place of a token in its document
    own: Int[Array, "batch time 1"]  # index of the first token of the query's own block
    last: Int[Array, "batch 1 time"]  # index of the last token of the token's block
    past: Bool[Array, "batch time time"]  # whether the query may see the token
    # whether the token ends a block that is complete when the query comes
    seen: Bool[Array, "batch time time"]
    # whether that block also ends before the query's own begins
    earlier: Bool[Array, "batch time time"]


def places(segment_ids: SegmentIds | None, batch: int, time: int, block_size: int) -> Places:
    """Where the queries and tokens of a sequence stand; blocks begin anew in every document."""
    document = jnp.zeros((batch, time), jnp.int32)
    if segment_ids is not None:
        document = run_numbers(segment_ids)
    begins = jnp.diff(document, axis=1, prepend=document[:, :1]) > 0
    index = jnp.arange(time)[None]
    in_document = index - lax.cummax(jnp.where(begins, index, 0), axis=1)
    place = in_document % block_size
    query, token = index[..., None], index[:, None, :]
    own = query - place[..., None]
    last = jnp.minimum(token + block_size - 1 - place[:, None, :], time - 1)
    past = (token <= query) & (document[:, :, None] == document[:, None, :])
    seen = past & (place == block_size - 1)[:, None, :]
    return Places(query, token, in_document, own, last, past, seen, seen & (token < own))


def means(x: Float[Array, "batch time heads size"], block_size: int) -> Array:
    """Means of the last `block_size` tokens, of which only those at the ends of blocks count."""
    total = x
    for shift in range(1, block_size):
        total = total + jnp.roll(x, shift, axis=1)
    return total / block_size


def read_tokens(
    scores: Float[Array, "batch heads time time"], where: Places, blocks: int
) -> Bool[Array, "batch heads time time"]:
    """Tokens of the query's own block and of the best earlier ones, `blocks` in all."""
    earlier = where.earlier[:, None]
    # A stable sort of the negated scores puts the earlier of two equal blocks first.
    order = jnp.argsort(jnp.where(earlier, -scores, jnp.nan), axis=-1, stable=True)
    chosen = earlier & (jnp.argsort(order, axis=-1) < blocks - 1)
    last = jnp.broadcast_to(where.last[:, None], scores.shape)
    is_own = (where.token >= where.own)[:, None]
    return where.past[:, None] & (jnp.take_along_axis(chosen, last, axis=-1) | is_own)


def attend(q, k, v, mask, scale) -> tuple[Array, Array]:
    """Softmax attention to the tokens in the mask, and its weights [batch, heads, time, time]."""
    scores = scale * jnp.einsum("bthk,bshk->bhts", q, k)
    weights = jax.nn.softmax(scores, axis=-1, where=mask)
    return jnp.einsum("bhts,bshv->bthv", weights, v), weights
