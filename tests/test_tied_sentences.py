"""Sentences with a number or a comparison are tied to an assertion or cited.

`tests/support/prose.py` says what is a claim and how a mark looks.
"""

import ast
import functools
import importlib
import math
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prose import (
    ROOT,
    Claims,
    cites,
    found,
    in_markdown,
    markdown_of,
    untied,
    without_numbers,
)

import toolkit
from toolkit.lab.lessons.catalogue import load_outline

claims = functools.cache(found)


def test_a_claim_is_tied() -> None:
    found = untied(claims())
    assert not found, "tie, cite or cut (tests/support/prose.py):\n" + "\n".join(found)


@functools.cache
def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def outline_of(page: str) -> str:
    return re.sub(r"^\d+_", "", Path(page).stem)


def fault(kind: str, words: str, page: str) -> str:
    """What is wrong with a mark; empty if nothing is."""
    if kind == "cited":
        return "" if words in markdown_of(ROOT / page) else "the page does not name it"
    if kind == "holds":
        lesson: Any = load_outline
        names = {name: getattr(math, name) for name in ("sqrt", "pi", "log", "ceil")}
        if page.startswith("tutorials/"):
            name = outline_of(page)
            catalogue = importlib.import_module("toolkit.lab.lessons.catalogue")
            folder = f"{catalogue._FOLDERS[name]}." if name in catalogue._FOLDERS else ""
            lesson = importlib.import_module(f"toolkit.lab.lessons.subjects.{folder}{name}")
        names |= {"np": np, "toolkit": toolkit, "lesson": lesson, "approx": pytest.approx}
        names |= {"Normal": statistics.NormalDist, "load": importlib.import_module}
        return "" if eval(words, names) else "it does not hold"
    for name in words.split("; "):
        if match := re.fullmatch(r"(exercise|question) (\w+)", name):
            outline = load_outline(outline_of(page))
            among = outline.exercises if match[1] == "exercise" else outline.questions
            if match[2] not in {one.name for one in among}:
                return f"the lesson has no {name}"
        elif match := re.fullmatch(r"(tests/[\w/]+\.py)::(test_\w+)", name):
            if not (ROOT / match[1]).exists() or match[2] not in functions(match[1]):
                return f"there is no test {name}"
        else:
            return f"{name!r} is no test, exercise or question"
    return ""


def test_marks_hold() -> None:
    wrong = []
    for group in claims():
        if group.marks and not group.sentences:
            wrong.append(f"{group.page}: a mark without a claim, {group.marks}")
        for kind, words in group.marks:
            if words := fault(kind, words, group.page):
                wrong.append(f"{group.page}: {kind}, {words}: {group.sentences}")
        if group.marks and (missing := without_numbers(group)):
            wrong.append(f"{group.page}: not held, {missing}: {group.sentences}")
    assert not wrong, "\n".join(wrong)


def test_the_check_itself_sees_faults(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "It is 3 times as fast. Read 2 pages. Is it faster?\n\n"
        "A byte has 8 bits. <!-- holds: 2 ** 8 == 256 --> It never ends.\n\n`x[3]` $a_1$ lesson 4\n"
    )
    first, second, third, _ = in_markdown(page, "page.md")
    assert (first.sentences, first.marks) == (["It is 3 times as fast."], [])
    assert second.sentences == ["A byte has 8 bits."]
    assert without_numbers(second) == set()
    assert third.sentences == ["It never ends."]
    assert without_numbers(Claims("", ["It has 9."], second.marks)) == {"9"}
    mine = [("tied", "tests/test_tied_sentences.py::test_the_check_itself_sees_faults")]
    assert without_numbers(Claims("docs/page.md", ["It is 300 %."], mine)) == set()
    other = [("tied", "tests/test_tied_sentences.py::test_a_claim_is_tied")]  # no number is in it
    assert without_numbers(Claims("docs/page.md", ["It is 300 %."], other)) == {"300"}
    assert cites("It is 3 times as fast (`tests/test_links.py`).")
    assert not cites("It is 3 times as fast (`tests/test_no_such.py`).")
    lesson = "tutorials/05_ring.ipynb"
    assert fault("holds", "2 + 2 == 5", lesson)
    assert fault("cited", "Nobody 1999", lesson)
    assert fault("tied", "exercise no_such", lesson)
    assert fault("tied", "tests/test_links.py::test_no_such", lesson)
    assert not fault("tied", "exercise ring_bytes; question least_bytes", lesson)
