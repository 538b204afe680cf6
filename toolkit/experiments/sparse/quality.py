"""The quality of a selector: on drawn data, and inside the retrieval model."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from toolkit.attention import softmax_attention
from toolkit.attention.sparse import (
    SELECTORS,
    Decoded,
    FixedTokens,
    Selector,
    SparseCache,
    build,
    decode_step,
    observe,
    recovered_mass,
    update,
)
from toolkit.attention.sparse.budget import Budget
from toolkit.experiments.sparse import model
from toolkit.experiments.sparse.data import Drawn
from toolkit.experiments.tasks import Retrieval


class Quality(NamedTuple):
    """The summary of many steps.

    Attributes:
        mass: mean share of the softmax that was read.
        worst_mass: its 5th percentile over queries and heads.
        error: root mean square error of the outputs over that of the exact ones.
        tokens: tokens read per head and step.
        kilobytes: kilobytes read per head and step, including the index.
    """

    mass: float
    worst_mass: float
    error: float
    tokens: float
    kilobytes: float


SMALLER = {
    "tactic": {"refresh_every": 16},
    "infllm": {"sinks": 8, "recent": 16, "block_size": 8, "kernel": 8, "stride": 4},
    "snapkv": {"recent": 16},
}


def at_small_budgets(name: str) -> Selector:
    """A system by its name; one that reads many recent tokens or large blocks has smaller ones."""
    return SELECTORS[name](**SMALLER.get(name, {}))


def quality_of(mass: Any, out: Any, exact: Any, tokens: Any, bytes_read: Any) -> Quality:
    """The summary of arrays of any shape."""
    out, exact = np.asarray(out), np.asarray(exact)
    error = np.sqrt(np.square(out - exact).sum() / np.square(exact).sum())
    low = np.percentile(np.asarray(mass), 5)
    means = (float(np.mean(np.asarray(x))) for x in (tokens, bytes_read))
    tokens, read = means
    return Quality(float(np.mean(np.asarray(mass))), float(low), float(error), tokens, read / 1000)


def fewer_tokens(found: Quality, tokens: int, bytes_per_token: int) -> int:
    """How many tokens read as much, with the index of these steps, as `tokens` alone would."""
    index = 1000 * found.kilobytes - found.tokens * bytes_per_token
    return math.floor(tokens - index / bytes_per_token)


def at_equal_bytes(
    measure: Callable[[Budget], Quality], selector: Selector, tokens: int, bytes_per_token: int
) -> FixedTokens | None:
    """The budget with which a system, its index included, reads what `tokens` alone would.

    None where the index leaves fewer tokens than the system always reads.
    """
    fewer = fewer_tokens(measure(FixedTokens(tokens)), tokens, bytes_per_token)
    return FixedTokens(fewer) if fewer >= selector.least else None


def of_drawn(
    drawn: Drawn, selector: Selector, budget: Budget, *, corrects_tail: bool = False
) -> Quality:
    """One step per query on drawn data."""
    k, v = (jnp.asarray(x)[None] for x in (drawn.k, drawn.v))
    cache = build(selector, k, v, jnp.full(1, k.shape[2], jnp.int32))
    done = _stacked(
        decode_step(cache, q[None], selector, budget, corrects_tail=corrects_tail) for q in drawn.q
    )
    exact, lse = _dense(drawn.q, k[0], v[0])
    mass = recovered_mass(done.lse[:, 0], lse)
    return quality_of(mass, done.out[:, 0], exact, done.tokens, done.bytes_read)


@jax.jit
def _dense(q, k, v):
    grouped = q.reshape(q.shape[0], k.shape[0], -1, q.shape[2])
    x = jnp.einsum("qhgd,hsd->qhgs", grouped, k) * q.shape[2] ** -0.5
    exact = jnp.einsum("qhgs,hsd->qhgd", jax.nn.softmax(x, axis=-1), v)
    return exact.reshape(q.shape), jax.nn.logsumexp(x, axis=-1).reshape(q.shape[:2])


def of_retrieval(
    params: model.Params,
    task: Retrieval,
    selector: Selector,
    budget: Budget,
    seed: int,
    *,
    batch: int = 4,
    corrects_tail: bool = False,
) -> tuple[float, Quality]:
    """Share of right answers, and what layer 0 kept while it read the questions sparsely.

    The haystack is read densely, the questions one token at a time; layer 1 is dense. A system
    compiles its own steps only, once for all tasks of a length: all else, every system shares.
    """
    drawn = task.draw(jax.random.key(seed + 1_000_003), batch)
    x, seen, exact, lse = _read_densely(params, drawn.tokens)
    start = task.haystack
    keys, values = (jnp.moveaxis(rows, 2, 1) for rows in seen[1:])
    queries, length = jnp.moveaxis(seen.q, 2, 1), jnp.full(batch, start, jnp.int32)
    cache = build(selector, keys, values, length, queries=queries)
    q, k, v = (np.asarray(rows) for rows in seen)
    steps = []
    for token in range(start, task.length):
        cache = _append(selector, cache, k[:, token], v[:, token])
        q_t = jnp.asarray(q[:, token])
        step = decode_step(cache, q_t, selector, budget, corrects_tail=corrects_tail)
        cache = observe(selector, cache, step)
        steps.append(step._replace(log_weights=None))
    done = _stacked(steps)
    out = done.out.swapaxes(0, 1)
    found = _finish(params, x, jnp.concatenate([exact[:, :start], out], axis=1))[:, start:]
    right = (found == drawn.targets[:, start:]) & drawn.mask[:, start:]
    mass = recovered_mass(done.lse.swapaxes(0, 1), lse[:, start:])
    accuracy = float(right.sum() / drawn.mask.sum())
    quality = quality_of(mass, out, exact[:, start:], done.tokens, done.bytes_read)
    return accuracy, quality


_append = jax.jit(update, donate_argnames="cache")


def _stacked(steps: Iterable[Decoded]) -> Any:
    return jax.tree.map(lambda *parts: np.stack(parts), *steps)


@jax.jit
def _read_densely(params, tokens):
    x = model.start(params, tokens)
    seen = model.project(params, 0, x)
    exact, _, lse = softmax_attention(*seen, return_residual=True)
    return x, seen, exact, lse


@jax.jit
def _finish(params, x, out):
    x = model.finish(params, 0, x, out)
    x = model.finish(params, 1, x, softmax_attention(*model.project(params, 1, x))[0])
    return model.logits(params, x).argmax(axis=-1)


class Steps(NamedTuple):
    """Sparse decoding of the end of a sequence, and dense attention for comparison.

    Attributes:
        exact: outputs of dense attention [batch, time, heads, size], of all tokens.
        out: sparse ones [batch, steps, heads, size].
        mass: share of the softmax that was read [batch, steps, heads].
        tokens: tokens read [steps, batch, key_value_heads].
        bytes_read: bytes read, with the index [steps, batch, key_value_heads].
        lost: share of the softmax of the last query on each token not read [batch, heads, time],
            where asked for.
    """

    exact: Array
    out: Array
    mass: Array
    tokens: Array
    bytes_read: Array
    lost: Array | None


def quality_of_steps(seen: Iterable[Steps], start: int) -> Quality:
    """The summary of all layers, which were read sparsely from `start` on."""
    parts = [(x.mass, x.out, x.exact[:, start:], x.tokens, x.bytes_read) for x in seen]
    return quality_of(*(np.stack(part) for part in zip(*parts, strict=True)))


@partial(jax.jit, static_argnames=("start", "budget", "corrects_tail", "tells_lost"))
def read_sparsely(
    seen: Any,
    selector: Selector,
    start: int,
    budget: Budget,
    *,
    corrects_tail: bool = False,
    tells_lost: bool = False,
) -> Steps:
    """Attention of a sequence (q, k, v) whose tokens from `start` on are decoded one by one.

    Compiled alone, and so once for all layers of a model.
    """
    exact, _, lse = softmax_attention(*seen, return_residual=True)
    keys, values = (jnp.moveaxis(rows, 2, 1) for rows in seen[1:])
    queries, length = jnp.moveaxis(seen[0], 2, 1), jnp.full(keys.shape[0], start, jnp.int32)
    cache = build(selector, keys, values, length, queries=queries)

    def step(cache, rows: tuple[Array, ...]):
        q, k, v = rows
        cache = update(selector, cache, k, v)
        done = decode_step(cache, q, selector, budget, corrects_tail=corrects_tail)
        return observe(selector, cache, done), done._replace(log_weights=None)

    rows: Any = tuple(jnp.moveaxis(x[:, start:], 1, 0) for x in seen)
    cache, done = lax.scan(step, cache, rows)
    out = jnp.moveaxis(done.out, 0, 1)
    mass = recovered_mass(jnp.moveaxis(done.lse, 0, 1), lse[:, start:].astype(done.lse.dtype))
    lost = _lost(cache, seen, selector, budget) if tells_lost else None
    return Steps(exact, out, mass, done.tokens, done.bytes_read, lost)


def _lost(cache: SparseCache, seen: Any, selector: Selector, budget: Budget) -> Array:
    """What the last query did not read: with one-hot values, its output is its weights."""
    batch, heads, capacity, _ = cache.keys.shape
    one_hot = jnp.broadcast_to(
        jnp.eye(capacity, dtype=cache.values.dtype), (batch, heads, capacity, capacity)
    )
    total = one_hot.sum(axis=2, dtype=cache.value_sum.dtype)
    q = seen[0][:, -1]
    marked = replace(cache, values=one_hot, value_sum=total)
    weights = decode_step(marked, q, selector, budget).out
    grouped = q.reshape(batch, heads, -1, q.shape[-1])
    x = jnp.einsum("bhgd,bhsd->bhgs", grouped, cache.keys) * q.shape[-1] ** -0.5
    p = jax.nn.softmax(x.astype(jnp.float32), axis=-1).reshape(batch, -1, capacity)
    return jnp.where(weights > 0, 0, p)
