"""The parts of a sparse step, seen by one key-value head of one row, and what each of them reads.

Sinks and recent tokens are attended to first: their residual tells an adaptive budget how much of
the softmax is held already. `sets` is 1 where the query heads of the group share a selection, and
the number of these heads where each has its own.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from toolkit.attention._attend import masked_softmax
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.sparse.budget import Budget, Ranked
from toolkit.attention.sparse.selector import Rest, Selector

GROUPS = ("union", "sum", "max", "each")


class Head(NamedTuple):
    """One head: a selector's index, what the cache holds, the scaled queries of the group."""

    index: Any
    keys: Float[Array, "capacity key"]
    values: Float[Array, "capacity value"]
    q: Float[Array, "group key"]
    length: Int[Array, ""]
    start: Int[Array, ""]


class Ranking(NamedTuple):
    """How a query ranks the units."""

    # by which units are ranked; -inf for a unit without selectable tokens
    scores: Float[Array, "sets units"]
    # estimated logarithm of every unit's sum of exponentials, None if not asked for
    logits: Float[Array, "group units"] | None
    # estimated shares of every head's softmax, likewise, and those of sinks and recent tokens
    shares: Float[Array, "sets heads units"] | None
    forced_share: Float[Array, "sets heads"] | None


class Part(NamedTuple):
    """Attention to some tokens, their number, their sums, to be subtracted for the rest, and the
    scores of a list of tokens, where asked for."""

    out: Float[Array, "group value"]
    lse: Float[Array, "group"]
    tokens: Int[Array, ""]
    counts: Int[Array, "sets"]
    key_sum: Float[Array, "sets key"]
    value_sum: Float[Array, "sets value"]
    scores: Float[Array, "sets group slots"] | None


def forced_tokens(selector: Selector, recent_slots: int, head: Head) -> tuple[Array, Array]:
    """The sinks and the recent tokens, a list of one set, and which of its slots hold one."""
    capacity = head.keys.shape[0]
    sinks, slots = min(selector.sinks, capacity), min(recent_slots, capacity)
    first = jnp.arange(sinks, dtype=jnp.int32)
    recent = jnp.clip(head.length - slots, 0, capacity - slots) + jnp.arange(slots, dtype=jnp.int32)
    is_recent = (recent >= head.start) & (recent < head.length)
    mask = jnp.concatenate([first < head.start, is_recent])
    return jnp.concatenate([first, recent])[None], mask[None]


def rank(
    group: str, needs_shares: bool, recent_slots: int, selector: Selector, head: Head, forced_lse
) -> Ranking:
    """Score the units, and reduce the scores of the group's heads to those of its sets.

    Heads that select together are compared by the logarithms of their softmax over the units, which
    keep the order of each head's own scores however small they are.
    """
    scores = selector.scores(head.index, head.keys, head.q, head.length)
    units = jnp.arange(scores.shape[1], dtype=jnp.int32)
    is_usable = (selector.sizes(head.index, units, head.start) > 0)[None]
    scores = jnp.where(is_usable, scores, -jnp.inf)
    logits = shares = forced_share = None
    if needs_shares and selector.estimates_mass:
        logits = selector.logits(head.index, head.q, scores)
        assert logits is not None
        logits = jnp.where(is_usable, logits, -jnp.inf)
        total = jnp.logaddexp(forced_lse, jax.nn.logsumexp(logits, axis=1))[:, None]
        sets = 1 if group in ("sum", "max") else scores.shape[0]
        shares = jnp.exp(logits - total).reshape(sets, -1, units.size)
        forced_share = jnp.exp(forced_lse - total[:, 0]).reshape(sets, -1)
    if group in ("union", "each") or scores.shape[0] == 1:
        return Ranking(scores, logits, shares, forced_share)
    in_logarithms = not selector.compares_scores
    reduce = functools.partial(_over_group, group, in_logarithms)
    arguments = head.index, head.q, head.length, head.start, recent_slots
    votes, reduced = scores, selector.together(*arguments, reduce)
    if reduced is None and in_logarithms:
        total = jax.nn.logsumexp(scores, axis=1, keepdims=True)
        if selector.counts_forced:
            total = jnp.logaddexp(forced_lse[:, None], total)
        # Without the barriers XLA computes votes and their sums again for every use of them.
        votes = lax.optimization_barrier(jnp.where(is_usable, scores - total, -jnp.inf))
    reduced = lax.optimization_barrier(reduce(votes) if reduced is None else reduced)
    return Ranking(jnp.where(is_usable, reduced, -jnp.inf), logits, shares, forced_share)


