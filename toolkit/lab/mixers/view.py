"""Two mixers read one text: norms of their states, and how far back they reach. Pure functions.

One program is compiled for each mixer, of fixed shape; words, gates and seeds enter as arrays, so
no slider ever compiles again. The token and the head looked at only select from what it returned.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from toolkit.attention import mixer
from toolkit.lab.attention.reading import word_key
from toolkit.lab.kit.text import MOST, TextView, back_to_most, looked_at
from toolkit.lab.kit.view import Data
from toolkit.lab.mixers import inputs
from toolkit.measure.words import counted

LIKE = 0.5  # cosine from which what is returned counts as like the value


@dataclass(frozen=True)
class Memory:
    """One mixer's reading of the text."""

    name: str  # its key in `MIXERS`
    title: str  # its name in words
    state_norm: np.ndarray  # Frobenius norm of the state after each token, [token, head]
    reach: np.ndarray  # |d out_t / d v_s|, [t, s, head]; zero for s after t
    log_decay: np.ndarray  # at each token, mean over the key channels, [token, head]
    states: np.ndarray  # before and after each token's value is written, [2 tokens, head, k, v]
    returned: np.ndarray  # after t, what key s returns, as cosine with v_s, [t, s, head]

    def share(self, token: int, head: int) -> np.ndarray:
        """The reach from `token` back to each token, as parts of its sum: [token]."""
        row = self.reach[token, :, head]
        total = row.sum()
        return row / total if total > 0 else np.zeros_like(row)

    def distance(self, token: int, head: int) -> int | None:
        """The effective memory, in tokens back; None when no value reaches the output at all."""
        share = self.share(token, head)
        return back_to_most(share, token) if share.any() else None

    def half_life(self) -> np.ndarray:
        """Tokens in which the decay alone halves the state, [token, head]; inf without decay."""
        with np.errstate(divide="ignore"):
            return np.log(2) / -np.minimum(self.log_decay, -0.0)


@dataclass(frozen=True)
class Comparison(TextView):
    """Two mixers, one text; one token and one head looked at."""

    head: int  # index of the head looked at
    left: Memory
    right: Memory

    @property
    def sides(self) -> dict[str, Memory]:
        """The two by the names of their sides."""
        return {"left": self.left, "right": self.right}

    def sentence(self) -> str:
        at = self.row(self.token)
        parts = [
            f"{memory.title}: {self._reach_of(memory)}; asked with each word's key, the state "
            f"returns something like its value {self.known(side)} times of {self.token + 1}; it "
            f"has norm {at[f'{side}: state norm']}, {self._decay_of(memory)}."
            for side, memory in self.sides.items()
        ]
        return (
            f"{self.place_in_words}, head {self.head}. {' '.join(parts)} Measured here on this "
            f"text, with random projections: nothing is trained.{self.left_out_in_words}"
        )

    def footnote(self) -> str:
        return (
            "Red: the token looked at; dots: the same word; beside maps: medians; above: corners "
            "of the states. Measured here; nothing is trained."
        )

    def known(self, side: str) -> int:
        """Words up to the token whose keys return at least half of the length along their value."""
        return int((self.sides[side].returned[self.token, :, self.head] >= LIKE).sum())

    def _reach_of(self, memory: Memory) -> str:
        distance = memory.distance(self.token, self.head)
        if distance is None:
            return "nothing reaches the output"
        before = f"it and the {counted(distance, 'token')} before it"
        return (
            f"{MOST:.0%} of what reaches the output comes from "
            f"{before if distance else 'the token itself'}"
        )

    def _decay_of(self, memory: Memory) -> str:
        half = np.median(memory.half_life()[:, self.head])
        return "no decay" if np.isinf(half) else f"decay halves it in {two_digits(half)} tokens"

    def data(self) -> Data:
        columns: Data = {"token": np.arange(len(self.words)) + 1, "word": self.words}
        for side, memory in self.sides.items():
            columns |= {
                f"{side}: state norm": memory.state_norm[:, self.head],
                f"{side}: |d out_{self.token + 1} / d v|": memory.reach[self.token, :, self.head],
                f"{side}: share": memory.share(self.token, self.head),
                f"{side}: decay e^g": np.exp(memory.log_decay[:, self.head]),
                f"{side}: its key returns its value (cosine)": memory.returned[
                    self.token, :, self.head
                ],
            }
        return columns


def compare(
    text: str, *, left: str, right: str, token: int, head: int, settings: inputs.Settings
) -> Comparison:
    """Let two of `recurrent_mixers()` read one text with the same queries, keys, values, rates."""
    given = looked_at(text.split(), token, inputs.MAX_TOKENS)
    both = (read(name, given["words"], settings) for name in (left, right))
    return Comparison(**given, head=head, **dict(zip(("left", "right"), both, strict=True)))


