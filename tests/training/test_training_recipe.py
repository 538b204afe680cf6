"""Recipes: optimisers by name, schedules, decay, averages, accumulation, scaling of the loss."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from float64 import enable_x64
from training_small_run import bigram_loss, bigram_params, digest

from toolkit import parallel, training
from toolkit.parallel.loss_scaling import FIRST_SCALE, with_loss_scale
from toolkit.training import Recipe, TrainState, evaluation_params, prepare

FLOAT64_TOLERANCE, FLOAT32_TOLERANCE = 1e-12, 1e-6
QUIET = {"log_every": 1, "is_progress_shown": False}


def near(tolerance):
    return partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)


def weighted_loss(params, batch):
    """A mean over the targets that count, as of packed documents."""
    inputs, targets = batch
    errors = (jnp.tanh(inputs @ params["w"]) + params["b"] - targets) ** 2
    return errors.mean(axis=1).mean(where=targets[:, 0] >= 0)


def counted(batch):
    return (batch[1][:, 0] >= 0).sum()


def gradient_of(params, batch, passes, weigh):
    """The gradient as plain descent shows it, and the loss."""
    step = training.make_train_step(weighted_loss, optax.sgd(1.0), accumulate=passes, weigh=weigh)
    state, metrics = step(TrainState.create(params, optax.sgd(1.0)), batch)
    return metrics["loss"][0], jax.tree.map(jnp.subtract, params, state.params)


def test_accumulated_gradients_are_those_of_the_whole_batch():
    """In float64, with an odd number of passes, and rows that do not count."""
    rng = np.random.default_rng(0)
    with enable_x64(True):
        params = {"w": jnp.asarray(rng.normal(size=(3, 2))), "b": jnp.ones(2)}
        targets = rng.normal(size=(6, 2)) ** 2
        targets[[0, 3, 4]] = -1  # so that the three passes count 1, 0 and 2 of their rows
        batch = (jnp.asarray(rng.normal(size=(6, 3))), jnp.asarray(targets))
        whole = gradient_of(params, batch, 1, None)
        for passes in (3, 2):
            if passes == 3:
                batch = jax.tree.map(lambda leaf: leaf[jnp.asarray([0, 1, 2, 5, 3, 4])], batch)
            jax.tree.map(
                near(FLOAT64_TOLERANCE), gradient_of(params, batch, passes, counted), whole
            )
        with pytest.raises(ValueError, match=r"got a mean whose weights depend .* or weigh="):
            gradient_of(params, batch, 2, None)  # a mean of means is another loss
        total = training.make_train_step(
            lambda params, batch: weighted_loss(params, batch) * counted(batch),
            optax.sgd(1.0),
            accumulate=2,
        )
        with pytest.raises(
            ValueError, match=r"loss_fn: got .*; wanted the mean of its rows, or weigh="
        ):
            total(TrainState.create(params, optax.sgd(1.0)), batch)
    with pytest.raises(ValueError, match=r"accumulate: got 4 passes .* \(6, 3\); wanted a divisor"):
        gradient_of(params, batch, 4, None)


def test_accumulation_sends_nothing_more_than_its_passes():
    """Every device keeps its rows, and the result is that of one device."""
    mesh = parallel.make_mesh({"data": 4}, devices=jax.devices()[:4])
    params = bigram_params(8)
    layout = parallel.layout(params, mesh, "data")
    text = jnp.asarray(np.frombuffer(b"the quick brown fox jumps over it. " * 20, np.uint8))
    sample = partial(training.sample_batch, seed=0, batch=16, time=8)
    recipe, losses = Recipe(steps=4, warmup=0, schedule="constant", accumulate=2), {}
    for name, place, sharding in (
        ("one", params, None),
        ("mesh", layout.apply(params), layout.batch_sharding),
    ):
        state, step = prepare(
            bigram_loss, place, recipe, sample=sample, most_steps=4, batch_sharding=sharding
        )
        if name == "mesh":
            text = jax.device_put(text, jax.sharding.NamedSharding(mesh, jax.P()))
            program = step.lower(state, text, 4).compile().as_text()
            assert "all-reduce" in program
            assert "all-to-all" not in program
            assert "collective-permute" not in program
        losses[name] = step(state, text, 4)[1]["loss"]
    near(FLOAT32_TOLERANCE)(losses["mesh"], losses["one"])


@pytest.mark.parametrize("ema", [0.9, 0.0])
def test_resumed_is_unbroken_and_the_average_is_what_is_evaluated(tmp_path, ema):
    name = "muon" if ema else "schedule_free"
    recipe = Recipe(steps=6, optimizer=name, ema=ema, accumulate=2, learning_rate=1e-2, warmup=0)
    text = jnp.asarray(np.frombuffer(b"the quick brown fox jumps over it. " * 20, np.uint8))
    sample = partial(training.sample_batch, seed=0, batch=4, time=8)
    seen = []

    def run(directory, stop=None):
        state, step = prepare(bigram_loss, bigram_params(8), recipe, sample=sample, most_steps=1)
        return training.fit(
            state, step, text, training.FitOptions(6, eval_every=3, checkpoint_every=3, **QUIET),
            directory=directory, stop=stop,
            evaluate=lambda params: (seen.append(params), 0.0)[1],
        )  # fmt: skip

    whole = run(tmp_path / "whole")
    calls = iter(range(9))
    run(tmp_path / "part", stop=lambda: next(calls) == 2)
    assert digest(run(tmp_path / "part").state) == digest(whole.state)
    kept = evaluation_params(whole.state)
    assert digest(seen[1]) == digest(kept)
    assert not np.allclose(kept["head"], whole.state.params["head"])


def test_the_average_is_the_weighted_mean_of_the_weights():
    """A decay so near 1 that 1 - decay**count in float32 would be off by a thousandth."""
    for decay in (0.5, 0.99999):
        optimizer = training.with_average(optax.sgd(0.1), decay)
        step = training.make_train_step(lambda w, data: jnp.sum((w - data) ** 2), optimizer)
        state = TrainState.create(jnp.asarray([1.0, -2.0]), optimizer)
        assert digest(evaluation_params(state)) == digest(state.params)
        weights = []
        for target in (3.0, 4.0, -1.0):
            state, _ = step(state, jnp.float32(target))
            weights.append(np.asarray(state.params, np.float64))
        shares = decay ** np.arange(3)[::-1]
        expected = (shares[:, None] * np.asarray(weights)).sum(0) / shares.sum()
        near(1e-5)(evaluation_params(state), expected)
    with pytest.raises(ValueError, match=r"decay must lie between 0 and 1, got 1\.0"):
        training.with_average(optax.sgd(0.1), 1.0)


def test_scaling_keeps_small_gradients_and_skips_infinite_ones():
    params = {"w": jnp.ones((2, 2))}

    def trained(optimizer, batches):
        def loss(params, batch):  # the gradient 1e-8 is zero in float16, 2^15 times as much is not
            factor, tiny = batch
            return (params["w"].astype(jnp.float16) * tiny * tiny).sum().astype(
                jnp.float32
            ) * factor

        step = training.make_train_step(loss, optimizer)
        state, rows = TrainState.create(params, optimizer), []
        for batch in batches:
            state, metrics = step(state, (jnp.float32(batch), jnp.float16(1e-4)))
            rows.append({name: float(row[0]) for name, row in metrics.items()})
        return state, rows

    sgd = optax.sgd(1e6)
    assert trained(sgd, [1.0])[0].params["w"].tolist() == [[1, 1], [1, 1]]  # lost without scaling
    scaled = with_loss_scale(sgd, grow_after=2)
    state, rows = trained(scaled, [1.0, 1e30, 1.0, 1.0])
    near(1e-2)(state.params["w"], np.full((2, 2), 1 - 3e-2))
    scales = [row["loss_scale"] / FIRST_SCALE for row in rows]
    assert scales == [1.0, 0.5, 0.5, 1.0]
    assert [row["skipped"] for row in rows] == [0, 1, 1, 1]
    assert rows[1]["gradient_norm"] == 0
    assert int(state.step) == 4


def test_a_gradient_that_no_scale_makes_finite_is_divergence():
    recipe = Recipe(steps=40, loss_scaling=True, warmup=0)

    def loss(params, batch):  # finite, with an infinite slope
        return jnp.sqrt(jnp.abs(params["w"] - 1)).sum() + batch

    state, step = prepare(loss, {"w": jnp.ones((2, 2))}, recipe)
    with pytest.raises(training.DivergedError, match=r"step 16 .*, loss scale 0\.5\)"):
        training.fit(state, step, jnp.float32(0), training.FitOptions(40, **QUIET))


def test_optimisers_are_those_of_optax():
    mask = {"w": True, "b": False}
    rate = {"learning_rate": 0.1}
    decay = rate | {"weight_decay": 0.1, "mask": mask}
    theirs = {
        "adamw": optax.adamw(b2=0.95, **decay),
        "ademamix": optax.contrib.ademamix(**decay),
        "lion": optax.lion(b2=0.99, **decay),
        "lamb": optax.lamb(eps=1e-8, **decay),
        "sgd": optax.chain(
            optax.trace(0.9, nesterov=True), optax.add_decayed_weights(0.1, mask), optax.scale(-0.1)
        ),
        "muon": optax.contrib.muon(
            0.1, weight_decay=0.1, weight_decay_mask=mask, adam_b2=0.95, consistent_rms=0.2
        ),
        "schedule_free": optax.contrib.schedule_free(
            optax.chain(
                optax.scale_by_adam(b1=0, b2=0.95),
                optax.add_decayed_weights(0.1, mask),
                optax.scale(-0.1),
            ),
            learning_rate=0.1,
        ),
        "adafactor": optax.chain(
            optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0),
            optax.add_decayed_weights(0.1, mask), optax.scale(-0.1),
        ),
    }  # fmt: skip
    assert theirs.keys() == training.OPTIMIZERS.keys()
    rng = np.random.default_rng(0)
    first = {"w": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32), "b": jnp.ones(3)}
    gradients = jax.tree.map(lambda leaf: 3 * leaf + 1, first)
    for name, optimizer in theirs.items():
        recipe = Recipe(steps=9, optimizer=name, warmup=0, schedule="constant", clip_norm=0, **rate)
        ours, ends = recipe.make_optimizer(), []
        for one in (ours, optimizer):
            params, state = first, one.init(first)
            update = jax.jit(one.update)
            for _ in range(3):
                updates, state = update(gradients, state, params)
                params = optax.apply_updates(params, updates)
            ends.append(params)
        jax.tree.map(near(FLOAT32_TOLERANCE), *ends)


def test_schedules_rise_and_fall():
    how = {"steps": 100, "warmup": 10, "learning_rate": 2.0}
    ends = {"constant": 2, "linear": 0, "cosine": 0, "wsd": 0, "wsd_sqrt": 0}
    for name, end in ends.items():
        rates = Recipe(schedule=name, **how).rates()
        near(FLOAT32_TOLERANCE)([rates(10), rates(100)], [2, end])
        assert rates(0) < rates(5) < 2
    near(FLOAT32_TOLERANCE)(Recipe(schedule="linear", final_rate=0.5, **how).rates()(100), 1)
    theirs = optax.warmup_cosine_decay_schedule(0.0, 2.0, 10, 100)
    near(0)([Recipe(**how).rates()(t) for t in (0, 7, 50)], [theirs(t) for t in (0, 7, 50)])


def test_what_does_not_decay():
    params = {"embedding": jnp.ones((2, 2)), "w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    cases = {
        ("vectors",): [1.0, 0.5, 0.5],  # b, embedding, w
        ("vectors", "embed"): [1.0, 1.0, 0.5],
        (): [0.5, 0.5, 0.5],
    }
    for spared, expected in cases.items():
        recipe = Recipe(
            steps=2, optimizer="sgd", learning_rate=0.5, weight_decay=1.0, warmup=0,
            schedule="constant", no_decay=spared,
        )  # fmt: skip
        optimizer = recipe.make_optimizer()
        zeros = jax.tree.map(jnp.zeros_like, params)
        updates, _ = optimizer.update(zeros, optimizer.init(params), params)
        found = optax.apply_updates(params, updates)
        assert [float(leaf.mean()) for leaf in jax.tree.leaves(found)] == expected
    misspelt = dataclasses.replace(recipe, no_decay=("embeding",))
    with pytest.raises(ValueError, match="no_decay: got 'embeding', which is in no parameter's"):
        misspelt.make_optimizer().init(params)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"optimizer": "adam"}, "optimizer must be one of 'adamw'"),
        ({"ema": 1.0}, "ema: got 1.0, wanted at least 0 and less than 1"),
        ({"ema": 0.9, "optimizer": "schedule_free"}, "averages the weights itself; wanted 0"),
        ({"accumulate": 0}, "accumulate: got 0, wanted at least 1"),
        ({"warmup": 10, "steps": 10}, "warmup: got 10, wanted less than 10 steps"),
        ({"final_rate": 0.1, "schedule": "wsd"}, "final_rate: got 0.1 with schedule 'wsd'"),
        ({"accumulate": 2, "learning_rate": "search"}, "accumulate: got 2 with learning_rate"),
        ({"schedule": "cosin"}, "schedule"),
    ],
)
def test_a_wrong_option_is_named(fields, words):
    with pytest.raises((ValueError, TypeError), match=words):
        Recipe(**fields)
