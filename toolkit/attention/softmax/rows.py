"""Softmax attention by whole rows of the matrix of scores.

Some at a time, recomputed wherever they are needed, take memory linear in time and are
differentiated by JAX: what `execution/derivatives.py` calls the equation.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from toolkit.attention._attend import Mask, masked_softmax
from toolkit.attention._shapes import known
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.softmax.scores import Context, Inputs, Options, at_ages, capped, kept

ROWS = 128  # in a chunk
CHUNKS_PER_STAGE = 8  # at least
MOST_STAGES = 4


def attend_rows(
    options: Options, inputs: Inputs, context: Context, first: Int[Array, ""] | int = 0
) -> tuple[Float[Array, "batch query_time heads value"], Float[Array, "batch query_time heads"]]:
    """Output and log-sum-exp of consecutive queries, the first of which is number `first`.

    What has a query axis (q, biases, mask, documents) holds these queries only.
    """
    q, k, v, bias, slopes, nearer = inputs
    batch, time, heads, _ = q.shape
    key_heads, keys, precise = k.shape[1], k.shape[3], accumulator(q.dtype)
    group = heads // key_heads

    def by_group(x):  # [batch, heads, ...] with heads in groups, either of them perhaps 1
        return x[:, :, None] if x.shape[1] == 1 else x.reshape(-1, key_heads, group, *x.shape[2:])

    mask = context.mask
    start, *ends = (x.reshape(-1, 1, 1, 1, 1) for x in mask.places(keys))
    query, key = jnp.arange(time, dtype=jnp.int32), jnp.arange(keys, dtype=jnp.int32)
    position = start + first + query.reshape(1, 1, 1, time, 1)
    key_position = key.reshape(1, 1, 1, 1, keys)
    visible = mask.sees(position, key_position, *ends)
    if mask.documents is not None:
        same = mask.documents.query[:, :, None] == mask.documents.key[:, None, :]
        visible = visible & same[:, None, None]
    if mask.allowed is not None:
        visible = visible & by_group(mask.allowed)
    if bias is not None:
        visible = visible & by_group(bias != -jnp.inf)
    if nearer is not None:
        nearer = by_group(nearer.swapaxes(1, 2).astype(precise))
        nearer = at_ages(nearer, position - key_position, nearer.shape[-1])
        visible = visible & (nearer != -jnp.inf)

    # 0 * NaN is NaN, so products see finite numbers only; NaN returns to the rows that saw one.
    q_is_finite, k_is_finite, v_is_finite = (jnp.isfinite(x) for x in (q, k, v))
    is_finite = (k_is_finite.all(axis=2) & v_is_finite.all(axis=2))[:, :, None, None]
    is_sound = (is_finite | ~visible).all(axis=-1)
    is_sound = is_sound & by_group(q_is_finite.all(axis=-1).swapaxes(1, 2))
    q, k, v = (
        jnp.where(ok, x, 0)
        for ok, x in zip((q_is_finite, k_is_finite, v_is_finite), (q, k, v), strict=True)
    )
    q = by_group(q.swapaxes(1, 2))
    products = jnp.einsum("bngtk,bnks->bngts", q, k, preferred_element_type=precise)
    scores = capped(products, options)
    if bias is not None:
        scores = scores + by_group(bias.astype(precise))
    if nearer is not None:
        scores = scores + nearer
    if slopes is not None:
        distance = jnp.abs(position - key_position).astype(precise)
        scores = scores - slopes.astype(precise).reshape(1, key_heads, group, 1, 1) * distance
    exponentials, total, lse = masked_softmax(scores, visible)
    weights = exponentials / total
    if options.dropout_rate:
        entry, head, query, key = jnp.indices((batch, heads, time, keys), jnp.int32, sparse=True)
        numbers = entry, head, first + query, key
        keep = kept(context.dropout_key, options.dropout_rate, *numbers)
        weights = jnp.where(by_group(keep), weights / (1 - options.dropout_rate), 0)
    out = jnp.einsum(
        "bngts,bnvs->bngtv", weights.astype(v.dtype), v, preferred_element_type=precise
    )
    nan = jnp.where(is_sound, 0, jnp.nan).astype(precise)
    lse = (lse[..., 0] + nan).reshape(batch, heads, time).swapaxes(1, 2)
    out = (out + nan[..., None]).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, time, heads, -1).astype(q.dtype), lse


def split_rows(x: Array, rows: int, axis: int = 1) -> Array:
    """[..., time, ...] as [chunks, ..., rows, ...]; zeros fill the last chunk."""
    chunks, widths = -(-x.shape[axis] // rows), [(0, 0)] * x.ndim
    widths[axis] = (0, chunks * rows - x.shape[axis])
    x = jnp.pad(x, widths).reshape(*x.shape[:axis], chunks, rows, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def join_rows(x: Array, time: int) -> Array:
    """Undo `split_rows`: [chunks, batch, rows, ...] as [batch, time, ...]."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :time]


def in_stages(run: Callable[..., Array], chunks: Any, mask: Mask, *, rows: int, keys: int) -> Array:
    """Run causal chunks of queries in groups, each of which meets the keys up to its last query.

    Four groups compute 5/8 of the products of queries and keys, of which 1/2 are needed; one loop
    over all chunks would compute all, as it does where queries do not start at the first key, or
    are as many as a symbol. Each group is compiled by itself, so it has to be long.

    `run` is called with the chunks of a group, arrays [chunks, ...] of `rows` queries each, and the
    number of keys that they may see.
    """
    count = jax.tree.leaves(chunks)[0].shape[0]
    if mask.query_start is not None or not isinstance(count, int):
        return run(chunks, keys)
    stages = min(MOST_STAGES, max(1, count // CHUNKS_PER_STAGE))
    ends = [count * stage // stages for stage in range(stages + 1)]
    outs = []
    for start, end in itertools.pairwise(ends):
        group = jax.tree.map(itemgetter(slice(start, end)), chunks)
        outs.append(run(group, min(end * rows, keys)))
    return jnp.concatenate(outs)


def attend_chunks(options: Options, inputs: Inputs, context: Context) -> Any:
    """As `attend_rows`, for all queries in chunks, which every pass over them computes anew."""
    time = inputs.q.shape[1]
    if known(time) <= ROWS:
        return attend_rows(options, inputs, context)
    chunks = -(-time // ROWS)

    def split(x, axis):  # None where there is nothing, or the same for all
        return None if x is None or x.shape[axis] == 1 else split_rows(x, ROWS, axis)

    documents, allowed = context.mask.documents, context.mask.allowed
    of_chunks = (
        split(inputs.q, 1),
        split(inputs.bias, 2),
        split(allowed, 2),
        split(documents and documents.query, 1),
        split(inputs.relative_bias, 1),
    )

    @partial(jax.checkpoint, prevent_cse=False)
    def chunk(first, of_chunk, inputs, context):
        q, bias, allowed, query, nearer = of_chunk
        bias = inputs.bias if bias is None else bias
        inputs = inputs._replace(q=q, bias=bias, relative_bias=nearer)
        mask, documents = context.mask, context.mask.documents
        if allowed is not None:
            mask = replace(mask, allowed=allowed)
        if documents is not None:
            mask = replace(mask, documents=documents._replace(query=query))
        return attend_rows(options, inputs, context._replace(mask=mask), first)

    firsts = ROWS * jnp.arange(chunks, dtype=jnp.int32)
    run = lambda x: chunk(*x, inputs, context)  # noqa: E731
    return tuple(join_rows(x, time) for x in lax.map(run, (firsts, of_chunks)))
