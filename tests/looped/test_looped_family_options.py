"""Options of published attention families in one block: decoding, documents, streaming."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_models import FAMILIES, model_of
from flax import nnx

from toolkit.looped import LoopedConfig, decode_step, load_checkpoint, prefill
from toolkit.looped.mixing.streaming import streaming

TOLERANCE: Any = {"rtol": 1e-5, "atol": 1e-5}
HALF_PRECISION = 0.05  # of the largest logit
TIME, PROMPT, BORDER = 12, 5, 7


def some_tokens(seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 64, (2, TIME)), jnp.int32)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if i else []) for i, n in enumerate(FAMILIES)]
)
def test_decoding_documents_and_recomputation(name):
    model, tokens = model_of(name), some_tokens()
    run = jax.jit(lambda model, tokens, documents: model(tokens, segment_ids=documents))
    one = jnp.zeros((2, TIME), jnp.int32)
    whole = run(model, tokens, one)
    logits, cache = prefill(model, tokens[:, :PROMPT], TIME)
    step = jax.jit(decode_step)
    for t in range(PROMPT, TIME):
        np.testing.assert_allclose(logits, whole[:, t - 1], **TOLERANCE)
        logits, cache = step(model, tokens[:, t], cache)
    np.testing.assert_allclose(logits, whole[:, -1], **TOLERANCE)

    documents = jnp.broadcast_to(jnp.arange(TIME) >= BORDER, (2, TIME)).astype(jnp.int32)
    other = jnp.concatenate([some_tokens(1)[:, :BORDER], tokens[:, BORDER:]], axis=1)
    first, second = run(model, tokens, documents), run(model, other, documents)
    np.testing.assert_allclose(first[:, BORDER:], second[:, BORDER:], **TOLERANCE)
    assert not np.allclose(first[:, :BORDER], second[:, :BORDER])
    np.testing.assert_array_equal(first[:, :BORDER], whole[:, :BORDER])
    half = run(model_of(name, dtype="bfloat16"), tokens, one)
    assert np.abs(half - whole).max() < HALF_PRECISION * np.abs(whole).max()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_streamed_backward_pass_has_the_same_gradient(name):
    graph, params = nnx.split(model_of(name))
    tokens = some_tokens()

    def loss(chunks, params):
        model = nnx.merge(graph, params)
        with streaming(chunks, model.config):
            return jnp.mean(model(tokens) ** 2)

    whole, pieces = (jax.jit(jax.grad(partial(loss, n)))(params) for n in (1, 3))
    for left, right in zip(*map(jax.tree.leaves, (whole, pieces)), strict=True):
        np.testing.assert_allclose(left, right, **TOLERANCE)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pre_norm": False}, "pre_norm is off, and so is sandwich_norm"),
        ({"shared_norm": True}, "shared_norm wants parallel_residual"),
        ({"parallel_residual": True, "ladder_residual": True}, "exclude each other"),
        ({"norm": "batch"}, "norm must be"),
        ({"head_soft_cap": -1.0}, "head_soft_cap is -1.0; it must be positive"),
        ({"residual_scale": float("nan")}, "residual_scale must be a finite number"),
        ({"options": {"full": {"score_scale": 0.0}}}, "full.score_scale is 0.0"),
        ({"options": {"full": {"rotary_divisors": [1.0, 2.0]}}}, "2 numbers, and 16 pairs"),
        ({"options": {"full": {"rotary_amplitude": 2.0}}}, "rotary_amplitude wants"),
        ({"pattern": "dsa", "options": {"dsa": {"logits_soft_cap": 2.0}}}, "dsa.logits_soft_cap"),
        ({"options": {"mlp": {"biases": True}}}, "options name 'mlp'"),
        ({"options": {"swiglu": {"activation": "tanh"}}}, "swiglu.activation"),
    ],
)
def test_options_that_make_no_sense_are_refused(fields, words):
    with pytest.raises(ValueError, match=words) as error:
        LoopedConfig.tiny(**fields)
    assert "\n" not in str(error.value)


def test_a_family_that_is_not_read_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="'apertus' are not read: its activation has learned"):
        load_checkpoint({"model.embed_tokens.weight": np.ones((3, 4), "f")}, style="apertus")
