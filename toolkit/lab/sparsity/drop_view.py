"""Sparse decoding of a long text: tokens read, tokens missed, and the cost. Pure functions.

With I the tokens read, p the softmax over all and o_I the output over I alone, the error is a sum
over the tokens that were missed,

    o_I - o = sum_{i not in I} p_i (o_I - v_i)

so the share of each is the projection of its term onto the error, over the error's length.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from toolkit.experiments.sparse.model import HEADS, LAYERS
from toolkit.lab.kit.view import Data, View
from toolkit.lab.sparsity.reading import (
    QUESTIONS,
    Text,
    answer,
    ask,
    best,
    finish,
    index_bytes,
    index_of,
    name_of,
    params,
    read_text,
    scores_of,
    tokens_read,
)
from toolkit.measure.words import in_words

LISTED, TILES = 6, 256


class Layer(NamedTuple):
    """One layer's attention for every question; the last token is the question itself.

    Attributes:
        weights: the softmax over all tokens [questions, heads, length].
        is_read: whether each token was read.
        mass: share of the softmax that was read [questions, heads].
        error: relative error of the output.
        parts: share of the error of each token if it is missed [questions, heads, length].
        out: outputs over the tokens read [questions, heads, size].
    """

    weights: Float[np.ndarray, "questions heads length"]
    is_read: Bool[np.ndarray, "questions heads length"]
    mass: Float[np.ndarray, "questions heads"]
    error: Float[np.ndarray, "questions heads"]
    parts: Float[np.ndarray, "questions heads length"]
    out: Float[np.ndarray, "questions heads size"]
    exact: Float[np.ndarray, "questions heads size"]
    index_bytes: int


class Missed(NamedTuple):
    """A token that was not read, its share of the softmax, and its share of the output's error."""

    token: int
    mass: float
    error: float


@functools.lru_cache(maxsize=4)
def read_sparsely(system: str, budget: int, context: int) -> tuple[tuple[Layer, ...], np.ndarray]:
    """Every layer's step for every question, and the answers; each layer reads sparsely."""
    text, index = read_text(context), index_of(system, context)
    x, layers = text.first, []
    for layer in range(LAYERS):
        q, k, v = ask(params(), layer, x)
        scores = scores_of(index, layer, text.keys[layer], q)
        is_read = tokens_read(system, context, layer, budget, scores)
        seen = attend(q, k, v, text.keys[layer], text.values[layer], is_read)
        found = {name: np.asarray(x) for name, x in seen.items()}
        layers.append(Layer(**found, is_read=is_read, index_bytes=index_bytes(index, layer, q)))
        x = finish(params(), layer, x, jnp.asarray(layers[-1].out))
    return tuple(layers), np.asarray(answer(params(), x))


@jax.jit
def attend(q, k, v, keys, values, is_read):
    """Attention of questions to the text and themselves: to all of it, and to what was read."""
    q = q * q.shape[-1] ** -0.5
    scores = jnp.einsum("qhd,htd->qht", q, keys)
    scores = jnp.concatenate([scores, (q * k).sum(axis=-1, keepdims=True)], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)

    def output(weights):
        return jnp.einsum("qht,htd->qhd", weights[..., :-1], values) + weights[..., -1:] * v

    def products(x):
        of_text = jnp.einsum("qhd,htd->qht", x, values)
        return jnp.concatenate([of_text, (x * v).sum(axis=-1, keepdims=True)], axis=-1)

    read = jnp.where(is_read, weights, 0)
    mass = read.sum(axis=-1)
    out, exact = output(read) / mass[..., None], output(weights)
    off = out - exact
    error = jnp.linalg.norm(off, axis=-1) / jnp.linalg.norm(exact, axis=-1)
    along = off / jnp.maximum(jnp.square(off).sum(axis=-1, keepdims=True), 1e-30)
    parts = weights * ((out * along).sum(axis=-1, keepdims=True) - products(along))
    return {
        "weights": weights,
        "mass": mass,
        "error": error,
        "parts": parts,
        "out": out,
        "exact": exact,
    }


def missed(layer: Layer, question: int, head: int) -> tuple[list[Missed], list[Missed]]:
    """The tokens missed most, by mass and by error."""
    at = question, head
    tokens = np.flatnonzero(~layer.is_read[at])
    weights, parts = layer.weights[at][tokens], layer.parts[at][tokens]

    def first(order) -> list[Missed]:
        return [Missed(int(tokens[i]), float(weights[i]), float(parts[i])) for i in order]

    return first(best(weights, LISTED)), first(best(parts, LISTED))


