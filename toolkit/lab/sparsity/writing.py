"""A cache with too little room while a text is written: which tokens are read, and which are gone.

No training: keys are those of `word_key`, and a word asks for its like. Values are one-hot, so that
a step's output is the weight of every token that it read.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from toolkit.attention import sparse
from toolkit.figures import ACCENT, look
from toolkit.figures.axes import set_limits
from toolkit.lab.attention.reading import MAX_TOKENS, SHARPNESS, word_keys
from toolkit.lab.kit.controls import Choice, Number, Words
from toolkit.lab.kit.played import PlayedPanel
from toolkit.lab.kit.plot import Drag, Plot
from toolkit.lab.kit.scene import Grid, Scene
from toolkit.lab.kit.text import TextView, looked_at
from toolkit.lab.kit.view import Data
from toolkit.measure.words import counted

TEXT = (
    "the key is red and the door is green so the guard asks what is the key and we say the key "
    "is red"
)
EVICTING = ("h2o", "tova", "snapkv")
SYSTEMS = {
    "H2O: evicts what was weighed least in all": "h2o",
    "TOVA: evicts what was weighed least last": "tova",
    "SnapKV: evicts by the prompt's end": "snapkv",
    "Quest: reads pages, keeps all": "quest",
    "window: the first and the newest": "window",
    "oracle: the largest scores": "oracle",
}
ACROSS = 6  # words of a line


@functools.lru_cache(64)
def written(
    words: tuple[str, ...], system: str, budget: int, prompt: int
) -> tuple[Float[np.ndarray, "time time"], Float[np.ndarray, "time time"]]:
    """Weights of what each word of the text read, and of softmax attention to everything: rows of
    the prompt are those of softmax."""
    count = len(words)
    keys = jnp.asarray(word_keys(words, MAX_TOKENS))[None, None]
    queries, values = SHARPNESS * keys, jnp.eye(MAX_TOKENS)[None, None]
    products = np.asarray(queries @ keys.mT)[0, 0, :count, :count]
    scores = np.where(np.tri(count, dtype=bool), products, -np.inf)
    full = np.exp(scores - scores.max(1, keepdims=True))
    full /= full.sum(1, keepdims=True)
    small = {"page_size": 2} if system == "quest" else {}
    selector = sparse.SELECTORS[system](sinks=int(system == "window"), recent=1, **small)
    known = {"queries": queries} if selector.sees_queries else {}
    cache = sparse.build(selector, keys, values, jnp.full(1, prompt, jnp.int32), scale=1.0, **known)
    rows = [*full[:prompt]]
    for place in range(prompt, count):
        at = (x[:, :, place] for x in (queries, keys, values))
        out, cache = step(selector, cache, np.int32(budget), *at)
        rows.append(np.asarray(out)[:count])
    return np.array(rows), full


@dataclass(frozen=True, eq=False)
class _GivenTokens(sparse.FixedTokens):
    """As many tokens as a program is given, so that another budget is no other program."""

    given: Any

    def count(self, length: Any, head: Any) -> Any:
        return self.given


@functools.partial(jax.jit, static_argnums=0)
def step(selector: Any, cache: Any, tokens: Any, q: Any, k: Any, v: Any) -> Any:
    """What one more token reads, and the cache after it."""
    cache = sparse.update(selector, cache, k, v)
    budget = _GivenTokens(MAX_TOKENS, tokens)
    found = sparse.decode_step(cache, q, selector, budget, scale=1.0)
    if found.log_weights is not None:
        cache = sparse.observe(selector, cache, found)
    return found.out[0, 0], cache


@dataclass(frozen=True)
class WritingView(TextView):
    """A text that is written with a small cache."""

    system: str
    budget: int
    prompt: int
    weights: Float[np.ndarray, "time time"]  # what each word read [time, time]
    full: Float[np.ndarray, "time time"]  # what softmax attention to everything would read

    @property
    def kept(self) -> Float[np.ndarray, "time"]:
        """Share of the full softmax that lies on what was read, word by word."""
        return np.where(self.weights > 0, self.full, 0).sum(1)

    def lines(
        self, through: Float[np.ndarray, "time time"]
    ) -> Float[np.ndarray, "time rows across"]:
        """Numbers by word, in lines; inf after the text."""
        count = len(self.words)
        rows = -(-count // ACROSS)
        cells = np.full((count, rows * ACROSS), np.inf)
        cells[:, :count] = through
        return cells.reshape(count, rows, ACROSS)

    def read(self) -> Float[np.ndarray, "time time"]:
        """Weights; NaN: evicted, inf: not there yet."""
        gone = np.nan if self.system in EVICTING else 0.0
        cells = np.where(self.weights > 0, self.weights, gone)
        cells[np.triu_indices(len(cells), 1)] = np.inf
        return cells

    def data(self) -> Data:
        return {
            "word": self.words,
            "tokens read": [*map(int, (self.weights > 0).sum(1))],
            "of the softmax (share)": [*map(float, self.kept)],
        }

    def sentence(self) -> str:
        worst = int(self.kept.argmin())
        return (
            f"{self.system}, {counted(self.budget, 'token')} of the cache, from word "
            f"{self.prompt + 1} on: at “{self.words[self.token]}” (word {self.token + 1}) it reads "
            f"{counted(int((self.weights[self.token] > 0).sum()), 'token')}, which hold "
            f"{self.kept[self.token]:.0%} of the full softmax; least, {self.kept[worst]:.0%}, at "
            f"“{self.words[worst]}” (word {worst + 1}). Measured here; nothing is trained."
            f"{self.left_out_in_words}"
        )

    def footnote(self) -> str:
        return "Measured here, with fixed random keys; nothing is trained. Crossed out: evicted."


class KeptPlot(Plot):
    """The share of the full softmax on what is read, over the words above."""

    drag = Drag("token", "x", -0.5)

    is_timed = True

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Of the full softmax, on what is read", grid="y")
        axes.set(ylim=(0, 1.06), xticks=[], yticks=(0, 0.5, 1), yticklabels=("0", "½", "1"))
        self.kept = self.line(drawstyle="steps-post", **look("full").line)
        self._word = self.marks(ACCENT, "v", markersize=7, clip_on=False)

    def show(self, view: WritingView) -> None:
        count = len(view.words)
        self.kept.set_data(range(count + 1), [*view.kept, view.kept[-1]])
        self._word.set_data([view.token + 0.5], [1.06])
        set_limits(self.axes, x=(0, count))


def writing_scene(view: WritingView) -> Scene:
    """The words as they are read and dropped; beside them what every word read."""
    count, read = len(view.words), view.read()
    times = [*map(float, range(count))]
    rows = -(-count // ACROSS)
    labels = [*view.words, *[""] * (rows * ACROSS - count)]
    lines = np.full((count, rows * ACROSS), np.inf)
    lines[:, :count] = read
    history = np.full((count, count, count), np.inf)
    for time in range(count):
        history[time, : time + 1] = read[: time + 1]
    grids = (
        Grid("Read now, by weight", (0, 0, 0.62, 1), [""] * rows, [""] * ACROSS, times,
             lines.reshape(count, rows, ACROSS), labels),
        Grid("Each word a row: what it read", (0.64, 0, 0.36, 1), [""] * count, [""] * count, times,
             history),
    )  # fmt: skip
    notes = []
    for time, word in enumerate(view.words):
        gone = [w for w, x in zip(view.words, read[time], strict=True) if np.isnan(x)]
        does = "is read with the prompt" if time < view.prompt else "is written"
        lost = f"; gone: {', '.join(gone)}" if gone else ""
        notes.append((float(time), f"“{word}” {does}: {view.kept[time]:.0%} of the softmax{lost}."))
    return Scene(
        end=float(count), words=view.sentence(), unit="words", tall=0.26, grids=grids,
        notes=tuple(notes),
    )  # fmt: skip


class WritingPanel(PlayedPanel):
    """A text is written with a small cache: tokens that are read, kept unread, and evicted.

    Example:
        >>> panel = WritingPanel(system="window", budget=4)
        >>> panel.data()["tokens read"][-1]
        4
    """

    title = "Writing with a small cache: what is read, what is gone?"
    figure_size = (9.6, 1.7)
    opening_seconds = 4
    has_palette = True
    time_control = "token"

    system = Choice("System", "h2o", SYSTEMS)
    budget = Number("Budget", 6, low=2, high=MAX_TOKENS, explanation="Tokens of a step")
    prompt = Number("Prompt", 6, low=2, high=16, explanation="Words that are read before")
    text = Words("Text", TEXT, f"Up to {MAX_TOKENS} words; press Enter")
    token = Number(
        "Word", 16, low=1, high=MAX_TOKENS, maximum=lambda view: len(view.words),
        explanation="In the caption; where the player rests",
    )  # fmt: skip

    def compute(
        self, *, text: str, token: int, system: str, budget: int, prompt: int
    ) -> WritingView:
        given = looked_at(text.split(), token, MAX_TOKENS)
        prompt = min(prompt, len(given["words"]))
        weights, full = written(given["words"], system, budget, prompt)
        return WritingView(
            **given, system=system, budget=budget, prompt=prompt, weights=weights, full=full
        )

    scene = staticmethod(writing_scene)
    places = ((KeptPlot, (0.04, 0.24, 0.94, 0.5)),)
