"""Nothing above a guess gives it away: no picture, caption, text or output."""

import importlib
import inspect
import json
import re
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("anywidget")

from toolkit.lab.lessons.catalogue import INSTRUMENTS, LESSONS, load_outline
from toolkit.lab.lessons.prediction import LOCKED

ROOT = Path(__file__).resolve().parents[2]
PATHS = [*(ROOT / "tutorials").glob("*.ipynb"), *(ROOT / "notebooks").glob("*.ipynb")]
NOTEBOOKS = {re.sub(r"^\d+_", "", path.stem): path for path in PATHS}
EVERY = [
    (name, one.name) for name in (*LESSONS, *INSTRUMENTS) for one in load_outline(name).questions
]

# The lesson on killed workers runs jobs of its own to know its answers.
COMPUTED = [
    pytest.param(*each, marks=[pytest.mark.nightly] if each[0] == "kill_worker" else [])
    for each in EVERY
]


def read(name):
    """The notebook's cells as (source, text of the outputs, whether there is a picture)."""
    cells = []
    for cell in json.loads(NOTEBOOKS[name].read_text())["cells"]:
        outputs = cell.get("outputs", [])
        text = json.dumps(outputs, ensure_ascii=False)
        cells.append(("".join(cell["source"]), text, "image/png" in text))
    return cells


def place_of(name, question):
    cells = read(name)
    (at,) = (i for i, (source, *_) in enumerate(cells) if f'predict("{question}"' in source)
    return cells, at


def test_every_lesson_has_its_notebook_and_every_notebook_its_lesson():
    assert {*LESSONS, *INSTRUMENTS, "attention"} == set(NOTEBOOKS)


@pytest.mark.parametrize(("name", "question"), EVERY)
def test_no_picture_is_above_a_guess(name, question):
    cells, at = place_of(name, question)
    assert f'Lesson("{name}")' in "".join(source for source, *_ in cells[: at + 1])
    assert LOCKED in cells[at][1]
    assert "The lesson was not run: run its first cell of code" in cells[at][1]
    assert not any(has_picture for *_, has_picture in cells[: at + 1])


def letters(text):
    """What is left of code or prose without spaces, signs and LaTeX."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r"\\\w+", "", text).lower())


@pytest.mark.parametrize("name", LESSONS)
def test_no_text_above_an_exercise_holds_its_solution(name):
    """Neither its last hint nor what the solution returns; an exercise has its own cell."""
    answers = importlib.import_module(f"lesson_answers.{name}").ANSWERS
    cells = read(name)
    for exercise in load_outline(name).exercises:
        (at,) = (i for i, (source, *_) in enumerate(cells) if f'check("{exercise.name}"' in source)
        above = letters("".join(source + output for source, output, _ in cells[:at]))
        assert letters(exercise.hints[-1]) not in above, exercise.name
        solution = textwrap.dedent(inspect.getsource(answers[exercise.name][0]))
        for line in re.findall(r"return (.+)", solution):
            assert len(letters(line)) < 12 or letters(line) not in above, (exercise.name, line)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "question"), COMPUTED)
def test_no_text_above_a_guess_holds_its_answer(name, question):
    asked = load_outline(name).question(question)
    answer = asked.answer()
    cells, at = place_of(name, question)
    above = "\n".join(source + output for source, output, _ in cells[:at]) + cells[at][0]
    assert answer.words[:40] not in above
    if asked.options:
        assert answer.truth in asked.options
        assert answer.truth not in above
    else:
        asked.check(answer.truth)
        shown = [f"{answer.truth:.{digits}g}" for digits in (2, 3, 10)]
        told = [f"{number} {asked.unit}" for number in shown]
        told += [number for number in shown if len(number) > 3]
        assert not [words for words in told if words in above]
