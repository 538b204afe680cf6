"""Every notebook runs top to bottom within its budget and is saved so that it reads anywhere."""

import json
import re
import tomllib
from pathlib import Path
from typing import get_type_hints

import pytest
from yardstick import slowness

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
INSTRUMENTS, LESSONS = (sorted((ROOT / n).glob("*.ipynb")) for n in ("notebooks", "tutorials"))
NOTEBOOKS = [*INSTRUMENTS, *LESSONS]

MAX_PROCESSOR_SECONDS = 120  # a minute on two quiet cores
MAX_MEMORY_BYTES = 900e6
MAX_OUTPUT_BYTES = 200_000
MOST_STILL_BYTES = 60_000  # of a lesson's picture

# A newcomer's first click on Colab or Kaggle; until there is a release, what is on the main branch.
SET_UP = f"""\
import os
import sys

if "google.colab" in sys.modules or "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
    %pip install -q "{PROJECT["name"]}[widgets] @ {REPOSITORY}/archive/refs/heads/main.zip"
"""

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


# Pictures that are no panels, by notebook.
FIGURES = dict.fromkeys(
    ("attention", "09_kill_worker", "12_causality_trap", "20_real_trace", "21_fewer_bits"), 1
)


def pictures(notebook: dict) -> list[dict]:
    """The outputs that carry a picture."""
    outputs = (output for cell in notebook["cells"] for output in cell.get("outputs", []))
    return [output for output in outputs if "image/png" in output.get("data", {})]


@pytest.mark.nightly
@every_notebook
# The kernel's own libraries close sockets late; what a notebook itself warns about is in stderr.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
# Colab's jupyter-client is older than its Python.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client")
def test_runs_within_its_budget(path: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TOOLKIT_PROGRESS", str(tmp_path))
    run = pytest.importorskip("toolkit.lab.notebooks.execute").run_notebook(path)
    assert not run.complaints
    assert run.processor_seconds < MAX_PROCESSOR_SECONDS * max(1, slowness())
    assert 0 < run.peak_memory_bytes < MAX_MEMORY_BYTES
    assert "widgets" not in run.notebook.metadata
    # Every panel is shown live and still, also by ipywidgets 7, which Colab has.
    made = pictures(run.notebook)
    assert len(made) == len(pictures(json.loads(path.read_text())))
    panels = [output for output in made if WIDGET_VIEW in output["data"]]
    assert len(made) - len(panels) == FIGURES.get(path.stem, 0)


@every_notebook
def test_asks_views_for_what_they_have(path: Path) -> None:
    lab = pytest.importorskip("toolkit.lab")
    pytest.importorskip("anywidget")
    cells = json.loads(path.read_text())["cells"]
    source = "\n".join("".join(one["source"]) for one in cells if one["cell_type"] == "code")
    for name, kind in re.findall(r"(?m)^(\w+) = (\w+Panel)\(", source):
        view = get_type_hints(getattr(lab, kind).compute)["return"]
        asked = {*re.findall(rf"\b{name}\.view\.(\w+)", source)}
        assert asked <= {*dir(view), *view.__dataclass_fields__}, kind


@every_notebook
def test_is_saved_without_what_breaks_viewers(path: Path) -> None:
    notebook = json.loads(path.read_text())
    assert "widgets" not in notebook["metadata"]
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert cell["execution_count"] is None
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            assert output.get("execution_count") is None
            assert WIDGET_VIEW not in output.get("data", {})
            assert len(json.dumps(output)) < MAX_OUTPUT_BYTES


@every_notebook
def test_shows_pictures_with_words_to_a_reader_without_a_kernel(path: Path) -> None:
    shown = pictures(json.loads(path.read_text()))
    assert shown
    for output in shown:
        assert len("".join(output["data"]["text/plain"])) > 40
        assert output["metadata"]["image/png"]["alt"]
        if path in LESSONS:
            assert len(output["data"]["image/png"]) * 3 / 4 < MOST_STILL_BYTES


@every_notebook
def test_opens_with_badges_and_a_guarded_set_up_cell(path: Path) -> None:
    first, second = json.loads(path.read_text())["cells"][:2]
    line = "".join(first["source"])
    file = f"{path.parent.name}/{path.name}"
    assert f"colab.research.google.com/github/mlsys-toolkit/toolkit/blob/main/{file}" in line
    assert f"kaggle.com/kernels/welcome?src={REPOSITORY}/blob/main/{file}" in line
    assert f"urlpath=lab/tree/{file}" in line
    assert "![" not in line  # no picture that only a network shows
    assert "".join(second["source"]).startswith(SET_UP)
