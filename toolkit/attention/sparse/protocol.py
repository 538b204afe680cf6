r"""Decoding with a selector: build -> update -> select -> attend -> combine -> correct -> observe.

    keys of a head:   [ sinks | selectable ............ | recent ]
    o, L = combine(attend(sinks and recent), attend(selected), tail)

Every part is exact softmax attention over tokens that no other part holds, so that merging them by
their residuals is exact; only the tail, if asked for, is an estimate. All functions are pure and of
static shapes: `length` grows inside arrays allocated once, and nothing is compiled again. Rows of a
batch may have unequal lengths.

The cache keeps one row per token, so that a selected token is one contiguous read.
"""

from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from toolkit._checks import checked
from toolkit._pytrees import check_classes
from toolkit.attention._attend import bounded, fixed_scale
from toolkit.attention._caches import check_room, show_overflow, write_token
from toolkit.attention._shapes import (
    HeadValue,
    HeldKeys,
    HeldQueries,
    HeldValues,
    Query,
    SharedKey,
    SharedValue,
)
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.softmax.merge import combine
from toolkit.attention.sparse.budget import Budget
from toolkit.attention.sparse.cache import Cache, SparseCache
from toolkit.attention.sparse.heads import (
    best_units,
    best_units_unordered,
    each,
    like,
    over_heads,
    per_head,
)
from toolkit.attention.sparse.parts import (
    Head,
    attend_to,
    forced_tokens,
    log_weights,
    rank,
    rest_of,
    selected_tokens,
)
from toolkit.attention.sparse.selector import Selector


class Decoded(NamedTuple):
    """What a sparse step returns.

    Attributes:
        out: outputs [batch, heads, value].
        lse: logarithm of the sum of exponentials over the tokens attended to [batch, heads],
            without the tail's estimate; `recovered_mass` makes a share of it.
        tokens: tokens attended to, of every key-value head [batch, key_value_heads].
        bytes_read: bytes of these tokens' keys and values and of the index [batch,
            key_value_heads].
        log_weights: logarithm of each token's share of the softmax over what was read [batch,
            heads, capacity], -inf for what was not; None for a selector that does not see it.

    Example:
        >>> empty = jnp.zeros((1, 2, 8, 4))
        >>> cache = build(Selector(), empty, empty, jnp.array([3]))
        >>> decode_step(cache, jnp.ones((1, 2, 4)), Selector(), FixedTokens(8)).tokens.tolist()
        [[3, 3]]
    """

    out: HeadValue
    lse: Float[Array, "batch heads"]
    tokens: Int[Array, "batch key_value_heads"]
    bytes_read: Int[Array, "batch key_value_heads"]
    log_weights: Float[Array, "batch heads capacity"] | None = None


@checked
def build(
    selector: Selector, keys: HeldKeys, values: HeldValues, length: Int[Array, "batch"], *,
    queries: HeldQueries | None = None, scale: float | None = None,
) -> SparseCache:  # fmt: skip
    """Make the cache of a prompt: its keys and values, and the selector's index of them.

    Args:
        selector: one of `SELECTORS`, with its settings.
        keys: [batch, key_value_heads, capacity, key]; slots from `length` on may hold anything.
        values: [batch, key_value_heads, capacity, value].
        length: tokens of each row, 0 to the capacity; below 0 counts as 0, above as the capacity.
        queries: of the same tokens [batch, heads, capacity, key], for a system that scores tokens
            by the attention that the prompt paid them; others do not look at them.
        scale: factor of the scores of these queries; key ** -0.5 if None.

    Returns:
        A `SparseCache` with room for capacity - length more tokens per row.

    Raises:
        TypeError: the class of the selector or of its index is registered by
            `jax.tree_util.register_dataclass`; see `attention.register_dataclass`.

    Example:
        >>> keys = values = jnp.ones((1, 2, 8, 4))
        >>> cache = build(Selector(), keys, values, jnp.array([5]))
        >>> cache.capacity, cache.length.tolist()
        (8, [5])
    """
    check_classes("selector", selector)
    seen, name = (), type(selector).__name__
    if selector.sees_queries:
        if queries is None:
            wanted = f"those of the prompt, by which {name} scores"
            raise ValueError(f"queries must be {wanted}; got None.")
        seen = (_scaled(*fixed_scale(queries, scale)),)
    cache = _build(selector, keys, values, length, *seen)
    check_classes(f"index of {name}", cache.index)
    return cache


@jax.jit
def _build(selector, keys, values, length, *queries):
    length = bounded(length, 0, keys.shape[2])
    is_token = (jnp.arange(keys.shape[2])[None] < length[:, None])[:, None, :, None]
    keys, values, *queries = (jnp.where(is_token, x, 0) for x in (keys, values, *queries))
    key_sum, value_sum = (x.sum(axis=2, dtype=accumulator(x.dtype)) for x in (keys, values))
    queries = [x.reshape(*keys.shape[:2], -1, *x.shape[2:]) for x in queries]
    index = each("build", selector, keys, values, per_head(length, keys), *queries)
    return SparseCache(keys, values, key_sum, value_sum, index, length)


