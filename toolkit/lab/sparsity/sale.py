"""SALE's tiles: the map, and one row of it against the threshold.

    keep tile (i, j)  if  max over its pairs of  x^_ts - L_t  >=  log tau

with L_t the exact residual over the sinks and the local keys. What the left side is, in nats, does
not depend on tau: it is found once, and every threshold is a comparison.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from toolkit.attention.sparse.prefill.sale import rounded
from toolkit.experiments.sparse import model
from toolkit.experiments.sparse.model import HEADS
from toolkit.figures import ACCENT, FAINT, look
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Data, View
from toolkit.lab.sparsity.reading import params, read_text
from toolkit.measure.words import in_words

CONTEXT = 1024
QUERY_BLOCK, KEY_BLOCK, SINK, LOCAL = 64, 32, 32, 128
ROWS, COLUMNS = CONTEXT // QUERY_BLOCK, CONTEXT // KEY_BLOCK


class Margins(NamedTuple):
    """One head's tiles."""

    # Largest of x^_ts - L_t in each tile, from 4-bit scores; -inf above the diagonal
    estimated: Float[np.ndarray, "rows columns"]
    exact: Float[np.ndarray, "rows columns"]  # the same, from exact scores
    # Tiles of the sinks and local keys, which are always kept
    always: Bool[np.ndarray, "rows columns"]
    # Share of its queries' softmax in each tile, mean over them
    masses: Float[np.ndarray, "rows columns"]


@functools.cache
def queries_and_keys() -> tuple[np.ndarray, np.ndarray]:
    """Of the first layer for the whole text [heads, time, size]."""
    seen = _projected(params(), jnp.asarray(read_text(CONTEXT).tokens)[None])
    q, k = (np.asarray(rows)[0].swapaxes(0, 1) for rows in (seen.q, seen.k))
    return q, k


@jax.jit
def _projected(params, tokens):
    return model.project(params, 0, model.start(params, tokens))


