"""SALE's tiles: scores in 4 bits against a bound of every query, tile by tile. Pure functions.

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

from toolkit.attention.sparse.prefill.sale import rounded
from toolkit.experiments.sparse import model
from toolkit.lab.kit.view import Data, View
from toolkit.lab.sparsity.reading import params, read_text
from toolkit.measure.words import in_words

CONTEXT = 1024
QUERY_BLOCK, KEY_BLOCK, SINK, LOCAL = 64, 32, 32, 128
ROWS, COLUMNS = CONTEXT // QUERY_BLOCK, CONTEXT // KEY_BLOCK


class Margins(NamedTuple):
    """One head's tiles.

    Attributes:
        estimated: largest of x^_ts - L_t in each tile, from 4-bit scores; -inf above the diagonal.
        exact: the same, from exact scores.
        always: tiles of the sinks and local keys, which are always kept.
        masses: share of its queries' softmax in each tile, mean over them.
    """

    estimated: Float[np.ndarray, "rows columns"]
    exact: Float[np.ndarray, "rows columns"]
    always: Bool[np.ndarray, "rows columns"]
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
    """Which tiles a threshold keeps, and the row looked at.

    Attributes:
        chosen: index of the selected block of queries.
        kept, by_exact: tiles read, and those that exact scores would keep.
    """

    threshold: float
    head: int
    chosen: int
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
        words = [
            "always"
            if of.always[self.chosen, c]
            else "kept"
            if self.kept[self.chosen, c]
            else "dropped"
            for c in columns
        ]
        return {
            "first key": columns * KEY_BLOCK + 1,
            "margin in 4 bits (nats)": of.estimated[self.chosen, columns],
            "exact margin (nats)": of.exact[self.chosen, columns],
            "tile": words,
            "softmax in it (share)": of.masses[self.chosen, columns],
        }

    def sentence(self) -> str:
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
