"""Softmax attention as its equation, to be read."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from toolkit._checks import checked
from toolkit.attention._attend import bounded, positions_in_documents, run_numbers
from toolkit.attention._caches import write_token
from toolkit.attention._shapes import OtherKeys, OtherValues, Queries, SegmentIds
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.softmax.cache import KVCache
from toolkit.attention.softmax.rounding import calibrated, floats, stored
from toolkit.attention.softmax.scores import FURTHEST, checked_key, kept, window_of


@checked
def softmax_attention_reference(
    q: Queries,
    k: OtherKeys,
    v: OtherValues,
    *,
    bias: Float[Array, "#batch #heads #time #key_time"] | None = None,
    mask: Bool[Array, "#batch #heads #time #key_time"] | None = None,
    scale: float | Float[Array, ""] | None = None,
    is_causal: bool = True,
    query_offset: int | Int[Array, "*batch"] | None = None,
    query_seq_lengths: Int[Array, "batch"] | None = None,
    key_value_seq_lengths: Int[Array, "batch"] | None = None,
    sliding_window: int | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Float[Array, "heads"] | None = None,
    relative_bias: Float[Array, "batch time heads distances"] | None = None,
    sinks: Float[Array, "heads"] | Float[Array, "batch time heads"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    segment_ids: SegmentIds | None = None,
    initial_state: KVCache | None = None,
    return_residual: bool = False,
) -> tuple[Any, ...]:
    """The equation of `softmax_attention`, to be read; the oracle of the fast forms.

        o_i = sum_j softmax_j(s_ij) v_j
        s_ij = c tanh(scale q_i . k_j / c) + bias_ij + relative_bias_i,i-j - slope |i - j|

    Arguments as `softmax_attention`. It runs eagerly where a cache is given, because it reads the
    cache's length.
    """
    left, right = window_of(is_causal, sliding_window, local_window_size)
    scale = float(q.shape[3] ** -0.5) if scale is None else scale
    dropout_key = checked_key(dropout_rate, dropout_key)
    if segment_ids is not None:
        segment_ids = run_numbers(segment_ids)
    cache, past, documents = None, query_offset, segment_ids
    if initial_state is not None:
        k, v, past, segment_ids, documents, cache = _continued(initial_state, k, v, segment_ids)
    group, dtype = q.shape[2] // k.shape[2], q.dtype
    q, k, v = (x.astype(accumulator(dtype)) for x in (q, k, v))
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    time, keys = q.shape[1], k.shape[1]

    query = jnp.arange(time, dtype=jnp.int32).reshape(1, 1, -1, 1)
    key = jnp.arange(keys, dtype=jnp.int32).reshape(1, 1, 1, -1)
    place = (
        query if past is None else query + bounded(past, -FURTHEST, FURTHEST).reshape(-1, 1, 1, 1)
    )
    visible = jnp.ones((1, 1, time, keys), bool) if mask is None else mask
    if left is not None:
        visible = visible & (key >= place - left)
    if right is not None:
        visible = visible & (key <= place + right)
    if key_value_seq_lengths is not None:
        visible = visible & (key < bounded(key_value_seq_lengths, 0, keys).reshape(-1, 1, 1, 1))
    if segment_ids is not None and documents is not None:
        visible = visible & (segment_ids[:, :, None] == documents[:, None, :])[:, None]

    scores = scale * jnp.einsum("bihk,bjhk->bhij", q, k)
    if logits_soft_cap is not None:
        scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
    if bias is not None:
        scores = scores + jnp.where(bias == -jnp.inf, 0, bias).astype(scores.dtype)
        visible = visible & (bias != -jnp.inf)
    if relative_bias is not None:
        for age in range(relative_bias.shape[-1]):
            at = relative_bias[..., age].swapaxes(1, 2)[..., None]
            scores = scores + jnp.where(place - key == age, at, 0).astype(scores.dtype)
    if alibi_slopes is not None:
        slopes = alibi_slopes.astype(scores.dtype).reshape(1, -1, 1, 1)
        scores = scores - slopes * abs(place - key).astype(scores.dtype)
    # where= keeps the softmax of a row that sees nothing at 0.
    p = jax.nn.softmax(scores, axis=-1, where=visible)
    is_empty = ~visible.any(axis=-1, keepdims=True)
    residual = jax.nn.logsumexp(scores, axis=-1, where=visible | is_empty, keepdims=True)
    if sinks is not None:  # one more key in the sum of exponentials
        sinks = sinks if sinks.ndim == 3 else sinks.reshape(1, 1, -1)
        sinks = sinks.astype(scores.dtype).swapaxes(1, 2)[..., None]
        p = p * jax.nn.sigmoid(residual - sinks)
        residual = jnp.where(is_empty, sinks, jnp.logaddexp(residual, sinks))
    else:
        residual = jnp.where(is_empty, -jnp.inf, residual)
    if query_seq_lengths is not None:
        counts = query < bounded(query_seq_lengths, 0, time).reshape(-1, 1, 1, 1)
        p, residual = jnp.where(counts, p, 0), jnp.where(counts, residual, -jnp.inf)
    if dropout_key is not None:
        numbers = jnp.indices(scores.shape, dtype=jnp.int32, sparse=True)
        keep = kept(dropout_key, dropout_rate, *numbers)
        p = jnp.where(keep, p / (1 - dropout_rate), 0)
    out = jnp.einsum("bhij,bjhv->bihv", p, v).astype(dtype)
    return (out, cache, residual[..., 0].swapaxes(1, 2)) if return_residual else (out, cache)


def _continued(cache, k, v, segment_ids):
    """Keys and values after those of a cache, documents 1, 2, ... of both, and the cache after."""
    # Token p of a row's document is in slot p, or p % capacity in a ring that forgets the
    # oldest. Rows that hold fewer tokens than others begin with some of no document.
    cache = calibrated(cache, k.transpose(0, 2, 3, 1))
    after, capacity, length = cache, cache.capacity, cache.length
    past = min(int(length.max()), capacity)
    old = length[:, None] - past + jnp.arange(past, dtype=jnp.int32)[None]
    slots = (old % capacity)[:, None, None]
    if segment_ids is None:
        segment_ids = jnp.ones(k.shape[:2], jnp.int32)
    documents = jnp.concatenate([jnp.where(old < 0, 0, 1), segment_ids], axis=1)
    for t, place in enumerate(positions_in_documents(segment_ids, length).T):
        new = stored(after, k[:, t], v[:, t])
        after = write_token(replace(after, length=place), place % capacity, axis=-1, **new)
    before = (
        jnp.take_along_axis(x, slots, axis=-1).transpose(0, 3, 1, 2) for x in floats(cache, k.dtype)
    )
    k, v = (jnp.concatenate(pair, axis=1) for pair in zip(before, (k, v), strict=True))
    return k, v, past, segment_ids, documents, after