def _over_group(group: str, in_logarithms: bool, votes: Float[Array, "group units"]) -> Array:
    """The largest vote of the group's heads, or the sum, as one row.

    The heads are added row by row: XLA's reduction of the first axis takes CPUs six times as long.
    """
    largest = functools.reduce(jnp.maximum, votes)
    if group == "max":
        return largest[None]
    if not in_logarithms:
        return functools.reduce(jnp.add, votes)[None]
    shift = jnp.where(jnp.isfinite(largest), largest, 0)
    return (shift + jnp.log(functools.reduce(jnp.add, [jnp.exp(x - shift) for x in votes])))[None]


def selected_tokens(
    group: str,
    slots: int,
    budget: Budget,
    selector: Selector,
    head: Head,
    ranking: Ranking,
    units: Int[Array, "sets ranked"],
    forced: Part,
    count: Int[Array, ""],
) -> tuple[Int[Array, "sets slots"], Bool[Array, "sets slots"], Bool[Array, "sets units"]]:
    """The tokens of the best units that fit a budget, as a list, and those units."""
    sets = units.shape[0]
    own, lse = (x[:, None] if sets > 1 else x[None] for x in (head.q, forced.lse))
    room = jnp.maximum(count - forced.tokens, 0)

    def expand(units, q, lse, scores, shares, forced_share):
        tokens, is_token = selector.expand(head.index, units, head.start, slots)
        sizes = selector.sizes(head.index, units, head.start)
        if selector.ranks_tokens:
            is_token &= scores[units] > -jnp.inf
        wanted = room
        if budget.needs_mass or budget.compares_heads:
            shares = None if shares is None else shares[:, units]
            ranked = Ranked(shares, sizes, forced_share, lse, scores, room)
            args = budget, ranked, head.index, head.keys, q, tokens
            suffices = selector.suffices(*args)
            wanted = suffices if budget.compares_heads else jnp.minimum(room, suffices)
        return tokens, jnp.cumsum(is_token, dtype=jnp.int32), is_token, sizes, wanted

    estimates = ranking.scores, ranking.shares, ranking.forced_share
    tokens, place, is_token, sizes, wanted = jax.vmap(expand)(units, own, lse, *estimates)
    if group == "each" and sets > 1:
        wanted = jnp.minimum(wanted, _fair_share(wanted, room))
    mask = is_token & (place <= wanted[:, None])
    if group == "union" and sets > 1:
        tokens, mask, depth = _union(tokens, mask, room, head.keys.shape[0])
        wanted = jnp.minimum(wanted, depth)
    is_taken = (jnp.cumsum(sizes, axis=1) - sizes < wanted[:, None]) & (sizes > 0)
    taken = jnp.zeros((sets, ranking.scores.shape[1]), bool)
    taken = taken.at[jnp.arange(sets)[:, None], units].max(is_taken)
    return tokens, mask, taken.any(axis=0, keepdims=True) if group == "union" else taken


def rest_of(key_sum: Array, value_sum: Array, length: Array, read: list[Part]) -> Rest:
    """The tokens that no part attended to, from the sums over all and over the parts."""
    count = (length - sum(part.counts for part in read)).astype(key_sum.dtype)
    divisor = jnp.maximum(count, 1)[:, None]
    key = (key_sum[None] - sum(part.key_sum for part in read)) / divisor
    return Rest(count, key, (value_sum[None] - sum(part.value_sum for part in read)) / divisor)


