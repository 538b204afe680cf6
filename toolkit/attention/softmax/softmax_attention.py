r"""Softmax attention, exact: causal or not, grouped queries, windows, packed documents, biases.

    o_i = sum_j p_ij v_j        p_ij = exp(s_ij) / sum_j' exp(s_ij')        s_ij = scale q_i . k_j

where j runs over the keys that query i sees. `softmax_attention_reference` is this equation;
"dense" computes it with the whole matrix of scores, and "blockwise" in tiles of it
(`blockwise.py`). What may be added to a score, and when, says `scores.py`.

Numbers: scores, exponentials and sums are float32 for bfloat16 and float16 inputs, and float64
for float64. A query that sees no key gives 0. What a query does not see never shows in its output
or in the gradients of a loss on it, even NaN; a query that sees a number that is not finite gives
NaN, and so does one whose scores overflow.
"""

from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from toolkit._annotations import Known
from toolkit._checks import checked
from toolkit.attention._attend import Mask, bounded, fixed_scale, packed
from toolkit.attention._caches import cut_as_arrays_are, show_overflow
from toolkit.attention._shapes import (
    OtherKeys,
    OtherValues,
    Queries,
    SegmentIds,
    TokenCount,
    known,
)
from toolkit.attention.best_known import in_best_form
from toolkit.attention.costs import (
    softmax_forward_bytes,
    softmax_forward_flops,
    softmax_state_bytes,
    softmax_step_bytes,
    softmax_step_flops,
)
from toolkit.attention.execution.cores import free_cores, over_cores
from toolkit.attention.inputs import K, Mixer, Q, V
from toolkit.attention.softmax.cache import (
    KVCache,
    append,
    check_room_of,
    lost,
    softmax_attention_step,
)
from toolkit.attention.softmax.forms import DENSE_UP_TO, attend_to_keys
from toolkit.attention.softmax.merge import with_sinks
from toolkit.attention.softmax.reference import softmax_attention_reference
from toolkit.attention.softmax.scores import (
    FURTHEST,
    Context,
    Inputs,
    Options,
    checked_cap,
    checked_key,
    window_of,
)
from toolkit.attention.softmax.stock import STOCK, check_stock, stock_attention

Implementation = Literal["dense", "blockwise", "cudnn", "splash"]