@dataclass(frozen=True)
class DropView(View):
    """The tokens of a text that a system reads and misses.

    Attributes:
        answers, dense: answers of the model that reads sparsely, and that reads everything.
        by_mass, by_error: tokens missed by the chosen head for the chosen question.
        kept, errors: recovered mass and error of every layer and head [layers * heads, questions].
    """

    system: str
    budget: int
    layer: int
    head: int
    question: int
    text: Text
    chosen: Layer
    answers: Int[np.ndarray, "questions"]
    dense: Int[np.ndarray, "questions"]
    by_mass: list[Missed]
    by_error: list[Missed]
    kept: Float[np.ndarray, "rows questions"]
    errors: Float[np.ndarray, "rows questions"]

    @property
    def context(self) -> int:
        """Tokens of the text."""
        return len(self.text.tokens)

    @property
    def bytes_of(self) -> dict[str, int]:
        """Bytes that a head reads in one step, for the tokens of the chosen question."""
        row = 2 * self.chosen.out.shape[-1] * self.chosen.out.dtype.itemsize
        tokens = int(self.chosen.is_read[self.question, self.head].sum())
        full = row * (self.context + 1)
        return {"index": self.chosen.index_bytes, "keys and values": row * tokens, "full": full}

    def tiles(self) -> Float[np.ndarray, "questions tiles"]:
        """The heaviest token of each tile: its weight if it was read, minus that if not."""
        signs = np.where(self.chosen.is_read[:, self.head, :-1], 1.0, -1.0)
        signed = signs * self.chosen.weights[:, self.head, :-1]
        parts = signed.reshape(QUESTIONS, TILES, -1)
        at = np.abs(parts).argmax(axis=-1)[..., None]
        return np.take_along_axis(parts, at, axis=-1)[..., 0]

    def name(self, token: int) -> str:
        """A token's name and position."""
        return f"{name_of(self.text.tokens[token])} at {token + 1:,}"

    def data(self) -> Data:
        none = ("–", float("nan"), float("nan"))
        columns = []
        for ranked in (self.by_mass, self.by_error):
            rows = [(self.name(token.token), token.mass, token.error) for token in ranked]
            columns += [*zip(*(rows + [none] * LISTED)[:LISTED], strict=True)]
        heads = "missed most", "mass (share)", "of the error (share)"
        others = "wrong most", "its mass (share)", "its part of the error (share)"
        return dict(zip((*heads, *others), columns, strict=True))

    def sentence(self) -> str:
        bytes_of, at = self.bytes_of, (self.question, self.head)
        read = bytes_of["index"] + bytes_of["keys and values"]
        right, dense = (int((x == self.text.answers).sum()) for x in (self.answers, self.dense))
        place = self.text.places[self.question]
        is_read = self.chosen.is_read[:, self.head][self.question, place]
        return (
            f"{self.system} reads {int(self.chosen.is_read[at].sum()):,} of {self.context + 1:,} "
            f"tokens and, with its index, {in_words(read / bytes_of['full'], 'share')} of the "
            f"bytes. Layer {self.layer + 1}, head {self.head + 1}, question {self.question + 1} "
            f"({name_of(self.text.asked[self.question])}): it keeps "
            f"{in_words(float(self.chosen.mass[at]), 'share')} of the softmax, its output is off "
            f"by {in_words(float(self.chosen.error[at]), 'share')}, and the answer, "
            f"{self.name(place)}, is {'read' if is_read else 'missed'}. The model finds {right} of "
            f"{QUESTIONS} needles; reading everything it finds {dense}."
        )

    def footnote(self) -> str:
        return "Measured here on the retrieval model, in float32. Both layers read sparsely."


def drop_view(
    *, system: str, budget: int, context: int, layer: int, head: int, question: int
) -> DropView:
    """A system at a budget on a text; layer, head and question count from 1."""
    layers, answers = read_sparsely(system, budget, context)
    _, dense = read_sparsely("oracle", context + 1, context)
    layer, head, question = layer - 1, head - 1, question - 1
    by_mass, by_error = missed(layers[layer], question, head)
    kept, errors = (
        np.stack([getattr(layer, name)[:, h] for layer in layers for h in range(HEADS)])
        for name in ("mass", "error")
    )
    return DropView(
        system, budget, layer, head, question, read_text(context), layers[layer], answers, dense,
        by_mass, by_error, kept, errors,
    )  # fmt: skip
