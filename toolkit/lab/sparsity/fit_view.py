"""How Tactic decides how much to read: its fit of a / x + b against the exact list. Pure functions.

The fit and its two segments come from the library. The exact exponentials, which it does not see,
are drawn in the order of the clusters and in the best order.
"""

import functools
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float, Int

from toolkit.attention.sparse.decode.tactic import Tactic, fit, harmonic, segments
from toolkit.lab.kit.view import Data, View
from toolkit.lab.sparsity.reading import (
    ask,
    best,
    first_recent,
    index_of,
    params,
    read_text,
    scores_of,
    units_of,
)
from toolkit.measure.words import in_words

POINTS = 160  # at which the exact list is drawn, evenly spaced in log x


@dataclass(frozen=True)
class FitView(View):
    """Tactic's list for one question, and where it stops.

    Attributes:
        target: the requested share of the softmax.
        exact: weights of the listed tokens, in Tactic's order, over the largest [listed].
        curve: Tactic's fit to them.
        count: listed tokens read; `needed` suffice in this order, `fewest` in the best order.
        forced: weight of sinks and recent tokens, over the largest.
        seen: places of the end of the exact head and of the two segments.
        levels: mean weights of the two segments.
    """

    target: float
    context: int
    exact: Float[np.ndarray, "listed"]
    curve: Float[np.ndarray, "listed"]
    count: int
    forced: float
    seen: tuple[float, float, float]
    levels: tuple[float, float]

    @property
    def total(self) -> float:
        """All weights, those of the sinks and recent tokens with them."""
        return self.forced + float(self.exact.sum())

    @property
    def mass(self) -> Float[np.ndarray, "listed+1"]:
        """Share of the softmax held after each number of listed tokens, none first."""
        return (self.forced + np.r_[0, np.cumsum(self.exact)]) / self.total

    @property
    def best_mass(self) -> Float[np.ndarray, "listed+1"]:
        """The same, if the list were sorted."""
        ordered = np.sort(self.exact)[::-1]
        return (self.forced + np.r_[0, np.cumsum(ordered)]) / self.total

    @property
    def needed(self) -> int:
        """Listed tokens that reach the target in this order."""
        return _first_at(self.mass, self.target)

    @property
    def fewest(self) -> int:
        """Listed tokens that reach it in the best order."""
        return _first_at(self.best_mass, self.target)

    def places(self) -> Int[np.ndarray, "points"]:
        """Places of the list that are drawn, from 0."""
        return np.unique(np.geomspace(1, len(self.exact), POINTS).astype(int)) - 1

    def data(self) -> Data:
        at = self.places()
        return {
            "place": at + 1,
            "weight": self.exact[at],
            "fit": self.curve[at],
            "mass held (share)": self.mass[at + 1],
            "in the best order (share)": self.best_mass[at + 1],
        }

    def sentence(self) -> str:
        got = in_words(float(self.mass[self.count]), "share")
        return (
            f"Asked for {in_words(self.target, 'share')} of the softmax, Tactic's fit reads "
            f"{self.count:,} of {len(self.exact):,} listed tokens and gets {got}. In this order "
            f"{self.needed:,} would do, in the best order {self.fewest:,}. Sinks and "
            f"recent tokens, always read, hold {in_words(self.forced / self.total, 'share')}."
        )

    def footnote(self) -> str:
        return "Measured here on the retrieval model, layer 1; weights over the largest one."


def fit_view(*, target: float, context: int, head: int, question: int) -> FitView:
    """Tactic's stopping point for one question of layer 1; head and question count from 1."""
    exact, curve, total, forced, seen, levels = _listed(context, head - 1, question - 1)
    before = forced + np.cumsum(curve) - curve
    count = int((before < target * (forced + total)).sum())
    return FitView(target, context, exact, curve, count, forced, seen, levels)


@functools.lru_cache(maxsize=32)
def _listed(context: int, head: int, question: int):
    """The list of one question, what is fitted to it, and at which places."""
    index, text = index_of("tactic", context), read_text(context)
    selector = index.selector
    assert isinstance(selector, Tactic)
    asked = ask(params(), 0, text.first)
    q, k = np.asarray(asked.q), np.asarray(asked.k)
    scale = q.shape[-1] ** -0.5
    keys, query = text.keys[0][head], scale * q[question, head]
    scores = scores_of(index, 0, text.keys[0], asked.q)[head, question]
    start = first_recent(index, 0, 0)
    tokens, sizes = units_of("tactic", context, 0, head, start)
    usable = np.flatnonzero(sizes)
    order = usable[best(scores[usable], len(usable))]
    firsts = np.cumsum(sizes) - sizes
    listed = np.concatenate([tokens[firsts[u] : firsts[u] + sizes[u]] for u in order])

    logits = np.r_[np.asarray(keys) @ query, query @ k[question, head]]
    largest = logits.max()
    weights = np.exp((logits - largest).astype(float))
    forced = np.r_[weights[: selector.sinks], weights[start:]].sum()
    exact = weights[listed]
    n = len(listed)
    head_end = min(max(int(np.ceil(np.float32(selector.exact_head) * n)), 64), n)
    found = _segments(scores, query, index.indices[0], keys, head)
    x, looked_at, is_token = (np.asarray(y) for y in found)
    y = np.where(is_token, np.exp(looked_at - largest), 0).sum(axis=1) / is_token.sum(axis=1)
    x, levels = x.reshape(2, 2).mean(axis=1), y.reshape(2, 2).mean(axis=1)
    a, b, rest = (float(z) for z in _fit(*x, *levels, np.float32(n), np.float32(head_end)))
    place = np.arange(1, n + 1)
    curve = np.where(place <= head_end, exact, a / place + b)
    total = exact[:head_end].sum() + a * rest + b * (n - head_end)
    seen = (head_end, float(x[0]), float(x[1]))
    return exact, curve, total, float(forced), seen, (float(levels[0]), float(levels[1]))


@jax.jit
def _segments(scores, query, index, keys, head):
    return segments(scores, query, jax.tree.map(lambda x: x[head], index), keys)


@jax.jit
def _fit(x1, x2, y1, y2, n, head_end):
    return *fit(x1, y1, x2, y2), harmonic(n) - harmonic(head_end)


def _first_at(mass: np.ndarray, target: float) -> int:
    return int(min(np.searchsorted(mass, target - 1e-6), len(mass) - 1))
