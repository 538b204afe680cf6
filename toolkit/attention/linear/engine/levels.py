r"""Log-linear attention: a state per level of a binary counter, each read with a weight of its own.

Token s is on level l of token t, where l is the length of the binary number s xor t: 0 for t
itself, and then spans of 1, 2, 4, ... tokens, the nearest first. The last level holds all that is
older.

    o_t = scale sum_l w_tl S_l^T q_t,    S_l: what the tokens on level l of t have left

All levels decay, and are corrected, as the state of the method is; a token writes into level 0.
Where a chunk enters with levels counted from token r, what is on level j of r is on level
max(j, length of r xor t) of a later token t, whose weights are picked accordingly.

Source: Guo, Yang, Goel, Xing, Dao, Kim, "Log-Linear Attention" (arXiv:2506.04761), sections 3, 4.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from toolkit._pytrees import register_dataclass
from toolkit.attention._shapes import known
from toolkit.attention.costs import LEVELS, STATE_BYTES
from toolkit.attention.execution.derivatives import without_transpose
from toolkit.attention.execution.precision import accumulator, precise_einsum
from toolkit.attention.linear.engine.chunks import cut, cut_documents, join
from toolkit.attention.linear.engine.decays import (
    Decays,
    chunk_decays,
    decayed_scores,
    within_documents,
)
from toolkit.attention.linear.engine.inverse import unit_lower_inverse
from toolkit.attention.linear.engine.quarantine import quarantine
from toolkit.attention.linear.engine.recurrence import document_starts, first_state, log_decays
from toolkit.attention.linear.engine.tokens import Tokens, own_keys


@register_dataclass
@dataclass(frozen=True)
class LevelState:
    """What a sequence leaves: a float32 state per level, and the tokens of its document so far.

    Example:
        >>> LevelState(jnp.zeros((1, 2, 14, 4, 8)), jnp.zeros((1, 2), int)).levels.shape
        (1, 2, 14, 4, 8)
    """

    levels: Float[Array, "batch value_heads levels key value"]
    count: Int[Array, "batch value_heads"]


class _Effect(NamedTuple):
    """What the tokens of chunks do, whatever the state: see `_effect`."""

    scores: Array  # [chunks, rows, C, C]
    query: Array  # [chunks, rows, C, key]
    key: Array  # [chunks, rows, C, key]
    erase: Array | None  # [chunks, rows, C, key]
    leaving: Array  # [chunks, rows, C, key]
    through: Array  # [chunks, rows, 1, 1]


def level_between(token: Array, other: Array, levels: int) -> Array:
    """The level on which two positions are of each other."""
    return jnp.minimum(32 - lax.clz(token ^ other), levels - 1)


def merged(
    states: Float[Array, "*heads levels key value"], least: Int[Array, "*heads"]
) -> Float[Array, "*heads levels key value"]:
    """All levels up to `least` on that one."""
    level = _every_level(least, states.shape[-3])
    lower, here = level <= least[..., None], level == least[..., None]
    total = jnp.sum(jnp.where(lower[..., None, None], states, 0), axis=-3, keepdims=True)
    return jnp.where(here[..., None, None], total, jnp.where(lower[..., None, None], 0, states))


def _every_level(like: Int[Array, "*shape"], levels: int) -> Int[Array, "*shape levels"]:
    return lax.broadcasted_iota(like.dtype, (*like.shape, levels), like.ndim)


def run_levels(
    corrects: bool, chunk: int, tokens: Tokens,
    initial_state: LevelState | None, segment_ids: Int[Array, "batch time"] | None,
) -> tuple[Array, LevelState]:  # fmt: skip
    """The share of a core: tokens (q, k, v, strength, weights) that correct, or only add."""
    tokens = own_keys(tokens)
    _, k, v, _, weights = arrays = tokens.arrays
    (batch, time, heads, value), dtype, levels = v.shape, tokens.g.dtype, weights.shape[-1]
    empty = empty_levels(batch, heads, k.shape[-1], value, 0, dtype, levels=levels)
    state = first_state((*arrays, tokens.g), initial_state, empty)
    starts = None if segment_ids is None else document_starts(segment_ids)
    tokens, state, poison = quarantine(tokens, state, initial_state is not None, starts)

    size = min(chunk, max(16, 1 << (known(time) - 1).bit_length()))
    q, k, v, strength, weights = (cut(x.astype(dtype), size) for x in tokens.arrays)
    documents = None if starts is None else cut_documents(starts, heads, size)
    decays = chunk_decays(cut(tokens.g, size), documents)
    if not corrects:
        v = strength[..., None] * v
    effect = _effect(q, k, strength if corrects else None, decays)
    positions = _positions(state.count, time, starts)
    place = cut(positions, size, "edge")
    last = place[..., -1]
    before = jnp.concatenate([state.count.reshape(1, -1) - 1, last[:-1]])

    level = level_between(place[..., :, None], place[..., None, :], levels)
    picked = jnp.take_along_axis(weights, level, axis=-1)
    inside = precise_einsum("...ij,...jv->...iv", picked * effect.scores, v)
    least = level_between(place, before[..., None], levels)
    every = _every_level(least, levels)
    of_entry = jnp.take_along_axis(weights, jnp.maximum(every, least[..., None]), axis=-1)
    written = level_between(place, last[..., None], levels)[..., None] == every

    def through(states, x):
        effect, v, of_entry, written, least = x
        readers = of_entry[..., None] * effect.query[..., None, :]
        out = precise_einsum("rilk,rlkv->riv", readers, states)
        states = merged(states, least)
        left = effect.through[..., None] * states
        if effect.erase is not None:
            erased = precise_einsum("rik,rlkv->rliv", effect.erase, states)
            left -= precise_einsum("rik,rliv->rlkv", effect.leaving, erased)
        writers = jnp.where(written[..., None], effect.key[..., None, :], 0)
        return left + precise_einsum("rilk,riv->rlkv", writers, v), out

    start = state.levels.reshape(-1, *state.levels.shape[2:])
    xs = (effect, v, of_entry, written, level_between(before, last, levels))
    final, outside = lax.scan(jax.checkpoint(through, prevent_cse=False), start, xs)
    out = join(inside + outside, batch, time) * tokens.scale.astype(dtype)
    state = LevelState(final.reshape(state.levels.shape), positions[:, -1] + 1)
    out, state = poison.shown(out, state)
    return without_transpose((out.astype(arrays[2].dtype), state))


def _effect(q: Array, k: Array, beta: Array | None, decays: Decays) -> _Effect:
    r"""What a chunk does to values V and to the states S that it enters with.

        O = M V + (E q) S,   S <- E_C S + (X k)^T V              where tokens only add

    and where they correct, with T = (I + beta P(k, k))^-1 beta and P(q, k) as in `chunked.py`,

        M = P(q, k) T,   O = M V + (E q - M (E k)) S,   S <- E_C S + (X k)^T T (V - (E k) S)
    """

    def scores(reader: Array) -> Array:
        found = decayed_scores(reader, k[..., None, :, :], decays, lax.Precision.HIGHEST)
        return within_documents(found, decays.documents)[..., 0, :]

    product = partial(precise_einsum, "...ij,...jk->...ik")
    read, query, leaving = scores(q), decays.entry * q, decays.exit * k
    if beta is None:
        return _Effect(read, query, leaving, None, leaving, decays.through)
    solved = unit_lower_inverse(beta[..., None] * jnp.tril(scores(k), -1)) * beta[..., None, :]
    read, erase = product(read, solved), product(solved, decays.entry * k)
    query -= product(read, decays.entry * k)
    key = precise_einsum("...ij,...ik->...jk", solved, leaving)
    return _Effect(read, query, key, erase, leaving, decays.through)


def _positions(
    count: Int[Array, "batch heads"], time: int, starts: Bool[Array, "batch time"] | None
) -> Int[Array, "batch time heads"]:
    """Of every token in its document, the first of which continues after `count` tokens."""
    index = jnp.arange(time, dtype=jnp.int32)[None, :, None]
    if starts is None:
        return index + count[:, None]
    first = lax.cummax(jnp.where(starts[..., None], index, 0), axis=1)
    is_first = jnp.cumsum(starts, axis=1)[..., None] == 0
    return index - first + jnp.where(is_first, count[:, None], 0)


def step_levels(corrects: bool, token: Tokens, state: LevelState) -> tuple[Array, LevelState]:
    """One token: levels are merged as a binary counter carries, updated, written and read.

    XLA for CPUs writes over a donated state: sums are scattered into it, what is read of it waits
    for that, and one elementwise pass follows. `merged` would copy it twice.
    """
    token = own_keys(token)
    dtype, value_dtype = token.g.dtype, token.arrays[2].dtype
    q, k, v, strength, weights = (x.astype(dtype) for x in token.arrays)
    decay = jnp.exp(log_decays(token.g))[..., None, None]
    least = level_between(state.count, state.count - 1, weights.shape[-1])
    level = _every_level(least, weights.shape[-1])[..., None, None]
    is_lower = level < least[..., None, None, None]

    def left(x: Array) -> Array:
        return decay * jnp.where(is_lower, 0, x)

    states = _summed(state.levels.astype(dtype), least)
    writer = (strength[..., None] * k)[:, :, None, :, None]
    new = jnp.where(level == 0, writer * v[:, :, None, None, :], 0)
    if corrects:
        new -= writer * left(_read(states, k)[..., None, :])
    states = left(states) + new
    out = jnp.sum(weights[..., None] * _read(states, q), axis=2) * token.scale.astype(dtype)
    return out.astype(value_dtype), LevelState(states, state.count + 1)


def _summed(
    states: Float[Array, "batch heads levels key value"], least: Int[Array, "batch heads"]
) -> Float[Array, "batch heads levels key value"]:
    """The sum of all levels up to `least` on that one; those below are as they were."""
    last = least[..., None, None]
    total = sum(jnp.where(i <= last, states[:, :, i], 0) for i in range(states.shape[2]))
    return jax.vmap(jax.vmap(lambda levels, at, new: levels.at[at].set(new)))(states, least, total)


def _read(
    states: Float[Array, "batch heads levels key value"], reader: Float[Array, "batch heads key"]
) -> Float[Array, "batch heads levels value"]:
    """Each level by the reader of its head: a product with all levels at once would transpose
    them first."""
    each = jnp.broadcast_to(reader[:, :, None], states.shape[:-1])
    return precise_einsum("bhlkv,bhlk->bhlv", states, each)


def empty_levels(batch, heads, key, value, capacity, dtype, *, levels=LEVELS):
    """Levels without tokens."""
    states = jnp.zeros((batch, heads, levels, key, value), accumulator(dtype))
    return LevelState(states, jnp.zeros((batch, heads), jnp.int32))


def level_state_bytes(batch, context, heads, key, value, *, levels=LEVELS, element_bytes=4):
    """A float32 state per level, whatever the context."""
    return batch * heads * levels * key * value * STATE_BYTES
