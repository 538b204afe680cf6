"""The legs of CI, the hosted workflow that runs them, and the tables made from legs and floors."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LEGS = {path.name: path.read_text() for path in (ROOT / ".ci/legs").iterdir()}
BY_NIGHT = {"third-tier"}


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import tables

    return tables


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/models.md"])
def test_tables_are_current(tables, page):
    text = (ROOT / page).read_text()
    assert tables.with_table(page, text) == text, "run: python docs/tables.py"
    old = (
        text.replace("| `toolkit/lr` |", "|")
        .replace("| 3.12 |", "| 3.10 |")
        .replace("| `gemma2` |", "|")
    )
    assert old != text
    assert tables.with_table(page, old) == text


@pytest.mark.parametrize("workflow", ["ci", "nightly"])
def test_the_hosted_workflow_runs_every_leg(workflow):
    text = (ROOT / f".github/workflows/{workflow}.yml").read_text()
    legs = re.findall(r"leg: \[(.*)\]", text)[0].split(", ")
    assert set(legs) == set(LEGS) - (BY_NIGHT if workflow == "ci" else set())
    pythons = {
        version for leg in LEGS.values() for version in re.findall(r"find_python (3\.\d+)", leg)
    }
    assert pythons <= set(re.findall(r"3\.\d+", text))


def test_legs_say_which_versions_they_test():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = dict(re.findall(r"^(\w+)>=([\d.]+)$", "\n".join(project["dependencies"]), re.M))
    colab = dict(
        re.findall(r"^(\w+)==(\d+\.\d+(?:\.\d+)?)", (ROOT / ".ci/colab.txt").read_text(), re.M)
    )
    for leg, wanted in (("floor", bounds), ("colab", colab)):
        numpy = ".".join(wanted["numpy"].split(".")[:2])
        assert f"; jax {wanted['jax']}; NumPy {numpy}\n" in LEGS[leg]
    for leg in ("newest", "floor", "colab"):
        (python,) = set(re.findall(r"find_python (3\.\d+)", LEGS[leg]))
        assert f"# Versions: Python {python};" in LEGS[leg]


def ci(folder, *arguments):
    command = [folder / ".ci/run", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )


@pytest.mark.skipif(sys.platform != "linux", reason="CI is of Linux")
def test_a_failing_leg_is_named_and_the_others_run(tmp_path):
    (tmp_path / ".ci/legs").mkdir(parents=True)
    (tmp_path / ".ci/run").write_bytes((ROOT / ".ci/run").read_bytes())
    for name in LEGS:
        code = "echo broken; exit 3" if name == "floor" else "echo well"
        (tmp_path / ".ci/legs" / name).write_text(f"#!/usr/bin/env bash\n{code}\n")
    for path in tmp_path.glob(".ci/**/*"):
        path.chmod(0o755)
    done = ci(tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].endswith(": floor")
    assert done.stdout.splitlines()[-1].startswith("failed after")
    assert "=== floor: FAILED" in done.stdout
    assert "broken" in done.stdout
    assert {name for name in LEGS if f"=== {name}: passed" in done.stdout} == (
        set(LEGS) - BY_NIGHT - {"floor"}
    )
    night = ci(tmp_path, "nightly", "third-tier")
    assert night.returncode == 0
    assert "=== third-tier: passed" in night.stdout
    wrong = ci(tmp_path, "fourth-tier")
    assert wrong.returncode == 2
    assert "third-tier" in wrong.stderr
