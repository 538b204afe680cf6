"""The index of instruments and lessons: pictures, requirements, links and progress.

It is read from the notebooks and the progress files, so that the index of `toolkit lab` and the
tables of the site agree.
"""

import base64
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.lab.lessons.progress import progress_file, progress_folder, read_events
from toolkit.lab.notebooks.lesson_pictures import PICTURES, lesson_picture

SITE = "https://mlsys-toolkit.github.io/toolkit"
FOLDERS = {"tutorials": "Lessons", "notebooks": "Instruments"}
PICTURE_PIXELS = 300
_LINK = re.compile(r"\[(Colab|Kaggle|Binder)\]\(([^)]*)\)")


@dataclass(frozen=True)
class Entry:
    """One notebook."""

    path: str  # path from the root, such as "notebooks/mixers.ipynb"
    name: str  # name of its progress file
    title: str
    minutes: str  # minutes to work through; empty for an instrument
    needs: str  # time and memory to run, in words
    devices: str  # number of devices, in words
    gain: str  # the learning goal; empty for an instrument
    links: dict[str, str]  # name -> address of other places that open it
    # guesses, exercises: number of each
    guesses: int
    exercises: int
    picture: bytes  # a small PNG


def read_entries(root: Path, folder: str) -> list[Entry]:
    """The notebooks of a folder, in order."""
    return [
        _entry(path, f"{folder}/{path.name}") for path in sorted((root / folder).glob("*.ipynb"))
    ]


def _entry(path: Path, place: str) -> Entry:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    first, code = sources[0], "\n".join(sources)
    links = dict(_LINK.findall(first)) | {"Site": f"{SITE}/{place.removesuffix('.ipynb')}.html"}
    found = {
        name: (match[1] if (match := re.search(pattern, first)) else "")
        for name, pattern in {
            "title": r"(?m)^# (.+)$",
            "minutes": r"(\d+) minutes to work through",
            "needs": r"(?:Needs|Runs in) (.*?GB)",
            "gain": r"By its end you (.*?)\.?\*",
        }.items()
    }
    stem = re.sub(r"^\d+_", "", path.stem)
    return Entry(
        place, stem, **found, links=links,
        devices="8 devices, or simulated ones" if "eight_devices" in code else "any device",
        guesses=len(set(re.findall(r"\.predict\(\"(\w+)", code))),
        exercises=len(set(re.findall(r"\.check\(\"(\w+)", code))),
        # A lesson's stills are too fine to be read this small.
        picture=_small(
            lesson_picture(stem, found["title"]) if stem in PICTURES else _still(cells)
        ),
    )  # fmt: skip


def _still(cells: list[dict[str, Any]]) -> bytes:
    """The first picture that a notebook was saved with."""
    for cell in cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                return base64.b64decode("".join(output["data"]["image/png"]))
    raise ValueError("a notebook without a picture needs one in the index")


def _small(png: bytes) -> bytes:
    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGB")
    height = round(image.height * PICTURE_PIXELS / image.width)
    image = image.resize((PICTURE_PIXELS, height), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.quantize(64).save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def progress_of(entry: Entry, root: Path) -> str:
    """A learner's progress in a notebook, in words; empty if it has no questions."""
    if not entry.guesses + entry.exercises:
        return ""
    path = progress_file(entry.name, progress_folder((root / entry.path).parent))
    try:
        data = read_events(entry.name, path)
    except (ValueError, OSError):
        return f"its progress file {path.name} cannot be read"
    right = sum(bool(check.get("is_right")) for check in data["checks"].values())
    parts = [(len(data["guesses"]), entry.guesses, "guess", "guesses"),
             (right, entry.exercises, "exercise", "exercises")]  # fmt: skip
    phrases = [
        f"{done} of {of} {singular if of == 1 else plural}"
        for done, of, singular, plural in parts
        if of
    ]
    sign = "\N{CHECK MARK}" if all(done >= of for done, of, *_ in parts) else ""
    return f"{sign} {', '.join(phrases)}".strip()


def table(entries: list[Entry], root: Path | None, picture: str) -> str:
    """A Markdown table; `picture` is where an entry's lies, with `{}` for its name.

    Without a root nothing is said of progress, and links lead to pages of the same site.
    """
    # A table leaves a picture no more room than its heading has.
    head = ["&nbsp;" * 40, "what", "needs", *(["done"] if root else []), "opens in"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for entry in entries:
        links = {k: v for k, v in entry.links.items() if root or k != "Site"}
        gain = f"<br>By its end you {entry.gain}" if entry.gain else ""
        minutes = f"{entry.minutes} minutes to work through; " if entry.minutes else ""
        row = [
            f"[![{entry.title}]({picture.format(entry.name)})]({entry.path})",
            f"**[{entry.title}]({entry.path})**{gain}",
            f"{minutes}runs in {entry.needs}; {entry.devices}",
            *([progress_of(entry, root)] if root else []),
            " · ".join(f"[{name}]({address})" for name, address in links.items()),
        ]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def write_index(root: Path) -> Path:
    """Write `index.ipynb` beside the notebooks: one cell a folder, its pictures inside."""
    import nbformat

    cells = [nbformat.v4.new_markdown_cell(
        "# toolkit\n\nLessons that ask before they show, and instruments to explore with. A click "
        "on a picture opens it here; none depends on another having run. A half-day is the lessons "
        "01, 04, 05, 06 and 08. *Done* is as of the start of `toolkit lab`.", id="toolkit"
    )]  # fmt: skip
    for folder, heading in FOLDERS.items():
        entries = read_entries(root, folder)
        text = f"## {heading}\n\n" + table(entries, root, "attachment:{}.png")
        cell = nbformat.v4.new_markdown_cell(text, id=folder)
        cell["attachments"] = {
            f"{entry.name}.png": {"image/png": base64.b64encode(entry.picture).decode()}
            for entry in entries
        }
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    path = root / "index.ipynb"
    nbformat.write(notebook, path)
    return path
