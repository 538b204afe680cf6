"""Gated DeltaNet under the name and with the arguments that other code bases call it by.

A layer that was written for MaxText's `jax_chunk_gated_delta_rule` runs on ours when its import is
changed, and sees packed documents apart once it passes their numbers on.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from toolkit._checks import checked
from toolkit.attention._shapes import SegmentIds, State
from toolkit.attention.linear.delta.gated_delta_net import gated_delta_net
from toolkit.attention.linear.gates import unit_length


@checked
def chunk_gated_delta_rule(
    query: Float[Array, "batch time heads key"], key: Float[Array, "batch time heads key"],
    value: Float[Array, "batch time value_heads value"], g: Float[Array, "batch time value_heads"],
    beta: Float[Array, "batch time value_heads"], chunk_size: int = 64,
    initial_state: State | None = None, use_qk_norm_in_gdn: bool = False,
    compute_dtype: Any = jnp.bfloat16, *,
    segment_ids: SegmentIds | None = None,
) -> tuple[Float[Array, "batch time value_heads value"], State | None]:  # fmt: skip
    r"""`gated_delta_net` in place of MaxText's `jax_chunk_gated_delta_rule`, argument by argument.

        S_t = e^(g_t) S_(t-1) + beta_t k_t (v_t - e^(g_t) S_(t-1)^T k_t)^T
        o_t = key^(-1/2) S_t^T q_t

    Levanter's function of this name takes arrays with named axes: pass the arrays of
    `x.rearrange(("batch", "position", "heads", ...))`, and name the axes of the output again. It
    normalises queries and keys unless it is told otherwise; this one does where it is told to.

    Args:
        query: queries [batch, time, heads, key].
        key: keys [batch, time, heads, key].
        value: values [batch, time, value_heads, value]. Heads of queries and keys need not be
            repeated: each may serve a group of consecutive value heads.
        g: log-decay [batch, time, value_heads], <= 0.
        beta: writing strength [batch, time, value_heads].
        chunk_size: accepted and not used, since the result does not depend on it.
        initial_state: [batch, value_heads, key, value] before the first token; None for zeros.
        use_qk_norm_in_gdn: bring queries and keys to unit length first.
        compute_dtype: of queries, keys, values and beta in the products.
        segment_ids: document of each token [batch, time]; the state is cleared wherever it changes.
            MaxText has no such argument: there a document reads the state of the one before it.

    Returns:
        The output [batch, time, value_heads, value] in the dtype of query, and the final state
        [batch, value_heads, key, value]; None in its place if there was no initial one.

    Cost:
        As `gated_delta_net`.

    Source: MaxText, `models/qwen3.py` (the layer of Qwen3-Next).

    Example:
        >>> q = k = v = jnp.full((1, 3, 2, 4), 0.5)
        >>> g, beta = -jnp.ones((1, 3, 2)), jnp.ones((1, 3, 2))
        >>> out, state = chunk_gated_delta_rule(q, k, v, g, beta, compute_dtype=jnp.float32)
        >>> out.shape, state
        ((1, 3, 2, 4), None)
    """
    dtype = query.dtype
    if use_qk_norm_in_gdn:
        query, key = unit_length(query), unit_length(key)
    query, key, value, beta = (x.astype(compute_dtype) for x in (query, key, value, beta))
    out, state = gated_delta_net(
        query, key, value, g, beta, initial_state=initial_state, segment_ids=segment_ids
    )
    return out.astype(dtype), None if initial_state is None else state
