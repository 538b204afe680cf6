"""What workloads are made of: texts and images in disjoint splits, draws, and small layers."""

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

SPLITS = (0.8, 0.9)  # training up to here, validation up to there, test the rest
HELD_OUT = 4096  # windows of text in validation and test, at most
SMOOTHING = 0.1  # of the labels of digits


@dataclass(frozen=True)
class Workload:
    """A problem to train on."""

    name: str  # its key, in the names of settings
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


def characters() -> tuple[np.ndarray, int, str]:
    """CPython's manual as indices of the byte values that occur in it."""
    from toolkit.training import load_corpus

    corpus = load_corpus("prose")
    values, text = np.unique(corpus.tokens, return_inverse=True)
    return text.astype(np.int32), len(values), corpus.sha256


def windows(text: np.ndarray, length: int) -> dict[str, Array]:
    """Training text whole; of the others windows of length + 1 in random order."""
    first, second = (int(share * len(text)) for share in SPLITS)
    cut = {"training": jnp.asarray(text[:first])}
    for name, part in (("validation", text[first:second]), ("test", text[second:])):
        windows = np.lib.stride_tricks.sliding_window_view(part, length + 1)
        order = np.random.default_rng(0).permutation(len(windows))[:HELD_OUT]
        cut[name] = jnp.asarray(windows[order])
    return cut


def draw_windows(text: Array, step: Array, seed: Array, *, length: int, batch_size: int) -> Array:
    """Windows of length + 1 at places drawn for a step: [batch, length + 1]."""
    starts = jax.random.randint(batch_key(step, seed), (batch_size,), 0, len(text) - length)
    return text[starts[:, None] + jnp.arange(length + 1)]


def digits() -> dict[str, tuple[Array, Array]]:
    """Images [examples, 8, 8] in 0..1, each in the nine places that one pixel aside leads to."""
    images, labels = scikit_learn("load_digits")
    splits = shuffled_splits(images.reshape(-1, 8, 8) / 16, labels)
    return {name: as_arrays(moved(*split)) for name, split in splits.items()}


def moved(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every image in the nine places that one pixel aside leads to, in random order."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    places = [(down, right) for down in range(3) for right in range(3)]
    moved = [padded[:, down : down + 8, right : right + 8] for down, right in places]
    order = np.random.default_rng(0).permutation(len(places) * len(labels))
    return np.concatenate(moved)[order], np.tile(labels, len(places))[order]


def scikit_learn(loader: str) -> tuple[np.ndarray, np.ndarray]:
    """A data set of scikit-learn as rows and answers; refused where it is not installed."""
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise RuntimeError(
            f"this workload needs scikit-learn ({loader}): pip install scikit-learn"
        ) from error
    return getattr(datasets, loader)(return_X_y=True)


def shuffled_splits(rows: np.ndarray, labels: np.ndarray) -> dict[str, tuple]:
    """Training 60 %, validation 20 %, test 20 %: so small a test set needs its fifth."""
    order = np.random.default_rng(0).permutation(len(rows))
    parts = np.split(order, [int(0.6 * len(rows)), int(0.8 * len(rows))])
    names = ("training", "validation", "test")
    return {name: (rows[part], labels[part]) for name, part in zip(names, parts, strict=True)}


def as_arrays(
    split: tuple[np.ndarray, np.ndarray], answers: Any = jnp.int32
) -> tuple[Array, Array]:
    """Rows in float32, and their answers."""
    return jnp.asarray(split[0], jnp.float32), jnp.asarray(split[1], answers)


def draw_rows(data: tuple[Array, Array], step: Array, seed: Array, *, batch_size: int) -> Any:
    """Rows of a data set drawn for a step, with replacement."""
    rows = jax.random.randint(batch_key(step, seed), (batch_size,), 0, len(data[0]))
    return jax.tree.map(lambda array: array[rows], data)


def batch_key(step: Array, seed: Array) -> Array:
    """The random key of a step's batch."""
    return jax.random.fold_in(jax.random.key(seed), step)


def dense(key: Array, sizes: tuple[int, ...]) -> list[dict[str, Array]]:
    """Layers of a perceptron: weights N(0, 2 / inputs), biases 0."""
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"weight": jax.random.normal(key, pair) * (2 / pair[0]) ** 0.5, "bias": jnp.zeros(pair[1])}
        for key, pair in zip(keys, itertools.pairwise(sizes), strict=True)
    ]


def affine(layer: dict[str, Array], inputs: Array) -> Array:
    """x W + b."""
    return inputs @ layer["weight"] + layer["bias"]


def mlp(layers: list[dict[str, Array]], inputs: Array) -> Array:
    """A perceptron with ReLU between its layers."""
    for layer in layers[:-1]:
        inputs = jax.nn.relu(affine(layer, inputs))
    return affine(layers[-1], inputs)


def neighbourhoods(images: Array) -> Array:
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


def halved(images: Array) -> Array:
    """Means of two by two pixels."""
    batch, height, width, channels = images.shape
    return images.reshape(batch, height // 2, 2, width // 2, 2, channels).mean((2, 4))


def smooth_cross_entropy(logits: Array, labels: Array) -> Array:
    """Mean cross-entropy with smoothed labels, in nats."""
    # Without it a few images misread with certainty decide the loss of so small a test split.
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), SMOOTHING)
    return optax.softmax_cross_entropy(logits, targets).mean()


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Mean cross-entropy, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
