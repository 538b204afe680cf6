"""Options of a language model's run: passes on fewer devices, extension, validation, averages."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from toolkit.language import TrainingRun, load_language_model, train_language_model
from toolkit.language.settings import TrainingSettings
from toolkit.looped import LoopedConfig
from toolkit.training import read_metrics

LOSS_TOLERANCE = 1e-4
QUIET = {"is_progress_shown": False}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "rose.txt"
    text.write_text("a rose is a rose is a rose. " * 60)
    config = LoopedConfig.tiny("full", width=32, feed_forward=32)
    return TrainingRun(config, text=(str(text),), steps=20, batch=8, sequence_length=16)


def rows_without_clock(directory):
    return [row | {"seconds": 0} for row in read_metrics(directory / "metrics.jsonl")]


@pytest.mark.slow
def test_fewer_devices_keep_the_batch(run, tmp_path):
    """Eight devices, then one that computes two of the eight sequences at once."""
    wide = dataclasses.replace(run, layout="data", evaluate_every=10, checkpoint_every=10, keep=1)
    whole = train_language_model(wide, tmp_path / "whole", **QUIET)
    assert [row["step"] for row in whole.history if "evaluation_loss" in row] == [10, 20]
    stopped = train_language_model(wide, tmp_path / "fewer", stop=lambda: True, **QUIET)
    assert stopped.step == 10
    narrow = dataclasses.replace(run, device_batch=2)
    fewer = train_language_model(narrow, tmp_path / "fewer", **QUIET)
    assert fewer.step == 20
    for one, other in zip(fewer.history, whole.history, strict=True):
        for name in ("loss", "gradient_norm"):
            np.testing.assert_allclose(one[name], other[name], rtol=LOSS_TOLERANCE)
    np.testing.assert_allclose(fewer.evaluation_loss, whole.evaluation_loss, rtol=LOSS_TOLERANCE)
    assert [p.name for p in (tmp_path / "whole/checkpoints").iterdir() if p.name.isdigit()] == [
        "20"
    ]


@pytest.mark.slow
def test_a_run_that_was_extended_is_the_longer_run(run, tmp_path):
    """Under a constant rate bit for bit; its average of the weights is what is loaded."""
    config = dataclasses.replace(run.config, dtype="float16")
    long = dataclasses.replace(
        run, config=config, schedule="constant", warmup=2, ema=0.9, loss_scaling=True,
        validation=run.text[0], checkpoint_every=10, evaluate_every=10, optimizer="lion",
    )  # fmt: skip
    whole = train_language_model(long, tmp_path / "whole", **QUIET)
    short = dataclasses.replace(long, steps=10)
    train_language_model(short, tmp_path / "part", **QUIET)
    with pytest.raises(ValueError, match=r"steps: got 20, and the run in .* has 10; .* --extend"):
        train_language_model(long, tmp_path / "part", **QUIET)
    for _ in range(2):  # the second time there is nothing left to do
        train_language_model(long, tmp_path / "part", extend=True, **QUIET)
    assert rows_without_clock(tmp_path / "part") == rows_without_clock(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"steps: got 10, and the run in .* has 20; wanted 20"):
        train_language_model(short, tmp_path / "part", **QUIET)
    with pytest.raises(ValueError, match=r"extend: .* holds no run"):
        train_language_model(long, tmp_path / "none", extend=True, **QUIET)
    loaded, trained = (nnx.state(m, nnx.Param) for m in (load_language_model(tmp_path / "part"),
                                                          whole.model))  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, loaded, trained)


@pytest.mark.slow
def test_texts_are_mixed_by_their_weights_and_held_out_each(run, tmp_path):
    """A long text of one letter and a short one: the losses are those of the shares."""
    for name, size in (("a", 4000), ("b", 500)):
        (tmp_path / f"{name}.txt").write_text(name * size)
    texts = tuple(str(tmp_path / f"{name}.txt") for name in "ab")
    mixed = dataclasses.replace(run, text=texts, weights=(1.0, 9.0), steps=30, learning_rate=1e-2)
    trained = train_language_model(mixed, tmp_path / "whole", **QUIET)
    row = trained.history[-1]
    losses = [row[f"evaluation_loss of {text}"] for text in texts]
    assert losses[0] > losses[1]
    shared = 0.1 * losses[0] + 0.9 * losses[1]
    np.testing.assert_allclose(row["evaluation_loss"], shared, rtol=LOSS_TOLERANCE)
    other = dataclasses.replace(mixed, weights=(9.0, 1.0))  # the control
    row = train_language_model(other, tmp_path / "other", **QUIET).history[-1]
    assert row[f"evaluation_loss of {texts[0]}"] < row[f"evaluation_loss of {texts[1]}"]
    train_language_model(mixed, tmp_path / "cut", stop=lambda: True, **QUIET)
    cut = train_language_model(mixed, tmp_path / "cut", **QUIET)
    models = (cut.model, trained.model, load_language_model(tmp_path / "whole"))
    jax.tree.map(np.testing.assert_array_equal, *(nnx.state(m, nnx.Param) for m in models[:2]))
    jax.tree.map(np.testing.assert_array_equal, *(nnx.state(m, nnx.Param) for m in models[1:]))
    with pytest.raises(ValueError, match="weights: got 2 for 1 texts"):
        train_language_model(dataclasses.replace(mixed, text=texts[:1]), tmp_path / "x", **QUIET)


def test_passes_follow_from_the_devices():
    settings = TrainingSettings(batch=24, device_batch=3)
    assert [settings.passes(devices) for devices in (1, 2, 4, 8)] == [8, 4, 2, 1]
    assert TrainingSettings(batch=24, accumulate=3).passes(2) == 3
    assert TrainingSettings(batch=24, accumulate=3, device_batch=2).passes(1) == 12
    assert TrainingSettings(batch=10, device_batch=4).passes(1) == 5  # 3 passes would be uneven
    with pytest.raises(ValueError, match="batch: got 24, wanted a multiple of 5 devices"):
        settings.passes(5)
    with pytest.raises(ValueError, match="accumulate: got 5, wanted a divisor of the 24"):
        TrainingSettings(batch=24, accumulate=5).passes()
    experts = TrainingRun(LoopedConfig.tiny("full", feed_forwards="moe"), accumulate=2)
    with pytest.raises(ValueError, match=r"accumulate: got 2 passes .* wanted 1, or balance=0"):
        experts.passes()
    assert dataclasses.replace(experts, balance=0.0).passes() == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"keep": 0}, "keep: got 0, wanted at least 1"),
        ({"device_batch": 2, "learning_rate": "search"}, "device_batch: a search"),
        ({"checkpoint_minutes": 0.0}, "checkpoint_minutes: got 0.0, wanted more than 0"),
        ({"config": LoopedConfig.tiny(dtype="float16")}, "loss_scaling: got False with dtype"),
    ],
)
def test_a_wrong_setting_is_named(fields, words):
    with pytest.raises(ValueError, match=words):
        TrainingRun(**({"config": LoopedConfig.tiny()} | fields))