@checked
def update(selector: Selector, cache: Cache, k_t: SharedKey, v_t: SharedValue) -> Cache:
    """Append one token to every row, and to the selector's index.

    Args:
        selector: the one the cache was built with.
        cache: donate it (`jax.jit(update, donate_argnames="cache")`) to write in place.
        k_t: key of the token [batch, key_value_heads, key].
        v_t: its value [batch, key_value_heads, value].

    Returns:
        The cache with one more token per row, refreshed where the selector says it is due.

    Example:
        >>> empty = jnp.zeros((1, 2, 8, 4))
        >>> cache = build(Selector(), empty, empty, jnp.array([0]))
        >>> update(Selector(), cache, jnp.ones((1, 2, 4)), jnp.ones((1, 2, 4))).length.tolist()
        [1]
    """
    check_room(cache, 1)
    return _update(selector, cache, k_t, v_t)


@jax.jit
def _update(selector, cache, k_t, v_t):
    position = per_head(cache.length, k_t)
    cache = write_token(cache, cache.length, axis=-2, keys=k_t, values=v_t)
    index = each("update", selector, cache.index, k_t, v_t, position)
    due = each("is_due", selector, index, position + 1)
    if due is not None:
        arguments = index, cache.keys, cache.values, position + 1

        def refresh():
            fresh = each("refresh", selector, *arguments)
            return jax.tree.map(lambda *pair: jnp.where(like(due, pair[0]), *pair), fresh, index)

        index = lax.cond(due.any(), refresh, lambda: index)
    key_sum = cache.key_sum + k_t.astype(cache.key_sum.dtype)
    value_sum = cache.value_sum + v_t.astype(cache.value_sum.dtype)
    return replace(cache, index=index, key_sum=key_sum, value_sum=value_sum)


@checked
def observe(selector: Selector, cache: Cache, step: Decoded) -> Cache:
    """Show a selector what a step attended to, after that step and before the next token.

    Args:
        selector: the one the cache was built with.
        cache: the one that the step read.
        step: from `decode_step`.

    Returns:
        The cache with the selector's new index; the same one for a selector that looks at no
        weights.

    Example:
        >>> empty = jnp.zeros((1, 2, 8, 4))
        >>> cache = build(Selector(), empty, empty, jnp.array([3]))
        >>> step = decode_step(cache, jnp.ones((1, 2, 4)), Selector(), FixedTokens(8))
        >>> observe(Selector(), cache, step) is cache
        True
    """
    return cache if step.log_weights is None else _observe(selector, cache, step.log_weights)


@jax.jit
def _observe(selector, cache, weights):
    weights = weights.reshape(*cache.keys.shape[:2], -1, weights.shape[-1])
    return replace(cache, index=each("observe", selector, cache.index, weights))


@checked
def decode_step(
    cache: SparseCache, q_t: Query, selector: Selector, budget: Budget, *,
    scale: float | None = None, group: Literal["union", "sum", "max", "each"] | None = None,
    corrects_tail: bool = False,
) -> Decoded:  # fmt: skip
    r"""Attend with one query per head to the tokens that a selector picks from the cache.

        o = sum_{i in I} softmax_I(scale q . k_i) v_i      I = sinks + selected + recent

    The token's own key is in the cache already (`update`).

    Args:
        cache: from `build` or `update`.
        q_t: queries [batch, heads, key], heads a multiple of key_value_heads.
        selector: the one the cache was built with.
        budget: how many tokens are read for a key-value head, whatever its number of query heads,
            sinks and recent ones counted. A budget that asks for a mass needs a selector that
            estimates it.
        scale: factor of the scores; key ** -0.5 if None.
        group: what the query heads that share a key head read. "union": the best of each of them
            in turn, every token once; "sum" and "max": the units with the largest sum, or the
            largest, of the heads' softmaxes over the units; "each": every head its own, read once
            per head, so that its part of the budget is one of the group's. None: the system's own.
        corrects_tail: whether to add an estimate of the tokens not attended to: less than half the
            error where attention is flat, and where it is peaked no head's error is larger by more
            than 5 % (tests/attention/sparse/test_sparse_tails.py). Off unless asked for, as smaller
            errors of outputs change no answers where random tokens fail: with HATA and PQCache they
            fall by a third on code, where perplexity changes by less than 2 %, and in the retrieval
            models, which find no more needles, to within 1 % (data/experiments/sparse.jsonl).

    Returns:
        A `Decoded`: outputs, residuals, and what was read.

    Cost:
        the selector's index, and 2 heads tokens (key + value) FLOPs on rows gathered once.

    Example:
        >>> keys = jnp.ones((1, 2, 64, 4))
        >>> cache = build(Selector(recent=8), keys, keys, jnp.array([64]))
        >>> step = decode_step(cache, jnp.ones((1, 4, 4)), Selector(recent=8), FixedTokens(12))
        >>> step.out.shape, step.tokens.tolist()
        ((1, 4, 4), [[12, 12]])
    """
    selector.check_budget(budget, cache.capacity, cache.keys.shape[1])
    q_t, scale = fixed_scale(q_t, scale)
    how = group or selector.group
    if budget.compares_heads and how in ("union", "each"):
        raise ValueError(f'group must be "sum" or "max" for {budget}; got {how!r}.')
    return _decode(cache, q_t, selector, budget, scale, how, corrects_tail)


@partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _decode(cache, q_t, selector, budget, scale, group, corrects_tail):
    batch, key_heads, capacity, key = cache.keys.shape
    q = _scaled(q_t.reshape(batch, key_heads, -1, key), scale)
    length = per_head(cache.length, q)
    number = jnp.broadcast_to(jnp.arange(key_heads, dtype=jnp.int32), length.shape)
    count = jax.vmap(jax.vmap(budget.count))(length, number)
    # Query heads that read for themselves may read a token several times.
    sets = q.shape[2] if group == "each" else 1
    most = budget.most(capacity * sets)
    count = jnp.minimum(jnp.maximum(count, selector.least), most)
    # What a query decides is not known before it is asked.
    adapts = budget.needs_mass or budget.compares_heads
    known, known_most = (0 * count, 0) if adapts else (count, most)
    start = each("start", selector, cache.index, length, known)
    head = Head(cache.index, cache.keys, cache.values, q, length, start)
    recent_slots = selector.recent_slots(known_most)
    forced = over_heads(lambda s, h: forced_tokens(s, recent_slots, h), selector, head)
    attend_list = partial(attend_to, keeps_scores=selector.sees_weights)
    read, lists = [attend_list(head, q[:, :, None], *forced)], [forced]

    slots, logits, is_taken = most - selector.sinks - selector.least_recent(known_most), None, None
    slots = min(slots if adapts else slots // sets, capacity)
    if slots > 0:
        needs_shares = budget.needs_mass or corrects_tail
        ranked_by = partial(rank, group, needs_shares, recent_slots)
        ranking = over_heads(ranked_by, selector, head, read[0].lse)
        # A branch is never fused: XLA for CPUs ignores barriers, and would compute scores anew for
        # every pass over them.
        once = lax.cond(cache.length.min() >= 0, lambda x: x, jnp.zeros_like, ranking.scores)
        ranking = ranking._replace(scores=once)
        ranked = selector.ranked_units(slots, ranking.scores.shape[-1])
        is_known = not adapts and (group != "union" or q.shape[2] == 1)
        if selector.ranks_tokens and is_known:
            units = best_units_unordered(ranking.scores, ranked, (count - read[0].tokens) // sets)
        else:
            units = best_units(ranking.scores, ranked)
        select = partial(selected_tokens, group, slots, budget)
        arguments = head, ranking, units, read[0], count
        tokens, mask, is_taken = over_heads(select, selector, *arguments)
        queries = q[:, :, :, None] if group == "each" else q[:, :, None]
        read = [*read, attend_list(head, queries, tokens, mask)]
        lists.append((tokens, mask))
        logits = ranking.logits
    parts = [(part.out, part.lse) for part in read]
    lse = combine(*parts)[1]
    if corrects_tail:
        sums = cache.key_sum, cache.value_sum
        rest = jax.vmap(jax.vmap(rest_of))(*sums, length, read)
        parts.append(each("tail", selector, cache.index, q, logits, is_taken, rest))
    out = show_overflow(combine(*parts)[0].reshape(batch, -1, cache.values.shape[-1]), cache)

    tokens = jnp.stack([part.tokens for part in read]).sum(axis=0)
    per_token = sum(x.shape[-1] * x.dtype.itemsize for x in (cache.keys, cache.values))
    index_bytes = each("index_bytes", selector, cache.index, q, length)
    if budget.needs_mass:
        index_bytes += each("estimate_bytes", selector, cache.index, q, length)
    if corrects_tail:
        index_bytes += each("tail_bytes", selector, cache.index, q, length)
    weights = log_weights(read, lists, lse, capacity) if selector.sees_weights else None
    weights = None if weights is None else weights.reshape(batch, -1, capacity)
    lse = lse.reshape(batch, -1)
    return Decoded(out.astype(q_t.dtype), lse, tokens, per_token * tokens + index_bytes, weights)


def _scaled(q, scale):
    return (q.astype(accumulator(q.dtype)) * scale).astype(q.dtype)
