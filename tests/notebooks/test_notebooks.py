"""Every notebook runs top to bottom within its budget and is saved so that it reads anywhere."""

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

MAX_SECONDS = 60
MAX_MEMORY_BYTES = 900e6
MAX_OUTPUT_BYTES = 200_000

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.mark.slow
@every_notebook
# The kernel's own libraries close sockets late; what a notebook itself warns about is in stderr.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_runs_within_its_budget(path: Path) -> None:
    run = pytest.importorskip("toolkit.lab.notebooks.execute").run_notebook(path)
    assert not run.complaints
    assert run.seconds < MAX_SECONDS
    assert 0 < run.peak_memory_bytes < MAX_MEMORY_BYTES
    assert "widgets" not in run.notebook.metadata


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
            assert "application/vnd.jupyter.widget-view+json" not in output.get("data", {})
            assert len(json.dumps(output)) < MAX_OUTPUT_BYTES


@every_notebook
def test_shows_pictures_with_words_to_a_reader_without_a_kernel(path: Path) -> None:
    notebook = json.loads(path.read_text())
    pictures = [
        output
        for cell in notebook["cells"]
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert pictures
    for output in pictures:
        assert len("".join(output["data"]["text/plain"])) > 40
        assert output["metadata"]["image/png"]["alt"]


@every_notebook
def test_opens_with_badges_and_a_guarded_set_up_cell(path: Path) -> None:
    first, second = json.loads(path.read_text())["cells"][:2]
    line = "".join(first["source"])
    assert f"main/notebooks/{path.name}" in line
    assert f"urlpath=lab/tree/notebooks/{path.name}" in line
    assert '"google.colab" in sys.modules' in "".join(second["source"])
