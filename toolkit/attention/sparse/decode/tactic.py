"""Tactic: clusters of keys in the order of their centroids' scores, read until a mass is reached.

Clusters in falling order of q . centroid put the tokens in an order that nearly sorts their
exponentials y. How many of them hold a share of the softmax is read off a fit

    y(x) ~ a / x + b        x = 1, 2, ... in that order

through the means of two segments, around a tenth and six tenths of the list; the first tokens of
the list, where the outliers are, are computed exactly. With H_n the n-th harmonic number

    Z = Z_forced + sum_{x <= h} y(x) + a (H_n - H_h) + b (n - h)

Keys are clustered in segments of the prompt. New tokens are attended to in full until
`refresh_every` of them are clustered among themselves, so that an index grown token by token has
the same kind of clusters as one that was built.
The paper clusters the prompt as a whole and leaves open where segments lie, what to do when b < 0
(here: b = 0) and whether a selection may be shorter than the exact head (here: yes).

A fit through two means may be far off: on keys in topics it promises 0.9 and holds 0.77 on average.
So samples of the rest decide where the list stops (`stopping.py`), unless `stops_by` is "fit", the
paper's form. Only `MassTarget` needs either; other budgets read the list in the same order.

Source: Zhu et al. (2025), arXiv:2502.12216.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from toolkit._pytrees import register_dataclass
from toolkit.attention._checks import check_choice, check_count, check_multiple
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.sparse.budget import Budget, MassTarget, Ranked
from toolkit.attention.sparse.decode.kmeans import k_means
from toolkit.attention.sparse.decode.stopping import estimate_rows, sampled_counts
from toolkit.attention.sparse.selector import Expanded, Rest, Selector, setting

PLACES = (0.09, 0.11, 0.58, 0.62)  # of the list, where two segments of two clusters each lie
TOKENS = 32  # of a cluster that a segment looks at
HALVINGS = 16  # that find those places


class Clusters(NamedTuple):
    """Centroids, mean values and sizes, and the tokens in order of their clusters."""

    centroids: Float[Array, "key clusters"]
    values: Float[Array, "clusters value"]
    sizes: Int[Array, "clusters"]
    first: Int[Array, "clusters"]
    members: Int[Array, "capacity"]


@register_dataclass
@dataclass(frozen=True)
class Tactic(Selector):
    """Rank clusters of keys by their centroids, and stop where a fit says the mass is reached.

    Attributes:
        cluster_size: tokens of a cluster on average.
        segment: tokens of the prompt that are clustered together.
        refresh_every: new tokens after which these are clustered, a divisor of `segment`.
        iterations: of k-means.
        exact_head: share of the list whose exponentials a fit has exactly.
        stops_by: what finds where a mass is reached, "samples" of the rest or the paper's "fit".
    """

    cluster_size: int = setting(16)
    segment: int = setting(2048)
    refresh_every: int = setting(64)
    iterations: int = setting(10)
    exact_head: float = setting(0.01)
    stops_by: str = setting("samples")

    def __post_init__(self):
        super().__post_init__()
        for name in ("cluster_size", "segment", "refresh_every"):
            check_count(name, getattr(self, name), 1)
        check_multiple("segment", self.segment, "refresh_every", self.refresh_every)
        check_multiple("refresh_every", self.refresh_every, "cluster_size", self.cluster_size)
        check_choice("stops_by", self.stops_by, ("samples", "fit"))
        if not 0 < self.exact_head <= 1:
            raise ValueError(f"exact_head must be above 0 and at most 1; got {self.exact_head}.")

    def _clustered(self, length) -> Array:
        """Tokens that lie in clusters."""
        old = jnp.maximum(length - self.recent, 0)
        return old - old % self.refresh_every

    def start(self, index: Clusters, length, count) -> Array:
        return self._clustered(length)

    def recent_slots(self, most: int) -> int:
        return self.recent + self.refresh_every - 1

    def ranked_units(self, slots: int, units: int) -> int:
        # Clusters at the top are often small: a needle is alone in its own.
        return min(4 * -(-slots // self.cluster_size) + 8, units)

    def build(self, keys: Array, values: Array, length) -> Clusters:
        capacity = keys.shape[0]
        end = self._clustered(length)
        pad = ((0, -capacity % self.refresh_every), (0, 0))
        keys, values = jnp.pad(keys, pad), jnp.pad(values, pad)
        size = min(self.segment, keys.shape[0])
        firsts = jnp.arange(0, keys.shape[0], size, dtype=jnp.int32)
        parts = lax.map(lambda first: self._cluster(keys, values, first, size, end), firsts)
        centroids, means, *rest = (x.reshape(-1, *x.shape[2:]) for x in parts)
        clusters = keys.shape[0] // self.cluster_size
        sizes, first, members = rest
        return Clusters(
            centroids[:clusters].T,
            means[:clusters],
            sizes[:clusters],
            first[:clusters],
            members[: keys.shape[0]],
        )

    def _cluster(self, keys, values, first, size, end) -> tuple[Array, ...]:
        """Clusters of the tokens from `first` on that come before `end`, sinks left out."""
        tokens = first + jnp.arange(size, dtype=jnp.int32)
        inside = jnp.minimum(tokens, keys.shape[0] - 1)
        is_row = (tokens >= self.sinks) & (tokens < end)
        clusters = size // self.cluster_size
        count = jnp.clip(end - first, 0, size) // self.cluster_size
        rows = keys[inside]
        _, own = k_means(
            rows, jnp.maximum(self.sinks - first, 0), jnp.minimum(end - first, size), clusters,
            self.iterations, count,
        )  # fmt: skip
        own = jnp.where(is_row, own[0], clusters)
        precise = accumulator(keys.dtype)
        members = jax.nn.one_hot(own, clusters, dtype=precise)
        sizes = members.sum(axis=0)
        means = members.T @ values[inside].astype(precise)
        means = means / jnp.maximum(sizes, 1)[:, None]
        centroids = members.T @ rows.astype(precise) / jnp.maximum(sizes, 1)[:, None]
        number = jnp.arange(clusters, dtype=jnp.int32)
        before = jnp.where(number[None] < number[:, None], sizes[None], 0).sum(axis=1)
        starts, sizes = first + before.astype(jnp.int32), sizes.astype(jnp.int32)
        order = tokens[jnp.argsort(own, stable=True)]
        return centroids.astype(keys.dtype), means.astype(values.dtype), sizes, starts, order

    def is_due(self, index: Clusters, length) -> Array:
        old = length - self.recent
        return (old > 0) & (old % self.refresh_every == 0)

    def refresh(self, index: Clusters, keys: Array, values: Array, length) -> Clusters:
        end = self._clustered(length)
        first = jnp.maximum(end - self.refresh_every, 0)
        new = self._cluster(keys, values, first, self.refresh_every, end)
        cluster = first // self.cluster_size
        columns = lax.dynamic_update_slice_in_dim(index.centroids, new[0].T, cluster, axis=1)
        rows = (index.values, index.sizes, index.first)
        rows = [
            lax.dynamic_update_slice_in_dim(row, x, cluster, axis=0)
            for row, x in zip(rows, new[1:4], strict=True)
        ]
        members = lax.dynamic_update_slice_in_dim(index.members, new[4], first, axis=0)
        return Clusters(columns, rows[0], rows[1], rows[2], members)

    def scores(self, index: Clusters, keys: Array, q: Array, length) -> Array:
        return jnp.matmul(q, index.centroids, preferred_element_type=accumulator(q.dtype))

    def logits(self, index: Clusters, q: Array, scores: Array) -> Array:
        """Of as many keys as a cluster has, all at its centroid: never too much."""
        return scores + jnp.log(index.sizes.astype(scores.dtype))[None]

    def sizes(self, index: Clusters, units: Array, start) -> Array:
        # After drafts were taken back, clusters of tokens that are recent again may remain.
        return jnp.where(units * self.cluster_size < start, index.sizes[units], 0)

    def expand(self, index: Clusters, units: Array, start, slots: int) -> Expanded:
        sizes = self.sizes(index, units, start)
        ends = jnp.cumsum(sizes)
        place = jnp.arange(slots, dtype=jnp.int32)
        marks = jnp.zeros(slots, jnp.int32).at[ends].add(1, mode="drop")
        own = jnp.minimum(jnp.cumsum(marks), units.shape[0] - 1)
        tokens = index.first[units][own] + place - (ends - sizes)[own]
        is_token = place < ends[-1]
        return Expanded(index.members[jnp.where(is_token, tokens, 0)], is_token)

    def suffices(
        self, budget: Budget, ranked: Ranked, index: Clusters, keys: Array, q: Array, tokens: Array
    ) -> Array:
        if not isinstance(budget, MassTarget):
            return budget.selected(ranked)
        total = index.sizes.sum()
        if self.stops_by == "samples":
            logits = (q @ keys[tokens].T).astype(ranked.forced_lse.dtype)
            is_token = jnp.arange(tokens.shape[0]) < ranked.sizes.sum()
            scores = self.scores(index, keys, q, total)
            return sampled_counts(
                budget.share, logits, is_token, ranked.scores, scores, q, index, keys,
                ranked.forced_lse,
            ).max()  # fmt: skip
        rows = min(tokens.shape[0], max(64, int(self.exact_head * keys.shape[0])))
        head = (q @ keys[tokens[:rows]].T).astype(ranked.forced_lse.dtype)
        scores = self.scores(index, keys, q, total)
        fits = jax.vmap(
            lambda head, scores, q, lse: self._count(
                budget.share, head, scores, q, lse, index, keys, total, tokens.shape[0]
            )
        )
        return fits(head, scores, q, ranked.forced_lse).max()

    def _count(self, share, head, scores, q, forced_lse, index, keys, total, slots) -> Array:
        """Tokens of the list that one query head needs."""
        n = total.astype(head.dtype)
        exact = jnp.minimum(jnp.maximum(jnp.ceil(self.exact_head * n), 64), n)
        exact = jnp.minimum(exact, head.shape[0])
        place = jnp.arange(1, slots + 1, dtype=head.dtype)
        is_exact = place[: head.shape[0]] <= exact
        x, logits, is_token = segments(scores, q, index, keys)
        largest = jnp.maximum(forced_lse, jnp.where(is_exact, head, -jnp.inf).max())
        largest = jnp.maximum(largest, jnp.where(is_token, logits, -jnp.inf).max())
        y = jnp.where(is_token, jnp.exp(logits - largest), 0).sum(axis=1)
        y = y / jnp.maximum(is_token.sum(axis=1), 1).astype(y.dtype)
        a, b = fit((x[0] + x[1]) / 2, y[:2].mean(), (x[2] + x[3]) / 2, y[2:].mean())
        seen = jnp.pad(jnp.where(is_exact, jnp.exp(head - largest), 0), (0, slots - head.shape[0]))
        y = jnp.where(place <= exact, seen, a / place + b)
        forced = jnp.exp(forced_lse - largest)
        mass = seen.sum() + a * (harmonic(n) - harmonic(exact)) + b * (n - exact)
        before = forced + jnp.cumsum(y) - y
        return ((before < share * (forced + mass)) & (place <= n)).sum(dtype=jnp.int32)

    def tail(self, index: Clusters, q: Array, logits, is_taken: Array, rest: Rest):
        """Every cluster not taken as so many tokens at its centroid with its mean value."""
        if logits is None:
            return super().tail(index, q, logits, is_taken, rest)
        logits = jnp.where(is_taken, -jnp.inf, logits)
        lse = jax.nn.logsumexp(logits, axis=1)
        shares = jnp.exp(logits - jnp.where(lse == -jnp.inf, 0, lse)[:, None])
        return shares.astype(index.values.dtype) @ index.values, lse

    def tail_bytes(self, index: Clusters, q: Array, length) -> Array:
        clusters = self._clustered(length) // self.cluster_size
        return clusters * (index.values.shape[1] * index.values.dtype.itemsize)

    def index_bytes(self, index: Clusters, q: Array, length) -> Array:
        clusters = self._clustered(length) // self.cluster_size
        return clusters * (q.shape[1] * q.dtype.itemsize + 8)

    def estimate_bytes(self, index: Clusters, q: Array, length) -> Array:
        """The keys that every query head of the group looks at, those it then reads among them."""
        capacity = index.members.shape[0]
        if self.stops_by == "samples":
            rows = jnp.int32(estimate_rows(capacity, capacity))
        else:
            exact = jnp.ceil(self.exact_head * length.astype(jnp.float32)).astype(jnp.int32)
            rows = len(PLACES) * TOKENS + jnp.maximum(exact, 64)
        return jnp.minimum(rows, length) * (q.size * q.dtype.itemsize)


def segments(
    scores: Float[Array, "clusters"], q: Float[Array, "key"], index: Clusters, keys: Array
) -> tuple[Array, Array, Array]:
    """Ranks, logits and reality of tokens in the clusters at `PLACES` of the ranked list."""
    weights = index.sizes.astype(scores.dtype)
    wanted = jnp.asarray(PLACES, scores.dtype)[:, None] * weights.sum()
    used = jnp.where(index.sizes > 0, scores, jnp.nan)
    low, high = (jnp.broadcast_to(f(used), (len(PLACES), 1)) for f in (jnp.nanmin, jnp.nanmax))

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        above = jnp.where(scores[None] >= middle, weights[None], 0).sum(axis=1, keepdims=True)
        is_many = above >= wanted  # as many tokens or more: the place lies higher
        return jnp.where(is_many, middle, low), jnp.where(is_many, high, middle)

    low, _ = lax.fori_loop(0, HALVINGS, halve, (low, high))
    own = jnp.argmin(
        jnp.where((scores[None] >= low) & (weights[None] > 0), scores[None], jnp.inf), axis=1
    )
    sizes = index.sizes[own]
    above = jnp.where(scores[None] >= scores[own][:, None], weights[None], 0).sum(axis=1)
    x = jnp.maximum(above - (sizes.astype(scores.dtype) - 1) / 2, 1)
    inside = jnp.arange(TOKENS, dtype=jnp.int32)[None]
    is_token = inside < sizes[:, None]
    tokens = index.members[jnp.where(is_token, index.first[own][:, None] + inside, 0)]
    return x, (keys[tokens] @ q).astype(scores.dtype), is_token


def fit(x1: Array, y1: Array, x2: Array, y2: Array) -> tuple[Array, Array]:
    """a and b >= 0 of y = a / x + b through two points; flat where they coincide."""
    steepness = 1 / x1 - 1 / x2
    a = jnp.where(steepness > 0, (y1 - y2) / jnp.where(steepness > 0, steepness, 1), 0)
    a = jnp.maximum(a, 0)
    return a, jnp.maximum(y1 - a / x1, 0)


def harmonic(n: Array) -> Array:
    """1 + 1/2 + ... + 1/n, to a millionth from n = 8 on; 0 for 0."""
    n_or_1 = jnp.maximum(n, 1)
    value = jnp.log(n_or_1) + 0.5772156649 + 1 / (2 * n_or_1) - 1 / (12 * n_or_1**2)
    return jnp.where(n > 0, value, 0)
