r"""Softmax attention whose tokens fade: the sums of log-gates that are added to the scores.

    D_ts = g_(s+1) + ... + g_t

The difference of two cumulative sums of g would lose the digits of D in a long sequence, and would
be NaN after a gate of -inf. Here D is only ever a sum of numbers that are not positive: gates
between the key and the first query of a chunk of queries, and gates within that chunk.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from toolkit.attention._attend import Mask, Segments
from toolkit.attention._shapes import known
from toolkit.attention.softmax.rows import attend_rows, in_stages, join_rows, split_rows
from toolkit.attention.softmax.scores import Context, Inputs, Options


def attend_fading(
    inputs: Inputs, g: Float[Array, "batch heads key_time"], mask: Mask, *,
    scale: float, rows: int,
) -> Float[Array, "batch query_time heads value"]:  # fmt: skip
    """Outputs of causal queries, `rows` at a time; a gate that is NaN spoils its document on."""
    q, k, v, *_ = inputs
    segments = mask.documents
    time, keys = q.shape[1], k.shape[-1]
    rows = min(known(rows), known(time))
    start, first, stop = (x.reshape(-1, 1) for x in mask.places(keys))
    index = jnp.arange(keys, dtype=jnp.int32)[None]
    exists = ((index >= first) & (index < stop))[:, None]
    is_wrong = exists & jnp.isnan(g)
    g = jnp.where(exists & ~jnp.isnan(g), g, 0)
    reach = until_document_ends(is_wrong, segments)
    # A chunk may go on past the last key.
    g, reach = (jnp.pad(x, ((0, 0), (0, 0), (0, rows))) for x in (g, reach))

    @partial(jax.checkpoint, prevent_cse=False)
    def chunk(first, q, documents, k, v, g):
        seen = k.shape[-1]
        own = replace(mask, documents=segments and Segments(documents, segments.key[:, :seen]))
        at = jnp.broadcast_to(start[:, 0] + first, q.shape[:1])
        bias = jax.vmap(partial(_decays, rows))(g, at)[..., :seen]
        out, _ = attend_rows(Options(scale), Inputs(q, k, v, bias), Context(own), first)
        spoilt = jax.vmap(lambda x, at: lax.dynamic_slice_in_dim(x, at, rows, axis=-1))(reach, at)
        return jnp.where(spoilt.swapaxes(1, 2)[..., None], jnp.nan, out)

    firsts = rows * jnp.arange(-(-time // rows), dtype=jnp.int32)
    of_chunks = firsts, split_rows(q, rows), segments and split_rows(segments.query, rows)

    def run(of_chunks, seen):
        own = k[..., :seen], v[..., :seen], g[..., : seen + rows]
        return lax.map(lambda x: chunk(*x, *own), of_chunks)

    return join_rows(in_stages(run, of_chunks, mask, rows=rows, keys=keys), time)


def _decays(rows: int, g: Array, at: Array) -> Float[Array, "heads rows keys"]:
    """D of `rows` consecutive queries, the first of which is key number `at`, to every key."""
    own = lax.dynamic_slice_in_dim(g, at, rows, axis=-1)
    number = jnp.arange(rows, dtype=jnp.int32)
    # Gates s + 1 to t of the chunk, for its keys s; and all of its gates up to t.
    later = jnp.where((number[None, :] > number[:, None])[None], own[:, None, :], 0)
    inside = jnp.cumsum(later, axis=-1).swapaxes(1, 2)
    before = jnp.where(jnp.arange(g.shape[-1], dtype=jnp.int32)[None] < at, g, 0)
    decays = jnp.cumsum(own, axis=-1)[..., None] + sum_of_later(before)[:, None, :]
    return lax.dynamic_update_slice(decays, inside, (jnp.zeros_like(at), jnp.zeros_like(at), at))


def sum_of_later(g: Array) -> Array:
    """Of every number, the sum of those after it."""
    later = jnp.pad(g[..., 1:], [(0, 0)] * (g.ndim - 1) + [(0, 1)])
    return lax.cumsum(later, axis=g.ndim - 1, reverse=True)


def until_document_ends(is_wrong: Array, segments: Segments | None) -> Array:
    """From every wrong gate to the end of its document."""
    index = jnp.arange(is_wrong.shape[-1], dtype=jnp.int32)
    last = lax.cummax(jnp.where(is_wrong, index, -1), axis=2)
    if segments is None:
        return last >= 0
    is_start = jnp.diff(segments.key, axis=1, prepend=segments.key[:, :1]) != 0
    return last >= lax.cummax(jnp.where(is_start, index, 0), axis=1)[:, None]
