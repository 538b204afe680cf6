r"""The lightning indexer: cheap scores that say which tokens to attend to, and what teaches them.

    I_ts = sum_j w_tj ReLU(q^I_tj . k^I_s)

One key k^I per token serves all index heads j, and one selection serves all heads of attention. The
selection passes no gradient, so the indexer learns from a loss of its own: its softmax should be
the attention it stands in for,

    KL( p_t || softmax_s(I_ts) )        p_t = mean over heads of the attention weights

over all earlier tokens while it warms up (the model is frozen and attends to everything), and over
the selected ones after that. A plain score <q, k>, which may be negative, is the case of two heads:
ReLU(x) - ReLU(-x) = x.

Source: DeepSeek-V3.2 technical report (2025), section 2; without its Hadamard rotation, which does
not change the scores, and its FP8, which approximates them.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from toolkit._annotations import AtLeast, SameDtype
from toolkit._checks import checked
from toolkit.attention._attend import attend, fixed_scale, run_numbers
from toolkit.attention._shapes import Queries, SegmentIds, SharedKeys
from toolkit.attention.execution.compiled import compiled
from toolkit.attention.execution.precision import accumulator, half_precision, precise_einsum
from toolkit.attention.sparse.selection import top_mask
from toolkit.attention.sparse.train.spread import each, over_queries

INDEX = SameDtype("queries and keys of the index")
SelectedTokens = Annotated[int, AtLeast(1)]


@checked
def index_scores(
    index_q: Float[Array, "queries index_heads index"],
    index_k: Float[Array, "keys index"],
    index_weights: Float[Array, "queries index_heads"],
) -> Float[Array, "queries keys"]:
    """Scores of the lightning indexer, in the precision of sums.

        I_ts = sum_j w_tj ReLU(q_tj . k_s)

    Args:
        index_q: queries of the index [queries, index_heads, index].
        index_k: its keys [keys, index].
        index_weights: weights of its heads [queries, index_heads].

    Returns:
        Scores [queries, keys].

    Cost:
        2 queries keys index_heads (index + 1) FLOPs.

    Source: DeepSeek-V3.2 technical report, equation 1.

    Example:
        >>> index_scores(jnp.ones((1, 2, 4)), jnp.ones((3, 4)), jnp.ones((1, 2))).tolist()
        [[8.0, 8.0, 8.0]]
    """
    precise = accumulator(index_q.dtype)
    precision = half_precision(index_q.dtype)
    products = precise_einsum("qhi,si->qhs", index_q, index_k, precision=precision)
    return jnp.einsum("qh,qhs->qs", index_weights.astype(precise), jax.nn.relu(products))


def past(
    position: Int[Array, "queries"],
    document: Int[Array, "queries"] | None,
    keys: int,
    key_documents: Int[Array, "keys"] | None,
) -> Bool[Array, "queries keys"]:
    """Which keys are not later than each query, and in its document."""
    visible = jnp.arange(keys, dtype=jnp.int32)[None] <= position[:, None]
    if document is None or key_documents is None:
        return visible
    return visible & (document[:, None] == key_documents[None])


@checked
@compiled
def indexer_loss(
    q: Queries, k: SharedKeys,
    index_q: Annotated[Float[Array, "batch time index_heads index"], INDEX],
    index_k: Annotated[Float[Array, "batch time index"], INDEX],
    index_weights: Float[Array, "batch time index_heads"], *,
    scale: float | None = None, selected_tokens: SelectedTokens | None = None,
    segment_ids: SegmentIds | None = None,
) -> Float[Array, "batch time"]:  # fmt: skip
    """Divergence of the indexer from the attention it stands in for, query by query.

        loss_t = KL( p_t || softmax_{s in S_t}(I_ts) )     p_t = mean_h softmax_{s in S_t}(q_th k_s)

    Gradients go to the index inputs alone; q and k are the target and are taken as constants.

    Args:
        q: queries of the attention.
        k: its keys.
        index_q: queries of the indexer.
        index_k: its keys.
        index_weights: weights of its heads.
        scale: factor of the attention's scores; None for key ** -0.5.
        selected_tokens: None for the warm-up, S_t being all earlier tokens; or how many the
            sparse attention selects, S_t being those.
        segment_ids: document of every token; S_t stays in the query's own.

    Returns:
        The divergence in nats, at least float32; 0 for the first token of a document.

    Cost:
        2 batch time^2 (heads key + index_heads index) FLOPs, three times that with the gradient;
        memory linear in time.

    Source: DeepSeek-V3.2 technical report (2025), equations 3 and 4.

    Example:
        >>> q = k = index_q = jnp.ones((1, 3, 2, 4))
        >>> index_k, index_weights = jnp.ones((1, 3, 4)), jnp.ones((1, 3, 2))
        >>> indexer_loss(q, k, index_q, index_k, index_weights).shape
        (1, 3)
    """
    batch, time, heads, key = q.shape
    groups = k.shape[2]
    q, scale = fixed_scale(q, scale)
    documents = None if segment_ids is None else run_numbers(segment_ids)
    q, k = lax.stop_gradient(q), lax.stop_gradient(k.swapaxes(1, 2))
    q = q.reshape(batch, time, groups, heads // groups, key)

    def sequence(q, k, index_q, index_k, index_weights, documents):
        def chunk(q, index_q, index_weights, position, document):
            mask = past(position, document, time, documents)
            scores = index_scores(index_q, index_k, index_weights)
            if selected_tokens is not None:
                mask = top_mask(scores, mask, selected_tokens)

            def head(q, k):
                return attend(q, k, k, mask, scale=scale).weights.mean(axis=1)

            target = lax.stop_gradient(each(head, q.swapaxes(0, 1), k).mean(axis=0))
            log_index = jax.nn.log_softmax(scores, axis=-1, where=mask)
            is_attended = mask & (target > 0)
            log_target = jnp.log(jnp.where(is_attended, target, 1))
            difference = log_target - jnp.where(is_attended, log_index, 0)
            return jnp.where(is_attended, target * difference, 0).sum(axis=-1)

        positions = jnp.arange(time, dtype=jnp.int32)
        return over_queries(chunk, q, index_q, index_weights, positions, documents)

    return each(sequence, q, k, index_q, index_k, index_weights, documents)
