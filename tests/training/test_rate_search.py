"""The search inside training: stopped half-way and resumed, sharded, with groups of parameters."""

import json
import os
import signal
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiers import by_night

from toolkit.lr import AutoLRS, ProbeThenDecay
from toolkit.parallel import fully_sharded, make_mesh
from toolkit.training import (
    CheckpointError,
    FitOptions,
    TrainState,
    make_evaluation,
    make_train_step,
    read_metrics,
    search_rate,
)
from toolkit.training.rate_search import decoded, encoded

CLOSE = 2e-3  # relative, of another order of summation, after hundreds of steps
BUDGET = 600

DATA = {
    "x": jax.random.normal(jax.random.key(0), (64, 16)),
    "y": jax.random.normal(jax.random.key(1), (64, 8)),
}
PARAMS = {
    "in": 0.3 * jax.random.normal(jax.random.key(2), (16, 32)),
    "out": 0.3 * jax.random.normal(jax.random.key(3), (32, 8)),
}
OPTIMIZER = optax.adam(1.0)


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["in"]) @ params["out"] - batch["y"]) ** 2)


def sample(data, step):
    rows = jax.random.randint(jax.random.fold_in(jax.random.key(7), step), (16,), 0, 64)
    return jax.tree.map(lambda leaf: leaf[rows], data)


def find(state=None, optimizer=OPTIMIZER, **options):
    state = TrainState.create(PARAMS, optimizer) if state is None else state
    settings = {
        "sample": sample,
        "lr_range": (1e-3, 1.0),
        "searcher": partial(ProbeThenDecay, shortest_probe=2),
    }
    budget, every = options.pop("budget", BUDGET), options.pop("checkpoint_every", 200)
    length = FitOptions(budget, checkpoint_every=every, is_progress_shown=False)
    return search_rate(loss_fn, optimizer, state, DATA, length, **{**settings, **options})


def assert_same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def stop_after(count):
    calls = iter(range(1, count + 1))
    return lambda: next(calls) == count


@pytest.fixture(scope="module")
def whole():
    return find()


def test_it_trains_and_the_schedule_trains_again(whole):
    assert whole.stopped_by is None
    assert whole.result.ledger.gradient_evaluations == BUDGET
    assert int(whole.state.step) == whole.result.ledger.kept_steps
    evaluate = make_evaluation(loss_fn, jax.tree.map(lambda leaf: leaf[None], DATA))
    assert evaluate(whole.state.params) < 0.8 * evaluate(PARAMS)
    again = optax.chain(OPTIMIZER, optax.scale_by_schedule(whole.result.schedule))
    step = make_train_step(loss_fn, again, sample=sample, most_steps=100)
    state = TrainState.create(PARAMS, again)
    while (left := int(whole.state.step) - int(state.step)) > 0:
        state, _ = step(state, DATA, min(left, 100))
    assert evaluate(state.params) == pytest.approx(evaluate(whole.state.params), rel=CLOSE)


# In the first probes, between them and the second, and in the run.
@pytest.mark.parametrize("cut", [1, 2, 7])
def test_a_search_stopped_half_way_ends_with_the_same_bits(whole, tmp_path, cut):
    part = find(directory=tmp_path, stop=stop_after(cut))
    assert part.stopped_by == "request"
    resumed = find(directory=tmp_path, checkpoint_every=50)
    assert resumed.stopped_by is None
    assert_same_bits(resumed.state, whole.state)
    assert_same_bits(resumed.result.table, whole.result.table)
    np.testing.assert_array_equal(
        resumed.result.progress.controller.rates, whole.result.progress.controller.rates
    )
    assert resumed.result.ledger.gradient_evaluations == BUDGET
    rows = [{**row, "seconds": 0} for row in resumed.history]
    assert rows == [{**row, "seconds": 0} for row in whole.history]
    assert read_metrics(tmp_path / "metrics.jsonl") == resumed.history
    # Complete: nothing is left to do.
    assert_same_bits(find(directory=tmp_path).state, whole.state)


def test_a_search_killed_between_a_row_and_its_checkpoint_repeats_the_row(whole, tmp_path):
    rows = []

    def die(row):
        rows.append(row)
        if len(rows) == 3:
            raise MemoryError

    with pytest.raises(MemoryError):
        find(directory=tmp_path, checkpoint_every=1, callback=die)
    resumed = find(directory=tmp_path)
    assert [row["step"] for row in resumed.history] == [row["step"] for row in whole.history]
    assert_same_bits(resumed.state, whole.state)


