"""Exact softmax attention over a selection, and how it is spread over queries, heads, sequences.

    o_t = sum_{i in I_t} p_ti v_i      p_ti = exp(s_ti - lse_t)      lse_t = log sum_{I_t} exp(s_ti)

One function serves two forms. Masked: all queries share the keys and a mask says which of them
each attends to; 2 S (K + V) FLOPs a query and head over S keys, at the speed of a matrix product.
Gathered: every query has its own copy of the k keys it selected; 2 k (K + V) FLOPs, but each copy
is written and read again, three times its size in memory traffic, shared by the query heads of one
key head only. So masked wins until S is many times k. `prefers_gather` counts that.

Both run over chunks of queries, recomputed in the backward pass: memory is linear in time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from toolkit.attention._precision import accumulator
from toolkit.attention._visibility import Extent, Segments
from toolkit.attention.softmax.blockwise import blockwise_attention
from toolkit.attention.softmax.dense import DENSE_UP_TO, dense_attention

QUERIES = 64  # in a chunk

# FLOPs of a matrix product in the time one byte crosses the memory bus.
FLOPS_PER_BYTE = {"cpu": 5, "gpu": 200, "tpu": 200}


class Attended(NamedTuple):
    """What attention over a selection returns, in the precision of sums.

    Attributes:
        out: outputs [queries, group, value]; 0 for a query that attends to nothing.
        weights: probabilities [queries, group, keys], 0 outside the selection.
        lse: logarithm of the sum of exponentials [queries, group]. Attention over two disjoint
            selections is their outputs weighed by softmax of the two.
    """

    out: Float[Array, "queries group value"]
    weights: Float[Array, "queries group keys"]
    lse: Float[Array, "queries group"]


def attend(
    q: Float[Array, "queries group key"],
    k: Float[Array, "*own keys key"],
    v: Float[Array, "*own keys value"],
    mask: Bool[Array, "queries keys"],
    *,
    scale: float,
) -> Attended:
    """Softmax attention of queries to the keys their mask selects, for the heads of one group.

    Args:
        q: queries.
        k: keys, the same for all queries, or [queries, keys, key] gathered for each.
        v: values, likewise.
        mask: which keys each query attends to.
        scale: factor of the scores.

    Returns:
        An `Attended`. A number that is not finite shows in the queries that attend to it, and
        nowhere else, neither in outputs nor in gradients.

    Cost:
        2 queries group keys (key + value) FLOPs.
    """
    precise = accumulator(q.dtype)
    q_is_finite, k_is_finite, v_is_finite = (jnp.isfinite(x) for x in (q, k, v))
    is_finite = k_is_finite.all(axis=-1) & v_is_finite.all(axis=-1)
    is_finite = is_finite if is_finite.ndim == 2 else is_finite[None]
    is_sound = (is_finite | ~mask).all(axis=-1)[:, None] & q_is_finite.all(axis=-1)
    q, k, v = (
        jnp.where(q_is_finite, q, 0),
        jnp.where(k_is_finite, k, 0),
        jnp.where(v_is_finite, v, 0),
    )
    keys = "qsk" if k.ndim == 3 else "sk"
    values = "qsv" if v.ndim == 3 else "sv"
    scores = scale * jnp.einsum(f"qgk,{keys}->qgs", q, k, preferred_element_type=precise)
    scores = jnp.where(mask[:, None], scores, -jnp.inf)
    # The maximum of a row without keys is the lowest *finite* number: -inf + inf is NaN.
    lowest = float(jnp.finfo(precise).min)
    largest = lax.stop_gradient(scores.max(axis=-1, keepdims=True, initial=lowest))
    weights = jnp.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    weights = weights / total
    out = jnp.einsum(
        f"qgs,{values}->qgv", weights.astype(v.dtype), v, preferred_element_type=precise
    )
    lse = jnp.where(is_empty, -jnp.inf, largest + jnp.log(total))[..., 0]
    return Attended(out + jnp.where(is_sound, 0, jnp.nan)[..., None], weights, lse)


def attend_to_past(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch key_value_heads keys key"],
    v: Float[Array, "batch key_value_heads keys value"],
    start: Int[Array, ""] | int,
    documents: Segments | None,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Float[Array, "batch time heads value"]:
    """Softmax attention to all earlier rows or the last ones, in the forms of `softmax.py`.

    Args:
        q: queries, the first at row `start`.
        k: keys, a row a token.
        v: values.
        start: tokens before the first query.
        documents: numbers of those of queries and keys, or None for one.
        scale: factor of the scores.
        sliding_window: tokens seen, itself included; None for all.

    Returns:
        Outputs in q's dtype.

    Cost:
        See `softmax_attention`.
    """
    attention = dense_attention if k.shape[2] <= DENSE_UP_TO else blockwise_attention
    return attention(
        q,
        k.swapaxes(2, 3),
        v.swapaxes(2, 3),
        Extent(start, 0, start + q.shape[1]),
        documents,
        scale=scale,
        is_causal=True,
        sliding_window=sliding_window,
    )


def prefers_gather(keys: int, selected: int, group: int, element_bytes: int) -> bool:
    """Whether copying the selected keys costs less than a masked product with all of them.

    Args:
        keys: how many there are.
        selected: how many a query attends to.
        group: query heads that share a copy.
        element_bytes: of one number.

    Returns:
        True if 3 selected element_bytes FLOPS_PER_BYTE / group + 2 selected < 2 keys, both sides
        in FLOPs a channel of a query head.

    Cost:
        Arithmetic.
    """
    flops_per_byte = FLOPS_PER_BYTE.get(jax.default_backend(), 200)
    copies = 3 * selected * element_bytes * flops_per_byte / group
    return copies + 2 * selected < 2 * keys


def each(function: Callable[..., Any], *arrays: Any, at_once: bool = False) -> Any:
    """Apply a function to every entry of the leading axis (sequences, heads).

    One after another on a CPU, where one product of two matrices is fast and a batch of them is
    not; all at once on an accelerator, which needs the parallel work, and in decoding, where a
    loop would copy every entry's part of the cache.

    Args:
        function: of one entry's arrays.
        *arrays: trees of arrays with the axis.
        at_once: never one after another.

    Returns:
        What the function returned, stacked.
    """
    if jax.default_backend() == "cpu" and not at_once:
        return lax.map(lambda entry: function(*entry), arrays)
    return jax.vmap(function)(*arrays)


def over_queries(function: Callable[..., Any], *arrays: Any) -> Any:
    """Apply a function to chunks of `QUERIES` queries, recomputing each in the backward pass.

    Args:
        function: of one chunk's arrays [queries, ...]; its result keeps that axis.
        *arrays: trees of arrays [time, ...].

    Returns:
        The results, joined to [time, ...].

    Cost:
        The function's, once more when differentiated; memory of one chunk beside the results.
    """
    time = jax.tree.leaves(arrays)[0].shape[0]
    size = min(QUERIES, time)

    def split(array):
        widths = [(0, -time % size)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, widths).reshape(-1, size, *array.shape[1:])

    def join(chunks):
        return chunks.reshape(-1, *chunks.shape[2:])[:time]

    run = jax.checkpoint(lambda chunk: function(*chunk), prevent_cse=False)
    return jax.tree.map(join, lax.map(run, jax.tree.map(split, arrays)))
