"""Every word of a pattern alike: one layer, whole and token by token, packed, causal, trained."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_options import everywhere
from tiers import by_night

from toolkit import looped
from toolkit.attention import MIXERS
from toolkit.looped import LoopedConfig, LoopedLM, parameter_count
from toolkit.looped.mixing import LAYERS

STEP_TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
BFLOAT16_ERROR = 0.05  # of the norm of the output
WORDS = tuple(MIXERS)
# Their caches are those of mamba2, gdn and kda.
AS_OTHERS = {"linear", "retention", "hgrn2", "delta", "comba", "gdn2", "delta_product"}
NOT_IN_TEST_LOOPED_MODEL = [word for word in WORDS if word not in ("full", "window", "gdn")]
# Longer than the smallest chunk; the prompt and the first document end within one.
TIME, PROMPT, BORDER = 21, 9, 11
CONFIG = LoopedConfig.tiny(
    width=16,
    heads=2,
    vocabulary=20,
    feed_forward=16,
    loops=2,
    options=everywhere(
        sliding_window=4, block_size=3, selected_blocks=3, selected_tokens=6, index_size=16
    ),
)
# Two value heads to a key head where a mixer can, sizes that are no power of two.
GROUPED = CONFIG.with_options(**everywhere(value_heads=4, key_size=6, value_size=5))
ONE_DOCUMENT = np.zeros((2, TIME), np.int32)


def drawn(make, seed=0):
    """A module with every parameter away from its (sometimes zero) start, so that all show.

    Its own initialisation would compile a program a shape.
    """
    module = nnx.eval_shape(make)
    generator = np.random.default_rng(seed)

    def draw(leaf):
        spread = leaf.shape[0] ** -0.5 if leaf.ndim > 1 else 0.5
        return jnp.asarray(spread * generator.standard_normal(leaf.shape), leaf.dtype)

    nnx.update(module, jax.tree.map(draw, nnx.state(module, nnx.Param)))
    return module


def build(word, config=CONFIG):
    return drawn(lambda: LAYERS[word](config, rngs=nnx.Rngs(0)))


def some_inputs(seed=0):
    x = np.random.default_rng(seed).standard_normal((2, TIME, CONFIG.width))
    return x.astype(np.float32)


@jax.jit
def _forward(layer, x, segment_ids):
    return layer(x, segment_ids=segment_ids)[0]


def forward(layer, x, documents=ONE_DOCUMENT):
    return np.asarray(_forward(layer, x, documents))


@jax.jit
def prefill(layer, x, cache):
    return layer(x, cache=cache)


@jax.jit
def step(layer, x_t, cache):
    return layer.step(x_t, cache)


def test_every_mixer_has_a_layer():
    assert set(LAYERS) - {"mla"} == set(MIXERS)


@pytest.mark.parametrize("word", by_night(AS_OTHERS, WORDS))
def test_prefill_and_steps_equal_the_parallel_form(word):
    layer, x = build(word, GROUPED), some_inputs()
    wanted = forward(layer, x)
    assert wanted.shape == x.shape
    empty = LAYERS[word].empty_cache(GROUPED, 2, TIME)
    out, cache = prefill(layer, x[:, :PROMPT], empty)
    assert jax.tree.map(jnp.shape, cache) == jax.tree.map(jnp.shape, empty)
    np.testing.assert_allclose(out, wanted[:, :PROMPT], **STEP_TOLERANCE)
    for t in range(PROMPT, TIME):
        out, cache = step(layer, x[:, t], cache)
        np.testing.assert_allclose(out, wanted[:, t], **STEP_TOLERANCE)


@pytest.mark.parametrize("word", WORDS)
def test_neither_the_future_nor_another_document_is_seen(word):
    layer, x, other = build(word, GROUPED), some_inputs(), some_inputs(1)
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


@pytest.mark.by_family
@pytest.mark.parametrize("word", NOT_IN_TEST_LOOPED_MODEL)
def test_a_training_step(word):
    """Two loops; every parameter gets a finite gradient, and a step along it lowers the loss."""
    config = dataclasses.replace(CONFIG, pattern=word)
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
    # An indexer has a loss of its own.
    idle = [name for name, leaf in names.items() if not np.any(leaf)]
    assert idle == [name for name in names if "indexer" in name]
    assert all(np.all(np.isfinite(leaf)) and leaf.dtype == np.float32 for _, leaf in leaves)
    length = np.sqrt(sum(np.sum(leaf**2) for _, leaf in leaves))
    after, _ = loss(jax.tree.map(lambda w, d: np.asarray(w) - 0.1 * d / length, model, gradient))
    assert after < before


@pytest.mark.by_family
@pytest.mark.parametrize("word", NOT_IN_TEST_LOOPED_MODEL)
def test_bfloat16_is_near_float32(word):
    x = some_inputs()
    # Rounding may select other tokens: here all are.
    config = GROUPED.with_options(**everywhere(selected_tokens=TIME, selected_blocks=TIME))
    layers = [build(word, dataclasses.replace(config, dtype=t)) for t in ("float32", "bfloat16")]
    wanted, out = (forward(layer, x) for layer in layers)
    assert out.dtype == jnp.bfloat16
    assert np.linalg.norm(out - wanted) < BFLOAT16_ERROR * np.linalg.norm(wanted)


def test_decays_start_away_from_their_limits():
    """Rates below 16 whose logarithm is finite, time steps between 1e-3 and 1e-1."""
    config = dataclasses.replace(CONFIG, width=512, heads=64)

    @partial(jax.jit, static_argnums=0)
    def initial_rate_and_step(layer):
        made = layer(config, rngs=nnx.Rngs(0))
        return jnp.exp(made.log_rate[...]), jax.nn.softplus(made.step_bias[...])

    for word, lowest in [("gdn", 0.01), ("mamba2", 1.0), ("kda", 1.0), ("delta_product", 0.01)]:
        rate, step = initial_rate_and_step(LAYERS[word])
        assert jnp.all((rate > 0.99 * lowest) & (rate < 16.1))
        assert jnp.all((step > 0.9e-3) & (step < 1.1e-1))


def test_a_rotated_head_has_pairs():
    with pytest.raises(ValueError, match=r"retention\.key_size is 5; it must be even"):
        CONFIG.with_options(retention={"key_size": 5})


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["gdn full", "rwkv7 comba", "mamba2 kda"])
def test_recurrent_layers_run_without_jit(pattern):
    config = LoopedConfig.tiny(pattern, loops=1, width=16, heads=2, vocabulary=12)
    model = LoopedLM(config, rngs=nnx.Rngs(0))
    tokens = jnp.array([[1, 2, 3, 4]])
    wanted = model(tokens)[:, -1]
    with jax.disable_jit():
        _, cache = looped.prefill(model, tokens[:, :3], 8)
        found, _ = looped.decode_step(model, tokens[:, 3], cache)
    np.testing.assert_allclose(found, wanted, **STEP_TOLERANCE)
