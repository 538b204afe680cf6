"""What a selector keeps of attention: on drawn data, and inside the retrieval model."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from toolkit.attention import softmax_attention
from toolkit.attention.sparse import Selector, build, decode_step, recovered_mass, update
from toolkit.attention.sparse.budget import Budget
from toolkit.experiments.sparse import model
from toolkit.experiments.sparse.data import Drawn
from toolkit.experiments.tasks import Retrieval


class Quality(NamedTuple):
    """What is reported of many steps.

    Attributes:
        mass: mean share of the softmax that was read.
        worst_mass: its 5th percentile over queries and heads.
        error: root mean square error of the outputs over that of the exact ones.
        tokens: tokens read per head and step.
        kilobytes: bytes read per head and step, those of the index included.
    """

    mass: float
    worst_mass: float
    error: float
    tokens: float
    kilobytes: float


def quality_of(mass: Any, out: Any, exact: Any, tokens: Any, bytes_read: Any) -> Quality:
    """The summary of arrays of any shape."""
    out, exact = np.asarray(out), np.asarray(exact)
    error = np.sqrt(np.square(out - exact).sum() / np.square(exact).sum())
    low = np.percentile(np.asarray(mass), 5)
    means = (float(np.mean(np.asarray(x))) for x in (tokens, bytes_read))
    tokens, read = means
    return Quality(float(np.mean(np.asarray(mass))), float(low), float(error), tokens, read / 1000)


def of_drawn(
    drawn: Drawn, selector: Selector, budget: Budget, *, corrects_tail: bool = False
) -> Quality:
    """One step per query on drawn data."""
    q, k, v = (jnp.asarray(x) for x in drawn)
    cache = build(selector, k[None], v[None], jnp.full(1, k.shape[1], jnp.int32))
    return quality_of(*_steps(cache, q, selector, budget, corrects_tail))


@partial(jax.jit, static_argnums=(3, 4))
def _steps(cache, q, selector, budget, corrects_tail):
    def step(q):
        return decode_step(cache, q[None], selector, budget, corrects_tail=corrects_tail)

    done = lax.map(step, q)
    heads = cache.keys.shape[1]
    grouped = q.reshape(q.shape[0], heads, -1, q.shape[2])
    x = jnp.einsum("qhgd,hsd->qhgs", grouped, cache.keys[0]) * q.shape[2] ** -0.5
    lse = jax.nn.logsumexp(x, axis=-1).reshape(q.shape[:2])
    exact = jnp.einsum("qhgs,hsd->qhgd", jax.nn.softmax(x, axis=-1), cache.values[0])
    mass = recovered_mass(done.lse[:, 0], lse)
    return mass, done.out[:, 0], exact.reshape(q.shape), done.tokens, done.bytes_read


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
    """Share of right answers, and what layer 0 kept while it read the questions sparsely."""
    drawn = task.draw(jax.random.key(seed + 1_000_003), batch)
    read = _read(params, drawn.tokens, selector, task.haystack, budget, corrects_tail)
    found, mass, out, exact, tokens, bytes_read = read
    right = (found == drawn.targets[:, task.haystack :]) & drawn.mask[:, task.haystack :]
    accuracy = float(right.sum() / drawn.mask.sum())
    return accuracy, quality_of(mass, out, exact, tokens, bytes_read)


@partial(jax.jit, static_argnums=(3, 4, 5))
def _read(params, tokens, selector, haystack, budget, corrects_tail):
    """The haystack is read densely, the questions one token at a time; layer 1 is dense."""
    x = model.start(params, tokens)
    seen = model.project(params, 0, x)
    exact, _, lse = softmax_attention(*seen, return_residual=True)
    keys, values = (jnp.moveaxis(rows, 2, 1) for rows in (seen.k, seen.v))
    length = jnp.full(tokens.shape[0], haystack, jnp.int32)
    cache = build(selector, keys, values, length)

    def step(cache, rows: tuple[Array, ...]):
        q, k, v = rows
        cache = update(selector, cache, k, v)
        return cache, decode_step(cache, q, selector, budget, corrects_tail=corrects_tail)

    questions: Any = tuple(jnp.moveaxis(rows[:, haystack:], 1, 0) for rows in seen)
    _, done = lax.scan(step, cache, questions)
    out = jnp.moveaxis(done.out, 0, 1)
    x = model.finish(params, 0, x, jnp.concatenate([exact[:, :haystack], out], axis=1))
    seen = model.project(params, 1, x)
    x = model.finish(params, 1, x, softmax_attention(*seen)[0])
    found = model.logits(params, x[:, haystack:]).argmax(axis=-1)
    mass = recovered_mass(jnp.moveaxis(done.lse, 0, 1), lse[:, haystack:])
    return found, mass, out, exact[:, haystack:], done.tokens, done.bytes_read
