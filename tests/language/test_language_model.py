"""A run on text: the same under every layout, resumed under another, read back as a model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from toolkit._files import sealed_json
from toolkit.lab import TrainingRun, load_language_model, stream_text, train_language_model
from toolkit.language import next_byte_loss
from toolkit.language.cores import run_cores
from toolkit.language.start import first_model
from toolkit.looped import LoopedConfig, LoopedLM
from toolkit.training import (
    CheckpointError,
    DivergedError,
    FitOptions,
    Recipe,
    evaluation_params,
    fit,
    pack_documents,
    prepare,
)

LOSS_TOLERANCE = 1e-4
TEXT = "a rose is a rose is a rose. " * 60


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "rose.txt"
    text.write_text(TEXT)
    config = LoopedConfig.tiny("full", loops=2, width=32, feed_forward=32)
    return TrainingRun(config, text=(str(text),), steps=20, batch=8, sequence_length=16)


@pytest.mark.slow
def test_packed_documents_train_as_if_each_were_alone():
    """Loss and gradients through all layers and loops; padding counts for nothing."""
    documents = np.random.default_rng(0).integers(0, 256, (2, 6))
    (row,) = pack_documents(list(documents), 13)
    config = LoopedConfig.tiny("gdn full", loops=2, width=16, heads=2, feed_forward=16)
    graph, params = nnx.split(LoopedLM(config, rngs=nnx.Rngs(0)))
    gradient = jax.jit(jax.value_and_grad(functools.partial(next_byte_loss, graph)))
    together = gradient(params, tuple(jnp.asarray(part)[None] for part in row))
    alone = gradient(params, (jnp.asarray(documents[:, :-1]), jnp.asarray(documents[:, 1:])))
    for ours, wanted in zip(*map(jax.tree.leaves, (together, alone)), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-6)


def test_a_loss_in_chunks_is_the_loss():
    config = LoopedConfig.tiny("window", loops=1, width=16, heads=2, feed_forward=16)
    graph, params = nnx.split(LoopedLM(config, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 256)
    segments = jnp.asarray([[0] * 8, [0] * 3 + [1] * 5])
    batch = tokens[:, :-1], tokens[:, 1:].at[1, 6:].set(-1), segments
    found = [
        jax.jit(jax.value_and_grad(functools.partial(next_byte_loss, graph, chunks=chunks)))(
            params, batch
        )
        for chunks in (1, 4)
    ]
    for whole, cut in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(cut, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_chunks": 3}, "loss_chunks: got 3, wanted a divisor of 16"),
        ({"layout": "ring"}, "context_devices: got 1 and layout 'ring'; wanted 2 or more with 'r"),
        ({"tensor_devices": 2}, "tensor_devices: got 2 and layout 'single'; wanted 2 or more with"),
        (
            {"layout": "zigzag", "context_devices": 8, "sequence_length": 20},
            "sequence_length: got 20, wanted a multiple of 8 context_devices",
        ),
        ({"layout": "ulysses", "context_devices": 4, "loss_chunks": 2}, "loss_chunks: got 2"),
    ],
)
def test_runs_that_cannot_be_are_refused(run, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(run, **change)


@pytest.mark.nightly
def test_layouts_train_the_same_model(run, tmp_path):
    losses = {}
    for changes in (
        {"layout": "single"},
        {"layout": "zero1+tensor", "tensor_devices": 2},
        {"layout": "zigzag+zero3", "context_devices": 4},
    ):
        placed = dataclasses.replace(run, **changes)
        layout = placed.layout
        losses[layout] = train_language_model(placed, tmp_path / layout).evaluation_loss
        assert losses[layout] == pytest.approx(losses["single"], abs=LOSS_TOLERANCE)


@pytest.mark.nightly
def test_a_run_moves_from_one_layout_to_another(run, tmp_path):
    single = train_language_model(run, tmp_path / "single")
    stopped = train_language_model(
        dataclasses.replace(run, layout="zero3"), tmp_path / "moved", stop=lambda: True
    )
    assert stopped.step == 10
    moved = train_language_model(run, tmp_path / "moved")
    assert moved.step == 20
    assert moved.evaluation_loss == pytest.approx(single.evaluation_loss, abs=LOSS_TOLERANCE)

    loaded = load_language_model(tmp_path / "moved")
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(moved.model), strict=True):
        np.testing.assert_array_equal(a, b)
    text = "".join(stream_text(loaded, "a ro", 8, temperature=0.0))
    assert len(text.encode()) >= 8
    assert jnp.isfinite(moved.evaluation_loss)


@pytest.mark.slow
def test_a_searched_rate_trains_and_resumes_to_the_bit(run, tmp_path):
    searched = dataclasses.replace(run, learning_rate="search", steps=200)
    whole = train_language_model(searched, tmp_path / "whole")
    assert whole.stopped_by is None
    assert whole.step == whole.history[-1]["step"] < 200
    assert whole.evaluation_loss < 1.0  # of log 256 = 5.5
    calls = iter(range(5))
    part = train_language_model(searched, tmp_path / "part", stop=lambda: next(calls) == 3)
    assert part.stopped_by == "request"
    resumed = train_language_model(searched, tmp_path / "part")
    assert resumed.stopped_by is None
    for model in (resumed.model, load_language_model(tmp_path / "part")):
        for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(whole.model), strict=True):
            np.testing.assert_array_equal(a, b)
    for name in ("step", "loss", "learning_rate"):
        assert [row[name] for row in resumed.history] == [row[name] for row in whole.history]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layout": "sharded"}, "layout"),
        ({"steps": 0}, "steps"),
        ({"sequence_length": -1}, "sequence_length"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate must be a finite number"),
        ({"steps": 1.5}, "steps must be an int; got 1.5"),
        ({"config": {}}, "config must be a LoopedConfig"),
        ({"weight_decay": -1.0}, "weight_decay"),
        (
            {"learning_rate": "find"},
            "learning_rate must be a finite number or 'search'; got 'find'",
        ),
    ],
)
def test_a_bad_run_is_refused_when_it_is_made(run, change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(run, **change)


def test_a_batch_that_devices_do_not_divide_is_refused(run, tmp_path):
    uneven = dataclasses.replace(run, batch=6, layout="zero3")
    with pytest.raises(ValueError, match=r"batch: got 6, wanted a multiple of (the )?8 devices"):
        train_language_model(uneven, tmp_path)


@pytest.mark.slow
def test_settings_changed_before_the_first_checkpoint_are_the_ones_read_back(run, tmp_path):
    wild = dataclasses.replace(run, learning_rate=1e30)
    with pytest.raises(DivergedError):
        train_language_model(wild, tmp_path)
    trained = train_language_model(run, tmp_path)
    loaded = load_language_model(tmp_path)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(trained.model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_folder_that_cannot_be_written_is_named(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"directory: cannot write in '.*file'"):
        train_language_model(run, tmp_path / "file")


def test_an_empty_prompt_and_an_empty_folder_are_refused(run, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run\.json"):
        load_language_model(tmp_path)
    (tmp_path / "run.json").write_text('{"configuration": {"model": {"dial": 1}')
    with pytest.raises(ValueError, match=r"directory: '.*run\.json' is damaged"):
        load_language_model(tmp_path)
    (tmp_path / "run.json").write_text("null")
    with pytest.raises(ValueError, match=r"directory: '.*run\.json' is damaged.*has no checksum"):
        load_language_model(tmp_path)
    facts = {"model": {"pattern": "full " * 3000}, "training": {}}
    (tmp_path / "run.json").write_bytes(sealed_json({"configuration": facts}))
    (tmp_path / "checkpoints" / "10").mkdir(parents=True)
    (tmp_path / "checkpoints" / "10" / "arrays").write_bytes(b"few")
    with pytest.raises(ValueError, match=r"describes .* parameters; the checkpoints hold 3 bytes"):
        load_language_model(tmp_path)
    with pytest.raises(ValueError, match="prompt"):
        stream_text(LoopedLM(run.config, rngs=nnx.Rngs(0)), "", 4)


@pytest.mark.nightly
def test_cores_share_a_batch_and_belong_to_the_run(run, tmp_path):
    shared = dataclasses.replace(run, cores=2)
    whole = train_language_model(shared, tmp_path / "whole")
    alone = train_language_model(run, tmp_path / "alone")
    assert whole.evaluation_loss == pytest.approx(alone.evaluation_loss, abs=LOSS_TOLERANCE)
    assert train_language_model(shared, tmp_path / "part", stop=lambda: True).step == 10
    resumed = train_language_model(shared, tmp_path / "part")
    for a, b in zip(jax.tree.leaves(whole.model), jax.tree.leaves(resumed.model), strict=True):
        np.testing.assert_array_equal(a, b)
    assert run_cores(tmp_path / "part", 8) == 2
    with pytest.raises(CheckpointError, match="cores"):
        train_language_model(run, tmp_path / "part")


@pytest.mark.slow
def test_a_folder_written_by_fit_is_read_with_its_average(tmp_path):
    """By a recipe that keeps an average: what is read is that, and not the last weights."""
    config = LoopedConfig.tiny("window", loops=1, width=16, heads=2)
    recipe = Recipe(steps=4, ema=0.9, optimizer="lion", no_decay=("vectors", "embedding"))
    graph, params = nnx.split(LoopedLM(config, rngs=nnx.Rngs(0)))
    batch = (jnp.zeros((1, 8), int), jnp.ones((1, 8), int))
    state, step = prepare(functools.partial(next_byte_loss, graph), params, recipe)
    facts = {"model": dataclasses.asdict(config), "training": dataclasses.asdict(recipe)}
    how = {"configuration": facts, "directory": tmp_path / "run"}
    options = FitOptions(4, log_every=1, is_progress_shown=False)
    done = fit(state, step, batch, options, **how).state
    loaded = nnx.state(load_language_model(tmp_path / "run"), nnx.Param)
    jax.tree.map(np.testing.assert_array_equal, loaded, evaluation_params(done))
    same = jax.tree.map(lambda a, b: bool((a == b).all()), loaded, done.params)
    assert not all(jax.tree.leaves(same))  # the control: the last weights
    other = dataclasses.replace(config, dtype="bfloat16", remat=True)
    begun = first_model(TrainingRun(other, init_from=str(tmp_path / "run")))
    assert begun.config == other
    jax.tree.map(np.testing.assert_array_equal, nnx.state(begun, nnx.Param), loaded)
    with pytest.raises(ValueError, match="differs from that of init_from"):
        first_model(TrainingRun(LoopedConfig.tiny("full"), init_from=str(tmp_path / "run")))
    state, step = prepare(functools.partial(next_byte_loss, graph), params, recipe)
    fit(state, step, batch, options, directory=tmp_path / "untold")
    with pytest.raises(ValueError, match="wanted the configuration of `fit` to have 'model'"):
        load_language_model(tmp_path / "untold")
