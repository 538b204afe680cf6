"""What a system reads of a long text, what it misses by it, and what that costs. Pure functions.

With I the tokens read, p the softmax over all and o_I the output over I alone, the error is a sum
over the tokens that were missed,

    o_I - o = sum_{i not in I} p_i (o_I - v_i)

so each of them has its share in it: its term along the error, over the error's length.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

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

LISTED, TILES = 8, 256


class Layer(NamedTuple):
    """One layer's attention for every question; the last token is the question itself.

    Attributes:
        weights: the softmax over all tokens [questions, heads, length].
        is_read: which of them were read.
        mass: share of the softmax that was read [questions, heads].
        error: of the output, over the length of the exact one.
        out: outputs over what was read [questions, heads, size].
        values: [heads, time, size] of the text; `own` are the questions' [questions, heads, size].
    """

    weights: Float[np.ndarray, "questions heads length"]
    is_read: Bool[np.ndarray, "questions heads length"]
    mass: Float[np.ndarray, "questions heads"]
    error: Float[np.ndarray, "questions heads"]
    out: Float[np.ndarray, "questions heads size"]
    exact: Float[np.ndarray, "questions heads size"]
    values: Float[np.ndarray, "heads time size"]
    own: Float[np.ndarray, "questions heads size"]
    index_bytes: int


class Missed(NamedTuple):
    """A token that was not read, its share of the softmax, and its share of the output's error."""

    token: int
    mass: float
    error: float


@functools.lru_cache(maxsize=4)
def read_sparsely(system: str, budget: int, context: int) -> tuple[tuple[Layer, ...], np.ndarray]:
    """Every layer's step for every question, and the answers; each layer reads sparsely."""
    text, held = read_text(context), index_of(system, context)
    x, layers = text.first, []
    for layer in range(LAYERS):
        q, k, v = ask(params(), layer, x)
        scores = scores_of(held, layer, text.keys[layer], q)
        is_read = tokens_read(system, context, layer, budget, scores)
        own = (np.asarray(q), np.asarray(k), np.asarray(v))
        keys, values = np.asarray(text.keys[layer]), np.asarray(text.values[layer])
        seen = attend(*own, keys, values, is_read)
        found: Any = (*seen, own[2], index_bytes(held, layer, q))
        layers.append(Layer(*found))
        x = finish(params(), layer, x, jnp.asarray(layers[-1].out))
    return tuple(layers), np.asarray(answer(params(), x))


def attend(q, k, v, keys, values, is_read) -> tuple[np.ndarray, ...]:
    """Attention of questions to the text and to themselves: to all of it, and to what was read."""
    scale = q.shape[-1] ** -0.5
    scores = np.matmul(scale * q.swapaxes(0, 1), keys.swapaxes(1, 2)).swapaxes(0, 1)
    scores = np.concatenate([scores, scale * (q * k).sum(axis=-1, keepdims=True)], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)

    def output(weights):
        of_text = np.matmul(weights[..., :-1].swapaxes(0, 1), values).swapaxes(0, 1)
        return of_text + weights[..., -1:] * v

    read = np.where(is_read, weights, 0)
    mass = read.sum(axis=-1)
    out, exact = output(read) / mass[..., None], output(weights)
    error = np.linalg.norm(out - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    return weights, is_read, mass, error, out, exact, values


def missed(layer: Layer, question: int, head: int) -> tuple[list[Missed], list[Missed]]:
    """The tokens missed most, by mass and by error."""
    at = question, head
    tokens = np.flatnonzero(~layer.is_read[at])
    weights = layer.weights[at][tokens]
    off = layer.out[at] - layer.exact[at]
    along = off / max(float(off @ off), 1e-30)
    # The question itself is always read, so that all of these stand in the text.
    terms = weights * (layer.out[at] @ along - layer.values[head, tokens] @ along)

    def first(order) -> list[Missed]:
        return [Missed(int(tokens[i]), float(weights[i]), float(terms[i])) for i in order[:LISTED]]

    return first(np.argsort(-weights, kind="stable")), first(np.argsort(-terms, kind="stable"))


@dataclass(frozen=True)
class DropView(View):
    """What a system reads and misses of a text.

    Attributes:
        answers: of the model that reads sparsely; `dense` those of the one that reads everything.
        by_mass, by_error: tokens missed by the chosen head for the chosen question.
        kept, errors: of every layer and head [layers * heads, questions].
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
        """What a head reads in one step; tokens are those of the chosen question."""
        row = 2 * self.chosen.own.shape[-1] * self.chosen.own.dtype.itemsize
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
        """What a token is, and where."""
        return f"{name_of(self.text.tokens[token])} at {token + 1:,}"

    def data(self) -> Data:
        none = ("–", float("nan"), float("nan"))
        columns = []
        for ranked in (self.by_mass, self.by_error):
            rows = [(self.name(one.token), one.mass, one.error) for one in ranked]
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
        np.stack([getattr(one, name)[:, h] for one in layers for h in range(HEADS)])
        for name in ("mass", "error")
    )
    return DropView(
        system, budget, layer, head, question, read_text(context), layers[layer], answers, dense,
        by_mass, by_error, kept, errors,
    )  # fmt: skip
