"""Names in prose are names in the code: rooms' members, commands with their flags, and files."""

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

import toolkit
from toolkit.cli.commands import COMMANDS

ROOT = Path(__file__).parent.parent
WRITTEN = (
    "README.md", "CONTRIBUTING.md", "docs/*.md", "docs/teaching/*.md", "notebooks/*.ipynb",
    "tutorials/*.ipynb",
)  # fmt: skip
IGNORED = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
PAGES = [
    path.relative_to(ROOT)
    for pattern in WRITTEN
    for path in sorted(ROOT.glob(pattern))
    if str(path.relative_to(ROOT)) not in IGNORED
]
MEMBER = re.compile(rf"(?:toolkit\.)?({'|'.join(toolkit._ROOMS)})((?:\.[A-Za-z_]\w*)+)(?!\w*\*)")
FILE = re.compile(r"(?:data|docs|notebooks|tutorials|tests|toolkit|binder|\.ci)/[\w./-]*")


def spans(page: Path) -> list[str]:
    """What stands between backticks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.S))


def has(room: str, names: list[str]) -> bool:
    """Whether a room has a member, a module of it, or a field of a class there."""
    value = importlib.import_module(f"toolkit.{room}")
    for at, name in enumerate(names):
        if hasattr(value, name) or name in getattr(value, "__annotations__", ()):
            value = getattr(value, name, None)
        elif inspect.ismodule(value):
            try:
                value = importlib.import_module(f"{value.__name__}.{name}")
            except ImportError:
                return False
        else:
            return False
        if value is None:
            return at == len(names) - 1
    return True


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_names_in_prose_are_in_the_code(page: Path) -> None:
    unknown = []
    for span in spans(page):
        if match := MEMBER.match(span):
            room, names = match[1], match[2][1:].split(".")
            if names[-1] not in ("py", "md", "ipynb") and not has(room, names):
                unknown.append(span)
        elif match := re.match(r"toolkit ([a-z]+(?:-[a-z]+)*)\b", span):
            if match[1] not in COMMANDS:
                unknown.append(span)
        elif match := FILE.fullmatch(span):
            path = span.strip("/")
            if not (ROOT / path).exists() and not any(path.startswith(one) for one in IGNORED):
                unknown.append(span)
    assert not unknown, f"{page}: " + "; ".join(unknown)


def test_the_check_itself_sees_faults() -> None:
    assert has("lr", ["search"])
    assert has("measure", ["Timing", "median"])
    assert not has("lr", ["serach"])
    assert not has("lab", ["Lesson", "exprot"])
    assert MEMBER.match("parallel.layout(model)")
    assert FILE.fullmatch("data/planning")
