"""Workloads for the comparison of learning rates: five small problems without downloads.

A workload is pure functions and arrays: parameters from a key, a batch from a step and a seed. Its
three splits are disjoint; the test split is only for the report.
"""

import functools
import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

CONTEXT = 8  # characters that predict the next one
SEQUENCE = 32  # of the looped transformer
SPLITS = (0.8, 0.9)  # training up to here, validation up to there, test the rest
HELD_OUT = 4096  # windows of text in validation and test, at most
SMOOTHING = 0.1  # of the labels of digits
# The tables that scikit-learn ships are so small that test losses rise in the longer budgets.
ROWS = {"training": 20_000, "validation": 2_000, "test": 4_000}
NOISE = 0.2  # in the answers to train on, in their standard deviations; 1 in Friedman's units


@dataclass(frozen=True)
class Workload:
    """A problem to train on."""

    name: str  # as in the names of settings
    title: str  # for figures
    batch_size: int  # examples of a step
    init: Callable[[Array], Any]  # key -> parameters
    # (parameters, batch) -> scalar mean loss: nats, or half a squared error
    loss: Callable[[Any, Any], Float[Array, ""]]
    data: Any  # arrays that `sample` draws from
    # (data, step, seed) -> batch; the same for the same step and seed
    sample: Callable[[Any, Array, Array], Any]
    validation: Any  # examples in random order, for selection
    test: Any  # examples for the report
    sha256: str = ""  # of the text, or "" where a package's version says it


def workload(name: str) -> Workload:
    """A workload by its name, made once; RuntimeError where scikit-learn is missing."""
    if name not in WORKLOADS:
        raise ValueError(f"workload: got {name!r}, wanted one of {', '.join(WORKLOADS)}")
    return _made(name)


@functools.cache
def _made(name: str) -> Workload:
    return WORKLOADS[name]()


def _char_lm() -> Workload:
    text, vocabulary, sha256 = _text()
    cut = _windows(text, CONTEXT)

    def init(key: Array) -> dict[str, Any]:
        first, second = jax.random.split(key)
        table = jax.random.normal(first, (vocabulary, 16))
        return {"table": table, "layers": _dense(second, (CONTEXT * 16, 128, vocabulary))}

    def loss(params: dict[str, Any], batch: Array) -> Array:
        embedded = params["table"][batch[:, :-1]].reshape(len(batch), -1)
        return _cross_entropy(_mlp(params["layers"], embedded), batch[:, -1])

    return Workload(
        "char-lm", "character LM", 64, init, loss, cut["training"],
        functools.partial(_draw_windows, length=CONTEXT, batch_size=64),
        cut["validation"], cut["test"], sha256,
    )  # fmt: skip


