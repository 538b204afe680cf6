"""One sentence read by two memories: softmax attention and the gated delta rule. Pure functions.

No training: a word's key is a fixed random projection of its letters, so equal words have equal
keys and similar words similar ones, and what the figure shows follows from the mixers alone.
"""

import functools
import zlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from toolkit.attention import gated_delta_net_step
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
    keys: Float[Array, "token key"],
    values: Float[Array, "token value"],
    window: Float[Array, ""],
    write_strength: Float[Array, ""],
    keep: Float[Array, ""],
) -> tuple[Array, Array, Array]:
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
