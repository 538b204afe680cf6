"""Real experiments made tiny: they train, resume to the same numbers, and draw what is recorded."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from toolkit.cli import commands as cli
from toolkit.experiments import (
    EXPERIMENTS,
    Stopped,
    Workspace,
    load_experiment,
    run_experiment,
)
from toolkit.experiments.kit import synthetic
from toolkit.experiments.kit.synthetic import Recipe, train
from toolkit.experiments.tasks import WordProblem
from toolkit.looped import LoopedConfig

# Together they compute for longer than the first tier has time.
pytestmark = pytest.mark.nightly

TINY = {"width": 16, "heads": 2, "feed_forward": 16}
STEPS = 60


@pytest.fixture(autouse=True)
def small_evaluations(monkeypatch):
    monkeypatch.setattr(synthetic, "LOG_EVERY", 10)
    monkeypatch.setattr(synthetic, "EVALUATION_BATCH", 16)


def tiny(task, steps=STEPS):
    model = LoopedConfig.tiny("full", vocabulary=task.vocabulary, **TINY)
    return Recipe(model, task, steps=steps, batch=4)


def test_training_killed_in_the_middle_ends_with_the_same_numbers(tmp_path):
    recipe = tiny(WordProblem("Z2", 6))
    unbroken = train(recipe, 1, Workspace(tmp_path / "unbroken", lambda share: None))
    shares = []

    def fail_half_way(share):
        shares.append(share)
        if share > 0.5:
            raise KeyboardInterrupt

    broken = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        train(recipe, 1, Workspace(broken, fail_half_way))
    resumed = []
    again = train(recipe, 1, Workspace(broken, resumed.append))
    assert resumed[0] == pytest.approx(shares[-1]), "nothing before the kill is trained again"
    same = ("loss", "step", "accuracy by step")
    assert [again.numbers[name] for name in same] == [unbroken.numbers[name] for name in same]
    for ours, theirs in zip(
        jax.tree.leaves(again.params), jax.tree.leaves(unbroken.params), strict=True
    ):
        assert (ours == theirs).all()
    assert len(unbroken.accuracy_by_position(recipe.task, 0)) == 6


def test_a_signal_stops_politely(tmp_path):
    import os
    import signal

    recipe = tiny(WordProblem("Z2", 6))
    workspace = Workspace(tmp_path, lambda share: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Stopped):
        train(recipe, 0, workspace)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_says_what_it_does(name):
    experiment = load_experiment(name)
    assert experiment.name == name
    assert experiment.settings
    assert experiment.claims
    assert experiment.beyond.endswith(".")
    assert all(experiment.work(setting) > 0 for setting in experiment.settings.values())
    for setting in experiment.settings.values():
        json.dumps(dataclasses.asdict(setting))


def test_an_experiment_runs_made_short(tmp_path, capsys):
    needle = load_experiment("needle")
    label, recipe = next(iter(needle.settings.items()))
    short = dataclasses.replace(needle, settings={label: dataclasses.replace(recipe, steps=10)})
    assert run_experiment(short, tmp_path, seeds=1)
    out = capsys.readouterr().out
    assert label in out
    assert re.search("not shown +T loops", out)
    assert (tmp_path / "figure.png").exists()


@pytest.mark.nightly
def test_language_is_measured_made_short(tmp_path, monkeypatch, capsys):
    from toolkit.experiments import language

    monkeypatch.setattr(language, "CONTEXTS", (64, 128))
    settings = {
        label: language.LanguageSetting(
            LoopedConfig.tiny(pattern, loops=loops, **TINY), steps=10, batch=2, time=16
        )
        for label, pattern, loops in (("plain", "full", 1), ("looped", "full", 2))
    }
    short = dataclasses.replace(language.EXPERIMENT, settings=settings)
    assert run_experiment(short, tmp_path, seeds=1)
    out = capsys.readouterr().out
    assert re.search(r"perplexity: looped \d", out)
    assert re.search("not shown +the hybrid beats looped attention", out)
    runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    rates = [run["outcome"][language._DECODE] for run in runs]
    assert [len(one) for one in rates] == [2, 2]
    assert np.min(rates) > 0


def test_command_lists_and_refuses(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_enable_compilation_cache", lambda: None)
    for arguments, status, word in (
        (["--list"], 0, "needle"),
        (["nothing"], 2, "must be one of 'needle'"),
        (["needle", "--seeds", "0"], 2, "seeds"),
    ):
        monkeypatch.setattr("sys.argv", ["toolkit", "experiment", *arguments])
        found = 0
        try:
            cli.main()
        except SystemExit as stop:
            found = stop.code
        out, err = capsys.readouterr()
        assert (found or 0) == status
        assert word in out + err
