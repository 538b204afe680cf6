"""How many cores share the batches of a run: those it began with, or what this machine has."""

import json
from pathlib import Path

from toolkit.measure import available_cores


def run_cores(directory: Path, batch: int) -> int:
    """Cores of the run in a folder; for a new one the most that there are and divide the batch."""
    try:
        facts = json.loads((directory / "run.json").read_text())
        return int(facts["configuration"]["training"]["cores"])
    except (OSError, ValueError, KeyError, TypeError):
        return max(n for n in range(1, available_cores() + 1) if batch % n == 0)
