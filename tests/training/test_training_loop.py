"""The loop and its metrics: rows, boundaries, stopping, resuming, diverging."""

import os
import resource
import signal
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from training_small_run import bigram_loss, bigram_params, digest, run

from toolkit import training


def without_clock(rows):
    return [{key: row[key] for key in row if key != "seconds"} for row in rows]


@pytest.fixture(scope="module")
def whole():
    return run(None, total_steps=45, log_every=10, checkpoint_every=15)


def test_rows_end_at_every_boundary_and_evaluate_when_due(whole):
    assert [row["step"] for row in whole.history] == [10, 15, 20, 30, 40, 45]
    evaluated = [row["step"] for row in whole.history if "evaluation_loss" in row]
    assert evaluated == [20, 40, 45]
    assert set(whole.history[0]) == {"step", "loss", "gradient_norm", "learning_rate", "seconds"}
    assert whole.history[-1]["loss"] < whole.history[0]["loss"]
    assert whole.stopped_by is None
    assert whole.state.step == 45


def test_stop_and_resume_repeat_the_unbroken_run(whole, tmp_path, capsys):
    options = {"total_steps": 45, "log_every": 10, "checkpoint_every": 15}

    def interrupt(row):
        if row["step"] == 20:
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    first = run(tmp_path, interrupt, **options)
    assert signal.getsignal(signal.SIGINT) is handler
    assert first.stopped_by == "SIGINT"
    assert first.state.step == 20
    message = capsys.readouterr().err
    assert message.startswith("stopped by SIGINT at step 20 of 45: saved in ")
    assert "to go on, run the same again" in message
    seen = []
    second = run(tmp_path, seen.append, **options)
    assert [row["step"] for row in seen] == [30, 40, 45]
    assert digest(second.state) == digest(whole.state)
    assert without_clock(second.history) == without_clock(whole.history)
    assert training.read_metrics(tmp_path / "metrics.jsonl") == second.history
    third = run(tmp_path, seen.append, **options)
    assert len(seen) == 3, "a complete run has nothing left to do"
    assert digest(third.state) == digest(whole.state)


def test_sharded_run_resumes_to_the_same_bits(tmp_path, capsys):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    by_rows = NamedSharding(mesh, PartitionSpec("data"))
    options = {
        "total_steps": 30,
        "log_every": 10,
        "checkpoint_every": 10,
        "place": lambda params: jax.device_put(params, by_rows),
    }
    whole = run(None, **options)
    run(tmp_path, lambda row: os.kill(os.getpid(), signal.SIGTERM), **options)
    resumed = run(tmp_path, **options)
    assert "stopped by SIGTERM at step 10" in capsys.readouterr().err
    assert resumed.state.params["head"].sharding == by_rows
    assert digest(resumed.state) == digest(whole.state)


def test_resuming_drops_rows_beyond_the_checkpoint(whole, tmp_path):
    options = {"total_steps": 45, "log_every": 10, "checkpoint_every": 15}
    run(tmp_path, **(options | {"total_steps": 30}))
    log = training.MetricsLog(tmp_path / "metrics.jsonl", step=30)
    log.append({"step": 40, "loss": 0.0})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 45, "lo')
    result = run(tmp_path, **options)
    assert [row["step"] for row in training.read_metrics(tmp_path / "metrics.jsonl")] == [
        row["step"] for row in result.history
    ]
    assert digest(result.state) == digest(whole.state)


def fit_bigram(optimizer=None, loss=bigram_loss, **arguments):
    optimizer = optimizer or training.adamw(1e-2)
    tokens = jnp.asarray(np.arange(256, dtype=np.uint8))
    step = training.make_train_step(loss, optimizer)
    batch = training.sample_batch(tokens, 0, seed=0, batch=2, time=8)
    options = {"total_steps": 6, "log_every": 1, "is_progress_shown": False}
    options |= arguments.pop("options", {})
    return training.fit(
        training.TrainState.create(bigram_params(4), optimizer),
        step,
        batch,
        training.FitOptions(**options),
        **arguments,
    )


def test_a_result_is_printed_in_one_line():
    text = repr(fit_bigram())
    assert text.startswith("FitResult: complete; step 6, ")
    assert len(text.splitlines()) == 1


