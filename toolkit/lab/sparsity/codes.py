"""Keys in a few bits: estimates of scores by hashes and by product-quantised codes.

Two hyperplane hashes of r bits that differ in h of them belong to vectors some pi h / r apart, so

    cos(angle) ~ sin(pi/2 (1 - 2 h / r))                   (SimHash, for random planes)

and a product-quantised key gives q . k ~ sum_j table_j[code_j], one look-up per part.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.axes import Axes

from toolkit.attention.sparse import build
from toolkit.attention.sparse.decode.hata import HATA, WORD
from toolkit.attention.sparse.decode.pqcache import PQCache
from toolkit.experiments.sparse.model import HEADS
from toolkit.figures import ACCENT, INK, SIGNED, WEIGHTS
from toolkit.figures.axes import set_limits
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Data, View
from toolkit.lab.sparsity.reading import CONTEXTS, QUESTIONS, ask, name_of, params, read_text
from toolkit.measure.words import in_words

TOP, LISTED, BINS = 64, 12, 48
CODE_BITS = 6


class Codes(NamedTuple):
    """The codes of both systems for layer 1, and the queries of the questions."""

    # Agreement of hash bits with each question, -1 to 1
    alike: Float[np.ndarray, "heads questions tokens"]
    # Cosines of questions and keys relative to their mean
    cosines: Float[np.ndarray, "heads questions tokens"]
    scores: Float[np.ndarray, "heads questions tokens"]  # HATA's scores
    # asked, kept: hash bits of the questions and of the keys
    asked: Bool[np.ndarray, "heads questions bits"]
    kept: Bool[np.ndarray, "heads bits tokens"]
    # table, codes: PQCache's table, and the codes of every key
    table: Float[np.ndarray, "heads questions parts clusters"]
    codes: Int[np.ndarray, "heads parts tokens"]
    # estimates, exact: PQCache's estimates of the scores, and the true scores
    estimates: Float[np.ndarray, "heads questions tokens"]
    exact: Float[np.ndarray, "heads questions tokens"]


@functools.lru_cache(maxsize=4)
def codes_of(context: int, bits: int, parts: int) -> Codes:
    """Hashes and codes of a text; remembered."""
    text, q = read_text(context), ask(params(), 0, read_text(context).first).q
    keys, length = text.keys[0], jnp.full(1, context, jnp.int32)
    hata, quantised = HATA(bits=bits), PQCache(parts=parts, bits=CODE_BITS)
    hashes, index = (
        build(selector, keys[None], text.values[0][None], length).index
        for selector in (hata, quantised)
    )
    scaled = np.asarray(q).swapaxes(0, 1) * q.shape[-1] ** -0.5
    centred = np.asarray(keys) - np.asarray(hashes.centre)[0][:, None]
    norms = np.asarray(hashes.norms[0].view(jnp.bfloat16).astype(jnp.float32))
    products = np.matmul(scaled, centred.swapaxes(1, 2))
    lengths = np.linalg.norm(scaled, axis=-1)[..., None] * np.linalg.norm(centred, axis=-1)[:, None]
    own = np.stack([_unpacked(words).T for words in np.asarray(_hashes(hata, scaled))])
    of_keys = np.stack([_unpacked(words) for words in np.asarray(hashes.words)[0]])
    alike = np.asarray(_alike(own, of_keys))
    pairs = np.asarray(index.codes)[0].astype(int)
    codes = np.stack([pairs >> CODE_BITS, pairs % 2**CODE_BITS], axis=2).reshape(
        len(keys), parts, context
    )
    cut = scaled.reshape(*scaled.shape[:2], parts, -1)
    table = np.einsum("hqpd,hpcd->hqpc", cut, np.asarray(index.centroids)[0])
    looked_up = [np.take_along_axis(table[:, :, j], codes[:, j][:, None], axis=2)
                 for j in range(parts)]  # fmt: skip
    exact = np.matmul(scaled, np.asarray(keys).swapaxes(1, 2))
    return Codes(
        alike, products / np.maximum(lengths, 1e-9), alike * norms[:, None], own, of_keys, table,
        codes, np.sum(looked_up, axis=0), exact,
    )  # fmt: skip


@jax.jit
def _hashes(hata, rows):
    return jax.vmap(hata.hashes)(rows)


@jax.jit
def _alike(asked, stored):
    """Mean over the bits of 1 where they are the same and -1 where not."""

    def head(bits):
        own, of_keys = (2 * x.astype(jnp.float32) - 1 for x in bits)
        return own @ of_keys / asked.shape[2]

    # In turn: as numbers, the bits take 32 times the room.
    return jax.lax.map(head, (asked, stored))


def _unpacked(words: np.ndarray) -> np.ndarray:
    """Bits [bits, rows] of words [words, rows]."""
    bits = (words[:, None] >> np.arange(WORD, dtype=np.uint32)[None, :, None]) & 1
    return bits.reshape(-1, words.shape[1]).astype(bool)


@dataclass(frozen=True)
class CodesView(View):
    """Both estimates for one question, and one token's bits and codes."""

    rank: int
    token: int  # the selected token, the `rank`-th heaviest
    name: str
    # alike, cosines: agreement of hash bits and cosine of every token
    alike: Float[np.ndarray, "tokens"]
    cosines: Float[np.ndarray, "tokens"]
    # estimates, exact: PQCache's scores and the true ones
    estimates: Float[np.ndarray, "tokens"]
    exact: Float[np.ndarray, "tokens"]
    bits: Bool[np.ndarray, "bits"]  # whether each hash bit of the token equals the question's
    # products, codes: products of the question with every centroid, and the token's codes
    products: Float[np.ndarray, "parts clusters"]
    codes: Int[np.ndarray, "parts"]
    recall: dict[str, float]  # share of the `TOP` heaviest tokens among the `TOP` that rank highest
    heaviest: Int[np.ndarray, "listed"]  # tokens in falling order of weight
    # Smallest and largest of the four numbers over all questions to the head
    ends: dict[str, tuple[float, float]]

    def counts(self, x: str, y: str) -> tuple[np.ndarray, tuple[float, float, float, float]]:
        """Tokens by two numbers: log(1 + count) in `BINS` x `BINS` cells, and where these lie.

        The same for all questions of a text, so that they compare.
        """
        numbers, ends = (getattr(self, x), getattr(self, y)), (self.ends[x], self.ends[y])
        # As `np.histogram2d`, in a tenth of its time.
        column, row = (
            np.minimum((values - low) * (BINS / max(high - low, 1e-9)), BINS - 1).astype(int)
            for values, (low, high) in zip(numbers, ends, strict=True)
        )
        found = np.bincount(BINS * row + column, minlength=BINS**2).reshape(BINS, BINS)
        return np.log1p(found), (*ends[0], *ends[1])

    def data(self) -> Data:
        at = self.heaviest
        return {
            "heaviest": np.arange(len(at)) + 1, "at": at + 1, "true score": self.exact[at],
            "by PQCache": self.estimates[at], "bits shared (share)": (1 + self.alike[at]) / 2,
            "cosine": self.cosines[at],
        }  # fmt: skip

    def sentence(self) -> str:
        shared = int(self.bits.sum())
        recalls = " and ".join(
            f"{name} {in_words(share, 'share')}" for name, share in self.recall.items()
        )
        return (
            f"Token {self.rank} by weight, {self.name}: {shared} of {len(self.bits)} hash bits are "
            f"the question's, cosine {self.cosines[self.token]:.2f}; its score is "
            f"{self.exact[self.token]:.2f}, by PQCache {self.estimates[self.token]:.2f}, from "
            f"codes {', '.join(map(str, self.codes))}. Of the {TOP} heaviest tokens, the "
            f"best {TOP} by estimate hold: {recalls}."
        )

    def footnote(self) -> str:
        return "Measured here on the retrieval model, layer 1; random hash planes, keys centred."


