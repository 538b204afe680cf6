"""The results kept in the repository: every one can still be read, judged and drawn."""

from pathlib import Path

import pytest

from toolkit import cli
from toolkit.experiments import load_experiment
from toolkit.experiments.records import results_of
from toolkit.measure import read_records

RECORDED = sorted((Path(__file__).parents[2] / "data/experiments").glob("*.json"))
LEAST_SEEDS = 3


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_results_are_shown_by_the_command(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_enable_compilation_cache", lambda: None)
    command = ["toolkit", "experiment", path.stem, "--recorded", path, "--directory", tmp_path]
    monkeypatch.setattr("sys.argv", [str(word) for word in command])
    cli.main()
    out = capsys.readouterr().out
    assert "recorded:" in out
    for claim in load_experiment(path.stem).claims:
        assert f"seen       {claim.text}" in out or f"not seen   {claim.text}" in out
    assert (tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_results_are_of_every_setting_with_three_seeds(path):
    experiment = load_experiment(path.stem)
    results = results_of(read_records(path), experiment)
    # A report of its own names the settings that were not run; a table would hide them.
    is_whole = set(results.labels) == set(experiment.settings)
    assert is_whole or (experiment.report and set(results.labels) < set(experiment.settings))
    assert min(map(len, results.outcomes.values())) >= LEAST_SEEDS
