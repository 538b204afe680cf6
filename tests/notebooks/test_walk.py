"""Every lesson taught through: guesses, hints, wrong answers, solutions, export, in one kernel."""

import ast
import importlib
import json
import os
import re
from pathlib import Path
from types import CodeType, ModuleType

import nbformat
import pytest

pytest.importorskip("anywidget")

from lesson_walk import walked
from yardstick import slowness

ROOT = Path(__file__).resolve().parents[2]
LESSONS = sorted((ROOT / "tutorials").glob("*.ipynb"))
MAX_PROCESSOR_SECONDS = 120  # a minute on two cores
MAX_MEMORY_BYTES = 900e6

every_lesson = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


@pytest.mark.nightly
@every_lesson
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client")
def test_is_taught_through_by_its_own_text(path: Path, tmp_path, monkeypatch) -> None:
    run_notebook = pytest.importorskip("toolkit.lab.notebooks.execute").run_notebook
    support = str(ROOT / "tests/support")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([support, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("TOOLKIT_PROGRESS", str(tmp_path / "progress"))
    nbformat.write(walked(path), tmp_path / path.name)
    run = run_notebook(tmp_path / path.name)
    print(f"{path.stem}: {run.processor_seconds:.0f} s, {run.peak_memory_bytes / 1e6:.0f} MB")
    assert not run.complaints
    assert run.processor_seconds < MAX_PROCESSOR_SECONDS
    assert 0 < run.peak_memory_bytes < MAX_MEMORY_BYTES
    # What the lesson says it needs, on two quiet cores and with nothing compiled before.
    needs = re.search(r"Runs in about (\d+) seconds and ([\d.]+) GB", path.read_text())
    assert needs
    assert run.processor_seconds < 2 * float(needs[1]) * max(1, slowness())
    assert float(needs[1]) < 3 * run.seconds + 10
    assert run.peak_memory_bytes < 1e9 * (float(needs[2]) + 0.05)


@every_lesson
def test_it_imports_what_its_answers_need(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    imported = set()
    for source in sources:
        tree = ast.parse(re.sub(r"^\s*%pip.*$", "    pass", source, flags=re.MULTILINE))
        found = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
        imported |= {name.asname or name.name for node in found for name in node.names}
    lesson = re.sub(r"^\d+_", "", path.stem)
    for solution, _ in importlib.import_module(f"lesson_answers.{lesson}").ANSWERS.values():
        modules = {
            name
            for name in _names(solution.__code__)
            if isinstance(solution.__globals__.get(name), ModuleType)
        }
        assert modules <= imported, f"{solution.__name__} needs {modules - imported}"


def _names(code: CodeType) -> set[str]:
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)