def attend_to(
    head: Head, q: Float[Array, "batch heads sets group key"],
    tokens: Int[Array, "batch heads sets slots"], mask: Bool[Array, "batch heads sets slots"], *,
    keeps_scores: bool = False,
) -> Part:  # fmt: skip
    """Softmax attention of all heads to the tokens of lists that a mask selects.

    A slot that is not selected copies the newest token, which is always attended to. So dropped
    tokens, which may be NaN, are never touched, and the copies need no cleaning.
    """
    capacity = head.keys.shape[2]
    newest = jnp.clip(head.length - 1, 0, capacity - 1)
    if newest.size * capacity >= 2**31:
        raise ValueError(f"a cache has room for 2^31 rows; got {newest.size} x {capacity}")
    # All rows as one long matrix, so that one index finds a row.
    first = capacity * jnp.arange(newest.size, dtype=jnp.int32).reshape(*newest.shape, 1, 1)
    rows = first + jnp.where(mask, tokens, newest[..., None, None])
    keys, values = (x.reshape(-1, x.shape[-1]) for x in (head.keys, head.values))

    def of_head(q: Array, rows: Array, mask: Array) -> tuple[Array, ...]:
        copies = tuple(x.at[rows].get(mode="promise_in_bounds") for x in (keys, values))
        # Without the barrier XLA makes the copies inside of the products, ten times slower.
        k, v = lax.optimization_barrier(copies)
        precise = accumulator(q.dtype)
        scores = jnp.einsum("...gk,...sk->...gs", q, k, preferred_element_type=precise)
        visible = mask[..., None, :]
        exponentials, total, lse = masked_softmax(scores, visible)
        weights = exponentials.astype(v.dtype)
        out = jnp.einsum("...gs,...sv->...gv", weights, v, preferred_element_type=precise)
        is_sound = (jnp.isfinite(scores) | ~visible).all(axis=-1, keepdims=True)
        out = jnp.where(lse == -jnp.inf, 0, jnp.where(is_sound, out / total, jnp.nan))
        sums = (jnp.where(mask[..., None], x, 0).sum(axis=-2, dtype=precise) for x in (k, v))
        return out, lse, *sums, *([scores] if keeps_scores else [])

    def in_turn(*arrays: Array) -> tuple[Array, ...]:
        each = (x.reshape(-1, *x.shape[2:]) for x in arrays)
        parts = lax.map(lambda head: of_head(*head), tuple(each))
        return tuple(x.reshape(*arrays[0].shape[:2], *x.shape[1:]) for x in parts)

    # The copies of one head fit the caches of a core; those of all heads do not.
    out, lse, *sums = lax.platform_dependent(q, rows, mask, cpu=in_turn, default=of_head)
    return _part(out, lse, mask, *sums)


def log_weights(
    read: list[Part],
    lists: list[tuple[Array, Array]],
    lse: Float[Array, "batch heads group"],
    capacity: int,
) -> Float[Array, "batch heads group capacity"]:
    """Logarithms of the softmax over the tokens of all lists (tokens, mask), -inf for others."""
    weights = jnp.full((*lse.shape, capacity), -jnp.inf, lse.dtype)
    for part, (tokens, mask) in zip(read, lists, strict=True):
        assert part.scores is not None  # they were asked for
        scores = part.scores.reshape(*lse.shape, -1) - lse[..., None]
        place = jnp.broadcast_to(jnp.where(mask, tokens, capacity), scores.shape)
        weights = jnp.put_along_axis(weights, place, scores, axis=-1, inplace=False, mode="drop")
    return weights


def _part(
    out: Array, lse: Array, mask: Array, key_sum: Array, value_sum: Array, scores: Any = None
) -> Part:
    """The outputs of every head's sets of queries, query after query."""
    counts, of_heads = mask.sum(axis=3, dtype=jnp.int32), mask.shape[:2]
    out, lse = out.reshape(*of_heads, -1, out.shape[-1]), lse.reshape(*of_heads, -1)
    return Part(out, lse, counts.sum(axis=2), counts, key_sum, value_sum, scores)


def _fair_share(wanted: Int[Array, "sets"], room: Int[Array, ""]) -> Int[Array, ""]:
    """The largest bound per set whose total min(wanted, bound) still fits the room.

    The sum of min(wanted, bound) is the minimum, over i, of the sum of the i smallest wants plus
    the bound for each of the others.
    """
    fewest = jnp.sort(wanted)
    left = room - (jnp.cumsum(fewest) - fewest)
    return (left // jnp.arange(wanted.size, 0, -1, dtype=jnp.int32)).max()


def _union(tokens: Array, mask: Array, room: Array, capacity: int) -> tuple[Array, Array, Array]:
    """One list of the sets' tokens without repeats: every set's best in turn, while there is room.

    Also returns how far down its own list each set got.
    """
    sets, slots = tokens.shape
    tokens, mask = tokens.T.reshape(-1), mask.T.reshape(-1)
    turn = jnp.arange(tokens.size, dtype=jnp.int32)
    place = jnp.where(mask, tokens, capacity)
    first = jnp.full(capacity, tokens.size, jnp.int32).at[place].min(turn, mode="drop")
    is_new = mask & (first[tokens] == turn)
    number = jnp.cumsum(is_new, dtype=jnp.int32)
    is_kept = is_new & (number <= jnp.minimum(room, slots))
    kept = jnp.zeros(slots, jnp.int32)
    kept = kept.at[jnp.where(is_kept, number - 1, slots)].set(tokens, mode="drop")
    depth = jnp.where(is_kept, turn // sets + 1, 0).max()
    mask = jnp.arange(slots, dtype=jnp.int32) < is_kept.sum(dtype=jnp.int32)
    return kept[None], mask[None], depth
