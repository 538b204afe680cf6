"""A long text read by a small trained model, and the tokens that a system would read of its cache.

The text is a haystack with needles: pairs of a key and a value at any place in noise. A question
is a key once more; the model, `retrieval.safetensors`, answers with the value that follows it.
Every question is asked on its own, as the next token after the haystack, which was read densely:
documents of `DOCUMENT` tokens, each on its own, as where the caches of documents are put together.

The selection is computed in NumPy for any budget, without compiling: the scores are the system's,
the rule is that of `attention.sparse.decode_step`, and a test compares both. With I the tokens
read, p the softmax over all and o_I the output over I alone, the error of a layer is a sum over the
tokens that were missed,

    o_I - o = sum_{i not in I} p_i (o_I - v_i)

so the share of each is the projection of its term onto the error, over the error's length.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from toolkit.attention import softmax_attention
from toolkit.attention.sparse import Selector, build
from toolkit.experiments.sparse import model
from toolkit.experiments.sparse.model import HEADS, LAYERS
from toolkit.experiments.sparse.quality import at_small_budgets
from toolkit.experiments.tasks.retrieval import KEYS
from toolkit.measure.stored import stored_folder

QUESTIONS = 8
CONTEXTS = (1024, 4096, 32768)
DOCUMENT = 4096
SYSTEMS = ("quest", "tactic", "hata", "pqcache", "oracle", "window", "random")


class Asked(NamedTuple):
    """Queries, keys and values of one layer for every question."""

    q: Float[Array, "questions heads size"]
    k: Float[Array, "questions heads size"]
    v: Float[Array, "questions heads size"]


class Text(NamedTuple):
    """A haystack, its questions, and the model's cache."""

    tokens: Int[np.ndarray, "time"]  # tokens of the haystack [time]
    asked: Int[np.ndarray, "questions"]  # the requested keys [questions]
    answers: Int[np.ndarray, "questions"]  # their values [questions]
    places: Int[np.ndarray, "questions"]  # positions of these values [questions]
    # keys, values: cache of every layer [heads, time, size]
    keys: tuple[Float[Array, "heads time size"], ...]
    values: tuple[Float[Array, "heads time size"], ...]
    first: Array  # input of the first layer for each question [questions, 1, width]


@contextmanager
def keeping_programs() -> Iterator[None]:
    """Have later sessions find what is compiled here, where JAX has a folder for it."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 0.0)
    try:
        yield
    finally:
        jax.config.update(name, before)


@functools.cache
def params() -> model.Params:
    """The model's parameters."""
    return model.load(stored_folder("models") / "retrieval.safetensors")


@functools.lru_cache(maxsize=2)
def read_text(context: int) -> Text:
    """The text of one of the `CONTEXTS`, read densely; cached.

    Its tokens are recorded: the program that draws them takes longer to compile than to read.
    """
    with np.load(stored_folder("models") / "retrieval-texts.npz") as texts:
        drawn = texts[str(context)].astype(np.int32)
    tokens, asked, answers = drawn[:context], drawn[context::2], drawn[context + 1 :: 2]
    places = [int(np.flatnonzero(tokens == key)[0]) + 1 for key in asked]
    return Text(tokens, asked, answers, np.array(places), *_read(params(), tokens, asked))


# One program: the hundred that JAX makes of single operations keep more memory than the text.
@jax.jit
def _read(params, tokens, asked):
    last = jnp.broadcast_to(tokens[-1], asked.shape)
    first = model.start(params, jnp.stack([last, asked], axis=1))[:, 1:]
    x = model.start(params, tokens.reshape(-1, min(DOCUMENT, len(tokens))))
    keys, values = [], []
    for layer in range(model.LAYERS):
        seen = model.project(params, layer, x)
        for rows, own in ((keys, seen.k), (values, seen.v)):
            rows.append(own.reshape(-1, *own.shape[2:]).swapaxes(0, 1))
        if layer + 1 < model.LAYERS:
            x = model.finish(params, layer, x, softmax_attention(*seen)[0])
    return tuple(keys), tuple(values), first


