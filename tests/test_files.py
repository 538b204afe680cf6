"""Files from which work goes on: no byte of them changes unnoticed, and every fault is one line."""

import json
import os
from functools import partial

import numpy as np
import pytest
from corruption import CORRUPTIONS, assert_none_silent, corrupted, outcome_of

from toolkit import _files
from toolkit.experiments.kit.experiment import Experiment
from toolkit.experiments.kit.records import read_runs
from toolkit.lab.lessons.progress import Progress
from toolkit.training import MetricsLog, read_metrics


def execute(setting, seed, workspace):
    return {"loss": 1.0}


EXPERIMENT = Experiment("lines", "", {"a": None}, execute, (), (), None, "", 1.0)


def test_metrics(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(9):
        log.append({"step": step, "loss": 1 / (step + 1)})
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == log.rows
    read = partial(read_metrics, tmp_path / "metrics.jsonl")
    assert_none_silent(tmp_path / "metrics.jsonl", read, is_log=True)


def test_finished_runs(tmp_path):
    path = tmp_path / "runs.jsonl"
    for seed in range(3):
        line = {"experiment": "lines", "label": "a", "seed": seed, "setting": {}}
        line |= {"outcome": {"loss": seed / 3}, "environment": {"commit": "0"}}
        _files.append_sealed_line(path, line)
    assert_none_silent(path, partial(read_runs, path, EXPERIMENT), is_log=True)


def test_progress_of_a_learner(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_PROGRESS", str(tmp_path))
    progress = Progress("lesson")
    for number in range(4):
        progress.add("guess", f"q{number}", guess=number)
    whole, content = progress.data, progress.path.read_bytes()
    generator = np.random.default_rng(0)
    for _ in range(CORRUPTIONS):
        progress.path.write_bytes(corrupted(content, generator))
        found, fault = outcome_of(lambda: progress.data)
        if fault is None:  # other events still count; what was lost is counted
            lost = whole["guesses"].keys() - found["guesses"].keys()
            assert found["guesses"].items() <= whole["guesses"].items()
            assert (
                found["damaged"]
                or not lost
                or progress.path.read_bytes() == b""
                or content.startswith(progress.path.read_bytes())
            )
        else:
            assert "\n" not in fault


def test_an_edited_record_is_refused(tmp_path):
    path = tmp_path / "runs.jsonl"
    line = {"experiment": "lines", "label": "a", "seed": 0, "setting": {}, "environment": {}}
    _files.append_sealed_line(path, line | {"outcome": {"loss": 0.75}})
    path.write_text(path.read_text().replace("0.75", "0.25"))
    with pytest.raises(ValueError, match=r"runs\.jsonl, line 1 is damaged or was edited"):
        read_runs(path, EXPERIMENT)
    path.write_text(json.dumps(line | {"outcome": {"loss": 0.25}}) + "\n")
    with pytest.raises(ValueError, match=r"runs\.jsonl, line 1 has no checksum"):
        read_runs(path, EXPERIMENT)
    del line["label"]
    path.write_bytes(_files.sealed_json(line | {"outcome": {}}) + b"\n")
    with pytest.raises(ValueError, match=r"has a line without label"):
        read_runs(path, EXPERIMENT)


@pytest.mark.parametrize("cut", [1, 30])
def test_a_line_cut_short_is_dropped_and_a_whole_one_kept(tmp_path, cut):
    path = tmp_path / "lines.jsonl"
    _files.append_sealed_line(path, {"at": 0})
    _files.append_sealed_line(path, {"at": 1})
    path.write_bytes(path.read_bytes()[:-cut])
    kept = [{"at": 0}, {"at": 1}] if cut == 1 else [{"at": 0}]
    assert _files.read_sealed_lines(path) == kept
    _files.append_sealed_line(path, {"at": 2})
    assert _files.read_sealed_lines(path) == [*kept, {"at": 2}]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[" * 100_000, "nested 100000 deep"),
        ('{"a": ' * 100_000, "nested 100000 deep"),
        ("[" * 65 + "]" * 65, "nested 65 deep"),
        ("[" + " " * _files.LARGEST_JSON + "]", "bytes of JSON, more than"),
        ("1" * 5000, "is not JSON"),
        ("{", "is not JSON"),
        (b"\xff{}", "is not JSON"),
        ("[]", "must be a JSON object, got list"),
    ],
)
def test_json_is_bounded(text, fault):
    with pytest.raises(ValueError, match=fault) as caught:
        _files.json_object(text, "this.json")
    assert str(caught.value).startswith("this.json")
    assert "\n" not in str(caught.value)


def test_brackets_in_strings_are_no_depth():
    facts = {"code": "[[[" * 100 + '"' + "\\" + "{" * 100}
    assert _files.read_sealed_json(_files.sealed_json(facts), "this") == facts


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    _files.write_whole(path, b"old")
    with pytest.raises(TypeError):
        _files.write_whole(path, "no bytes")
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_the_umask_says_who_may_read_a_file(tmp_path):
    before = os.umask(0o027)
    try:
        _files.write_whole(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
