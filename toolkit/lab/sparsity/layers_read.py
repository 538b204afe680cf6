"""One step of every layer over the tokens that a system reads, and the error traced to the others.

With I the tokens read, p the softmax over all and o_I the output over I alone, the error is a sum
over the tokens that were missed,

    o_I - o = sum_{i not in I} p_i (o_I - v_i)

so the share of each is the projection of its term onto the error, over the error's length.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from toolkit.experiments.sparse.model import LAYERS
from toolkit.lab.sparsity.reading import (
    answer,
    ask,
    finish,
    index_bytes,
    index_of,
    params,
    read_text,
    scores_of,
    tokens_read,
)


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