def test_a_checkpoint_of_another_search_is_refused(tmp_path):
    find(directory=tmp_path, stop=stop_after(2))
    with pytest.raises(CheckpointError, match="another run"):
        find(directory=tmp_path, budget=700)


def test_a_search_that_another_version_wrote_is_refused_in_one_line():
    controller = {"steps": 3, "rates": np.ones(2)}
    written = json.loads(json.dumps(encoded(controller)))
    assert_same_bits(decoded(written, controller), controller)
    fewer, renamed = {"steps": 3}, {"spent": 3, "rates": np.ones(2)}
    for template, leaves in (
        (fewer, written),
        (renamed, written),
        (controller, [*written.values()]),
    ):
        with pytest.raises(CheckpointError, match=r"^directory: another version of toolkit wrote"):
            decoded(leaves, template)


def test_autolrs_resumes_too(tmp_path):
    options = {"searcher": AutoLRS.scaled, "budget": 300}
    straight = find(**options)
    find(directory=tmp_path, stop=stop_after(3), **options)
    assert_same_bits(find(directory=tmp_path, **options).state, straight.state)


def on_mesh():
    mesh = make_mesh({"data": 8})
    params = fully_sharded(PARAMS, mesh, min_elements=64).apply(PARAMS)
    return TrainState.create(params, OPTIMIZER), NamedSharding(mesh, PartitionSpec("data"))


@pytest.mark.parametrize("evaluation", by_night({"loop"}, ["loop", "vmap"]))
def test_on_a_sharded_mesh(whole, tmp_path, evaluation):
    state, batch_sharding = on_mesh()
    options = {"evaluation": evaluation, "batch_sharding": batch_sharding}
    straight = find(state, **options)
    layouts = [leaf.sharding for leaf in jax.tree.leaves(state)]
    assert [leaf.sharding for leaf in jax.tree.leaves(straight.state)] == layouts
    assert any(not layout.is_fully_replicated for layout in layouts)
    table, alone = straight.result.table, whole.result.table
    # Five rates are a grid; the next two follow from the losses, and are as close as those.
    np.testing.assert_array_equal(table["rate"][:5], alone["rate"][:5])
    np.testing.assert_allclose(table["rate"][5:7], alone["rate"][5:7], rtol=CLOSE)
    np.testing.assert_allclose(table["forecast"][:7], alone["forecast"][:7], rtol=CLOSE)
    find(state, directory=tmp_path, stop=stop_after(4), **options)
    resumed = find(on_mesh()[0], directory=tmp_path, **options)
    assert_same_bits(resumed.state, straight.state)


def test_groups_of_parameters_keep_the_ratio_of_their_rates():
    groups = {"in": "fast", "out": "frozen"}
    optimizer = optax.multi_transform(
        {"fast": optax.adam(1.0), "frozen": optax.adam(1e-12)}, groups
    )
    found = find(optimizer=optimizer)
    np.testing.assert_allclose(found.state.params["out"], PARAMS["out"], rtol=1e-5)
    assert not np.allclose(found.state.params["in"], PARAMS["in"], rtol=0.1)


def test_the_history_is_of_the_training_that_was_kept():
    seen = []
    found = find(evaluate=lambda params: float(loss_fn(params, DATA)), callback=seen.append)
    kept = found.result.ledger.kept_steps
    assert found.history == seen
    assert [row["step"] for row in seen] == sorted({row["step"] for row in seen})
    assert seen[-1]["step"] == kept < BUDGET
    assert "evaluation_loss" in seen[-1]
    assert 2 <= sum("evaluation_loss" in row for row in seen) < len(seen)
    assert seen[-1]["learning_rate"] == found.result.schedule(kept - 1)


def test_an_interrupted_search_says_how_to_go_on(tmp_path, capsys):
    part = find(directory=tmp_path, callback=lambda row: os.kill(os.getpid(), signal.SIGTERM))
    assert part.stopped_by == "SIGTERM"
    spent = part.result.ledger.gradient_evaluations
    message = capsys.readouterr().err
    assert f"stopped by SIGTERM at {spent} of {BUDGET} gradient evaluations: saved in" in message
