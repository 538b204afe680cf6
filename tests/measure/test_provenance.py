"""Records: there and back unchanged, all or nothing, and nothing private in them."""

import dataclasses
import getpass
import json
import os
import re
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from toolkit.measure import Record, environment, provenance, read_records, record, write_records


def test_records_come_back_equal(tmp_path):
    records = [
        record("a", 0.1 + 0.2, "s", samples=[0.1, 1 / 3]),
        record("b", 7, "byte", kind="modelled"),
        record("c", np.float32(1.5), "FLOP/s", kind="recorded", device="TPU v5e"),
        record("d", jnp.float32(2.5), "s"),
    ]
    path = tmp_path / "records.json"
    write_records(path, records)
    assert read_records(path) == records
    assert isinstance(read_records(path)[1].value, int)
    assert json.loads(path.read_text())[0]["kind"] == "measured"


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "records.json"
    write_records(path, [record("a", 1, "s")])
    before = path.read_text()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_records(path, [record("b", 2, "s")])
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["records.json"]


def test_a_record_knows_where_it_comes_from():
    made = record("a", 1.0, "s")
    assert made.versions["jax"]
    assert made.versions["python"]
    assert made.date.endswith("+00:00")
    assert made.commit
    assert made.device


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "guessed"}, "kind must be one of 'measured', 'recorded', 'modelled'"),
        ({"value": float("nan")}, "value must be a finite number; got nan"),
        ({"samples": [float("inf")]}, "samples must be"),
    ],
)
def test_wrong_records_are_refused(wrong, message):
    settings = {"name": "a", "value": 1.0, "unit": "s", **wrong}
    with pytest.raises(ValueError, match=message):
        record(**settings)


def test_wrong_files_are_refused(tmp_path):
    path = tmp_path / "records.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"records\.json holds a dict: want a list"):
        read_records(path)
    entry = dataclasses.asdict(record("a", 1, "s"))
    del entry["commit"]
    path.write_text(json.dumps([entry]))
    with pytest.raises(ValueError, match="entry 0: fields commit missing"):
        read_records(path)
    with pytest.raises(TypeError, match="want only Record"):
        write_records(path, [{"name": "a"}])


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (
            ["toolkit", "train", "runs/a", "--pattern", "gdn full"],
            "toolkit train runs/a --pattern 'gdn full'",
        ),
        (
            ["/home/someone/bin/toolkit", "bench", "--out=/tmp/x/r.json"],
            "toolkit bench --out=r.json",
        ),
        (["/venv/lib/pytest/__main__.py", "-k", "x"], "python -m pytest -k x"),
        (["run.py", "--data", "data/a.json", "~/private/b"], "run.py --data data/a.json b"),
        (["run.py", "file:///tmp/x", "10/2"], "run.py file:x 10/2"),
    ],
)
def test_commands_carry_no_folder_of_the_machine(monkeypatch, arguments, command):
    monkeypatch.setattr(sys, "argv", arguments)
    assert environment()["command"] == command


def test_environment_is_complete_and_not_private(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run.py", f"--host={socket.gethostname()}"])
    facts = environment()
    assert {"python", "versions", "device_kind", "device_count", "cpu", "cores"} <= set(facts)
    assert {"memory_bytes", "commit", "date", "command", "device"} <= set(facts)
    assert facts["device_count"] == 8
    assert "8 simulated devices" in facts["device"]
    text = json.dumps(facts)
    assert os.getcwd() not in text
    assert os.path.expanduser("~") not in text
    if len(socket.gethostname()) > 3:
        assert socket.gethostname() not in text
    assert getpass.getuser() not in text or getpass.getuser() == "root"


def test_record_is_a_plain_frozen_value():
    made = record("a", 1, "s")
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.value = 2
    assert made == Record(**dataclasses.asdict(made))


def test_a_changed_tree_is_named_and_records_are_no_change(tmp_path, monkeypatch):
    def git(*words):
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *name, *words], cwd=tmp_path, check=True, capture_output=True)

    for name in ("toolkit/measure/provenance.py", "data/experiments/a.jsonl", "data/other.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    git("init")
    git("add", ".")
    git("commit", "-m", "all")
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "toolkit/measure/provenance.py"))
    commit = provenance._commit.__wrapped__
    (tmp_path / "data/experiments/a.jsonl").unlink()
    assert re.fullmatch(r"[0-9a-f]{12}", commit())
    (tmp_path / "data/other.txt").write_text("after")
    assert re.fullmatch(r"[0-9a-f]{12}\+changes", commit())


def test_an_archive_of_the_repository_knows_its_commit(tmp_path):
    """Notebooks install one, in which there is no repository to ask."""
    root = Path(provenance.__file__).parents[2]
    source = tmp_path / "copy"

    def git(*words, folder=source):
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        how = {"cwd": folder, "check": True, "capture_output": True}
        return subprocess.run(["git", *name, *words], **how).stdout

    (source / "toolkit/measure").mkdir(parents=True)
    for name in (".gitattributes", "toolkit/measure/provenance.py"):
        (source / name).write_bytes((root / name).read_bytes())
    git("init")
    git("add", ".")
    git("commit", "-m", "all")
    commit = git("rev-parse", "HEAD").decode().strip()
    (tmp_path / "all.zip").write_bytes(git("archive", "--format=zip", "HEAD"))
    with zipfile.ZipFile(tmp_path / "all.zip") as archive:
        archive.extractall(tmp_path / "unpacked")
    installed = tmp_path / "unpacked/toolkit/measure/provenance.py"
    code = f"import runpy; print(runpy.run_path({str(installed)!r})['_commit']())"
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE)
    assert found.stdout.decode().strip() == commit[:12]
