"""Blocks of keys: where they lie, their means, and which ones a query reads.

Only complete blocks have a mean and can be selected; the block a query stands in is always read,
up to the query. So a sequence of S tokens has at most S / block_size blocks to score, however many
documents it packs, although each document counts its blocks from its own start.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from toolkit.attention._attend import Mask, attend
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.sparse.selection import selected_indices, top_mask


class Blocking(NamedTuple):
    """What is fixed at compile time; see `native_sparse_attention`."""

    scale: float
    block_size: int
    selected_blocks: int
    is_gathered: bool


class Own(NamedTuple):
    """Indices on the keys' axis that every query has of its own."""

    position: Int[Array, "queries"]  # of the query
    document: Int[Array, "queries"]  # of the first token of its document
    block: Int[Array, "queries"]  # of the first token of its own block, complete or not


class Blocks(NamedTuple):
    """Where the complete blocks of one sequence lie."""

    # index of the last token of every complete block, ascending; a place without a block has the
    # number of tokens
    last: Int[Array, "blocks"]
    # the first block that ends at a token or after it; None when no document but the first begins,
    # and token s belongs to block s // block_size
    of_token: Int[Array, "keys"] | None


def layout(
    documents: Int[Array, "keys"] | None, positions: Int[Array, "queries"], length, block_size
) -> tuple[Blocks, Own]:
    """Where blocks lie when they are counted from the start of every document."""
    index = jnp.arange(length, dtype=jnp.int32)
    if documents is None:
        return layout_from_zero(positions, length, block_size)
    begins = jnp.concatenate([jnp.ones(1, bool), documents[1:] != documents[:-1]])
    document = lax.cummax(jnp.where(begins, index, 0))
    place = (index - document) % block_size
    is_last = place == block_size - 1
    ends = jnp.sort(jnp.where(is_last, index, length))
    last = lax.slice_in_dim(ends, 0, length // block_size)
    of_token = jnp.cumsum(is_last, dtype=jnp.int32) - is_last.astype(jnp.int32)
    own = Own(positions, document[positions], (index - place)[positions])
    return Blocks(last, of_token), own


def layouts(mask: Mask, batch: int, time, length, block_size: int) -> tuple[Blocks, Own]:
    """Where the blocks of every sequence lie, and its queries."""
    first, start, _ = (jnp.broadcast_to(x, (batch,))[:, None] for x in mask.places(length))
    positions = first + jnp.arange(time, dtype=jnp.int32)[None]
    of_keys = None
    if mask.documents is not None:
        # Slots that a row does not fill lie in front, and belong to no document.
        index = jnp.arange(length, dtype=jnp.int32)[None]
        of_keys = jnp.where(index < start, 0, mask.documents.key)
    return jax.vmap(partial(layout, length=length, block_size=block_size))(of_keys, positions)


def layout_from_zero(
    positions: Int[Array, "queries"], length: int, block_size: int
) -> tuple[Blocks, Own]:
    """Where the blocks of a single document lie, which begins at 0."""
    last = block_size * jnp.arange(1, length // block_size + 1, dtype=jnp.int32) - 1
    own = Own(positions, jnp.zeros_like(positions), positions - positions % block_size)
    return Blocks(last, None), own


def block_means(rows: Float[Array, "keys size"], blocks: Blocks, block_size: int) -> Array:
    """Means of the complete blocks [blocks, size], in the precision of sums."""
    count = blocks.last.shape[0]
    if blocks.of_token is None:
        tokens = rows[: count * block_size].reshape(count, block_size, rows.shape[1])
    else:
        tokens = rows[blocks.last[:, None] - jnp.arange(block_size, dtype=jnp.int32)[None, ::-1]]
    return tokens.mean(axis=1, dtype=accumulator(rows.dtype))


def attend_to_blocks(
    blocking: Blocking, blocks: Blocks, k: Float[Array, "keys key"], v: Float[Array, "keys value"],
    mean_keys: Float[Array, "blocks key"], mean_values: Float[Array, "blocks value"],
    q: Float[Array, "queries group key"], own: Own,
) -> tuple[Array, Array]:  # fmt: skip
    """Attention of one key head's queries to block means, and to the blocks these select."""
    position, document, block = (index[:, None] for index in own)
    last = blocks.last[None]
    seen = (last <= position) & (last >= document)
    compressed = attend(
        q.astype(mean_keys.dtype), mean_keys, mean_values, seen, scale=blocking.scale
    )
    importance = lax.stop_gradient(compressed.weights.mean(axis=1))
    earlier = seen & (last < block)
    is_forced = (last == document + blocking.block_size - 1) | (last == block - 1)
    others = blocking.selected_blocks - 1  # beside the query's own
    chosen = top_mask(jnp.where(is_forced, 2, importance), earlier, others)
    return compressed.out, attend_to_chosen(blocking, blocks, k, v, chosen, q, own)


def attend_to_best_blocks(
    blocking: Blocking, blocks: Blocks, k: Float[Array, "keys key"], v: Float[Array, "keys value"],
    mean_keys: Float[Array, "blocks key"], q: Float[Array, "queries 1 key"], own: Own,
) -> Array:  # fmt: skip
    """Attention of one query head to the blocks whose mean keys agree with each query best."""
    _, document, block = (index[:, None] for index in own)
    last = blocks.last[None]
    scores = jnp.einsum("qk,bk->qb", q[:, 0].astype(mean_keys.dtype), mean_keys)
    others = blocking.selected_blocks - 1  # beside the query's own
    chosen = top_mask(scores, (last >= document) & (last < block), others)
    return attend_to_chosen(blocking, blocks, k, v, chosen, q, own)


def attend_to_chosen(blocking, blocks, k, v, chosen, q, own) -> Array:
    """Attention to the tokens of the chosen blocks and of the query's own."""
    if blocking.is_gathered:
        tokens, mask = _gathered_tokens(blocking, blocks, chosen, own)
        k, v = k[tokens], v[tokens]
    else:
        mask = _selected_tokens(blocking, blocks, chosen, own, k.shape[0])
    return attend(q, k, v, mask, scale=blocking.scale).out


def _selected_tokens(blocking, blocks, chosen, own, length) -> Bool[Array, "queries keys"]:
    """Which tokens lie in the chosen blocks or in the query's own, up to the query."""
    position, document, block = (index[:, None] for index in own)
    key = jnp.arange(length, dtype=jnp.int32)[None]
    if blocks.of_token is None:
        in_chosen = jnp.repeat(chosen, blocking.block_size, axis=1)
        in_chosen = jnp.pad(in_chosen, ((0, 0), (0, length - in_chosen.shape[1])))
    else:  # one more that nothing chooses, of the tokens after the last complete block
        in_chosen = jnp.pad(chosen, ((0, 0), (0, 1)))[:, blocks.of_token]
    return (key <= position) & (key >= document) & (in_chosen | (key >= block))


def _gathered_tokens(blocking, blocks, chosen, own) -> tuple[Array, Array]:
    """Indices of the tokens of the chosen blocks and of the query's own, and which are real."""
    inside = jnp.arange(blocking.block_size, dtype=jnp.int32)[None]
    tokens = own.block[:, None] + inside
    is_real = tokens <= own.position[:, None]
    if chosen.shape[1]:
        index, filled = selected_indices(chosen, min(blocking.selected_blocks - 1, chosen.shape[1]))
        others = (blocks.last[index] - blocking.block_size + 1)[:, :, None] + inside[None]
        filled = jnp.repeat(filled, blocking.block_size, axis=1)
        tokens = jnp.concatenate([others.reshape(others.shape[0], -1), tokens], axis=1)
        is_real = jnp.concatenate([filled, is_real], axis=1)
    return tokens, is_real
