"""One sentence in two memories: the weights of softmax attention and the state of the delta
rule.

No training: a word's key is a fixed random projection of its letters, so equal words have equal
keys and similar words similar ones, and what the figure shows follows from the mixers alone.
"""

import functools
import zlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit.attention import gated_delta_net_step
from toolkit.figures import ACCENT, SIGNED, WEIGHTS, look
from toolkit.figures.axes import set_limits
from toolkit.lab.kit.controls import Number, Words
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Drag, Plot
from toolkit.lab.kit.text import TextView, looked_at
from toolkit.lab.kit.view import Data
from toolkit.measure.words import counted

# Shapes of the one program that is compiled: shorter sentences are padded, longer ones cut.
MAX_TOKENS = 24
KEY_SIZE = 16
VALUE_SIZE = 16
# Length of the queries: large enough that equal words stand out, small enough to see the rest.
SHARPNESS = 5.0
_LETTER_PAIRS = 512
WEIGHT, RETURNED = "softmax weight (share)", "returned by the state (share)"


@dataclass(frozen=True)
class Reading(TextView):
    """What both memories hold after each token of a sentence."""

    window: int  # tokens softmax attention may look back to, itself included
    weights: np.ndarray  # softmax weights, row = reader, [MAX_TOKENS, MAX_TOKENS]
    states: np.ndarray  # of the gated delta net, [MAX_TOKENS, KEY_SIZE, VALUE_SIZE]
    recall: np.ndarray  # part of value s that the state after t returns for key s, [t, s]

    def sentence(self) -> str:
        # tied: tests/lab/attention/test_reading.py::test_sentence_and_table_agree_with_the_arrays
        data, count = self.data(), self.token + 1
        first, most = (self.row(place) for place in (0, int(np.argmax(data[WEIGHT]))))
        out_of_reach = count - self.window
        unseen = f" and cannot see {counted(out_of_reach, 'token')} before its window"
        return (
            f"{self.place_in_words} softmax attention gives its largest weight, "
            f"{most['softmax weight']}, to “{most['word']}” (token {most['token']})"
            f"{unseen if out_of_reach > 0 else ''}. The state of the gated delta net, {KEY_SIZE} × "
            f"{VALUE_SIZE} numbers whatever the length, still returns at least half of the value "
            f"of {np.sum(data[RETURNED] >= 0.5)} of {counted(count, 'token')}; of “{first['word']}”"
            f" (token 1) it returns {first['returned by the state']}.{self.left_out_in_words}"
        )

    def data(self) -> Data:
        read = slice(self.token + 1)
        return {
            "token": np.arange(self.token + 1) + 1,
            "word": self.words[read],
            WEIGHT: self.weights[self.token, read],
            RETURNED: self.recall[self.token, read],
        }


def read_sentence(
    text: str, *, token: int, window: int, write_strength: float, keep: float
) -> Reading:
    """Let both memories read a sentence, word by word.

    Softmax attention, with scores only inside the window:

        weights[t, s] = softmax_s(q_t . k_s)         t - window < s <= t

    Gated delta net, with the same keys; alpha is `keep`, beta is `write_strength`:

        S_t = alpha S_{t-1} + beta k_t (v_t - (alpha S_{t-1})^T k_t)^T

    The state is linear in the values, so writing one-hot values beside the shown ones tells how
    much of each token's value its key still returns: `recall[t, s] = k_s . S_t[:, one-hot s]`.

    Source: Vaswani et al. 2017, section 3.2; Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks",
        equation 10.
    """
    given = looked_at(text.split(), token, MAX_TOKENS)
    numbers = map(jnp.float32, (window, write_strength, keep))
    read = _both_memories(word_keys(given["words"], MAX_TOKENS), _values(), *numbers)
    weights, states, recall = map(np.asarray, read)
    return Reading(**given, window=window, weights=weights, states=states, recall=recall)


def word_keys(words: tuple[str, ...], most: int) -> np.ndarray:
    """The keys of words, [most, KEY_SIZE], zero after the last one."""
    keys = np.zeros((most, KEY_SIZE), np.float32)
    keys[: len(words)] = [word_key(word) for word in words]
    return keys


@functools.lru_cache(maxsize=4096)
def word_key(word: str) -> np.ndarray:
    """The key of a word, [KEY_SIZE]: a fixed random projection of its neighbouring letters.

    Unit vectors, the same for equal words and similar for similar ones; upper case and punctuation
    do not count.
    """
    letters = "".join(c for c in word.lower() if c.isalnum()) or word
    marked = f"<{letters}>"
    pairs = [zlib.crc32(marked[i : i + 2].encode()) % _LETTER_PAIRS for i in range(len(marked) - 1)]
    vector = _projection()[pairs].sum(0)
    return vector / np.linalg.norm(vector)


@functools.cache
def _projection() -> np.ndarray:
    return np.random.default_rng(7).standard_normal((_LETTER_PAIRS, KEY_SIZE)).astype(np.float32)


@functools.cache
def _values() -> np.ndarray:
    """One random value per position, and beside it the one-hot value that marks the position."""
    shown = np.random.default_rng(3).standard_normal((MAX_TOKENS, VALUE_SIZE))
    return np.concatenate([shown, np.eye(MAX_TOKENS)], axis=1).astype(np.float32)


