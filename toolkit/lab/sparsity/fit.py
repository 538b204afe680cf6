"""Tactic's fit: the number of tokens it reads, and the number that would have sufficed.

The fit and its two segments come from the library. The exact exponentials, which it does not see,
are drawn in the order of the clusters and in the best order.
"""

import functools
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes

from toolkit.attention.sparse.decode.tactic import Tactic, fit, harmonic, segments
from toolkit.experiments.sparse.model import HEADS
from toolkit.figures import ACCENT, FAINT, INK, look
from toolkit.figures.axes import set_limits
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Data, View
from toolkit.lab.sparsity import reading
from toolkit.measure.words import in_words

POINTS = 160  # at which the exact list is drawn, evenly spaced in log x


@dataclass(frozen=True)
class FitView(View):
    """Tactic's list for one question, and where it stops."""

    target: float  # the requested share of the softmax
    context: int
    # Weights of the listed tokens, in Tactic's order, over the largest [listed]
    exact: Float[np.ndarray, "listed"]
    curve: Float[np.ndarray, "listed"]  # Tactic's fit to them
    count: int  # listed tokens read; `needed` suffice in this order, `fewest` in the best order
    forced: float  # weight of sinks and recent tokens, over the largest
    seen: tuple[float, float, float]  # places of the end of the exact head and of the two segments
    levels: tuple[float, float]  # mean weights of the two segments

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
        # tied: tests/lab/sparsity/test_estimate_views.py::test_tactic_stops_where_a_step_stops
        got = in_words(float(self.mass[self.count]), "share")
        return (
            f"Asked for {in_words(self.target, 'share')} of the softmax, Tactic's fit reads "
            f"{self.count:,} of {len(self.exact):,} listed tokens and gets {got}. In this order "
            f"{self.needed:,} would do, in the best order {self.fewest:,}. Sinks and "
            f"recent tokens, always read, hold {in_words(self.forced / self.total, 'share')}."
        )

    def footnote(self) -> str:
        return "Measured here on the retrieval model, layer 1; weights over the largest one."


@reading.keeping_programs()
def fit_view(*, target: float, context: int, head: int, question: int) -> FitView:
    """Tactic's stopping point for one question of layer 1; head and question count from 1."""
    exact, curve, total, forced, seen, levels = _listed(context, head - 1, question - 1)
    before = forced + np.cumsum(curve) - curve
    count = int((before < target * (forced + total)).sum())
    return FitView(target, context, exact, curve, count, forced, seen, levels)


@functools.lru_cache(maxsize=32)
def _listed(context: int, head: int, question: int):
    """The list of one question, what is fitted to it, and at which places."""
    index, text = reading.index_of("tactic", context), reading.read_text(context)
    selector = index.selector
    assert isinstance(selector, Tactic)
    asked = reading.ask(reading.params(), 0, text.first)
    q, k = np.asarray(asked.q), np.asarray(asked.k)
    scale = q.shape[-1] ** -0.5
    keys, query = text.keys[0][head], scale * q[question, head]
    scores = reading.scores_of(index, 0, text.keys[0], asked.q)[head, question]
    start = reading.first_recent(index, 0, 0)
    tokens, sizes = reading.units_of("tactic", context, 0, head, start)
    usable = np.flatnonzero(sizes)
    order = usable[reading.best(scores[usable], len(usable))]
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


_LEAST = 1e-7  # weights below are drawn here


class ListPlot(Plot):
    """Weights in Tactic's order, the fit through two segments, and where reading stops."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Weights in the order of the clusters")
        axes.set(xscale="log", yscale="log", ylim=(_LEAST, 2), xlabel="place in the list")
        axes.set_ylabel("weight, over the largest")
        self.exact = self.marks(FAINT, "o", markersize=3, label="exact")
        self.fit = self.line(color=look("full").colour, linewidth=1.8, label="a / x + b")
        self.looked_at = self.marks(
            look("gdn").colour, "D", markersize=7, label="the two segments looked at"
        )
        self.stop = self.line(color=ACCENT, linewidth=1.6, linestyle="--", label="stops here")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, fontsize=8.5)

    def show(self, view: FitView) -> None:
        at = view.places()
        self.exact.set_data(at + 1, np.maximum(view.exact[at], _LEAST))
        fitted = at[at >= view.seen[0]]
        self.fit.set_data(fitted + 1, np.maximum(view.curve[fitted], _LEAST))
        self.looked_at.set_data(view.seen[1:], np.maximum(view.levels, _LEAST))
        self.stop.set_data([max(view.count, 1)] * 2, [_LEAST, 2])
        set_limits(self.axes, x=(0.9, 1.1 * len(view.exact)))


class MassPlot(Plot):
    """Share of the softmax against the number of tokens, and the requested share."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Softmax held")
        axes.set(xscale="log", ylim=(0, 1.02), xlabel="listed tokens read")
        self.own = self.line(color=look("full").colour, label="in this order")
        self.best = self.line(**look("window").line, linewidth=1.6, label="in the best order")
        self.target = self.line(color=INK, linewidth=1, linestyle=":", label="asked for")
        self.stop = self.line(color=ACCENT, linewidth=1.6, linestyle="--")
        self.got = self.marks(ACCENT, "o", markersize=7, label="got")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, fontsize=8.5)

    def show(self, view: FitView) -> None:
        at = view.places() + 1
        self.own.set_data(at, view.mass[at])
        self.best.set_data(at, view.best_mass[at])
        right = 1.1 * len(view.exact)
        self.target.set_data([0.9, right], [view.target] * 2)
        stop = max(view.count, 1)
        self.stop.set_data([stop] * 2, [0, 1.02])
        self.got.set_data([stop], [view.mass[view.count]])
        set_limits(self.axes, x=(0.9, right))


class FitPanel(Panel):
    """Tactic's stopping point: its fit and the exact list.

    Example:
        >>> view = FitPanel(target=0.9, context=1024).view
        >>> view.fewest <= view.needed
        True
    """

    title = "Tactic: how much must be read for a share of the softmax?"
    figure_size = (9.6, 4.9)
    opening_seconds = 4
    has_palette = True

    target = Number("Share", 0.9, low=0.5, high=0.99, step=0.01, explanation="Of the softmax")
    context = Choice("Context", 4096, {f"{n:,} tokens": n for n in reading.CONTEXTS})
    head = Number("Head", 1, low=1, high=HEADS, explanation="Of layer 1")
    question = Number("Question", 3, low=1, high=reading.QUESTIONS)

    compute = staticmethod(fit_view)
    places = (
        (ListPlot, (0.085, 0.29, 0.45, 0.62)),
        (MassPlot, (0.6, 0.29, 0.385, 0.62)),
    )
