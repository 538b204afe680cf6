"""Pages of progress for one learner, and for a teacher.

A learner's page carries the progress as data, so that a teacher needs only a folder of such pages.
"""

import html
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from toolkit._checks import checked
from toolkit.figures import ACCENT, LOOKS, in_words, new_figure, report, style
from toolkit.lab.lessons.catalogue import load_outline
from toolkit.lab.lessons.outline import Outline, Question
from toolkit.lab.lessons.progress import read_events, read_progress

_DATA = re.compile(r'<script type="application/json" id="toolkit-progress">(.*?)</script>', re.S)
MOST_BYTES = 20_000_000
LONGEST_MESSAGE = 200
LARGEST = 1e300  # a page may hold an integer too large for a float


def write_export(outline: Outline, data: Mapping[str, Any], directory: Path) -> Path:
    """Write a learner's page: predictions with answers, checks, code, drawings."""
    without = {name: {**check, "picture": ""} for name, check in data["checks"].items()}
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    kept = json.dumps({**data, "checks": without, "handed_in": now}).replace("<", "\\u003c")
    guesses = f'<script type="application/json" id="toolkit-progress">{kept}</script>'
    for question in outline.questions:
        found = data["guesses"].get(question.name, {})
        guess, truth = (_value(found.get(key), question.unit) for key in ("guess", "truth"))
        guesses += report.paragraph(question.text)
        guesses += report.paragraph(f"Guessed: {guess}. It is: {truth}.")
    parts = [("Predictions", guesses)]
    for exercise in outline.exercises:
        found = data["checks"].get(exercise.name, {})
        state = "solved" if found.get("is_right") else "not solved yet"
        tried = f"attempts: {found.get('attempts', 0)}, hints: {found.get('hints', 0)}"
        body = report.paragraph(exercise.task) + report.paragraph(f"{state.capitalize()}; {tried}.")
        if found.get("words"):
            body += report.paragraph(found["words"])
        if found.get("picture"):
            alt = html.escape(f"Drawing of what {exercise.name} did", quote=True)
            source = html.escape(f"data:image/png;base64,{found['picture']}", quote=True)
            body += f'<figure><img alt="{alt}" style="width:100%" src="{source}"></figure>'
        if found.get("code"):
            body += f"<pre>{html.escape(found['code'])}</pre>"
        parts.append((exercise.name.replace("_", " "), body))
    learner = data["learner"] or "anonymous"
    # Two learners may have the same name; a random id distinguishes them.
    stem = re.sub(r"[^\w-]+", "_", f"{learner}-{data['lesson']}-{data['learner_id']}")
    directory.mkdir(parents=True, exist_ok=True)
    return report.write_page(directory / f"{stem}.html", outline.title, learner, parts)


@checked
def gather(folder: str | Path) -> Path:
    """Write one page about a class of learners: their progress and their guesses.

    Args:
        folder: a folder, searched recursively, with pages from `Lesson.export` or progress files.
            Other files are named on the page.

    Returns:
        The page, `gathered.html` in the folder.

    Example:
        >>> from pathlib import Path
        >>> page = Lesson("attention_cost").export(learner="Ada", directory="handed-in")
        >>> gather("handed-in").name
        'gathered.html'
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"folder: got {str(folder)!r}, wanted a folder of exported pages")
    found, unread = _read_folder(folder)
    if not found:
        raise ValueError(
            f"folder: {folder} holds nothing that a lesson wrote; wanted pages from lesson.export()"
        )
    sections = []
    for lesson in sorted(found):
        try:
            outline = load_outline(lesson)
        except ValueError:
            unread.append(f"of an unknown lesson: {lesson}")
            continue
        learners = found[lesson]
        sections.append((outline.title, _who(outline, learners)))
        for question in outline.questions:
            if histogram := _histogram(question, learners):
                sections.append((question.text, histogram))
    if unread:
        rows = [(name,) for name in unread]
        sections.append(("Not read", report.table(("file",), rows, "No progress of a lesson")))
    ids = (data["learner_id"] or name for each in found.values() for name, data in each.items())
    count = len(set(ids))
    lead = f"Learners: {count}. Lessons: {len(found)}."
    return report.write_page(folder / "gathered.html", "The room", lead, sections)


def _read_folder(folder: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """lesson -> learner -> progress, and the files that hold none."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    unread = []
    pages = (path for path in folder.rglob("*") if path.suffix in (".html", ".json", ".jsonl"))
    for path in sorted(pages):
        if path.name == "gathered.html":
            continue
        try:
            data = _read_page(path)
        except (ValueError, OSError):
            unread.append(str(path.relative_to(folder)))
            continue
        # Of several pages with the same learner id, the last counts.
        learner = data["learner_id"] or data["learner"] or str(path.relative_to(folder))
        before = found[data["lesson"]].get(learner, {"handed_in": ""})
        if data["handed_in"] >= before["handed_in"]:
            found[data["lesson"]][learner] = data
    return {lesson: _by_name(learners) for lesson, learners in found.items()}, unread