@jax.jit
def _both_memories(
    keys: Float[Array, "token key"], values: Float[Array, "token value"], window: Float[Array, ""],
    write_strength: Float[Array, ""], keep: Float[Array, ""],
) -> tuple[Array, Array, Array]:  # fmt: skip
    position = jnp.arange(MAX_TOKENS)
    distance = position[:, None] - position[None, :]
    is_visible = (distance >= 0) & (distance < window)
    scores = jnp.where(is_visible, SHARPNESS * keys @ keys.T, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)

    def read(state, token):
        key, value = token[0][None, None], token[1][None, None]  # batch and head of one
        log_keep, beta = jnp.log(keep)[None, None], write_strength[None, None]
        _, state = gated_delta_net_step(key, key, value, log_keep, beta, state)
        return state, state[0, 0]

    empty = jnp.zeros((1, 1, KEY_SIZE, values.shape[-1]), jnp.float32)
    _, states = jax.lax.scan(read, empty, (keys, values))
    one_hot_part = states[:, :, VALUE_SIZE:]  # [t, key, s]
    recall = jnp.einsum("sk,tks->ts", keys, one_hot_part)
    return weights, states[:, :, :VALUE_SIZE], recall


SENTENCE = "the cat sat on the mat because the mat was warm and the cat was tired"
# Entries of the state rarely exceed this; a fixed scale shows the decay.
STATE_SCALE = 1.5


class ReadingPanel(Panel):
    """Attention map and recurrent state side by side, token by token.

    Example:
        >>> panel = ReadingPanel(text="the cat sat on the mat", token=5)
        >>> panel.keep = 0.8
        >>> panel.data()["word"]
        ('the', 'cat', 'sat', 'on', 'the')
    """

    title = "Two memories read one sentence"
    figure_size = (9.6, 6.2)

    text = Words("Sentence", SENTENCE, "Up to 24 words; press Enter")
    token = Number(
        "Tokens read", 12, low=1, high=MAX_TOKENS, explanation="Move through the sentence",
        maximum=lambda view: len(view.words),
    )  # fmt: skip
    window = Number(
        "Window", MAX_TOKENS, low=1, high=MAX_TOKENS, explanation="Tokens softmax may look back to"
    )
    write_strength = Number(
        "Write (beta)", 1.0, low=0.0, high=1.0, step=0.05,
        explanation="1 replaces, 0 writes nothing",
    )  # fmt: skip
    keep = Number("Keep (alpha)", 0.95, low=0.5, high=1.0, step=0.01, explanation="1 never forgets")

    def compute(self, *, text: str, token: int, window: int, **rates: float) -> Reading:
        return read_sentence(text, token=token, window=window, **rates)

    def plots(self, figure: Figure) -> list[Plot]:
        grid = figure.add_gridspec(
            2, 2, height_ratios=(3.1, 1), left=0.085, right=0.925, top=0.93, bottom=0.135,
            wspace=0.2, hspace=0.2,
        )  # fmt: skip
        weights, state, weight, recall = (figure.add_subplot(place) for place in grid)
        return [
            WeightMap(weights),
            StateMap(state),
            BarPlot(weight, WEIGHT, "full", "weight in\nmarked row"),
            BarPlot(recall, RETURNED, "gdn", "returned\nby the state"),
        ]


class MatrixPlot(Plot):
    """A matrix with a scale of colours beside it; the base of two plots."""

    def __init__(self, axes: Axes, matrix: tuple[Any, ...], **settings: Any) -> None:
        super().__init__(axes, grid="", xticks=[], yticks=[], **settings)
        self.matrix = self.image(*matrix)
        self.scale_beside(self.matrix, 0.008, 0.01).ax.tick_params(labelsize=8, length=2)


class WeightMap(MatrixPlot):
    """The softmax weights of every token, the row of the one now read marked."""

    drag = Drag("token", "y", -1)

    def __init__(self, axes: Axes) -> None:
        title, shape = "Softmax: a weight for every earlier token", (MAX_TOKENS, MAX_TOKENS)
        super().__init__(axes, (shape, WEIGHTS, 0, 1), title=title)
        self._row = self.frame(0, 0, 1, 1, linewidth=2)
        self._pointer = self.marks(ACCENT, ">", markersize=9, clip_on=False)

    def show(self, view: Reading) -> None:
        # Blank is "not allowed to look"; a zero weight inside the window stays white too.
        self.matrix.set_data(view.weights)
        self._row.set_bounds(-0.5, view.token - 0.5, view.token + 1, 1)
        self._pointer.set_data([-0.5], [view.token])
        self.name_places("y", view.words, fontsize=8.5)
        set_limits(self.axes, x=(-0.5, len(view.words) - 0.5))


class StateMap(MatrixPlot):
    """The state of the gated delta net after the token now read."""

    def __init__(self, axes: Axes) -> None:
        title = f"Gated delta net: one {KEY_SIZE} × {VALUE_SIZE} state"
        matrix = (KEY_SIZE, VALUE_SIZE), SIGNED, -STATE_SCALE, STATE_SCALE
        labels = {"xlabel": "value channel", "ylabel": "key channel"}
        super().__init__(axes, matrix, title=title, **labels)

    def show(self, view: Reading) -> None:
        self.matrix.set_data(view.states[view.token])


class BarPlot(Plot):
    """One column of the data, a bar per token."""

    def __init__(self, axes: Axes, column: str, name: str, label: str) -> None:
        super().__init__(axes, grid="y", ylim=(0, 1.05), yticks=(0, 0.5, 1), ylabel=label)
        self._column = column
        self._bars = self.bars_at(range(MAX_TOKENS), 0.78, color=look(name).colour)

    def show(self, view: Reading) -> None:
        heights = np.zeros(MAX_TOKENS)
        heights[: view.token + 1] = np.clip(view.data()[self._column], 0, 1.05)
        for bar, height in zip(self._bars, heights, strict=True):
            bar.set_height(height)
        self.name_places(
            "x", view.words, fontsize=8.5, rotation=60, ha="right", rotation_mode="anchor"
        )
