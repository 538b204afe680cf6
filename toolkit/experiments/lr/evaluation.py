"""Workloads that no constant of a search was chosen on: ten, of kinds unlike those of development.

They are used once per version of the search, for the recorded comparison. To choose a constant, use
`toolkit.experiments.lr.workloads`; a test holds that the two have nothing in common but sources of
data and layers.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array

from toolkit.experiments.lr.sources import (
    HELD_OUT,
    Workload,
    affine,
    as_arrays,
    batch_key,
    characters,
    cross_entropy,
    dense,
    digits,
    draw_rows,
    draw_windows,
    mlp,
    scikit_learn,
    shuffled_splits,
    smooth_cross_entropy,
    windows,
)

ROWS = {"training": 8000, "validation": 1024, "test": 2048}  # of what is drawn from a law
WORD = 24  # symbols of a word of the formal language
SET = 12  # numbers of a set, nodes of a graph
BYTES, SEQUENCE = 256, 32  # of the fine-tuned model
TRAINED_STEPS, TRAINED_RATE = 400, 3e-3  # of that model, on other text
LOWEST_SIGNAL = 0.05  # of an image in the noisiest example


def _from_rows(
    title: str, init: Callable, loss: Callable, splits: dict[str, Any], size: int
) -> Workload:
    """A workload whose batches are rows of arrays."""
    draw = functools.partial(draw_rows, batch_size=size)
    parts = (splits["training"], draw, splits["validation"], splits["test"])
    return Workload("", title, size, init, loss, *parts)


def _drawn(law: Callable[[np.random.Generator, int], tuple], answers: Any = jnp.float32) -> dict:
    """Splits of rows drawn from a law."""
    return {
        name: as_arrays(law(np.random.default_rng([7, place]), count), answers)
        for place, (name, count) in enumerate(ROWS.items())
    }


def _squared(predicted: Array, wanted: Array) -> Array:
    return 0.5 * jnp.mean((predicted - wanted) ** 2)


def _gru() -> Workload:
    """A gated recurrent net guesses the next symbol of words that a random automaton writes."""
    states, symbols, width = 16, 6, 32
    random = np.random.default_rng(3)
    follows = random.integers(states, size=(states, symbols))
    odds = random.dirichlet(np.full(symbols, 0.5), states).cumsum(1)

    def law(random: np.random.Generator, count: int) -> tuple:
        words, state = np.zeros((count, WORD + 1), np.int64), np.zeros(count, np.int64)
        for place in range(WORD + 1):
            drawn = (random.uniform(size=(count, 1)) > odds[state]).sum(1).clip(max=symbols - 1)
            words[:, place], state = drawn, follows[state, drawn]
        return words[:, :-1], words[:, 1:]

    def init(key: Array) -> dict[str, Any]:
        keys = jax.random.split(key, 3)
        sizes = {"gates": (symbols + width, 2 * width), "new": (symbols + width, width),
                 "head": (width, symbols)}  # fmt: skip
        return {
            name: dense(key, pair)[0] for key, (name, pair) in zip(keys, sizes.items(), strict=True)
        }

    def loss(params: dict[str, Any], batch: tuple[Array, Array]) -> Array:
        def step(state: Array, symbol: Array) -> tuple[Array, Array]:
            seen = jnp.concatenate([symbol, state], -1)
            update, reset = jnp.split(jax.nn.sigmoid(affine(params["gates"], seen)), 2, -1)
            new = jnp.tanh(affine(params["new"], jnp.concatenate([symbol, reset * state], -1)))
            state = update * state + (1 - update) * new
            return state, affine(params["head"], state)

        inputs = jax.nn.one_hot(batch[0].astype(jnp.int32), symbols).swapaxes(0, 1)
        logits = jax.lax.scan(step, jnp.zeros((inputs.shape[1], width)), inputs)[1]
        return cross_entropy(logits.swapaxes(0, 1), batch[1])

    return _from_rows("GRU, formal language", init, loss, _drawn(law, jnp.int32), 32)


def _vision_transformer() -> Workload:
    """Two layers of attention over the sixteen 2 x 2 patches of a digit."""
    width, heads = 32, 4

    def init(key: Array) -> dict[str, Any]:
        keys = iter(jax.random.split(key, 12))
        layer = lambda *sizes: dense(next(keys), sizes)  # noqa: E731
        blocks = [
            {"mix": layer(width, 3 * width), "out": layer(width, width),
             "mlp": layer(width, 2 * width, width)}
            for _ in range(2)
        ]  # fmt: skip
        places = 0.1 * jax.random.normal(next(keys), (16, width))
        return {"in": layer(4, width), "places": places, "blocks": blocks, "out": layer(width, 10)}

    def normed(x: Array) -> Array:
        return jax.nn.standardize(x, epsilon=1e-5)

    def loss(params: dict[str, Any], batch: tuple[Array, Array]) -> Array:
        images, labels = batch
        patches = images.reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, 16, 4)
        x = mlp(params["in"], patches) + params["places"]
        for block in params["blocks"]:
            mixed = mlp(block["mix"], normed(x)).reshape(*x.shape[:2], 3, heads, width // heads)
            q, k, v = jnp.moveaxis(mixed, 2, 0)
            x += mlp(block["out"], jax.nn.dot_product_attention(q, k, v).reshape(x.shape))
            x += mlp(block["mlp"], normed(x))
        return smooth_cross_entropy(mlp(params["out"], normed(x).mean(1)), labels)

    return _from_rows("digits, vision transformer", init, loss, digits(), 32)


def _autoencoder() -> Workload:
    init = functools.partial(dense, sizes=(64, 64, 8, 64, 64))

    def loss(params: Any, batch: tuple[Array, Array]) -> Array:
        rows = batch[0].reshape(len(batch[0]), -1)
        return _squared(mlp(params, rows), rows)

    return _from_rows("digits, autoencoder", init, loss, digits(), 64)


def _diffusion() -> Workload:
    """A perceptron guesses the noise in a digit (DDPM with a cosine schedule)."""

    def noisy(split: tuple[Array, Array], seed: int) -> tuple[Array, ...]:
        images = 2 * split[0].reshape(len(split[0]), -1) - 1
        random = np.random.default_rng(seed)
        signal = jnp.asarray(random.uniform(LOWEST_SIGNAL, 1, (len(images), 1)), jnp.float32)
        return images, signal, jnp.asarray(random.normal(size=images.shape), jnp.float32)

    def loss(params: Any, batch: tuple[Array, ...]) -> Array:
        images, signal, noise = batch
        angle = signal * jnp.pi / 2
        mixed = jnp.sin(angle) * images + jnp.cos(angle) * noise
        times = [wave(n * angle) for n in (1, 2, 4) for wave in (jnp.sin, jnp.cos)]
        return _squared(mlp(params, jnp.concatenate([mixed, *times], -1)), noise)

    def sample(data: Any, step: Array, seed: Array) -> tuple[Array, ...]:
        images, _, _ = draw_rows(data, step, seed, batch_size=64)
        first, second = jax.random.split(jax.random.fold_in(batch_key(step, seed), 1))
        signal = jax.random.uniform(first, (64, 1), minval=LOWEST_SIGNAL)
        return images, signal, jax.random.normal(second, images.shape)

    init = functools.partial(dense, sizes=(70, 256, 256, 64))
    splits = {name: noisy(part, at) for at, (name, part) in enumerate(digits().items())}
    parts = (splits["training"], sample, splits["validation"], splits["test"])
    return Workload("", "digits, DDPM", 64, init, loss, *parts)


def _diabetes() -> Workload:
    """A perceptron that learns 265 patients by heart."""
    rows, answers = scikit_learn("load_diabetes")
    splits = shuffled_splits(rows / rows.std(0), (answers - answers.mean()) / answers.std())
    splits = {name: as_arrays(split, jnp.float32) for name, split in splits.items()}
    init = functools.partial(dense, sizes=(10, 64, 64, 1))
    loss = lambda params, batch: _squared(mlp(params, batch[0])[:, 0], batch[1])  # noqa: E731
    return _from_rows("overfitting table (diabetes)", init, loss, splits, 32)


def _sets() -> Workload:
    """Deep Sets: the third largest of twelve numbers."""

    def law(random: np.random.Generator, count: int) -> tuple:
        rows = random.normal(size=(count, SET, 1))
        return rows, np.sort(rows[..., 0], 1)[:, -3] / 0.4

    def init(key: Array) -> list[Any]:
        first, second = jax.random.split(key)
        return [dense(first, (1, 64, 64)), dense(second, (64, 64, 1))]

    def loss(params: list[Any], batch: tuple[Array, Array]) -> Array:
        pooled = jax.nn.relu(mlp(params[0], batch[0])).mean(1)
        return _squared(mlp(params[1], pooled)[:, 0], batch[1])

    return _from_rows("deep sets", init, loss, _drawn(law), 64)


def _graphs() -> Workload:
    """Three rounds of messages: how many triangles has a random graph."""

    def law(random: np.random.Generator, count: int) -> tuple:
        density = random.uniform(0.1, 0.7, (count, 1, 1))
        upper = np.triu(random.uniform(size=(count, SET, SET)) < density, 1).astype(float)
        edges = upper + upper.swapaxes(1, 2)
        triangles = np.trace(edges @ edges @ edges, axis1=1, axis2=2) / 6
        return edges, np.log1p(triangles) - 2.5

    def init(key: Array) -> list[Any]:
        keys = jax.random.split(key, 4)
        sizes = [(2 * 32, 32, 32)] * 3 + [(32, 32, 1)]
        return [dense(key, pair) for key, pair in zip(keys, sizes, strict=True)]

    def loss(params: list[Any], batch: tuple[Array, Array]) -> Array:
        edges = batch[0]
        nodes = jnp.ones((*edges.shape[:2], 32)) * edges.mean(-1, keepdims=True)
        for layer in params[:3]:
            seen = jnp.concatenate([nodes, edges @ nodes / SET], -1)
            nodes = jax.nn.standardize(nodes + mlp(layer, seen), epsilon=1e-5)
        return _squared(mlp(params[3], nodes.mean(1))[:, 0], batch[1])

    return _from_rows("graph net", init, loss, _drawn(law), 32)


def _field() -> Workload:
    """A field in the plane from points of it, by Fourier features."""

    def law(random: np.random.Generator, count: int) -> tuple:
        points = random.uniform(-1, 1, (count, 2))
        x, y = points.T
        wanted = np.sin(9 * x + 3 * np.sin(4 * y)) + np.sign(np.hypot(x, y) - 0.6)
        return points, wanted + 0.05 * random.normal(size=count)

    def loss(params: Any, batch: tuple[Array, Array]) -> Array:
        angles = (batch[0][..., None] * 2.0 ** jnp.arange(5)).reshape(len(batch[0]), -1)
        features = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        return _squared(mlp(params, features)[:, 0], batch[1])

    init = functools.partial(dense, sizes=(20, 64, 64, 64, 1))
    return _from_rows("coordinate net", init, loss, _drawn(law), 64)


def _mixture() -> Workload:
    """Two of eight experts guess a character from the twelve before it."""
    length, experts = 12, 8
    text, vocabulary, sha256 = characters()
    cut = windows(text, length)

    def init(key: Array) -> dict[str, Any]:
        keys = jax.random.split(key, 4)
        own = jax.vmap(lambda key: dense(key, (64, 64, 64)))(jax.random.split(keys[0], experts))
        return {
            "table": jax.random.normal(keys[1], (vocabulary, 16)),
            "in": dense(keys[2], (length * 16, 64)),
            "experts": own,
            "router": 0.1 * jax.random.normal(keys[3], (64, experts)),
            "out": dense(keys[3], (64, vocabulary)),
        }

    def loss(params: dict[str, Any], batch: Array) -> Array:
        rows = params["table"][batch[:, :-1]].reshape(len(batch), -1)
        x = mlp(params["in"], rows)
        scores = x @ params["router"]
        # The chosen scores stay; all experts are computed, as so small ones may be.
        chosen = scores >= jax.lax.top_k(scores, 2)[0][:, 1:]
        gates = jax.nn.softmax(jnp.where(chosen, scores, -jnp.inf), -1)
        x += jnp.einsum("be,ebw->bw", gates, jax.vmap(mlp, (0, None))(params["experts"], x))
        return cross_entropy(mlp(params["out"], jax.nn.relu(x)), batch[:, -1])

    draw = functools.partial(draw_windows, length=length, batch_size=64)
    parts = (cut["training"], draw, cut["validation"], cut["test"], sha256)
    return Workload("", "mixture of experts", 64, init, loss, *parts)


def _fine_tuning() -> Workload:
    """A looped model, trained on the manual for a while, goes on with source code."""
    from toolkit.looped import LoopedConfig, LoopedLM
    from toolkit.training import load_corpus

    config = LoopedConfig.tiny(
        "full", loops=2, vocabulary=BYTES, width=32, heads=2, feed_forward=64
    )
    graph, params = nnx.split(LoopedLM(config, rngs=nnx.Rngs(0)))
    code, prose = load_corpus("code"), load_corpus("prose")
    cut = windows(code.tokens[: 2**20].astype(np.int32), SEQUENCE)
    draw = functools.partial(draw_windows, length=SEQUENCE, batch_size=8)

    def loss(params: Any, batch: Array) -> Array:
        return cross_entropy(nnx.merge(graph, params)(batch[:, :-1]), batch[:, 1:])

    optimizer = optax.adam(optax.linear_schedule(TRAINED_RATE, 0.0, TRAINED_STEPS))
    text = jnp.asarray(prose.tokens.astype(np.int32))

    def step(carry: tuple[Any, Any], step: Array) -> tuple[tuple[Any, Any], None]:
        params, state = carry
        gradient = jax.grad(loss)(params, draw(text, step, jnp.uint32(0)))
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, updates), state), None

    train = jax.jit(lambda start: jax.lax.scan(step, start, jnp.arange(TRAINED_STEPS))[0][0])
    trained = train((params, optimizer.init(params)))
    held_out = {name: cut[name][: HELD_OUT // 8] for name in ("validation", "test")}
    return Workload(
        "", "looped transformer, fine-tuned", 8, lambda key: trained, loss, cut["training"], draw,
        held_out["validation"], held_out["test"], code.sha256,
    )  # fmt: skip


EVALUATION: dict[str, Callable[[], Workload]] = {
    "gru": _gru,
    "digits-vit": _vision_transformer,
    "autoencoder": _autoencoder,
    "ddpm": _diffusion,
    "diabetes": _diabetes,
    "sets": _sets,
    "graphs": _graphs,
    "field": _field,
    "mixture": _mixture,
    "fine-tuning": _fine_tuning,
}
"""Name -> how to make it."""

MILLISECONDS = {
    "gru": 0.5, "digits-vit": 2.0, "autoencoder": 0.1, "ddpm": 0.6, "diabetes": 0.05, "sets": 0.4,
    "graphs": 1.0, "field": 0.1, "mixture": 0.5, "fine-tuning": 2.0,
}  # fmt: skip
"""Name -> processor time of a step with Adam, roughly, on one core."""