def _read_page(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path}: too large")
    if path.suffix == ".jsonl":
        data = read_events(path.stem, path)
        return data | {"learner_id": "", "handed_in": ""}
    return read_page_text(path.read_text(encoding="utf-8"), path)


def read_page_text(text: str, path: Path) -> dict[str, Any]:
    """The progress in the text of a page or of a file of progress; ValueError if it holds none."""
    match = _DATA.search(text)
    return read_progress(match[1] if match else text, path)


def _by_name(learners: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Learners by name; equal names get numbers."""
    named: dict[str, Any] = {}
    for key, data in learners.items():
        name = stem = data["learner"] or f"anonymous {key}"
        number = 1
        while name in named:
            name = f"{stem} ({(number := number + 1)})"
        named[name] = data
    return named


def _who(outline: Outline, learners: dict[str, Any]) -> str:
    """Who is where, and below it who tried and is stuck, those who tried most first."""
    rows, stuck = [], []
    for name, data in learners.items():
        cells = []
        for exercise in outline.exercises:
            check = data["checks"].get(exercise.name, {})
            attempts, hints = check.get("attempts", 0), check.get("hints", 0)
            state = "right" if check.get("is_right") is True else "tried" if attempts else ""
            counts = [f"{n} {word}" for n, word in ((attempts, "tries"), (hints, "hints")) if n]
            cells.append(f"{state} ({', '.join(counts)})" if counts else state)
            if state == "tried":
                words = str(check.get("words", ""))[:LONGEST_MESSAGE]
                stuck.append((name, exercise.name.replace("_", " "), attempts, hints, words))
        entered = sum(question.name in data["guesses"] for question in outline.questions)
        rows.append((name, f"{entered} of {len(outline.questions)}", *cells))
    names = (exercise.name.replace("_", " ") for exercise in outline.exercises)
    page = report.table(("learner", "predictions", *names), rows, "Who is where")
    if stuck:
        stuck.sort(key=lambda row: -row[2])
        head = ("learner", "exercise", "tries", "hints", "last message")
        page += report.table(head, [tuple(map(str, row)) for row in stuck], "Who is stuck")
    return page


def _histogram(question: Question, learners: dict[str, Any]) -> str:
    entries = [data["guesses"].get(question.name, {}) for data in learners.values()]
    guesses, truths = [], []
    for entry in entries:
        try:
            guesses.append(question.check(entry.get("guess")))
            truths.append(entry.get("truth"))
        except ValueError:
            continue
    if not guesses:
        return ""
    with style():
        figure = new_figure(8.0, 2.8)
        if question.options:
            _draw_choices(figure, question, guesses, truths)
        else:
            _draw_numbers(figure, question, guesses, truths)
    alt = f"Histogram of {len(guesses)} guesses"
    return report.picture(figure, f"Guesses: {len(guesses)}. What came out is marked.", alt)


def _draw_choices(figure: Figure, question: Question, guesses: Any, truths: Any) -> None:
    axes = figure.add_axes((0.42, 0.18, 0.54, 0.76))
    counts, truth = Counter(guesses), Counter(map(str, truths)).most_common(1)[0][0]
    for place, option in enumerate(question.options):
        is_true = option == truth
        colour, hatch = (LOOKS["full"].colour, "") if is_true else (ACCENT, "//")
        axes.barh(place, counts[option], 0.6, color=colour, hatch=hatch)
    names = [f"{o} \N{CHECK MARK}" if o == truth else o for o in question.options]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(False, axis="y")
    axes.set_xlabel("learners")


def _draw_numbers(figure: Figure, question: Question, guesses: Any, truths: Any) -> None:
    axes = figure.add_axes((0.08, 0.24, 0.88, 0.62))
    known = [t for t in truths if isinstance(t, int | float) and abs(t) < LARGEST]
    low, high = min([*guesses, *known]), max([*guesses, *known])
    if low > 0 and high > 8 * low:
        axes.set_xscale("log")
        bins: Any = np.geomspace(low / 1.1, high * 1.1, 16)
    else:
        margin = 0.05 * (high - low) or 1.0
        bins = np.linspace(low - margin, high + margin, 16)
    axes.hist(guesses, bins, color=ACCENT, hatch="//", edgecolor="white")
    if known:
        truth = float(np.median(known))
        axes.axvline(truth, color=LOOKS["full"].colour, linewidth=3)
        axes.set_title(f"it is {in_words(truth, question.unit)}", fontsize=10)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel=f"guess, {question.unit}".rstrip(", "), ylabel="learners")


def _value(value: Any, unit: str) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else in_words(value, unit)
