"""Training on text of models with a mixture of experts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.experts import balance_loss, max_violation, pooled_statistics, z_loss
from toolkit.language import (
    TrainingRun,
    load_language_model,
    next_byte_loss,
    train_language_model,
)
from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.training import load_corpus, sample_batch

CLOSE = 1e-5
CONFIG = LoopedConfig.tiny(
    "window window",
    2,
    width=16,
    heads=2,
    feed_forwards="swiglu moe",
    options={"moe": {"experts": 4, "hidden": 8}},
)
BATCH = tuple(np.random.default_rng(0).integers(0, 256, (2, 2, 16)))


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_loss_is_cross_entropy_and_the_balance_loss(chunks):
    model = LoopedLM(CONFIG, rngs=nnx.Rngs(0))
    _, routing = model.with_routing(jnp.asarray(BATCH[0]))
    parts = nnx.split(model)
    plain, whole = (
        next_byte_loss(*parts, BATCH, chunks=chunks, balance=balance) for balance in (0.0, 0.5)
    )
    wanted = 0.5 * balance_loss(pooled_statistics(routing[0], 2))
    np.testing.assert_allclose(whole - plain, wanted, rtol=CLOSE)
    assert wanted > 0.4


@pytest.mark.slow
def test_training_evens_the_loads(tmp_path):
    """With the balance loss they end more even than without, at the same start."""
    worst = {}
    for balance in (0.0, 1.0):
        run = TrainingRun(CONFIG, steps=60, batch=4, sequence_length=32, balance=balance)
        trained = train_language_model(run, tmp_path / str(balance), is_progress_shown=False)
        tokens = jax.random.randint(jax.random.key(0), (16, 32), 32, 127)
        loads = pooled_statistics(trained.model.with_routing(tokens)[1][0], 2).loads
        worst[balance] = float(max_violation(loads))
        assert trained.evaluation_loss < 5
    assert worst[1.0] < worst[0.0]


def test_the_z_loss_is_added_with_its_weight():
    model = LoopedLM(CONFIG, rngs=nnx.Rngs(0))
    _, routing = model.with_routing(jnp.asarray(BATCH[0]))
    plain, whole = (next_byte_loss(*nnx.split(model), BATCH, router_z=z) for z in (0.0, 0.5))
    np.testing.assert_allclose(whole - plain, 0.5 * z_loss(routing[0]), rtol=CLOSE)


@pytest.mark.nightly
def test_a_choice_bias_evens_the_loads_without_a_loss(tmp_path):
    """The bias is no parameter: at rate 0 it stays at zero, and the loads stay uneven."""
    config = CONFIG.with_options(moe={"choice_bias": True, "scores": "sigmoid"})
    worst, biases = {}, {}
    sizes: dict[str, Any] = {"steps": 100, "batch": 4, "sequence_length": 32, "learning_rate": 1e-2}
    for rate in (0.0, 0.01):
        run = TrainingRun(config, **sizes, balance=0.0, bias_rate=rate)
        trained = train_language_model(run, tmp_path / str(rate), is_progress_shown=False)
        batch, _ = sample_batch(jnp.asarray(load_corpus().tokens), 7, seed=3, batch=64, time=32)
        loads = pooled_statistics(trained.model.with_routing(batch)[1][0], 2).loads
        worst[rate] = float(max_violation(loads))
        loaded = load_language_model(tmp_path / str(rate))
        biases[rate], again = (
            model.blocks[1].feed_forward.router.choice_bias[...]
            for model in (trained.model, loaded)
        )
        np.testing.assert_array_equal(again, biases[rate])
        assert trained.evaluation_loss < 5
    assert not np.asarray(biases[0.0]).any()
    steps = np.asarray(biases[0.01]) / 0.01
    np.testing.assert_allclose(steps, steps.round(), atol=1e-3)  # so many times up as down
    assert worst[0.01] < 0.4 < 0.8 < worst[0.0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bias_rate": 0.1}, "bias_rate: got 0.1, wanted 0 for a model without moe.choice_bias"),
        ({"router_z": -1.0}, "router_z: got -1.0, wanted 0 or more"),
        ({"balance": -1.0}, "balance: got -1.0, wanted 0 or more"),
        ({"block_chunks": 2}, "block_chunks: got 2, wanted 1 with a balance loss"),
        ({"layout": "ring", "context_devices": 2}, "context_devices: got 2, wanted 1 for a model"),
    ],
)
def test_what_mixtures_cannot_do_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        TrainingRun(CONFIG, batch=4, sequence_length=32, **fields)
    dense = dataclasses.replace(CONFIG, feed_forwards="swiglu", options={})
    if len(fields.keys() & {"balance", "bias_rate", "router_z"}) == 0:
        TrainingRun(dense, batch=4, sequence_length=32, **fields)
