"""DeepSeek sparse attention as its equation, to be read."""

from dataclasses import replace
from typing import Annotated

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from toolkit._checks import checked
from toolkit.attention._attend import Segments, packed, positions_in_documents
from toolkit.attention._caches import write_token
from toolkit.attention._shapes import HeadValues, Queries, SegmentIds, SharedKeys, SharedValues
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.sparse.train.cache import IndexedCache
from toolkit.attention.sparse.train.indexer import INDEX, SelectedTokens


@checked
def deepseek_sparse_attention_reference(
    q: Queries, k: SharedKeys, v: SharedValues,
    index_q: Annotated[Float[Array, "batch time index_heads index"], INDEX],
    index_k: Annotated[Float[Array, "batch time index"], INDEX],
    index_weights: Float[Array, "batch time index_heads"], *,
    scale: float | None = None, selected_tokens: SelectedTokens = 2048,
    segment_ids: SegmentIds | None = None, initial_state: IndexedCache | None = None,
) -> tuple[HeadValues, IndexedCache | None]:  # fmt: skip
    """The equation of `deepseek_sparse_attention`, to be read; the oracle of the fast forms.

        o_t = sum_{s in top-k of I_t} softmax_s(scale q_t . k_s) v_s

    Arguments as `deepseek_sparse_attention`. It runs eagerly where a cache is given, because it
    reads the cache's length.
    """
    scale = float(q.shape[3] ** -0.5 if scale is None else scale)
    cache, start, time = None, 0, q.shape[1]
    documents = packed(segment_ids)
    if initial_state is not None:
        # Token p of a row's document is in slot p. Rows that hold fewer tokens than others begin
        # with some of no document.
        cache, length = initial_state, initial_state.length
        start = int(length.max())
        old = length[:, None] - start + jnp.arange(start, dtype=jnp.int32)[None]
        if documents is None:
            documents = Segments(*(jnp.ones(q.shape[:2], jnp.int32),) * 2)
        of_old = jnp.where(old < 0, 0, 1)
        places = positions_in_documents(documents.query, length)
        documents = documents._replace(key=jnp.concatenate([of_old, documents.key], axis=1))
        for t, place in enumerate(places.T):
            rows = {"keys": k[:, t], "values": v[:, t], "index_keys": index_k[:, t]}
            cache = write_token(replace(cache, length=place), place, axis=-2, **rows)
        past, before = initial_state, old[:, None, :, None]
        k, v = (
            jnp.concatenate([jnp.take_along_axis(a, before, axis=2).swapaxes(1, 2), b], axis=1)
            for a, b in ((past.keys, k), (past.values_for(v), v))
        )
        index_old = jnp.take_along_axis(past.index_keys, old[..., None], axis=1)
        index_k = jnp.concatenate([index_old, index_k], axis=1)
    query, key = start + jnp.arange(time)[:, None], jnp.arange(k.shape[1])[None]
    visible = (key <= query)[None]
    if documents is not None:
        visible = visible & (documents.query[:, :, None] == documents.key[:, None, :])

    dtype = q.dtype
    q, k, v, index_q, index_k, index_weights = (
        x.astype(accumulator(dtype)) for x in (q, k, v, index_q, index_k, index_weights)
    )
    relu = jnp.maximum(jnp.einsum("bthi,bsi->bths", index_q, index_k), 0)
    index = lax.stop_gradient(jnp.einsum("bth,bths->bts", index_weights, relu))
    # A stable sort of the negated scores puts the earlier of two equal tokens first.
    order = jnp.argsort(jnp.where(visible, -index, jnp.inf), axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    selected = (visible & (rank < selected_tokens))[:, None]

    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scores = scale * jnp.einsum("bthk,bshk->bhts", q, k)
    p = jax.nn.softmax(scores, axis=-1, where=selected)
    return jnp.einsum("bhts,bshv->bthv", p, v).astype(dtype), cache