def test_stop_function_ends_the_run_also_outside_the_main_thread(capsys):
    results = []
    rows = []
    thread = threading.Thread(
        target=lambda: results.append(fit_bigram(stop=lambda: len(rows) == 2, callback=rows.append))
    )
    thread.start()
    thread.join()
    assert results[0].stopped_by == "request"
    assert [row["step"] for row in rows] == [1, 2]
    assert "nothing was saved" in capsys.readouterr().err


def test_divergence_is_an_error_and_is_not_saved(tmp_path):
    def explode(params, batch):
        return bigram_loss(params, batch) / (params["bias"][0] == 0.0)

    with pytest.raises(training.DivergedError, match="there is no checkpoint"):
        fit_bigram(loss=explode, directory=tmp_path)
    # With a zero head the bias first moves in the second update, so the third loss is infinite.
    assert [row["step"] for row in training.read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert not [path for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()]


def test_another_configuration_does_not_continue(tmp_path):
    fit_bigram(directory=tmp_path, configuration={"learning_rate": 0.01})
    with pytest.raises(training.CheckpointError, match=r"checkpoint has 0\.01, this run 0\.02"):
        fit_bigram(directory=tmp_path, configuration={"learning_rate": 0.02})


def test_progress_bar_shows_loss_and_tokens_per_second(capsys):
    fit_bigram(options={"is_progress_shown": True, "tokens_per_step": 16})
    shown = capsys.readouterr().err
    assert "6/6" in shown
    assert "loss " in shown
    assert "tokens/s" in shown


def test_minutes_between_checkpoints_add_to_those_of_steps(tmp_path, monkeypatch):
    times = iter(range(0, 10**6, 45))  # of seconds: a step takes 45
    clock = SimpleNamespace(monotonic=lambda: next(times), perf_counter=time.perf_counter)
    monkeypatch.setattr("toolkit.training.loop.time", clock)
    options = {"checkpoint_every": 100, "checkpoint_minutes": 1.0, "keep": 10}
    fit_bigram(directory=tmp_path, options=options)
    saved = sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit())
    assert saved == [2, 4, 6]


def test_chosen_updates_are_traced_once(tmp_path, whole):
    """The steps between which a trace lies are boundaries, whether it was resumed or not."""
    options = {"log_every": 10, "checkpoint_every": 15, "profile": (12, 14)}
    first = run(tmp_path, total_steps=12, **options)
    assert not (tmp_path / "profile").exists()
    both = run(tmp_path, total_steps=45, **options)
    assert [row["step"] for row in first.history] == [10, 12]
    assert [row["step"] for row in both.history] == [10, 12, 14, 15, 20, 30, 40, 45]
    assert digest(both.state) == digest(whole.state)
    assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == 1
    run(tmp_path, total_steps=45, **options)
    assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == 1
    with pytest.raises(ValueError, match="directory"):
        run(None, total_steps=20, **options)


def test_options_are_checked():
    for name in ("total_steps", "checkpoint_every", "tokens_per_step"):
        with pytest.raises(ValueError, match=f"{name} must be an int.*; got 1.5"):
            training.FitOptions(**{"total_steps": 3, name: 1.5})
    with pytest.raises(ValueError, match="checkpoint_minutes must be positive, got 0"):
        training.FitOptions(3, checkpoint_minutes=0)
    with pytest.raises(ValueError, match="checkpoint_every must be at least 1, got 0"):
        training.FitOptions(10, checkpoint_every=0)
    with pytest.raises(ValueError, match=r"most_steps=1: set log_every=1, or .* `sample`"):
        fit_bigram(options={"log_every": 2})


def test_metrics_file_is_readable_while_written_and_refuses_a_spoiled_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert training.read_metrics(path) == []
    log = training.MetricsLog(path)
    log.append({"step": 1, "loss": 0.1})
    assert training.read_metrics(path) == [{"step": 1, "loss": 0.1}]
    log.close()
    path.write_text(path.read_text() + "nonsense\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 has no checksum"):
        training.read_metrics(path)


def test_metrics_that_cannot_be_written_are_one_line(tmp_path):
    """A file-size limit stands for a full disk; the rows before it stay readable."""
    log = training.MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"step": 1, "loss": 0.5})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 4, hard))
    try:
        with pytest.raises(OSError, match=r"could not write metrics to .*metrics\.jsonl: File too"):
            log.append({"step": 2, "loss": 0.25})
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert training.read_metrics(log.path) == [{"step": 1, "loss": 0.5}]