def codes_view(
    *, bits: int, parts: int, context: int, head: int, question: int, rank: int
) -> CodesView:
    """Estimates of one question of layer 1; head, question and rank count from 1."""
    found, text = codes_of(context, bits, parts), read_text(context)
    at = head - 1, question - 1
    order = np.argsort(-found.exact[at], kind="stable")
    token = int(order[rank - 1])
    recall = {
        name: len(set(order[:TOP]) & set(np.argsort(-ranked[at], kind="stable")[:TOP])) / TOP
        for name, ranked in (("HATA", found.scores), ("PQCache", found.estimates))
    }
    return CodesView(
        rank, token, f"{name_of(text.tokens[token])} at {token + 1:,}", found.alike[at],
        found.cosines[at], found.estimates[at], found.exact[at],
        found.asked[at] == found.kept[head - 1, :, token], found.table[at],
        found.codes[head - 1][:, token], recall, order[:LISTED],
        _ends(context, bits, parts, head - 1),
    )  # fmt: skip


@functools.lru_cache(maxsize=8)
def _ends(context: int, bits: int, parts: int, head: int) -> dict[str, tuple[float, float]]:
    found = codes_of(context, bits, parts)
    return {
        name: (float(values[head].min()), float(values[head].max()))
        for name in ("alike", "cosines", "estimates", "exact")
        for values in (getattr(found, name),)
    }


_MOST_PARTS, _LINES = 4, 8


