"""The train step: what it computes, in how many calls, in which precision and layout; optimiser."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from training_small_run import bigram_loss, bigram_params, digest

from toolkit import training

FLOAT32_TOLERANCE = 1e-6
TOKENS = jnp.asarray(np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 20, np.uint8))
SAMPLE = partial(training.sample_batch, seed=0, batch=8, time=16)


def test_step_equals_optax_written_out():
    optimizer = training.adamw(1e-2)
    params = bigram_params(8)
    step = training.make_train_step(bigram_loss, optimizer)
    batch = SAMPLE(TOKENS, 0)
    state, metrics = step(training.TrainState.create(params, optimizer), batch)

    @jax.jit
    def written_out(params, batch):
        loss, gradients = jax.value_and_grad(bigram_loss)(params, batch)
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        return loss, optax.tree.norm(gradients), optax.apply_updates(params, updates)

    loss, norm, expected = written_out(params, batch)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=FLOAT32_TOLERANCE, atol=FLOAT32_TOLERANCE),
        state.params,
        expected,
    )
    assert state.step == 1
    np.testing.assert_allclose(metrics["loss"], [loss], rtol=FLOAT32_TOLERANCE)
    np.testing.assert_allclose(metrics["gradient_norm"], [norm], rtol=FLOAT32_TOLERANCE)
    np.testing.assert_allclose(metrics["learning_rate"], [1e-2], rtol=FLOAT32_TOLERANCE)


def test_any_cutting_into_calls_gives_the_same_bits_from_one_program():
    optimizer = training.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 12))
    step = training.make_train_step(bigram_loss, optimizer, sample=SAMPLE, most_steps=8)
    digests = []
    for calls in ([8, 4], [1] * 12, [5, 7]):
        state = training.TrainState.create(bigram_params(8), optimizer)
        for steps in calls:
            state, metrics = step(state, TOKENS, steps)
            assert metrics["loss"].shape == (steps,)
        digests.append(digest(state))
    assert len(set(digests)) == 1
    assert step._run.program._cache_size() == 1


def test_loss_falls_and_the_given_parameters_survive_donation():
    optimizer = training.adamw(1e-2)
    params = bigram_params(16)
    step = training.make_train_step(bigram_loss, optimizer, sample=SAMPLE, most_steps=100)
    _, metrics = step(training.TrainState.create(params, optimizer), TOKENS, 100)
    assert metrics["loss"][0] > 5.0
    assert metrics["loss"][-1] < 2.0
    assert np.isfinite(params["head"]).all()


def test_compute_dtype_casts_matrices_inside_the_loss_only():
    seen = {}

    def loss_fn(params, batch):
        seen.update({name: leaf.dtype for name, leaf in params.items()})
        return bigram_loss(params, batch).astype(jnp.float32)

    optimizer = training.adamw(1e-2)
    step = training.make_train_step(loss_fn, optimizer, compute_dtype=jnp.bfloat16)
    state, _ = step(training.TrainState.create(bigram_params(8), optimizer), SAMPLE(TOKENS, 0))
    assert seen == {"embedding": jnp.bfloat16, "head": jnp.bfloat16, "bias": jnp.float32}
    floats = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert {leaf.dtype for leaf in floats} == {jnp.dtype("float32")}


def test_evaluation_is_the_mean_over_its_batches():
    batches = training.evaluation_batches(TOKENS, batch=4, time=16, count=3)
    params = bigram_params(8)
    each = [bigram_loss(params, jax.tree.map(lambda leaf, i=i: leaf[i], batches)) for i in range(3)]
    evaluate = training.make_evaluation(bigram_loss, batches)
    np.testing.assert_allclose(evaluate(params), np.mean(each), rtol=FLOAT32_TOLERANCE)


def test_sharded_state_keeps_its_layout_and_agrees_with_one_device():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    optimizer = training.adamw(1e-2)
    by_rows = NamedSharding(mesh, PartitionSpec("data"))
    params = bigram_params(8)
    placed = jax.tree.map(lambda leaf: jax.device_put(leaf, by_rows), params)
    options = {"sample": SAMPLE, "most_steps": 4}
    sharded = training.make_train_step(bigram_loss, optimizer, batch_sharding=by_rows, **options)
    state = training.TrainState.create(placed, optimizer)
    layout = jax.tree.map(lambda leaf: leaf.sharding, state)
    state, _ = sharded(state, TOKENS, 4)
    state, _ = sharded(state, TOKENS, 4)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == layout
    assert sharded._run.program._cache_size() == 1
    single = training.make_train_step(bigram_loss, optimizer, **options)
    expected = training.TrainState.create(params, optimizer)
    for _ in range(2):
        expected, _ = single(expected, TOKENS, 4)
    np.testing.assert_allclose(state.params["bias"], expected.params["bias"], atol=1e-4, rtol=1e-4)


def test_nnx_state_is_a_tree_of_parameters_like_any_other(tmp_path):
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    definition, params = nnx.split(model)
    optimizer = training.adamw(1e-2)
    batch = jnp.ones((4, 3))
    step = training.make_train_step(
        lambda params, batch: (nnx.merge(definition, params)(batch) ** 2).mean(), optimizer
    )
    state, _ = step(training.TrainState.create(params, optimizer), batch)
    with training.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        restored, _ = checkpoints.restore_latest(training.TrainState.create(params, optimizer))
    assert isinstance(restored.params, nnx.State)
    assert digest(restored) == digest(state)
    np.testing.assert_array_equal(
        nnx.merge(definition, restored.params)(batch), nnx.merge(definition, state.params)(batch)
    )
    assert model(batch).shape == (4, 2), "the model's own arrays were not donated"


def test_step_refuses_impossible_counts():
    optimizer = training.adamw(1e-2)
    with pytest.raises(ValueError, match="needs `sample`"):
        training.make_train_step(bigram_loss, optimizer, most_steps=2)
    with pytest.raises(ValueError, match="most_steps must be at least 1"):
        training.make_train_step(bigram_loss, optimizer, most_steps=0)
    step = training.make_train_step(bigram_loss, optimizer, sample=SAMPLE, most_steps=2)
    with pytest.raises(ValueError, match=r"steps must lie in 1\.\.2"):
        step(training.TrainState.create(bigram_params(8), optimizer), TOKENS, 3)


def test_adamw_decays_matrices_only_and_clips():
    params = {"matrix": jnp.ones((2, 2)), "vector": jnp.ones(2)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    optimizer = training.adamw(0.1, weight_decay=0.5)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    np.testing.assert_allclose(updates["matrix"], -0.05, rtol=FLOAT32_TOLERANCE)
    np.testing.assert_array_equal(updates["vector"], 0.0)

    def first_moment(clip_norm):
        optimizer = training.adamw(0.1, b1=0.0, clip_norm=clip_norm)
        gradients = jax.tree.map(lambda leaf: 10.0 * leaf, params)
        _, state = optimizer.update(gradients, optimizer.init(params), params)
        return optax.tree.norm(optax.tree.get(state, "mu"))

    np.testing.assert_allclose(first_moment(1.0), 1.0, rtol=FLOAT32_TOLERANCE)
    np.testing.assert_allclose(first_moment(None), 10 * np.sqrt(6), rtol=FLOAT32_TOLERANCE)
    with pytest.raises(ValueError, match="clip_norm"):
        training.adamw(0.1, clip_norm=0.0)
    for name, wrong in {"b1": -0.1, "b2": 2.0, "eps": 0.0, "learning_rate": float("nan")}.items():
        with pytest.raises(ValueError, match=f"{name} must"):
            training.adamw(**{"learning_rate": 0.1, name: wrong})
    with pytest.raises(ValueError, match="weight_decay"):
        training.adamw(0.1, weight_decay=-1.0)
