r"""The number of tokens that hold a share of the mass, by laws fitted to two segments of Tactic's
list.

    y(x) ~ a / x + b      c x^-e      c exp(-r x)      b        x = 1, 2, ... in the clusters' order

Each law goes through the two segments that Tactic looks at; the list's head is exact for all of
them, and the mass is reached where the law says so. a / x + b is the law of the system itself.

Source: Zhu et al. (2025), arXiv:2502.12216, which compares laws at equal accuracy.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from toolkit.attention.sparse import build
from toolkit.attention.sparse.decode.tactic import Clusters, Tactic, fit, segments
from toolkit.experiments.sparse.data import Drawn

Law = Callable[..., Array]
"""(places, x1, y1, x2, y2) -> what y is taken for at these places."""


def _inverse(place, x1, y1, x2, y2):
    a, b = fit(x1, y1, x2, y2)
    return a / place + b


def _power(place, x1, y1, x2, y2):
    return y1 * (place / x1) ** (jnp.log(y2 / y1) / jnp.log(x2 / x1))


def _exponential(place, x1, y1, x2, y2):
    return y1 * jnp.exp(jnp.log(y2 / y1) * (place - x1) / (x2 - x1))


def _constant(place, x1, y1, x2, y2):
    return jnp.broadcast_to((y1 + y2) / 2, place.shape)


LAWS: dict[str, Law] = {
    "a / x + b": _inverse,
    "power law": _power,
    "exponential": _exponential,
    "constant": _constant,
}


class Reached(NamedTuple):
    """The stopping point of a law, over queries and heads.

    Attributes:
        mass: share of the softmax read, on average.
        worst_mass: its 5th percentile.
        tokens: read per head and query, sinks and recent ones among them.
    """

    mass: float
    worst_mass: float
    tokens: float


def reached(drawn: Drawn, selector: Tactic, law: str, target: float) -> Reached:
    """The results of a law for a target on drawn data, per query."""
    q = drawn.q.swapaxes(0, 1) * np.float32(drawn.q.shape[2] ** -0.5)
    q, k, v = (jnp.asarray(x) for x in (q, drawn.k, drawn.v))
    cache = build(selector, k[None], v[None], jnp.full(1, k.shape[1], jnp.int32))
    index = jax.tree.map(lambda x: x[0], cache.index)
    mass, tokens = (np.asarray(x) for x in _reached(q, k, index, selector, law, target))
    return Reached(float(mass.mean()), float(np.percentile(mass, 5)), float(tokens.mean()))


@partial(jax.jit, static_argnums=(4,))
def _reached(
    q: Float[Array, "heads queries key"],
    k: Float[Array, "heads tokens key"],
    index: Clusters,
    selector: Tactic,
    law: str,
    target: float,
) -> tuple[Array, Array]:
    n = k.shape[1]
    place = jnp.arange(1, n + 1, dtype=k.dtype)

    def of_head(q, k, index):
        start = selector.start(index, n, 0)

        def of_query(q):
            scores = selector.scores(index, k, q[None], n)[0]
            listed = selector.expand(index, jnp.argsort(-scores), start, n)
            x, logits, is_looked_at = segments(scores, q, index, k)
            exact = k @ q
            most = exact.max()
            y = jnp.where(listed.is_token, jnp.exp(exact[listed.tokens] - most), 0)
            looked_at = jnp.where(is_looked_at, jnp.exp(logits - most), 0).sum(axis=1)
            level = looked_at / is_looked_at.sum(axis=1).astype(k.dtype)
            x, level = x.reshape(2, 2).mean(axis=1), level.reshape(2, 2).mean(axis=1)
            length = listed.is_token.sum().astype(k.dtype)
            head = jnp.maximum(jnp.ceil(selector.exact_head * length), 64)
            curve = jnp.where(place <= head, y, LAWS[law](place, x[0], level[0], x[1], level[1]))
            curve = jnp.where(listed.is_token, curve, 0)
            whole = jnp.exp(exact - most).sum()
            forced = whole - y.sum()
            wanted = target * (forced + curve.sum())
            is_read = (forced + jnp.cumsum(curve) - curve < wanted) & listed.is_token
            read_mass = forced + jnp.where(is_read, y, 0).sum()
            return read_mass / whole, is_read.sum() + n - length.astype(jnp.int32)

        return jax.vmap(of_query)(q)

    return jax.vmap(of_head)(q, k, index)