def ask(params: model.Params, layer: int, x: Float[Array, "questions 1 width"]) -> Asked:
    """Queries, keys and values of the questions in a layer."""
    return _ask(_of_layer(params, layer), x)


def finish(params: model.Params, layer: int, x: Array, out: Array) -> Array:
    """The questions' stream after a layer whose attention gave `out` [questions, heads, size]."""
    return _finish(_of_layer(params, layer), x, out)


def _of_layer(params: model.Params, layer: int) -> model.Params:
    """One layer's parameters as those of the first, so that all layers share their programs."""
    start = f"{layer}."
    return {f"0.{k.removeprefix(start)}": x for k, x in params.items() if k.startswith(start)}


@jax.jit
def _ask(params, x):
    return Asked(*(rows[:, 0] for rows in model.project(params, 0, x)))


@jax.jit
def _finish(params, x, out):
    return model.finish(params, 0, x, out[:, None])


@jax.jit
def answer(params: model.Params, x: Float[Array, "questions 1 width"]) -> Int[Array, "questions"]:
    """The model's answer to each question."""
    return model.logits(params, x[:, 0]).argmax(axis=-1)


def name_of(token: int) -> str:
    """A token as it is written: a key, a value, or noise."""
    kind, number = divmod(int(token), KEYS)
    return f"{('key', 'value')[kind]} {number}" if kind < 2 else "noise"


class Held(NamedTuple):
    """A system's index of every layer and head of a text, `length` tokens with the question."""

    selector: Selector
    indices: tuple[Any, ...]
    length: int


@functools.lru_cache(maxsize=2 * len(SYSTEMS))
def index_of(system: str, context: int) -> Held:
    """A system's index of a text; cached."""
    selector, text = at_small_budgets(system), read_text(context)
    length = jnp.full(1, context, jnp.int32)
    caches = [
        build(selector, jnp.asarray(k)[None], jnp.asarray(v)[None], length)
        for k, v in zip(text.keys, text.values, strict=True)
    ]
    # In NumPy, where taking a row compiles nothing.
    rows = (jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[0]), cache.index) for cache in caches)
    indices = tuple(rows)
    return Held(selector, indices, context + 1)


def scores_of(index: Held, layer: int, keys: Array, q: Array) -> Float[np.ndarray, "heads rows u"]:
    """A system's scores of a layer's units for each row of queries [rows, heads, size]."""
    if type(index.selector).scores is Selector.scores:  # a window asks no query
        return np.zeros((q.shape[1], q.shape[0], 0), np.float32)
    length = jnp.asarray(index.length, jnp.int32)
    return np.asarray(_scores(index.selector, index.indices[layer], keys, q, length))


@jax.jit
def _scores(selector, index, keys, q, length):
    q = q.swapaxes(0, 1) * q.shape[-1] ** -0.5
    return jax.vmap(lambda i, k, q: selector.scores(i, k, q, length))(index, keys, q)


def index_bytes(index: Held, layer: int, q: Array) -> int:
    """Bytes of the index that a head reads in one step."""
    return int(_index_bytes(index.selector, index.indices[layer], q, jnp.int32(index.length)))


@jax.jit
def _index_bytes(selector, index, q, length):
    return selector.index_bytes(jax.tree.map(lambda x: x[0], index), q[:1, 0], length)


class Units(NamedTuple):
    """The units of one head: the tokens of all, unit after unit, and how many each has."""

    tokens: Int[np.ndarray, "selectable"]
    sizes: Int[np.ndarray, "units"]


