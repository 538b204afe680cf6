"""How many cores share the batches of a run: those it began with, or what this machine has."""

from pathlib import Path
from typing import Any

from toolkit._files import read_sealed_json
from toolkit.measure import available_cores


def run_cores(directory: Path, batch: int) -> int:
    """Cores of the run in a folder; for a new one the most that there are and divide the batch."""
    if not (directory / "run.json").is_file():
        return max(n for n in range(1, available_cores() + 1) if batch % n == 0)
    try:
        return int(read_run(directory)["configuration"]["training"]["cores"])
    except (KeyError, TypeError):
        raise ValueError(f"{directory / 'run.json'} is of another version: no cores") from None


def read_run(directory: Path) -> dict[str, Any]:
    """What `run.json` of a run's folder says; ValueError where it is damaged or was edited."""
    path = directory / "run.json"
    return read_sealed_json(path.read_bytes(), str(path))