@functools.cache
def margins(head: int) -> Margins:
    """Every tile of a head of layer 1."""
    q, k = (rows[head] for rows in queries_and_keys())
    q = q * np.float32(q.shape[-1] ** -0.5)
    k = k - k.mean(axis=0)
    mean = q.mean(axis=0)
    four_bits = np.asarray(_four_bits(q - mean, k)) + k @ mean
    query, key = np.arange(CONTEXT)[:, None], np.arange(CONTEXT)[None]
    is_seen = key <= query
    x = np.where(is_seen, q @ k.T, -np.inf)
    start = np.maximum(query // QUERY_BLOCK * QUERY_BLOCK - LOCAL, 0) // KEY_BLOCK
    block = key // KEY_BLOCK
    is_always = (block < SINK // KEY_BLOCK) | (block >= start)
    bound = _residual(np.where(is_always, x, -np.inf))

    def by_tile(of, reduce):
        return reduce(of.reshape(ROWS, QUERY_BLOCK, COLUMNS, KEY_BLOCK), axis=(1, 3))

    estimated, exact = (
        by_tile(np.where(is_seen, scores - bound, -np.inf), np.max) for scores in (four_bits, x)
    )
    weights = np.exp(x - _residual(x))
    always = by_tile(is_always & is_seen, np.any)
    return Margins(estimated, exact, always, by_tile(weights, np.sum) / QUERY_BLOCK)


@jax.jit
def _four_bits(q, k):
    return rounded(q) @ rounded(k).T


def _residual(x: np.ndarray) -> np.ndarray:
    most = x.max(axis=1, keepdims=True)
    return most + np.log(np.exp(x - most).sum(axis=1, keepdims=True))


@dataclass(frozen=True)
class SaleView(View):
    """Which tiles a threshold keeps, and the row looked at."""

    threshold: float
    head: int
    chosen: int  # index of the selected block of queries
    tiles: Margins

    @property
    def kept(self) -> Bool[np.ndarray, "rows columns"]:
        """Tiles that are read."""
        return self.tiles.always | (self.tiles.estimated >= np.log(self.threshold))

    @property
    def by_exact(self) -> Bool[np.ndarray, "rows columns"]:
        """Tiles that exact scores would keep."""
        return self.tiles.always | (self.tiles.exact >= np.log(self.threshold))

    @property
    def causal(self) -> Bool[np.ndarray, "rows columns"]:
        """Tiles with any pair of a query and an earlier key."""
        return np.isfinite(self.tiles.exact)

    @property
    def mass(self) -> float:
        """Share of all queries' softmax that is kept."""
        return float(np.where(self.kept, self.tiles.masses, 0).sum() / ROWS)

    def data(self) -> Data:
        columns = np.flatnonzero(self.causal[self.chosen])
        of = self.tiles
        words = np.where(self.kept, np.where(of.always, "always", "kept"), "dropped")
        return {
            "first key": columns * KEY_BLOCK + 1,
            "margin in 4 bits (nats)": of.estimated[self.chosen, columns],
            "exact margin (nats)": of.exact[self.chosen, columns],
            "tile": words[self.chosen, columns].tolist(),
            "softmax in it (share)": of.masses[self.chosen, columns],
        }

    def sentence(self) -> str:
        # tied: tests/lab/sparsity/test_estimate_views.py::test_tiles_are_those_of_sale
        causal, kept = self.causal, self.kept & self.causal
        wrong = int((kept != (self.by_exact & causal)).sum())
        first = self.chosen * QUERY_BLOCK + 1
        return (
            f"At tau = {self.threshold:g} head {self.head + 1} reads {int(kept.sum())} of "
            f"{int(causal.sum())} tiles of {QUERY_BLOCK} queries x {KEY_BLOCK} keys and keeps "
            f"{in_words(self.mass, 'share')} of the softmax. 4 bits decide {wrong} of them "
            f"otherwise than exact scores would. Queries {first:,} to {first + QUERY_BLOCK - 1:,} "
            f"read {int(kept[self.chosen].sum())} of {int(causal[self.chosen].sum())}."
        )

    def footnote(self) -> str:
        return "Measured here on the retrieval model, layer 1; 32 sink and 128 local keys."


def sale_view(*, threshold: float, head: int, row: int) -> SaleView:
    """The tiles of one head of layer 1 at a threshold; head and row count from 1."""
    return SaleView(threshold, head - 1, row - 1, margins(head - 1))


_LOW, _HIGH = -6.0, 10.0  # nats; margins beyond are drawn here
_KINDS = ListedColormap(["#ffffff", "#eef1f4", "#a8cfe8", "#2f7fb8"])
_THRESHOLDS = (0.008, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_DROPPED, _ALWAYS, _KEPT = 1, 2, 3


class TileMapPlot(Plot):
    """Every tile: dropped, always kept, or kept for its score; crosses: exact scores differ."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_title("Tiles: dark blue kept, pale always", fontsize=10.5)
        axes.set(xlabel="keys", ylabel="queries")
        axes.grid(False)
        axes.set_xticks(np.linspace(-0.5, COLUMNS - 0.5, 5), [f"{256 * n:,}" for n in range(5)])
        axes.set_yticks(np.linspace(-0.5, ROWS - 0.5, 5), [f"{256 * n:,}" for n in range(5)])
        axes.tick_params(labelsize=8)
        self.image_of = self.image((ROWS, COLUMNS), _KINDS, 0, 3)
        self.wrong = self.marks(
            ACCENT, "x", markersize=6, markeredgewidth=1.4, label="4 bits decide otherwise"
        )
        self._row = self.line(color=ACCENT, linewidth=1.6, clip_on=False)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), fontsize=8.5)

    def show(self, view: SaleView) -> None:
        kinds = np.where(view.kept, _KEPT, _DROPPED)
        kinds = np.where(view.tiles.always, _ALWAYS, kinds)
        self.image_of.set_data(np.where(view.causal, kinds, 0))
        rows, columns = np.nonzero((view.kept != view.by_exact) & view.causal)
        self.wrong.set_data(columns, rows)
        left, right, top, bottom = -0.5, COLUMNS - 0.5, view.chosen - 0.5, view.chosen + 0.5
        self._row.set_data([left, right, right, left, left], [top, top, bottom, bottom, top])


class MarginPlot(Plot):
    """One row of tiles: how far the largest score lies above each query's bound, against tau."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_title("The framed row: largest score over the bound", fontsize=10.5)
        axes.set(xlim=(-0.5, COLUMNS - 0.5), ylim=(_LOW, _HIGH), xlabel="keys", ylabel="nats")
        axes.set_xticks(np.linspace(-0.5, COLUMNS - 0.5, 5), [f"{256 * n:,}" for n in range(5)])
        axes.tick_params(labelsize=8)
        self.always = self.marks(FAINT, "s", markersize=6, label="always kept")
        self.estimated = self.marks(look("full").colour, "o", markersize=6, label="in 4 bits")
        self.exact = self.marks(
            look("gdn").colour, "_", markersize=9, markeredgewidth=1.8, label="exact"
        )
        self.bound = self.line(color=ACCENT, linewidth=1.4, linestyle="--", label="log tau")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=4, fontsize=8.5)

    def show(self, view: SaleView) -> None:
        of, at = view.tiles, np.flatnonzero(view.causal[view.chosen])
        is_always = of.always[view.chosen, at]
        estimated, exact = (
            np.clip(x[view.chosen, at], _LOW, _HIGH) for x in (of.estimated, of.exact)
        )
        self.always.set_data(at[is_always], estimated[is_always])
        self.estimated.set_data(at[~is_always], estimated[~is_always])
        self.exact.set_data(at, exact)
        self.bound.set_data([-0.5, COLUMNS - 0.5], [np.log(view.threshold)] * 2)


class SalePanel(Panel):
    """Which tiles SALE keeps at a threshold, and why.

    Example:
        >>> panel = SalePanel(threshold=0.1)
        >>> panel.threshold = 10.0
    """

    title = "SALE: which tiles of a prompt are worth reading?"
    figure_size = (9.6, 4.9)
    opening_seconds = 2
    has_palette = True

    threshold = Choice(
        "Tau", 3.0, {f"{tau:g}": tau for tau in _THRESHOLDS},
        explanation="Of the sinks' and local keys' sum of exponentials",
    )  # fmt: skip
    head = Number("Head", 1, low=1, high=HEADS, explanation="Of layer 1")
    row = Number(
        "Row", 12, low=1, high=ROWS,
        explanation=f"Block of {QUERY_BLOCK} queries; keys come in blocks of {KEY_BLOCK}",
    )  # fmt: skip

    compute = staticmethod(sale_view)
    places = (
        (TileMapPlot, (0.075, 0.29, 0.36, 0.61)),
        (MarginPlot, (0.52, 0.29, 0.45, 0.61)),
    )
