"""A learner's progress in one lesson: an append-only file of events.

Several boxes and kernels may append to it concurrently, and a killed kernel damages at most its
last line.
"""

import os
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolkit._files import json_object, read_sealed_json, sealed_json
from toolkit.lab.lessons.catalogue import load_outline
from toolkit.lab.lessons.outline import Outline
from toolkit.training.checkpoints.locks import locked

FOLDER_VARIABLE = "TOOLKIT_PROGRESS"
LONGEST_NAME = 100
MOST_TRIES = 100_000
EARLIER: dict[str, str] = dict.fromkeys(
    ("causality_trap", "known_rates", "own_kernel"), "loops_rates_kernels"
)
"""Lessons that were one: their names, and its name."""
_SUFFIXES = (".jsonl", ".json")
KINDS = ("guess", "check", "hint", "learner")


def progress_folder(beside: Path = Path()) -> Path:
    """The folder of progress files for the notebooks in a folder."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else beside / "toolkit-progress"


def progress_file(lesson: str, folder: Path) -> Path:
    """The file of a lesson's events."""
    return folder / f"{lesson}.jsonl"


class Progress:
    """The guesses and checks of one lesson, appended to a file.

    Attributes:
        path: the file, `toolkit-progress/LESSON.jsonl` in the current folder, or in the folder that
            the environment variable TOOLKIT_PROGRESS names.
    """

    def __init__(self, lesson: str) -> None:
        self.lesson = lesson
        self.path = progress_file(lesson, progress_folder())
        _ = self.data  # refuse a foreign file before the learner starts

    @property
    def data(self) -> dict[str, Any]:
        """The current progress, see `read_events`."""
        return read_events(self.lesson, self.path)

    def add(self, kind: str, name: str = "", **found: Any) -> None:
        """Append an event (one of KINDS) about a question or exercise."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        found |= {"when": datetime.now(UTC).isoformat(timespec="milliseconds")}
        event = {"kind": kind, "name": name, **found}
        line = sealed_json(event, ensure_ascii=False) + b"\n"
        with locked(self.path.with_suffix(".lock"), wait=True), self.path.open("ab+") as file:
            if file.tell() and _last_byte(file) != b"\n":  # a kernel was killed while writing
                line = b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def learner_id(self) -> str:
        """A random id of the learner in this folder, to distinguish learners with the same name."""
        path = self.path.parent / "learner-id"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock"), wait=True):
            if not path.exists():
                path.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
            return path.read_text(encoding="utf-8").strip()


def read_events(lesson: str, path: Path) -> dict[str, Any]:
    """Read a lesson's progress from a file of events.

    The first guess counts, since the answer is shown after it. An exercise that was right once
    stays right; until then its last check counts. Damaged lines are skipped and counted in
    `damaged`. What the file of an EARLIER lesson beside it holds of this one's questions and
    exercises comes first. ValueError if no line is an event.
    """
    before = path.with_suffix(".json")  # of an earlier version
    data: dict[str, Any] = {"lesson": lesson, "learner": "", "guesses": {}, "checks": {}}
    whole = EARLIER.get(lesson)
    if whole and any((old := path.with_stem(whole)).with_suffix(e).exists() for e in _SUFFIXES):
        data |= _part(read_events(whole, old), load_outline(lesson))
    if before.exists():
        data |= read_progress(before.read_text(encoding="utf-8"), before)
    data["damaged"] = 0
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    lines = [line for line in lines if line]
    for line in lines:
        event = _event(line)
        if event is None:
            data["damaged"] += 1
        else:
            _apply(event, data)
    if lines and data["damaged"] == len(lines):
        raise ValueError(f"{path} holds no progress of a lesson; move it away to start afresh")
    return data


def _part(whole: dict[str, Any], outline: Outline) -> dict[str, Any]:
    """What a lesson that was cut into several holds of one of them, by names."""
    parts = {"guesses": outline.questions, "checks": outline.exercises}
    found = {
        kind: {each.name: whole[kind][each.name] for each in those if each.name in whole[kind]}
        for kind, those in parts.items()
    }
    return {"learner": whole["learner"], **found}


def read_progress(text: str, path: Path) -> dict[str, Any]:
    """Read progress from an exported page; ValueError if it holds none."""
    try:
        data = json_object(text, str(path))
        whole = all(isinstance(data[kind], dict) for kind in ("guesses", "checks"))
        parts = [*data["guesses"].values(), *data["checks"].values()]
        if not whole or not all(isinstance(part, dict) for part in parts):
            raise TypeError
        for name in ("lesson", "learner", "learner_id", "handed_in"):
            data[name] = str(data.get(name, ""))[:LONGEST_NAME]
        for check in data["checks"].values():
            for name in ("attempts", "hints"):
                count = check.get(name)
                check[name] = min(count, MOST_TRIES) if isinstance(count, int) else 0
        if not data["lesson"]:
            raise TypeError
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError(
            f"{path} holds no progress of a lesson; move it away to start afresh"
        ) from None
    return data


def _apply(event: dict[str, Any], data: dict[str, Any]) -> None:
    kind, name = event.pop("kind"), event.pop("name")
    if kind == "learner":
        data["learner"] = str(event.get("learner", ""))
    elif kind == "guess":
        data["guesses"].setdefault(name, event)
    elif kind == "hint":
        check = data["checks"].setdefault(name, {})
        check["hints"] = max(check.get("hints", 0), event.get("count", 0))
    elif not (check := data["checks"].setdefault(name, {})).get("is_right"):
        check |= event | {"attempts": check.get("attempts", 0) + 1}


def _event(line: bytes) -> dict[str, Any] | None:
    """The event of a line, or None if it is damaged."""
    try:
        found = read_sealed_json(line, "an event")
    except ValueError:
        return None
    if found.get("kind") not in KINDS:
        return None
    return found if isinstance(found.get("name"), str) else None


def _last_byte(file: Any) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)
