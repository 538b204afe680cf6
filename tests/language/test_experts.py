"""Training on text of models with a mixture of experts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit.experts import balance_loss, max_violation, pooled_statistics
from toolkit.language import TrainingRun, next_byte_loss, train_language_model
from toolkit.looped import LoopedConfig, LoopedLM

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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"balance": -1.0}, "balance: got -1.0, wanted 0 or more"),
        ({"block_chunks": 2}, "block_chunks: got 2, wanted 1 with a balance loss"),
        ({"layout": "ring", "context_devices": 2}, "context_devices: got 2, wanted 1 for a model"),
    ],
)
def test_what_mixtures_cannot_do_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        TrainingRun(CONFIG, batch=4, sequence_length=32, **fields)
    dense = dataclasses.replace(CONFIG, feed_forwards="swiglu", options={})
    if "balance" not in fields:
        TrainingRun(dense, batch=4, sequence_length=32, **fields)
