"""Metrics as JSON lines: one object per line, readable during the run, exact after a kill.

Every line carries a checksum, which is no part of its row.
"""

import os
from pathlib import Path
from typing import Any

from toolkit._checks import checked
from toolkit._files import read_sealed_lines, sealed_json, write_whole


@checked
def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Reads the rows of a metrics file, leaving out a last line that a kill cut short.

    Args:
        path: a file of JSON lines; one that does not exist has no rows.

    Returns:
        The rows, in order.

    Raises:
        ValueError: a line was not written by `MetricsLog` or has changed since (names file and
            line).

    Example:
        >>> log = MetricsLog("run/metrics.jsonl")
        >>> log.append({"step": 10, "loss": 0.5})
        >>> log.close()
        >>> read_metrics("run/metrics.jsonl")
        [{'step': 10, 'loss': 0.5}]
    """
    return read_sealed_lines(Path(path))


class MetricsLog:
    """A file of metrics that agrees with the checkpoint a run resumes from.

    Opening it at step `step` drops the rows beyond (the run will make them again), so no step
    appears twice. Rows reach the operating system as they are appended and survive a kill of the
    process.

    Attributes:
        path: the file.
        rows: every row so far, those of earlier runs included.

    Example:
        >>> log = MetricsLog("run/metrics.jsonl")
        >>> log.append({"step": 10, "loss": 0.5})
        >>> log.close()
        >>> log.rows
        [{'step': 10, 'loss': 0.5}]
    """

    @checked
    def __init__(self, path: str | os.PathLike | None, step: int = 0):
        self.path = None if path is None else Path(path)
        self.rows = [] if path is None else [r for r in read_metrics(path) if r["step"] <= step]
        self._file = None
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, b"".join(map(_line, self.rows)))
            self._file = self.path.open("ab")

    def append(self, row: dict[str, Any]) -> None:
        """Adds one row, which must carry "step"; it is on its way to disk when this returns."""
        self.rows.append(row)
        if self._file is not None:
            self._file.write(_line(row))
            self._file.flush()

    def close(self) -> None:
        """Closes the file; rows stay readable in `rows`."""
        if self._file is not None:
            self._file.close()


def _line(row: dict[str, Any]) -> bytes:
    return sealed_json(row) + b"\n"