def _looped() -> Workload:
    from toolkit.looped import LoopedConfig, LoopedLM

    text, vocabulary, sha256 = _text()
    cut = _windows(text, SEQUENCE)
    config = LoopedConfig.tiny(
        "full", loops=2, vocabulary=vocabulary, width=32, heads=2, feed_forward=64
    )
    graph = nnx.split(nnx.eval_shape(lambda: LoopedLM(config, rngs=nnx.Rngs(0))))[0]

    def init(key: Array) -> Any:
        return nnx.split(LoopedLM(config, rngs=nnx.Rngs(key)))[1]

    def loss(params: Any, batch: Array) -> Array:
        return _cross_entropy(nnx.merge(graph, params)(batch[:, :-1]), batch[:, 1:])

    held_out = {name: cut[name][: HELD_OUT // 8] for name in ("validation", "test")}
    return Workload(
        "looped", "looped transformer", 8, init, loss, cut["training"],
        functools.partial(_draw_windows, length=SEQUENCE, batch_size=8),
        held_out["validation"], held_out["test"], sha256,
    )  # fmt: skip


def _digits_mlp() -> Workload:
    splits = _digits()

    def loss(params: Any, batch: tuple[Array, Array]) -> Array:
        return _smooth_cross_entropy(_mlp(params, batch[0].reshape(len(batch[0]), -1)), batch[1])

    return Workload(
        "digits-mlp", "digits, MLP", 64, functools.partial(_dense, sizes=(64, 128, 128, 10)), loss,
        splits["training"], functools.partial(_draw_rows, batch_size=64),
        splits["validation"], splits["test"],
    )  # fmt: skip


def _digits_cnn() -> Workload:
    splits = _digits()

    def init(key: Array) -> list[dict[str, Array]]:
        keys = jax.random.split(key, 3)
        sizes = ((9, 16), (9 * 16, 32), (2 * 2 * 32, 10))
        return [_dense(key, pair)[0] for key, pair in zip(keys, sizes, strict=True)]

    def loss(params: list[dict[str, Array]], batch: tuple[Array, Array]) -> Array:
        images, labels = batch
        hidden = images[..., None]
        for layer in params[:2]:
            hidden = _halved(jax.nn.relu(_affine(layer, _neighbourhoods(hidden))))
        return _smooth_cross_entropy(_affine(params[2], hidden.reshape(len(hidden), -1)), labels)

    return Workload(
        "digits-cnn", "digits, CNN", 32, init, loss,
        splits["training"], functools.partial(_draw_rows, batch_size=32),
        splits["validation"], splits["test"],
    )  # fmt: skip


def _tabular() -> Workload:
    splits = {name: _friedman(rows, seed) for seed, (name, rows) in enumerate(ROWS.items())}
    noise = np.random.default_rng(len(ROWS)).normal(size=ROWS["training"])
    rows, answers = splits["training"]
    splits["training"] = rows, answers + NOISE * noise

    def loss(params: Any, batch: tuple[Array, Array]) -> Array:
        return 0.5 * jnp.mean((_mlp(params, batch[0])[:, 0] - batch[1]) ** 2)

    arrays = {name: _as_arrays(split, jnp.float32) for name, split in splits.items()}
    return Workload(
        "tabular", "table (Friedman #1)", 64, functools.partial(_dense, sizes=(10, 64, 64, 1)),
        loss, arrays["training"], functools.partial(_draw_rows, batch_size=64),
        arrays["validation"], arrays["test"],
    )  # fmt: skip


def _friedman(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Ten columns uniform in 0..1, five of which matter; answers of mean 0 and deviation 1.

    Source: Friedman, Annals of Statistics 19 (1991), section 4.3.
    """
    x = np.random.default_rng(seed).uniform(size=(count, 10))
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    y += 10 * x[:, 3] + 5 * x[:, 4]
    return (x - 0.5) * 12**0.5, (y - 14.41) / 4.9


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "digits-mlp": _digits_mlp,
    "tabular": _tabular,
    "char-lm": _char_lm,
    "digits-cnn": _digits_cnn,
    "looped": _looped,
}
"""Name -> how to make it."""

MILLISECONDS = {
    "digits-mlp": 0.16, "tabular": 0.03, "char-lm": 0.22, "digits-cnn": 0.4, "looped": 1.8
}  # fmt: skip
"""Name -> processor time of a step with Adam, measured on one core of two."""


def _text() -> tuple[np.ndarray, int, str]:
    """CPython's manual as indices of the byte values that occur in it."""
    from toolkit.training import load_corpus

    corpus = load_corpus("prose")
    values, text = np.unique(corpus.tokens, return_inverse=True)
    return text.astype(np.int32), len(values), corpus.sha256


def _windows(text: np.ndarray, length: int) -> dict[str, Array]:
    """Training text whole; of the others windows of length + 1 in random order."""
    first, second = (int(share * len(text)) for share in SPLITS)
    cut = {"training": jnp.asarray(text[:first])}
    for name, part in (("validation", text[first:second]), ("test", text[second:])):
        windows = np.lib.stride_tricks.sliding_window_view(part, length + 1)
        order = np.random.default_rng(0).permutation(len(windows))[:HELD_OUT]
        cut[name] = jnp.asarray(windows[order])
    return cut


def _draw_windows(text: Array, step: Array, seed: Array, *, length: int, batch_size: int) -> Array:
    starts = jax.random.randint(_key(step, seed), (batch_size,), 0, len(text) - length)
    return text[starts[:, None] + jnp.arange(length + 1)]


def _digits() -> dict[str, tuple[Array, Array]]:
    """Images [examples, 8, 8] in 0..1, each in the nine places that one pixel aside leads to."""
    images, labels = _scikit_learn("load_digits")
    splits = _shuffled_splits(images.reshape(-1, 8, 8) / 16, labels)
    return {name: _as_arrays(_moved(*split)) for name, split in splits.items()}


def _moved(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    places = [(down, right) for down in range(3) for right in range(3)]
    moved = [padded[:, down : down + 8, right : right + 8] for down, right in places]
    order = np.random.default_rng(0).permutation(len(places) * len(labels))
    return np.concatenate(moved)[order], np.tile(labels, len(places))[order]


def _scikit_learn(loader: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise RuntimeError(
            f"this workload needs scikit-learn ({loader}): pip install scikit-learn"
        ) from error
    return getattr(datasets, loader)(return_X_y=True)


def _shuffled_splits(rows: np.ndarray, labels: np.ndarray) -> dict[str, tuple]:
    """Training 60 %, validation 20 %, test 20 %: so small a test set needs its fifth."""
    order = np.random.default_rng(0).permutation(len(rows))
    parts = np.split(order, [int(0.6 * len(rows)), int(0.8 * len(rows))])
    names = ("training", "validation", "test")
    return {name: (rows[part], labels[part]) for name, part in zip(names, parts, strict=True)}


def _as_arrays(
    split: tuple[np.ndarray, np.ndarray], answers: Any = jnp.int32
) -> tuple[Array, Array]:
    return jnp.asarray(split[0], jnp.float32), jnp.asarray(split[1], answers)


def _draw_rows(data: tuple[Array, Array], step: Array, seed: Array, *, batch_size: int) -> Any:
    rows = jax.random.randint(_key(step, seed), (batch_size,), 0, len(data[0]))
    return jax.tree.map(lambda array: array[rows], data)


def _key(step: Array, seed: Array) -> Array:
    return jax.random.fold_in(jax.random.key(seed), step)


def _dense(key: Array, sizes: tuple[int, ...]) -> list[dict[str, Array]]:
    """Layers of a perceptron: weights N(0, 2 / inputs), biases 0."""
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"weight": jax.random.normal(key, pair) * (2 / pair[0]) ** 0.5, "bias": jnp.zeros(pair[1])}
        for key, pair in zip(keys, itertools.pairwise(sizes), strict=True)
    ]


def _affine(layer: dict[str, Array], inputs: Array) -> Array:
    return inputs @ layer["weight"] + layer["bias"]


def _mlp(layers: list[dict[str, Array]], inputs: Array) -> Array:
    for layer in layers[:-1]:
        inputs = jax.nn.relu(_affine(layer, inputs))
    return _affine(layers[-1], inputs)


def _neighbourhoods(images: Array) -> Array:
    """[batch, h, w, c] -> [batch, h, w, 9 c]: a convolution as a product of matrices.

    XLA's convolutions are many times slower on CPU inside a loop or with weights of their own in
    every lane of a vmap.
    """
    height, width = images.shape[1:3]
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifted = [
        padded[:, down : down + height, right : right + width]
        for down in range(3)
        for right in range(3)
    ]
    return jnp.concatenate(shifted, axis=-1)


def _halved(images: Array) -> Array:
    batch, height, width, channels = images.shape
    return images.reshape(batch, height // 2, 2, width // 2, 2, channels).mean((2, 4))


def _smooth_cross_entropy(logits: Array, labels: Array) -> Array:
    # Without it a few images misread with certainty decide the loss of so small a test split.
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), SMOOTHING)
    return optax.softmax_cross_entropy(logits, targets).mean()


def _cross_entropy(logits: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