@checked
def softmax_attention(
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
    sliding_window: TokenCount | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: Annotated[float, Known()] | None = None,
    alibi_slopes: Float[Array, "heads"] | None = None,
    relative_bias: Float[Array, "batch time heads distances"] | None = None,
    sinks: Float[Array, "heads"] | Float[Array, "batch time heads"] | None = None,
    dropout_rate: Annotated[float, Known()] = 0.0,
    dropout_key: Array | None = None,
    segment_ids: SegmentIds | None = None,
    initial_state: KVCache | None = None,
    return_residual: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Any, ...]:
    """Softmax attention of every token to the tokens it sees.

        o_i = sum_j softmax_j(s_ij) v_j
        s_ij = c tanh(scale q_i . k_j / c) + bias_ij + relative_bias_i,i-j - slope |i - j|

    Every argument may be combined with every other, except that `initial_state` goes without the
    arguments that count keys: bias, mask, query_offset, the lengths and local_window_size.

    Args:
        q: queries [batch, time, heads, key].
        k: keys [batch, key_time, key_value_heads, key]; heads is a multiple of key_value_heads,
            and consecutive query heads share a key head (grouped queries).
        v: values [batch, key_time, key_value_heads, value].
        bias: added to the scores; [batch, heads, time, key_time], of which any may be 1. A key with
            a bias of -inf is not seen, as if `mask` said so.
        mask: whether a query sees a key, as far as the rest allows; the same axes, boolean.
        scale: factor of the products, a number or a traced one; None for key ** -0.5.
        is_causal: a token sees no token after itself.
        query_offset: place of the first query among the keys, one for all or one per sequence
            [batch]. With None, which is 0, query i sees keys up to i as in jax.nn; a chunk at the
            end of a prompt has key_time - time. Arrays are clamped to +-2**30, which sees no more
            and no less; a number beyond is refused.
        query_seq_lengths: queries that count [batch]; those after them give 0. A length below 0
            counts as 0, and one above time as time.
        key_value_seq_lengths: keys that count [batch], likewise from 0 to key_time.
        sliding_window: tokens seen, itself included (on each side if not causal); None for all.
        local_window_size: tokens seen before and after itself (left, right), itself apart, or one
            number for both; None in place of either for all. Another way to say `sliding_window`.
        logits_soft_cap: bound c of the scaled products; None for none.
        alibi_slopes: slope per head [heads] of a penalty on distance.
        relative_bias: [batch, time, heads, distances], added to a query's score of the key that
            many tokens before it, from 0; a key farther away gets none. Scores then come in chunks
            of 128 queries, whatever `implementation` says: memory is linear in time, and nothing
            is skipped.
        sinks: score of a key without a value, which every query sees, per head [heads] or per query
            and head [batch, time, heads].
        dropout_rate: share of the weights that become 0, while the others grow to make up for it.
        dropout_key: random key (a scalar) of the dropout. Both implementations drop the same
            weights.
        segment_ids: document number of every token [batch, time]; equal numbers in a row are one
            document, and a token sees its own.
        initial_state: tokens before these, the first document of which these continue; they are
            seen too, and the new ones are appended.
        return_residual: return the log-sum-exp as well.
        implementation: "dense", "blockwise", or None for dense on short and what is known to be
            the best on long inputs (`best_known.py`). Both compute the same function. "cudnn" (of
            NVIDIA GPUs, half precision) and "splash" (of TPUs) are kernels of others, which compute
            it for fewer arguments, with no derivative but the gradient, and refuse the rest in one
            line; see `stock.py`. None takes cuDNN's on a single GPU where it computes the same.

    Returns:
        The output [batch, time, heads, value] in q's dtype, and the new cache (None without
        `initial_state`). With `return_residual` third the logarithm of every query's sum of
        exponentials, the sink's included, [batch, time, heads] in the precision of sums;
        -inf where nothing is seen, and for queries that do not count. `merge_attention` needs it.

    Cost:
        2 batch heads time^2 (key + value) FLOPs, half of it when causal, time * window instead of
        time^2 in a window; the backward pass 2.5 times that. Memory: linear in time when blockwise,
        batch heads time^2 when dense. Forward mode and derivatives beyond the first gradient work
        for both, linear in time, but skip nothing: as many FLOPs as without mask or window.

    Source: Vaswani et al. (2017), arXiv:1706.03762, section 3.2.1; Ainslie et al. (2023),
        arXiv:2305.13245 (grouped queries); Beltagy et al. (2020), arXiv:2004.05150 (window); Press
        et al. (2021), arXiv:2108.12409 (ALiBi); Gemma Team (2024), arXiv:2408.00118 (cap); OpenAI
        (2025), arXiv:2508.10925 (sinks).

    Example:
        >>> q = k = v = jnp.ones((1, 3, 2, 4))
        >>> out, _ = softmax_attention(q, k, v)
        >>> out.shape
        (1, 3, 2, 4)
    """
    window = window_of(is_causal, sliding_window, local_window_size)
    counted = {
        "bias": bias,
        "mask": mask,
        "query_offset": query_offset,
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
        "local_window_size": local_window_size,
    }
    _check(q, k, query_offset, sliding_window, segment_ids, initial_state, counted)
    q, scale = fixed_scale(q, scale)
    dropout_key = checked_key(dropout_rate, dropout_key)
    options = Options(scale, checked_cap(logits_soft_cap), float(dropout_rate))
    if implementation in STOCK:
        given = {**counted, "alibi_slopes": alibi_slopes, "sinks": sinks}
        given |= {"segment_ids": segment_ids, "return_residual": return_residual}
        given |= {"initial_state": initial_state, "local_window_size": None}  # it is the window
        given |= {"relative_bias": relative_bias}
        check_stock(implementation, q, k, v, options, window, given)
        lengths = query_seq_lengths, key_value_seq_lengths
        how = {"name": implementation, "window": window, "options": options}
        return stock_attention(q, k, v, segment_ids, lengths, **how), None
    inputs = Inputs(q, k, v, bias, alibi_slopes, relative_bias)
    seen = Mask(window, query_offset, key_stop=key_value_seq_lengths, allowed=mask)
    lengths = query_seq_lengths
    arrays = inputs, sinks, seen, lengths, segment_ids, initial_state, dropout_key
    how = {"options": options, "implementation": implementation, "cores": free_cores()}
    out, cache, residual = _attend(*arrays, **how, wants_residual=return_residual)
    return (out, cache, residual) if return_residual else (out, cache)