@functools.lru_cache(maxsize=256)
def units_of(system: str, context: int, layer: int, head: int, start: int) -> Units:
    """The selectable tokens of a head that come before its recent ones, by unit; remembered."""
    selector, indices, length = index_of(system, context)
    index = indices[layer]
    if hasattr(index, "members"):  # clusters, whose tokens all come before the recent ones
        firsts, sizes, members = (
            np.asarray(rows)[head] for rows in (index.first, index.sizes, index.members)
        )
        runs = [members[first : first + size] for first, size in zip(firsts, sizes, strict=True)]
        return Units(np.concatenate(runs), sizes)
    tokens = np.arange(selector.sinks, start)
    units = -(-length // selector.unit)
    return Units(tokens, np.bincount(tokens // selector.unit, minlength=units))


def first_recent(index: Held, layer: int, budget: int) -> int:
    """The first token that is read for being recent; with a budget of 0 the query decides."""
    length = jnp.int32(index.length)
    return int(_start(index.selector, index.indices[layer], length, jnp.int32(budget)))


@jax.jit
def _start(selector, index, length, budget):
    return selector.start(jax.tree.map(lambda x: x[0], index), length, budget)


def tokens_read(
    system: str, context: int, layer: int, budget: int,
    scores: Float[np.ndarray, "heads rows units"],
) -> Bool[np.ndarray, "rows heads length"]:  # fmt: skip
    """Which tokens each query of a layer reads with `budget` tokens, the rule of `decode_step`."""
    index = index_of(system, context)
    selector, length = index.selector, index.length
    budget = min(budget, length)
    start = first_recent(index, layer, budget)
    forced = np.zeros(length, bool)
    forced[: min(selector.sinks, start)] = forced[start:] = True
    read = np.broadcast_to(forced, (scores.shape[1], scores.shape[0], length)).copy()
    slots = budget - selector.sinks - selector.least_recent(budget)
    room = budget - int(forced.sum())
    if slots <= 0 or room <= 0:
        return read
    for head, of_head in enumerate(scores):
        tokens, sizes = units_of(system, context, layer, head, start)
        firsts = np.cumsum(sizes) - sizes
        usable = np.flatnonzero(sizes)
        most = min(selector.ranked_units(slots, len(sizes)), room, len(usable))
        for row, own in enumerate(of_head):
            units = usable[best(own[usable], most)]
            lengths = sizes[units]
            ends = np.cumsum(lengths)
            inside = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
            chosen = tokens[np.repeat(firsts[units], lengths) + inside]
            read[row, head, chosen[:room]] = True
    return read


def best(scores: Float[np.ndarray, "units"], count: int) -> Int[np.ndarray, "count"]:
    """The largest scores in falling order; of equal ones the first."""
    if count < len(scores):
        bound = np.partition(scores, len(scores) - count)[len(scores) - count]
        above = np.flatnonzero(scores > bound)
        ties = np.flatnonzero(scores == bound)[: count - len(above)]
        picked = np.sort(np.concatenate([above, ties]))
    else:
        picked = np.arange(len(scores))
    return picked[np.argsort(-scores[picked], kind="stable")]


class Layer(NamedTuple):
    """One layer's attention for every question; the last token is the question itself."""

    # The softmax over all tokens [questions, heads, length]
    weights: Float[np.ndarray, "questions heads length"]
    is_read: Bool[np.ndarray, "questions heads length"]  # whether each token was read
    # Share of the softmax that was read [questions, heads]
    mass: Float[np.ndarray, "questions heads"]
    error: Float[np.ndarray, "questions heads"]  # relative error of the output
    # Share of the error of each token if it is missed [questions, heads, length]
    parts: Float[np.ndarray, "questions heads length"]
    # Outputs over the tokens read [questions, heads, size]
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


@functools.lru_cache(maxsize=2)
def dense_answers(context: int) -> Int[np.ndarray, "questions"]:
    """The answers where every layer reads everything; cached."""
    text = read_text(context)
    everything, x = np.ones((QUESTIONS, HEADS, context + 1), bool), text.first
    for layer in range(LAYERS):
        asked = ask(params(), layer, x)
        seen = attend(*asked, text.keys[layer], text.values[layer], everything)
        x = finish(params(), layer, x, seen["exact"])
    return np.asarray(answer(params(), x))


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
        "weights": weights, "mass": mass, "error": error, "parts": parts, "out": out,
        "exact": exact,
    }  # fmt: skip
