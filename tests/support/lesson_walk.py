"""A lesson as a learner works through it: its own cells, and between them what a learner does."""

import importlib
import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell

from toolkit.lab.lessons.catalogue import load_outline
from toolkit.lab.lessons.outline import Question

GUESS = """\
asked.guess = {guess!r}
assert asked.answer.words in asked._repr_mimebundle_()[0]["text/plain"]
assert {is_choice} or asked.png or asked.answer.draw
asked"""
EXERCISE = """\
from lesson_answers.{lesson} import ANSWERS

for _ in range(3):
    lesson.hint("{exercise}")
solution, wrong = ANSWERS["{exercise}"]
for answer, reason in wrong:
    verdict = lesson.check("{exercise}", answer)
    assert not verdict.is_right and reason in verdict.words, verdict.words
{exercise} = solution
verdict = lesson.check("{exercise}", {exercise})
assert verdict.is_right and verdict.png, verdict.words
verdict"""
END = """\
asked_for = len(lesson.outline.questions), len(lesson.outline.exercises)
done = lesson.progress.data["guesses"], lesson.progress.data["checks"].values()
assert (len(done[0]), sum(one["is_right"] for one in done[1])) == asked_for, lesson.summary()
text = lesson.export(learner="Ada").read_text()
assert all(one["words"].split(":")[0] in text for one in done[1])"""


def walked(path: Path) -> nbformat.NotebookNode:
    """The notebook with every guess entered, every hint read, wrong answers and the solution."""
    lesson = re.sub(r"^\d+_", "", path.stem)
    outline = load_outline(lesson)
    notebook = nbformat.read(path, as_version=4)
    answers = importlib.import_module(f"lesson_answers.{lesson}").ANSWERS
    left = {("predict", each.name) for each in outline.questions}
    left |= {("check", name) for name in answers}
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if cell.cell_type != "code":
            continue
        if asked := re.search(r'^lesson\.predict\("(\w+)"', cell.source, re.MULTILINE):
            question = outline.question(asked[1])
            enter = GUESS.format(guess=guess_at(question), is_choice=bool(question.options))
            cell.source = cell.source.replace("lesson.predict(", "asked = lesson.predict(")
            cell.source += "\n" + enter
            left.remove(("predict", asked[1]))
        if checked := re.search(r'^lesson\.check\("(\w+)"', cell.source, re.MULTILINE):
            # Their own cell stays as it is: a learner runs the empty stub too.
            cells.append(new_code_cell(EXERCISE.format(lesson=lesson, exercise=checked[1])))
            left.remove(("check", checked[1]))
    assert not left, f"{path.name} asks for no {sorted(left)}"
    notebook.cells = [*cells, new_code_cell(END)]
    return notebook


def guess_at(question: Question) -> float | str:
    """A guess that the question takes."""
    if question.options:
        return question.options[0]
    return min(max(3.0, question.low), question.high)