# Compiled as a whole, or an eager call would compile its loops anew every time.
@partial(jax.jit, static_argnames=("options", "implementation", "cores", "wants_residual"))
def _attend(*arrays, options, implementation, cores, wants_residual):
    inputs, sinks, mask, query_lengths, segment_ids, initial_state, dropout_key = arrays
    time, key_time = inputs.q.shape[1], inputs.k.shape[1]
    is_free = implementation is cores is None and known(key_time) > DENSE_UP_TO
    if is_free and not wants_residual and not jax.tree.leaves((inputs[3:], arrays[1:])):
        form = partial(_form, mask, options)
        return in_best_form("softmax", None, form, *inputs[:3]), None, None
    if mask.query_start is not None:
        mask = replace(mask, query_start=bounded(mask.query_start, -FURTHEST, FURTHEST))
    if mask.key_stop is not None:
        mask = replace(mask, key_stop=bounded(mask.key_stop, 0, key_time))
    keys, values = inputs.k.transpose(0, 2, 3, 1), inputs.v.transpose(0, 2, 3, 1)
    arrays = inputs.q, keys, values, inputs.alibi_slopes, inputs.relative_bias
    axes = (2, 1, 1, 0, 2)

    def share(q, k, v, slopes, nearer, mask, bias, allowed):
        context = Context(replace(mask, allowed=allowed), dropout_key)
        own = Inputs(q, k, v, bias, slopes, nearer)
        return attend_to_keys(own, context, options, implementation)

    def share_with_cache(q, k, v, slopes, nearer, segment_ids, cache):
        positions = cache.length[:, None] + jnp.arange(time, dtype=jnp.int32)[None]
        is_lost = lost(cache, positions, mask.window)
        k, v, seen, cache = append(cache, k, v, segment_ids, window=mask.window)
        if seen.documents is not None:
            is_lost &= seen.documents.query == 1
        out, residual = share(q, k, v, slopes, nearer, seen, None, None)
        return jnp.where(is_lost[..., None, None], jnp.nan, out), residual, cache

    # Which weights are dropped depends on their places in the whole, which a share does not know.
    if initial_state is not None and dropout_key is not None:
        out, residual, cache = share_with_cache(*arrays, segment_ids, initial_state)
    elif initial_state is not None:
        arrays, heads = (*arrays, segment_ids), (*axes, None)
        out, residual, cache = cut_as_arrays_are(
            share_with_cache, arrays, initial_state, heads=heads, heads_out=(2, 2)
        )
    else:
        is_plain = not jax.tree.leaves((mask, inputs[3:]))
        allowed, cache = mask.allowed, None
        mask = replace(mask, documents=packed(segment_ids), allowed=None)
        arrays, heads = (*arrays, mask, inputs.bias, allowed), (*axes, None, -3, -3)
        if dropout_key is None:
            cores = cores if is_plain else None
            out, residual = over_cores(cores, share, arrays, heads=heads, heads_out=(2, 2))
        else:
            out, residual = share(*arrays)
    if sinks is not None:
        out, residual = with_sinks(out, residual, sinks)
    if query_lengths is not None:
        numbers = jnp.arange(time, dtype=jnp.int32)
        counts = (numbers[None] < bounded(query_lengths, 0, time)[:, None])[..., None]
        out = jnp.where(counts[..., None], out, 0)
        residual = jnp.where(counts, residual, -jnp.inf)
    if cache is not None and mask.window[0] is None:
        out = show_overflow(out, cache)
    return out, cache, residual


def _form(mask, options, implementation):
    """Attention without further arguments, as a function of q, k and v."""

    def stock(q, k, v):
        how = {"options": options, "window": mask.window}
        check_stock(implementation, q, k, v, **how, given={})
        return stock_attention(q, k, v, None, (None, None), name=implementation, **how)

    def own(q, k, v):
        how = {"options": options, "implementation": implementation, "cores": None}
        return _attend(Inputs(q, k, v), None, mask, *[None] * 4, **how, wants_residual=False)[0]

    return stock if implementation in STOCK else own


def _check(q, k, query_offset, sliding_window, segment_ids, initial_state, counted) -> None:
    batch, time, key_time = *q.shape[:2], k.shape[1]
    if isinstance(query_offset, int) and abs(query_offset) > FURTHEST:
        raise ValueError(f"query_offset must be within 2**30; got {query_offset}.")
    if query_offset is not None and np.shape(query_offset) not in ((), (batch,)):
        wanted = f"one number, or one per sequence [{batch}]"
        raise ValueError(f"query_offset must be {wanted}; got shape {np.shape(query_offset)}.")
    same = None if initial_state is None else "initial_state"
    same = same if segment_ids is None else "segment_ids"
    if same is not None and time != key_time:
        raise ValueError(
            f"with {same} queries and keys are the same tokens; got {time} and {key_time} of them."
        )
    if initial_state is not None:
        for name, value in counted.items():
            if value is not None:
                raise ValueError(f"{name} counts keys without a cache; give no initial_state.")
        check_room_of(initial_state, time, sliding_window, segment_ids)


def _softmax_empty_state(batch, heads, key, value, capacity, dtype, *, sliding_window=None):
    # A window is a ring of exactly its tokens, however long the sequence becomes.
    return KVCache.empty(batch, heads, key, value, sliding_window or capacity, dtype)


FULL = Mixer(
    name="full",
    title="Softmax attention",
    paper="Vaswani et al., Attention Is All You Need (arXiv:1706.03762)",
    is_linear_time=False,
    inputs=(Q, K, V),
    implementations=("dense", "blockwise"),
    options=MappingProxyType({}),
    function=softmax_attention,
    step=softmax_attention_step,
    reference=softmax_attention_reference,
    empty_state=_softmax_empty_state,
    forward_flops=softmax_forward_flops,
    forward_bytes=softmax_forward_bytes,
    step_flops=softmax_step_flops,
    step_bytes=softmax_step_bytes,
    state_bytes=softmax_state_bytes,
)
WINDOW = replace(
    FULL,
    name="window",
    title="Sliding-window attention",
    paper="Beltagy, Peters, Cohan, Longformer (arXiv:2004.05150)",
    is_linear_time=True,
    options=MappingProxyType({"sliding_window": 256}),
)
ROWS = (FULL, WINDOW)
"""The rows of `MIXERS`."""