class CountPlot(Plot):
    """All tokens by an estimate and the truth, counted in cells; the chosen one is marked."""

    def __init__(self, axes: Axes, names: tuple[str, str], titles: tuple[str, str, str]) -> None:
        super().__init__(axes)
        self._pair, self._is_hash = names, names[0] == "alike"
        axes.set(title=titles[0], xlabel=titles[1], ylabel=titles[2])
        axes.grid(False)
        axes.locator_params(axis="y", nbins=5)  # for short words beside the axis
        self.image_of = self.image((BINS, BINS), WEIGHTS, 0, 1, origin="lower")
        label = "SimHash law" if self._is_hash else "exact"
        self.law = self.line(color=INK, linewidth=1.1, linestyle="--", label=label)
        self.mark = self.marks(ACCENT, "o", fillstyle="none", markersize=9, label="the token")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, fontsize=8.5)

    def show(self, view: CodesView) -> None:
        counts, extent = view.counts(*self._pair)
        self.image_of.set(data=counts, extent=extent, clim=(0, counts.max()))
        left, right, low, high = extent
        x = np.linspace(left, right, 40)
        self.law.set_data(x, np.sin(np.pi / 2 * x) if self._is_hash else x)
        xs, ys = (getattr(view, name) for name in self._pair)
        self.mark.set_data([xs[view.token]], [ys[view.token]])
        pad = 0.05 * (right - left), 0.05 * (high - low)
        set_limits(self.axes, x=(left - pad[0], right + pad[0]),
                   y=(low - pad[1], high + pad[1]))  # fmt: skip


class BitsPlot(Plot):
    """The token's hash, bit by bit: dark where it is the question's."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_title("Bits of the token: blue if also the question's", fontsize=10)
        axes.set(xticks=[], yticks=[])
        axes.grid(False)
        self.image_of = self.image((_LINES, 1), WEIGHTS, 0, 1.4)

    def show(self, view: CodesView) -> None:
        self.image_of.set_data(view.bits.reshape(_LINES, -1).astype(float))


class TablePlot(Plot):
    """The question's table: its product with every centroid, and which are the token's."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_title("Products with the centroids; x: the token's codes", fontsize=10)
        axes.set_xlabel("centroid", fontsize=9)
        axes.set_yticks(range(_MOST_PARTS), [f"part {n + 1}" for n in range(_MOST_PARTS)])
        axes.set_xticks((0, 16, 32, 48, 63))
        axes.tick_params(length=0, labelsize=8)
        axes.grid(False)
        self.image_of = self.image((_MOST_PARTS, 2**CODE_BITS), SIGNED, -1, 1)
        self.crosses = self.marks(INK, "x", markersize=7, markeredgewidth=1.6)

    def show(self, view: CodesView) -> None:
        parts, clusters = view.products.shape
        shown = np.full((_MOST_PARTS, clusters), np.nan)
        shown[:parts] = view.products
        most = np.abs(view.products).max()
        self.image_of.set(data=shown, clim=(-most, most))
        self.crosses.set_data(view.codes, range(parts))


class CodesPanel(Panel):
    """Hash bits and product-quantised codes against true scores, and one token's own.

    Example:
        >>> panel = CodesPanel(bits=32, context=1024)
        >>> panel.view.bits.shape
        (32,)
    """

    title = "Keys in a few bits: how well do they rank?"
    figure_size = (9.6, 6.4)
    opening_seconds = 4
    has_palette = True

    bits = Choice("Hash", 128, {f"{n} bits": n for n in (32, 128, 512)})
    parts = Choice(
        "Codes", 2, {f"{n} parts of {CODE_BITS} bits": n for n in (2, _MOST_PARTS)}
    )  # fmt: skip
    context = Choice("Context", 4096, {f"{n:,} tokens": n for n in CONTEXTS})
    head = Number("Head", 1, low=1, high=HEADS, explanation="Of layer 1")
    question = Number("Question", 3, low=1, high=QUESTIONS)
    rank = Number("Token", 1, low=1, high=TOP, explanation="By weight, the heaviest first")

    compute = staticmethod(codes_view)

    places = (
        (CountPlot, (0.075, 0.51, 0.4, 0.42), ("alike", "cosines"),
         ("HATA: bits shared", "bits shared, -1 to 1", "cosine with the key")),
        (CountPlot, (0.58, 0.51, 0.4, 0.42), ("estimates", "exact"),
         ("PQCache: rounded keys", "score by the codes", "true score")),
        (BitsPlot, (0.075, 0.13, 0.4, 0.15)),
        (TablePlot, (0.58, 0.13, 0.4, 0.15)),
    )  # fmt: skip
