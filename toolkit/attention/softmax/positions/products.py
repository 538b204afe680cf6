r"""Softmax attention whose scores pass through the reflections of all tokens in between.

    s_ij = scale k_j^T H_(j+1) ... H_i q_i,    H_n = I - beta_n w_n w_n^T

A query meets the keys block by block, from the last to the first, and takes the reflections of each
block with it. With rows w_n, k_n in W, K, and T = (I + diag(beta) tril(W W^T, -1))^-1 diag(beta),
the products of reflections from j + 1 to i of one block follow from the parts of T between them:

    scores of a block    q K^T - (q W^T) T tril(W K^T, -1)
    query before it      q - (q W^T) T W

where q W^T is 0 for tokens that the query does not see, those after its own place.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from toolkit.attention._attend import Mask, masked_softmax
from toolkit.attention._shapes import known
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.linear.engine.inverse import unit_lower_inverse
from toolkit.attention.softmax.positions.fading import until_document_ends
from toolkit.attention.softmax.rows import ROWS, in_stages, join_rows, split_rows

BLOCK = 32  # keys; the inverse of a block is as wide


class Path(NamedTuple):
    """Keys and values, and the reflection that every token adds to the path."""

    k: Float[Array, "batch key_value_heads key key_time"]
    v: Float[Array, "batch key_value_heads value key_time"]
    w: Float[Array, "batch key_value_heads key key_time"]
    beta: Float[Array, "batch key_value_heads key_time"]


class Block(NamedTuple):
    """One block of tokens, and what its reflections do; blocks lead where there are several."""

    k: Float[Array, "batch key_value_heads block key"]
    w: Float[Array, "batch key_value_heads block key"]
    change: Float[Array, "batch key_value_heads block key_and_block"]  # T W, T tril(W K^T, -1)
    index: Int[Array, "block"]
    documents: Int[Array, "batch block"] | None


def attend_along_path(
    q: Float[Array, "batch query_time heads key"], path: Path, mask: Mask, *, scale: float
) -> Float[Array, "batch query_time heads value"]:
    """Outputs of causal queries, some at a time; what is not finite spoils its document on."""
    batch, time, heads, size = q.shape
    groups, keys = path.beta.shape[1:]
    precise = accumulator(q.dtype)
    start, first, stop = (x.reshape(-1, 1) for x in mask.places(keys))
    index = jnp.arange(keys, dtype=jnp.int32)[None]
    exists = ((index >= first) & (index < stop))[:, None]
    is_wrong = exists & ~_is_finite(path)
    spoilt = until_document_ends(is_wrong, mask.documents)
    path = Path(*(jnp.where(jnp.isfinite(x), x, 0).astype(precise) for x in path))
    blocks = _blocks(path, mask)
    v = jnp.pad(path.v, ((0, 0), (0, 0), (0, 0), (0, blocks.index.size - keys)))

    rows = min(known(ROWS), known(time))

    @partial(jax.checkpoint, prevent_cse=False)
    def chunk(q, documents, at, blocks, v):
        is_sound = jnp.isfinite(q).all(axis=-1)
        q = jnp.where(jnp.isfinite(q), q, 0).astype(precise)
        # [batch, key heads, queries of the group, key]
        q = jnp.moveaxis(q.reshape(batch, rows, groups, -1, size), 1, 3)

        def meet(q, block):
            place = at[:, :, None]
            visible = mask.sees(place, block.index[None, None], first[..., None], stop[..., None])
            if documents is not None:
                visible &= documents[:, :, None] == block.documents[:, None, :]
            visible = visible[:, None, None]
            onto = jnp.einsum("bghrk,bgnk->bghrn", q, block.w)
            change = jnp.einsum("bghrn,bgnm->bghrm", jnp.where(visible, onto, 0), block.change)
            scores = jnp.einsum("bghrk,bgnk->bghrn", q, block.k) - change[..., size:]
            return q - change[..., :size], (scores, jnp.broadcast_to(visible, scores.shape))

        _, (scores, visible) = lax.scan(meet, q, blocks, reverse=True)
        scores, visible = (
            jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1) for x in (scores, visible)
        )
        softmax = masked_softmax(scale * scores, visible)
        out = jnp.einsum(
            "bghrn,bgvn->brghv", softmax.exponentials / softmax.total.astype(precise), v
        )
        out = out.reshape(batch, rows, heads, -1)
        return jnp.where(is_sound[..., None], out, jnp.nan)

    def run(of_chunks, seen):
        count = -(-seen // BLOCK)
        own = jax.tree.map(lambda x: x[:count], blocks), v[..., : count * BLOCK]
        return lax.map(lambda x: chunk(*x, *own), of_chunks)

    place = start + jnp.arange(time, dtype=jnp.int32)[None]
    place = jnp.broadcast_to(place, (batch, time))
    documents = mask.documents and split_rows(mask.documents.query, rows)
    with jax.default_matmul_precision("highest"):
        of_chunks = split_rows(q, rows), documents, split_rows(place, rows)
        out = in_stages(run, of_chunks, mask, rows=rows, keys=keys)
    out = join_rows(out, time)
    # A query past the last key has no room; its cache says so.
    at = partial(jnp.take, axis=-1, mode="clip")
    is_spoilt = jax.vmap(at)(spoilt, place)
    is_spoilt = jnp.repeat(is_spoilt, heads // groups, axis=1)
    return jnp.where(is_spoilt.swapaxes(1, 2)[..., None], jnp.nan, out).astype(q.dtype)


def _is_finite(path: Path) -> Array:
    """Whether all that a token brings is finite, and its strength in [0, 2]."""
    vectors = [jnp.isfinite(x).all(axis=2) for x in (path.k, path.v, path.w)]
    return vectors[0] & vectors[1] & vectors[2] & (path.beta >= 0) & (path.beta <= 2)


def _blocks(path: Path, mask: Mask) -> Block:
    """All keys in blocks, the last filled up with tokens that reflect nothing."""
    keys = path.beta.shape[-1]
    count = -(-keys // BLOCK)

    def split(x):
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count * BLOCK - keys)])
        return jnp.moveaxis(x.reshape(*x.shape[:-1], count, BLOCK), -2, 0)

    k, w = split(path.k).swapaxes(-1, -2), split(path.w).swapaxes(-1, -2)
    beta = split(path.beta)[..., None]
    with jax.default_matmul_precision("highest"):
        t = unit_lower_inverse(beta * jnp.einsum("cbgnk,cbgmk->cbgnm", w, w)) * beta.swapaxes(
            -1, -2
        )
        onto = jnp.tril(jnp.einsum("cbgnk,cbgmk->cbgnm", w, k), -1)
        change = t @ jnp.concatenate([w, onto], axis=-1)
    index = jnp.arange(count * BLOCK, dtype=jnp.int32).reshape(count, BLOCK)
    return Block(k, w, change, index, mask.documents and split(mask.documents.key))
