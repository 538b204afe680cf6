"""The runner itself: what it keeps, what it removes, what it complains about."""

import base64
import io
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output
from PIL import Image

from toolkit.lab.notebooks.execute import (
    MOST_STILL_BYTES,
    WIDGET_VIEW,
    run_notebook,
    save,
    strip,
)

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


def test_strip_keeps_the_picture_and_nothing_that_differs_between_runs() -> None:
    data = {"image/png": "abc", "text/plain": "words", WIDGET_VIEW: {"model_id": "1"}}
    cell = new_code_cell("panel", execution_count=7)
    sign = {"text/html": "", "text/plain": "<IPython.core.display.HTML object>"}  # it has ended
    cell.outputs = [
        new_output("display_data", data=sign),
        new_output("execute_result", data=data, execution_count=7),
        new_output("stream", text="words"),
    ]
    cell.metadata["execution"] = {"iopub.status.busy": "now"}
    notebook = new_notebook(cells=[cell], metadata={"widgets": {"state": {}}})
    strip(notebook)
    assert "widgets" not in notebook.metadata
    assert cell.execution_count is cell.outputs[0].execution_count is None
    assert len(cell.outputs) == 2
    assert cell.outputs[0].data == {"image/png": "abc", "text/plain": "words"}
    assert "execution" not in cell.metadata
    nbformat.validate(notebook)


def test_a_large_still_keeps_the_colour_of_a_few_pixels(tmp_path: Path) -> None:
    greys = np.random.default_rng(0).integers(0, 256, (400, 1248, 1), np.uint8).repeat(3, axis=2)
    greys[100:130, 200:230] = accent = (0xB3, 0x24, 0x5B)
    Image.fromarray(greys).save(png := io.BytesIO(), format="png")
    assert len(png.getvalue()) > MOST_STILL_BYTES
    data = {"image/png": base64.b64encode(png.getvalue()).decode()}
    cell = new_code_cell("panel", outputs=[new_output("display_data", data=data)])
    save(new_notebook(cells=[cell]), tmp_path / "still.ipynb")
    still = base64.b64decode(cell.outputs[0].data["image/png"])
    pixel = Image.open(io.BytesIO(still)).convert("RGB").getpixel((165, 88))
    np.testing.assert_allclose(pixel, accent, atol=12)


def test_run_reports_errors_and_stderr_and_stops(tmp_path: Path) -> None:
    sources = ["import sys; print('beware', file=sys.stderr)", "1 / 0", "print('never')"]
    path = tmp_path / "small.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in sources]), path)
    run = run_notebook(path)
    assert run.complaints == [
        "cell 0 wrote to stderr: beware",
        "cell 1: ZeroDivisionError: division by zero",
    ]
    assert run.notebook.cells[2].outputs == []
    assert run.peak_memory_bytes > 10e6
    assert run.processor_seconds > 0
