"""Workloads for the comparison of learning rates: seven small problems without downloads.

A workload is pure functions and arrays: parameters from a key, a batch from a step and a seed. Its
three splits are disjoint; the test split is only for the report.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from toolkit._checks import check_choice
from toolkit.experiments.lr.evaluation import EVALUATION
from toolkit.experiments.lr.sources import (
    HELD_OUT,
    Workload,
    affine,
    as_arrays,
    characters,
    cross_entropy,
    dense,
    digits,
    draw_rows,
    draw_windows,
    halved,
    mlp,
    neighbourhoods,
    smooth_cross_entropy,
    windows,
)

CONTEXT = 8  # characters that predict the next one
SEQUENCE = 32  # of the looped transformer
# The tables that scikit-learn ships are so small that test losses rise in the longer budgets.
ROWS = {"training": 20_000, "validation": 2_000, "test": 4_000}
NOISE = 0.2  # in the answers to train on, in their standard deviations; 1 in Friedman's units


def workload(name: str) -> Workload:
    """A workload by its name, made once; RuntimeError where scikit-learn is missing."""
    known = WORKLOADS | EVALUATION
    check_choice("workload", name, known)
    return _made(name)


@functools.cache
def _made(name: str) -> Workload:
    return replace((WORKLOADS | EVALUATION)[name](), name=name)


def _char_lm() -> Workload:
    text, vocabulary, sha256 = characters()
    cut = windows(text, CONTEXT)

    def init(key: Array) -> dict[str, Any]:
        first, second = jax.random.split(key)
        table = jax.random.normal(first, (vocabulary, 16))
        return {"table": table, "layers": dense(second, (CONTEXT * 16, 128, vocabulary))}

    def loss(params: dict[str, Any], batch: Array) -> Array:
        embedded = params["table"][batch[:, :-1]].reshape(len(batch), -1)
        return cross_entropy(mlp(params["layers"], embedded), batch[:, -1])

    return Workload(
        "", "character LM", 64, init, loss, cut["training"],
        functools.partial(draw_windows, length=CONTEXT, batch_size=64),
        cut["validation"], cut["test"], sha256,
    )  # fmt: skip


def _looped() -> Workload:
    from toolkit.looped import LoopedConfig, LoopedLM

    text, vocabulary, sha256 = characters()
    cut = windows(text, SEQUENCE)
    config = LoopedConfig.tiny(
        "full", loops=2, vocabulary=vocabulary, width=32, heads=2, feed_forward=64
    )
    graph = nnx.split(nnx.eval_shape(lambda: LoopedLM(config, rngs=nnx.Rngs(0))))[0]

    def init(key: Array) -> Any:
        return nnx.split(LoopedLM(config, rngs=nnx.Rngs(key)))[1]

    def loss(params: Any, batch: Array) -> Array:
        return cross_entropy(nnx.merge(graph, params)(batch[:, :-1]), batch[:, 1:])

    held_out = {name: cut[name][: HELD_OUT // 8] for name in ("validation", "test")}
    return Workload(
        "", "looped transformer", 8, init, loss, cut["training"],
        functools.partial(draw_windows, length=SEQUENCE, batch_size=8),
        held_out["validation"], held_out["test"], sha256,
    )  # fmt: skip


def _digits_mlp() -> Workload:
    splits = digits()

    def loss(params: Any, batch: tuple[Array, Array]) -> Array:
        return smooth_cross_entropy(mlp(params, batch[0].reshape(len(batch[0]), -1)), batch[1])

    return Workload(
        "", "digits, MLP", 64, functools.partial(dense, sizes=(64, 128, 128, 10)), loss,
        splits["training"], functools.partial(draw_rows, batch_size=64),
        splits["validation"], splits["test"],
    )  # fmt: skip


def _digits_cnn() -> Workload:
    splits = digits()

    def init(key: Array) -> list[dict[str, Array]]:
        keys = jax.random.split(key, 3)
        sizes = ((9, 16), (9 * 16, 32), (2 * 2 * 32, 10))
        return [dense(key, pair)[0] for key, pair in zip(keys, sizes, strict=True)]

    def loss(params: list[dict[str, Array]], batch: tuple[Array, Array]) -> Array:
        images, labels = batch
        hidden = images[..., None]
        for layer in params[:2]:
            hidden = halved(jax.nn.relu(affine(layer, neighbourhoods(hidden))))
        return smooth_cross_entropy(affine(params[2], hidden.reshape(len(hidden), -1)), labels)

    return Workload(
        "", "digits, CNN", 32, init, loss,
        splits["training"], functools.partial(draw_rows, batch_size=32),
        splits["validation"], splits["test"],
    )  # fmt: skip


def _tabular() -> Workload:
    splits = {name: _friedman(rows, seed) for seed, (name, rows) in enumerate(ROWS.items())}
    noise = np.random.default_rng(len(ROWS)).normal(size=ROWS["training"])
    rows, answers = splits["training"]
    splits["training"] = rows, answers + NOISE * noise

    def loss(params: Any, batch: tuple[Array, Array]) -> Array:
        return 0.5 * jnp.mean((mlp(params, batch[0])[:, 0] - batch[1]) ** 2)

    arrays = {name: as_arrays(split, jnp.float32) for name, split in splits.items()}
    return Workload(
        "", "table (Friedman #1)", 64, functools.partial(dense, sizes=(10, 64, 64, 1)),
        loss, arrays["training"], functools.partial(draw_rows, batch_size=64),
        arrays["validation"], arrays["test"],
    )  # fmt: skip


def _clouds() -> Workload:
    """Two clouds of points, 3 % of which lie nearer to the other: few examples tell rates apart."""

    def law(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(seed)
        labels = random.integers(2, size=count)
        apart = 1.9 * (2 * labels - 1)[:, None] / 20**0.5
        return random.normal(size=(count, 20)) + apart, labels

    def loss(params: Any, batch: tuple[Array, Array]) -> Array:
        return cross_entropy(mlp(params, batch[0]), batch[1])

    splits = {name: as_arrays(law(seed, rows)) for seed, (name, rows) in enumerate(ROWS.items())}
    return Workload(
        "", "two clouds, MLP", 8, functools.partial(dense, sizes=(20, 32, 2)), loss,
        splits["training"], functools.partial(draw_rows, batch_size=8),
        splits["validation"], splits["test"],
    )  # fmt: skip


def _adding() -> Workload:
    """A recurrent net adds two marked numbers of sixteen."""
    length, width = 16, 32

    def law(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        numbers, marks = random.uniform(-1, 1, (count, length)), np.zeros((count, length))
        for half in (0, length // 2):
            marks[np.arange(count), half + random.integers(length // 2, size=count)] = 1
        return np.stack([numbers, marks], -1), (numbers * marks).sum(1)

    def init(key: Array) -> dict[str, Any]:
        first, second = jax.random.split(key)
        return {"new": dense(first, (2 + width, width))[0], "head": dense(second, (width, 1))[0]}

    def loss(params: dict[str, Any], batch: tuple[Array, Array]) -> Array:
        def step(state: Array, seen: Array) -> tuple[Array, None]:
            return jnp.tanh(affine(params["new"], jnp.concatenate([seen, state], -1))), None

        start = jnp.zeros((len(batch[0]), width))
        state = jax.lax.scan(step, start, batch[0].swapaxes(0, 1))[0]
        return 0.5 * jnp.mean((affine(params["head"], state)[:, 0] - batch[1]) ** 2)

    splits = {
        name: as_arrays(law(np.random.default_rng([5, seed]), rows), jnp.float32)
        for seed, (name, rows) in enumerate(ROWS.items())
    }
    return Workload(
        "", "Elman net, adding", 32, init, loss, splits["training"],
        functools.partial(draw_rows, batch_size=32), splits["validation"], splits["test"],
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
    "adding": _adding,
    "clouds": _clouds,
}
"""Name -> how to make it."""
