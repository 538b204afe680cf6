"""The lock, the checks, the hints, the file of progress, and the pages made of it."""

import inspect
import json
from pathlib import Path

import pytest

pytest.importorskip("anywidget")

import ipywidgets as widgets

from toolkit.lab import Lesson, gather
from toolkit.lab.kit.panel import WIDGET_VIEW
from toolkit.lab.lessons.outline import INSTRUMENTS, LESSONS, Answer, Question, load_outline

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_PROGRESS", str(tmp_path / "progress"))
    monkeypatch.chdir(tmp_path)


def correct(tokens, heads, head_size):
    return 2 * tokens * (tokens + 1) * heads * head_size


def texts_of(widget):
    """All words of a widget and those inside it."""
    inside = "".join(map(texts_of, getattr(widget, "children", ())))
    return inside + (widget.value if isinstance(widget, widgets.HTML) else "")


def test_nothing_is_computed_or_shown_before_a_guess():
    made = []
    lesson = Lesson("attention_cost")
    prediction = lesson.predict("doubling", lambda: made.append(1) or widgets.HTML("instrument"))
    assert not made
    bundle, _ = prediction._repr_mimebundle_()
    assert "image/png" not in bundle
    assert WIDGET_VIEW in bundle
    shown = texts_of(prediction) + bundle["text/plain"]
    assert "Locked" in shown
    assert "instrument" not in shown
    prediction._input.value = "3"
    prediction._button.click()
    assert made
    assert "instrument" in texts_of(prediction)
    assert "You guessed 3. It grows 4 times" in texts_of(prediction)
    assert prediction.png[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match="is entered already and stays"):
        prediction.guess = 4


def test_a_bad_guess_is_named_and_keeps_the_lock():
    prediction = Lesson("attention_cost").predict("doubling")
    prediction._input.value = "many"
    prediction._button.click()
    assert "got &#x27;many&#x27;, wanted a number" in texts_of(prediction)
    assert prediction.guess is None
    with pytest.raises(ValueError, match="wanted a number from"):
        prediction.guess = 1e9


def test_a_choice_is_entered_like_a_number(tmp_path):
    from toolkit.lab.lessons.prediction import Prediction

    question = Question("which", "Which?", lambda: Answer("b", "It is b."), options=("a", "b"))
    prediction = Prediction(question, Lesson("attention_cost").progress)
    assert prediction._input.value is None
    with pytest.raises(ValueError, match="got 'c', wanted one of a, b"):
        prediction.guess = "c"
    prediction.guess = "a"
    assert "You guessed “a”. It is b." in texts_of(prediction)


def test_progress_survives_a_restart(capsys):
    lesson = Lesson("attention_cost")
    lesson.predict("doubling").guess = 3
    assert not lesson.check("score_flops", lambda *sizes: 1.0).is_right
    lesson.hint("score_flops")
    assert lesson.check("score_flops", correct).is_right
    assert lesson.check("score_flops", lambda *sizes: 1.0).is_right is False
    again = Lesson("attention_cost")
    assert again.predict("doubling").guess == 3
    known = again.progress.data["checks"]["score_flops"]
    assert (known["is_right"], known["attempts"], known["hints"]) == (True, 2, 1)
    assert "def correct" in known["code"]
    assert "1 of 2 predictions, 1 of 3 exercises" in again.summary()
    for count in (2, 3, 3):
        capsys.readouterr()
        again.hint("score_flops")
        assert len(capsys.readouterr().out.splitlines()) == count


def test_what_a_learner_raises_or_forgets_is_said():
    lesson = Lesson("attention_cost")
    said = lambda function: lesson.check("score_flops", function).words  # noqa: E731
    assert said(lambda *sizes: None) == "Not written yet: <lambda> returned None."
    assert said(lambda *sizes: 1 / 0) == "<lambda> raised ZeroDivisionError: division by zero"
    assert "takes 0 positional arguments" in said(lambda: 1)
    assert said(lambda *sizes: "much") == "<lambda> returned str; wanted a number."


def test_a_file_that_is_no_progress_is_named(tmp_path):
    path = tmp_path / "progress" / "attention_cost.json"
    path.parent.mkdir()
    for text in ("", "[]", '{"lesson": "x", "learner": "", "guesses": [], "checks": {}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="holds no progress of a lesson"):
            Lesson("attention_cost")


def test_a_room_is_gathered_from_pages_and_files(tmp_path, monkeypatch):
    room = tmp_path / "room"
    for learner, guess in (("Ada", 4), ("<b>Bob</b>", 2), ("", 8)):
        monkeypatch.setenv("TOOLKIT_PROGRESS", str(tmp_path / f"of {guess}"))
        lesson = Lesson("attention_cost")
        lesson.predict("doubling").guess = guess
        lesson.check("score_flops", correct)
        lesson.export(learner=learner, directory=room)
    (room / "note.html").write_text("hello")
    (room / "copy.json").write_text(lesson.progress.path.read_text())
    page = gather(room).read_text()
    assert page.count("<td>right</td>") == 4
    assert "Ada" in page
    assert "<b>Bob" not in page
    assert "&lt;b&gt;Bob" in page
    assert "note.html" in page
    assert "Learners: 4. Lessons: 1." in page
    assert "Guesses: 4." in page
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="holds nothing that a lesson wrote"):
        gather(empty)


def test_an_export_holds_guesses_checks_and_code():
    lesson = Lesson("attention_cost")
    lesson.predict("doubling").guess = 3
    lesson.check("score_flops", correct)
    page = lesson.export().read_text()
    for part in ("Predictions", "4×", "def correct", "data:image/png", "Not solved yet"):
        assert part in page, part


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_has_a_page_for_those_who_teach_it(name):
    (page,) = (ROOT / "docs/teaching").glob(f"[0-9][0-9]_{name}.md")
    text, outline = page.read_text(), load_outline(name)
    for exercise in outline.exercises:
        assert f"| `{exercise.name}` | {exercise.minutes} | {exercise.task} |" in text
    for heading in ("Timing", "Pitfalls", "To discuss", "Where the answers are"):
        assert f"\n## {heading}\n" in text
    assert (ROOT / "tutorials" / f"{page.stem}.ipynb").exists()
    assert (ROOT / f"tests/support/lesson_answers/{name}.py").exists()
    assert f"tests/support/lesson_answers/{name}.py)" in text


@pytest.mark.parametrize("name", [*LESSONS, *INSTRUMENTS])
def test_an_outline_is_whole(name):
    """Names differ, no text gives an answer away, and every hint says something new."""
    outline = load_outline(name)
    for kind in (outline.questions, outline.exercises):
        assert len({one.name for one in kind}) == len(kind)
    for exercise in outline.exercises:
        assert len(set(exercise.hints)) == 3
        assert inspect.signature(exercise.judge).parameters
    for question in outline.questions:
        assert not question.options or len(question.options) > 1
        json.dumps([question.low, question.high])
