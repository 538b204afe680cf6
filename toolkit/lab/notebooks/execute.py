"""Run a notebook and save it in the form that the repository keeps.

    python -m toolkit.lab.notebooks.execute notebooks/attention.ipynb

writes the notebook back with its still pictures and texts, without widget state, execution counts
or anything else that differs from run to run. The tests run notebooks with the same function.
"""

import argparse
import base64
import contextlib
import io
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil

from toolkit.lab.lessons.progress import FOLDER_VARIABLE

MOST_STILL_BYTES = 60_000
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


@dataclass(frozen=True)
class NotebookRun:
    """One execution of a notebook.

    Attributes:
        notebook: the executed notebook, with outputs.
        seconds: wall clock from the first cell to the last; starting the kernel is not counted.
        processor_seconds: what the kernel computed, on all cores; other programs do not stretch it.
        peak_memory_bytes: largest resident set of the kernel process seen.
        complaints: what the cells wrote to stderr, and their errors.

    Example:
        >>> run = NotebookRun({"cells": []}, 2.5, 2.0, peak_memory_bytes=10**8, complaints=[])
        >>> not run.complaints
        True
    """

    notebook: nbformat.NotebookNode
    seconds: float
    processor_seconds: float
    peak_memory_bytes: int
    complaints: list[str]


def run_notebook(path: Path, *, timeout_seconds: int = 600) -> NotebookRun:
    """Run every cell of a notebook in a fresh kernel.

    Args:
        path: an `.ipynb` file; it is not changed.
        timeout_seconds: limit for each cell.

    Returns:
        A `NotebookRun`; an error in a cell ends the run and is among the complaints.

    Example:
        >>> from pathlib import Path
        >>> run = run_notebook(Path("notebooks/mixers.ipynb"))  # doctest: +SKIP
        >>> run.complaints  # doctest: +SKIP
        []
    """
    # The kernel's client is needed only here; importing it costs more than the rest of the module.
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=timeout_seconds,
        kernel_name="python3",
        store_widget_state=False,
        resources={"metadata": {"path": str(path.resolve().parent)}},
    )
    with client.setup_kernel():
        assert client.km is not None
        process = psutil.Process(client.km.provisioner.pid)  # pyright: ignore
        with _PeakMemory(process) as memory:
            start, before = time.perf_counter(), _processor_seconds(process)
            try:
                for index, cell in enumerate(notebook.cells):
                    client.execute_cell(cell, index)
            except CellExecutionError:
                pass  # the error is in the cell's outputs, where `_complaints` finds it
            seconds = time.perf_counter() - start
            computed = _processor_seconds(process) - before
    return NotebookRun(notebook, seconds, computed, memory.peak_bytes, _complaints(notebook))


def _processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def strip(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Remove what changes from run to run or breaks a viewer without a kernel.

    Widget state and widget views go (the still picture beside them stays), and so do execution
    counts, cell timings and the kernel's version.
    """
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": kernel, "language_info": {"name": "python"}}
    )
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.execution_count = None
            # A sign that the cell works, which is empty once it has ended.
            cell.outputs = [
                output for output in cell.outputs if output.get("data", {}).get("text/html") != ""
            ]
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = None
                output.get("data", {}).pop(WIDGET_VIEW, None)
    return notebook


def save(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Write a notebook, stripped in place, in the form the repository keeps."""
    for cell in strip(notebook).cells:
        for output in cell.get("outputs", []):
            if png := output.get("data", {}).get("image/png"):
                output["data"]["image/png"] = _as_still(png)
    nbformat.write(notebook, path)


def _as_still(png: str) -> str:
    """A large picture in a palette: a clone of the repository holds all of them."""
    content = base64.b64decode(png)
    if len(content) <= MOST_STILL_BYTES:
        return png
    from PIL import Image

    image, buffer = Image.open(io.BytesIO(content)).convert("RGB"), io.BytesIO()
    image = image.resize((960, round(image.height * 960 / image.width)), Image.Resampling.LANCZOS)
    # Median cut, the default, would grey the few pixels of an accent.
    image = image.quantize(64, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    image.save(buffer, format="png", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


class _PeakMemory:
    """Largest resident set of a process while the block runs."""

    def __init__(self, process: psutil.Process) -> None:
        self.peak_bytes, self._process = 0, process
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "_PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while True:
                self.peak_bytes = max(self.peak_bytes, self._process.memory_info().rss)
                if self._is_over.wait(0.1):
                    return


def _complaints(notebook: nbformat.NotebookNode) -> list[str]:
    found = []
    for index, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                found.append(f"cell {index}: {output.ename}: {output.evalue}")
            elif output.get("name") == "stderr":
                found.append(f"cell {index} wrote to stderr: {output.text.strip()}")
    return found


def main() -> int:
    """The command line: run each notebook given and write it back if nothing complained."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("notebooks", nargs="+", type=Path)
    failed = False
    os.environ[FOLDER_VARIABLE] = tempfile.mkdtemp(prefix="toolkit-progress-")  # nobody's guesses
    for path in parser.parse_args().notebooks:
        run = run_notebook(path)
        print(f"{path}: {run.seconds:.1f} s, {run.peak_memory_bytes / 1e6:.0f} MB")
        for complaint in run.complaints:
            print(f"  {complaint}")
        failed |= bool(run.complaints)
        if not run.complaints:
            save(run.notebook, path)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
