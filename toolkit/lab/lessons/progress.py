"""What a learner did in one lesson, kept in a file: a restart of the kernel loses nothing."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolkit.lab.tour.report import write_whole

FOLDER_VARIABLE = "TOOLKIT_PROGRESS"


def progress_folder(beside: Path = Path()) -> Path:
    """Where progress of the notebooks in a folder is kept."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else beside / "toolkit-progress"


class Progress:
    """The guesses and checks of one lesson, written to disk at every change.

    Attributes:
        path: the file, `toolkit-progress/LESSON.json` in the current folder, or in the folder that
            the environment variable TOOLKIT_PROGRESS names.
        data: lesson, learner, guesses (question -> guess, truth, when) and checks (exercise ->
            is_right, attempts, hints, words, code, picture, when).
    """

    def __init__(self, lesson: str) -> None:
        self.path = progress_folder() / f"{lesson}.json"
        self.data: dict[str, Any] = {"lesson": lesson, "learner": "", "guesses": {}, "checks": {}}
        if self.path.exists():
            self.data |= read_progress(self.path.read_text(encoding="utf-8"), self.path)

    def note(self, kind: str, name: str, **found: Any) -> dict[str, Any]:
        """Add to what is known of a question or exercise, and write the file."""
        entry = self.data[kind].setdefault(name, {})
        entry |= found | {"when": datetime.now(UTC).isoformat(timespec="seconds")}
        self.save()
        return entry

    def save(self) -> None:
        """Write the file whole."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(self.data, indent=1, ensure_ascii=False))


def read_progress(text: str, path: Path) -> dict[str, Any]:
    """Progress as it was written, or a ValueError that names the file."""
    try:
        data = json.loads(text)
        whole = all(isinstance(data[kind], dict) for kind in ("guesses", "checks"))
        parts = [*data["guesses"].values(), *data["checks"].values()]
        if not whole or not all(isinstance(part, dict) for part in parts):
            raise TypeError
        data["lesson"], data["learner"] = str(data["lesson"]), str(data["learner"])
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError):
        raise ValueError(
            f"{path} holds no progress of a lesson; move it away to start afresh"
        ) from None
    return data