@functools.lru_cache(maxsize=64)
def read(name: str, words: tuple[str, ...], settings: inputs.Settings) -> Memory:
    r"""One mixer reads the words, from an empty state; remembered.

        state_norm[t] = |S_t|,   reach[t, s] = |d o_t / d v_s|

    The output is linear in the values, and no value channel mixes with another: d o_t / d v_s is
    diagonal. So the gradient of the sum of all output channels, one vector-Jacobian product per
    token, holds it all, and the norm is its largest channel.
    """
    if name not in inputs.recurrent_mixers():
        known = ", ".join(map(repr, inputs.recurrent_mixers()))
        raise ValueError(f"mixer: got {name!r}, wanted one with a recurrent state: {known}")
    row, count = mixer(name), len(words)
    given = inputs.inputs_of(row, inputs.features_of(words), settings)
    state_norm, states, returned, reach = program(name)(given.arrays, given.constants)
    return Memory(
        name=name, title=row.title, state_norm=np.asarray(state_norm)[:count],
        reach=np.asarray(reach)[:count, :count], log_decay=given.log_decay[:count],
        states=np.asarray(states)[:count].reshape(2 * count, *states.shape[2:]),
        returned=np.asarray(returned)[:count, :count] * np.tri(count)[:, :, None],
    )  # fmt: skip


@functools.cache
def program(name: str) -> Callable[..., tuple[jax.Array, ...]]:
    """The compiled program of one mixer: inputs and constants to what `Memory` has, in its order.

    Of a state, what a token erases shows in the step that writes zeros in place of its value. A
    mixer that makes its keys of its gates is asked with queries.
    """
    row = mixer(name)
    place, asking = row.names.index("v"), row.names.index("q")
    keys = row.names.index("k") if "k" in row.names else asking

    @jax.jit
    def run(arrays: tuple[jax.Array, ...], constants: dict[str, jax.Array]):
        options = {**row.options, **constants}

        def ask(inputs_t, state, query):
            given = (*inputs_t[:asking], query[None], *inputs_t[asking + 1 :])
            return row.step(*given, state, **options)[0][0]

        def read_token(state, inputs_t):
            silent = (*inputs_t[:place], 0 * inputs_t[place], *inputs_t[place + 1 :])
            (_, erased), (_, new) = (
                row.step(*given, state, **options) for given in (silent, inputs_t)
            )
            out = jax.vmap(ask, (None, None, 0))(inputs_t, state, _first(arrays[keys]))
            seen = norm_of_state(new)[0], jnp.stack([_matrix(erased), _matrix(new)])
            return new, (*seen, _cosine(out, _first(arrays[place])))

        empty = row.empty_state(
            1, inputs.HEADS, inputs.KEY_SIZE, inputs.VALUE_SIZE, inputs.MAX_TOKENS, jnp.float32
        )
        by_time = tuple(jnp.moveaxis(x, 1, 0) for x in arrays)
        _, (state_norm, states, returned) = jax.lax.scan(read_token, empty, by_time)

        def outputs(values):
            given = (*arrays[:place], values, *arrays[place + 1 :])
            return row.reference(*given, **options)[0][0]  # [time, head, value]

        _, pull = jax.vjp(outputs, arrays[place])
        one_token = jnp.eye(inputs.MAX_TOKENS)[:, :, None, None]
        shape = (inputs.MAX_TOKENS, inputs.MAX_TOKENS, inputs.HEADS, inputs.VALUE_SIZE)
        (gradient,) = jax.vmap(pull)(jnp.broadcast_to(one_token, shape))
        squares = gradient[:, 0] ** 2  # [t, s, head, ..., value], between them a token's steps
        squares = jnp.sum(squares, axis=tuple(range(3, squares.ndim - 1)))
        return state_norm, states, returned, jnp.sqrt(jnp.max(squares, axis=-1))

    return run


def _first(array: jax.Array) -> jax.Array:
    """One vector per token and head [time, head, size]: of several corrections the first."""
    return array[0] if array.ndim == 4 else array[0, :, :, 0]


def _matrix(state: Any) -> jax.Array:
    """The largest array of a state as [head, key, value]; levels are added up."""
    largest = max(jax.tree.leaves(state), key=lambda x: x.size)[0]
    return largest if largest.ndim == 3 else largest.sum(1)


def _cosine(x: jax.Array, y: jax.Array) -> jax.Array:
    lengths = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1)
    return jnp.clip((x * y).sum(-1) / jnp.maximum(lengths, 1e-9), -1, 1)


def norm_of_state(state: Any) -> jax.Array:
    """The root of the sum of the squares of all that a state holds of a head: [batch, heads]."""
    arrays = (x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating))
    return jnp.sqrt(sum(jnp.sum(x * x, axis=tuple(range(2, x.ndim))) for x in arrays))


def two_digits(half_life: float) -> str:
    """A half-life in two digits or whole, `"∞"` without decay."""
    whole = "∞" if np.isinf(half_life) else f"{half_life:,.0f}"
    return whole if half_life >= 9.95 else f"{half_life:.2g}"


def is_same(word: str, other: str) -> bool:
    """Whether a mixer cannot tell two words apart: capitals and punctuation do not count."""
    return np.array_equal(word_key(word), word_key(other))
