"""The contract of layers of a looped model, as functions of a layer's word."""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from toolkit._pytrees import check_classes
from toolkit.looped import LAYERS, LoopedConfig, LoopedLM, parameter_count

STEP_TOLERANCE: Any = {"rtol": 1e-5, "atol": 1e-5}
BFLOAT16_ERROR = 0.05  # of the norm of the output
WIDTH = 16
# Longer than the smallest chunk; the prompt and the first document end within one.
TIME, PROMPT, BORDER = 21, 9, 11
ONE_DOCUMENT = np.zeros((2, TIME), np.int32)


def everywhere(**options):
    """What `LoopedConfig(options=...)` takes: each option, for every layer with one of its name."""
    by_word = {}
    for word, layer in LAYERS.items():
        own = {field.name for field in dataclasses.fields(layer.Options)} & set(options)
        by_word |= {word: {name: options[name] for name in own}} if own else {}
    return by_word


_SHARED_KEY = {
    "head_size": 8, "rope_size": 4, "query_latent_size": 8, "output_groups": 2,
    "output_latent_size": 8,
}  # fmt: skip


@cache
def small():
    """Two loops of a small model, in which sparse layers do not see all."""
    return LoopedConfig.tiny(
        width=WIDTH,
        heads=2,
        vocabulary=20,
        feed_forward=16,
        loops=2,
        options=everywhere(
            sliding_window=4,
            block_size=3,
            selected_blocks=3,
            selected_tokens=6,
            selected_entries=2,
            index_size=16,
            **_SHARED_KEY,
        ),
    )


@cache
def grouped():
    """Two value heads per key head if the mixer allows it, and sizes that are not powers of two."""
    return small().with_options(**everywhere(value_heads=4, key_size=6, value_size=5))


def drawn(make, seed=0):
    """A module with random parameters instead of its initial (sometimes zero) ones.

    Its own initialisation would compile a program per shape.
    """
    module = nnx.eval_shape(make)
    generator = np.random.default_rng(seed)

    def draw(leaf):
        spread = leaf.shape[0] ** -0.5 if leaf.ndim > 1 else 0.5
        return jnp.asarray(spread * generator.standard_normal(leaf.shape), leaf.dtype)

    nnx.update(module, jax.tree.map(draw, nnx.state(module, nnx.Param)))
    return module


def _made(word: str, config: LoopedConfig) -> Any:
    layer: Any = LAYERS[word]
    return layer(config, rngs=nnx.Rngs(0))


def build(word, config):
    """A layer."""
    return drawn(lambda: _made(word, config))


def some_inputs(seed=0):
    """A stream of random numbers."""
    x = np.random.default_rng(seed).standard_normal((2, TIME, WIDTH))
    return x.astype(np.float32)


@jax.jit
def _forward(layer, x, segment_ids):
    return layer(x, segment_ids=segment_ids)[0]


def forward(layer, x, documents=ONE_DOCUMENT):
    """Its outputs."""
    return np.asarray(_forward(layer, x, documents))


@jax.jit
def prefill(layer, x, cache):
    """Reads a prompt into a cache."""
    return layer(x, cache=cache)


@jax.jit
def step(layer, x_t, cache):
    """Takes one token."""
    return layer.step(x_t, cache)


def prefill_and_steps_equal_the_parallel_form(word: str) -> None:
    """A prompt into a cache, then one token at a time."""
    layer, x = build(word, grouped()), some_inputs()
    wanted = forward(layer, x)
    assert wanted.shape == x.shape
    layers: Any = LAYERS
    empty = layers[word].empty_cache(grouped(), 2, TIME)
    check_classes(f"cache of {word!r}", empty)
    out, cache = prefill(layer, x[:, :PROMPT], empty)
    assert jax.tree.map(jnp.shape, cache) == jax.tree.map(jnp.shape, empty)
    np.testing.assert_allclose(out, wanted[:, :PROMPT], **STEP_TOLERANCE)
    for t in range(PROMPT, TIME):
        out, cache = step(layer, x[:, t], cache)
        np.testing.assert_allclose(out, wanted[:, t], **STEP_TOLERANCE)


def neither_the_future_nor_another_document_is_seen(word: str) -> None:
    """Bit for bit, and to rounding."""
    layer, x, other = build(word, grouped()), some_inputs(), some_inputs(1)
    documents = ONE_DOCUMENT + np.where(np.arange(TIME) < BORDER, 3, 8).astype(np.int32)
    out = forward(layer, x, documents)
    changed = forward(layer, np.concatenate([x[:, :PROMPT], other[:, PROMPT:]], 1), documents)
    np.testing.assert_array_equal(out[:, :PROMPT], changed[:, :PROMPT])
    assert not np.allclose(out[:, PROMPT:], changed[:, PROMPT:])
    changed = forward(layer, np.concatenate([other[:, :BORDER], x[:, BORDER:]], 1), documents)
    np.testing.assert_allclose(out[:, BORDER:], changed[:, BORDER:], **STEP_TOLERANCE)
    # The second document, moved to the front, reads the same there.
    moved = forward(layer, np.roll(x, -BORDER, axis=1), np.roll(documents, -BORDER, axis=1))
    np.testing.assert_allclose(moved[:, : TIME - BORDER], out[:, BORDER:], **STEP_TOLERANCE)


def a_training_step(word: str) -> None:
    """Two loops; every parameter gets a finite gradient, and a step along it lowers the loss."""
    config = dataclasses.replace(small(), pattern=word)
    model = drawn(lambda: LoopedLM(config, rngs=nnx.Rngs(0)))
    tokens = np.random.default_rng(1).integers(0, config.vocabulary, (2, 17))

    @jax.jit
    @jax.value_and_grad
    def loss(model):
        logits = jax.nn.log_softmax(model(tokens[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1))

    before, gradient = loss(model)
    gradient = jax.tree.map(np.asarray, gradient)
    leaves = jax.tree_util.tree_leaves_with_path(gradient)
    assert sum(leaf.size for _, leaf in leaves) == parameter_count(config)
    names = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    # An indexer has a separate loss.
    idle = [name for name, leaf in names.items() if not np.any(leaf)]
    assert idle == [name for name in names if "indexer" in name]
    assert all(np.all(np.isfinite(leaf)) and leaf.dtype == np.float32 for _, leaf in leaves)
    length = np.sqrt(sum(np.sum(leaf**2) for _, leaf in leaves))
    after, _ = loss(jax.tree.map(lambda w, d: np.asarray(w) - 0.1 * d / length, model, gradient))
    assert after < before


def bfloat16_is_near_float32(word: str) -> None:
    """Checked where rounding cannot change the selected tokens."""
    x = some_inputs()
    # Rounding may select other tokens: here all are.
    many = everywhere(selected_tokens=TIME, selected_blocks=TIME, selected_entries=TIME)
    config = grouped().with_options(**many)
    layers = [build(word, dataclasses.replace(config, dtype=t)) for t in ("float32", "bfloat16")]
    wanted, out = (forward(layer, x) for layer in layers)
    assert out.dtype == jnp.bfloat16
    assert np.linalg.norm(out - wanted) < BFLOAT16_ERROR * np.linalg.norm(wanted)


def layer_contracts():
    """By name, as functions of a word."""
    return {
        contract.__name__: contract
        for contract in (
            prefill_and_steps_equal_the_parallel_form,
            neither_the_future_nor_another_document_is_seen,
            a_training_step,
            bfloat16_is_near_float32,
        )
    }
