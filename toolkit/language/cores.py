"""The number of cores that share a run's batches: as at its start, or those of this machine."""

from pathlib import Path
from typing import Any

from toolkit._files import read_sealed_json
from toolkit.measure import available_cores


def run_cores(directory: Path, batch: int) -> int:
    """Cores of the run in a folder; for a new run the largest available number that divides the
    batch."""
    if not (directory / "run.json").is_file():
        return max(n for n in range(1, available_cores() + 1) if batch % n == 0)
    try:
        return int(read_run(directory)["configuration"]["training"]["cores"])
    except (KeyError, TypeError):
        raise ValueError(f"{directory / 'run.json'} is of another version: no cores") from None


def read_run(directory: Path) -> dict[str, Any]:
    """Read `run.json` of a run's folder; ValueError if it is damaged or was edited."""
    path = directory / "run.json"
    return read_sealed_json(path.read_bytes(), str(path))
