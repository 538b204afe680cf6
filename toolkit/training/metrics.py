"""Metrics as JSON lines with checksums, readable during the run and exact after a kill."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit._checks import checked
from toolkit._files import read_sealed_lines, sealed_json, write_whole


@checked
def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Read the rows of a metrics file, without a last line that a kill truncated.

    Args:
        path: a file of JSON lines; a missing file has no rows.

    Returns:
        The rows, in order.

    Raises:
        ValueError: when a line was not written by `MetricsLog` or was changed (names file and
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
    """A file of metrics that agrees with the checkpoint from which a run resumes.

    Opening it at a step drops later rows, which the run will repeat. Appended rows survive a kill
    of the process.

    Attributes:
        path: the file.
        rows: every row so far, including those before a resume.

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
        """Add one row, which must have "step"; the operating system has it when this returns."""
        self.rows.append(row)
        if self._file is None:
            return
        try:
            self._file.write(_line(row))
            self._file.flush()
        except OSError as error:
            raise OSError(
                f"could not write metrics to {self.path}: {error.strerror}.\n"
                "Checkpoints are untouched; free some space and start again."
            ) from error

    def close(self) -> None:
        """Close the file; `rows` stays readable."""
        if self._file is not None:
            with suppress(OSError):  # of a row that `append` has reported
                self._file.close()


def _line(row: dict[str, Any]) -> bytes:
    return sealed_json(row) + b"\n"
