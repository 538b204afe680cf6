"""The lock, the checks, the hints, the file of progress, and the pages made of it."""

import inspect
import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from yardstick import slowness

pytest.importorskip("anywidget")

import ipywidgets as widgets
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.formatters import DisplayFormatter
from IPython.core.interactiveshell import InteractiveShell

from toolkit.lab import Lesson, MemoryPanel, Room, gather
from toolkit.lab.kit.panel import WIDGET_VIEW
from toolkit.lab.lessons.catalogue import INSTRUMENTS, LESSONS, load_outline
from toolkit.lab.lessons.outline import Answer, Question
from toolkit.lab.lessons.prediction import Prediction
from toolkit.lab.lessons.progress import Progress
from toolkit.lab.lessons.room import send

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
    assert not prediction._button.disabled
    with pytest.raises(ValueError, match="wanted a number from"):
        prediction.guess = 1e9


def test_a_choice_is_entered_like_a_number(tmp_path):
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
    assert "1 of 2 predictions, 1 of 2 exercises, 0 of 1 for a second hour" in again.summary()
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


def test_a_second_click_changes_nothing():
    first, second = (Lesson("attention_cost").predict("doubling") for _ in range(2))
    for box, value in ((first, "3"), (first, "5"), (second, "7")):
        box._input.value = value
        box._button.click()
        assert (box.guess, box._said.value, box._button.disabled) == (3, "", True)


def test_long_work_says_how_long():
    """The bar is shown before the answer is computed, and goes with it."""
    shown = []

    def slow():
        shown.append(texts_of(prediction))
        return Answer(1.0, "It is 1.")

    question = Question("slow", "How many?", slow, seconds=40)
    prediction = Prediction(question, Progress("attention_cost"))
    prediction._input.value = "1"
    prediction._button.click()
    assert "Working: about 40 s" in shown[0]
    assert "Working" not in texts_of(prediction)


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (("lesson.working(6); lesson.working(9); 1 / 0", "1", "lesson.working(0.2)"), "about 6 s"),
        (("from toolkit.lab import Lesson",), "about 3 s"),
        (("MemoryPanel(); 1", "1"), "a second or two"),
    ],
)
@pytest.mark.parametrize("message", ["execute_request", "comm_msg"])
def test_a_cell_shows_that_it_works_until_it_ends(message, cells, words, monkeypatch):
    if words == "about 3 s":  # as before anything was loaded
        monkeypatch.delitem(sys.modules, "toolkit.figures")
    shell, shown = InteractiveShell.instance(), CapturingDisplayPublisher()
    shell.display_pub = shown
    shell.get_parent = lambda: {"header": {"msg_type": message}}  # as a kernel's shell has it
    shell.user_ns |= {"lesson": Lesson("attention_cost"), "MemoryPanel": MemoryPanel}
    try:
        for cell in cells:
            shell.run_cell(cell)
    finally:
        InteractiveShell.clear_instance()
    signs = [output["data"]["text/html"] for output in shown.outputs]
    if message == "comm_msg":  # a widget's: it is no cell, and nothing would end the sign
        assert not signs
        return
    began, ended = signs
    assert f"Working: {words}" in began
    assert ended == ""


def test_a_picture_is_told_in_words_where_it_cannot_be_seen():
    drawing = Lesson("kill_worker").picture("best_minutes")
    data, metadata = DisplayFormatter().format(drawing)
    assert data["text/plain"] == drawing.words == metadata["image/png"]["alt"]
    assert len(drawing.words) < 1000


def test_an_old_box_takes_nothing_back():
    """The set-up cell is run again between: each box writes what it knows, not a whole file."""
    box = Lesson("attention_cost").predict("doubling")
    again = Lesson("attention_cost")
    assert again.check("score_flops", correct).is_right
    box.guess = 3
    assert "1 of 2 predictions, 1 of 2 exercises, 0 of 1 for a second hour" in again.summary()
    assert (
        "1 of 2 predictions, 1 of 2 exercises, 0 of 1 for a second hour"
        in Lesson("attention_cost").summary()
    )
    assert again.predict("doubling").guess == 3


def test_the_first_guess_counts_whichever_box_it_was_entered_in():
    lesson = Lesson("attention_cost")
    first, second = lesson.predict("doubling"), lesson.predict("doubling")
    first.guess = 3
    with pytest.raises(ValueError, match=r"3\.0 is entered already"):
        second.guess = 4
    assert second.guess == 3
    assert Lesson("attention_cost").predict("doubling").guess == 3


WRITER = """
import os, signal, sys
from toolkit.lab.lessons.progress import Progress
from toolkit.training.checkpoints.locks import locked
progress = Progress("attention_cost")
for at in range(int(sys.argv[2])):
    progress.add("check", f"{sys.argv[1]}-{at}", is_right=True)
    if at == 3 and sys.argv[1] == "killed":
        with locked(progress.path.with_suffix(".lock"), wait=True):
            with progress.path.open("ab") as file:
                file.write(b"0123456789abcdef {half of an event")
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kernels_that_write_at_once_lose_nothing():
    count, names = 25, ("a", "b", "killed")
    kernels = [subprocess.Popen([sys.executable, "-c", WRITER, name, str(count)]) for name in names]
    codes = [kernel.wait() for kernel in kernels]
    assert codes == [0, 0, -signal.SIGKILL]
    progress = Progress("attention_cost")
    progress.add("check", "last", is_right=True)
    kept = set(progress.data["checks"])
    wanted = {f"{name}-{at}" for name in "ab" for at in range(count)}
    wanted |= {f"killed-{at}" for at in range(4)} | {"last"}
    assert kept == wanted
    assert progress.data["damaged"] == 1
    assert "damaged lines" in Lesson("attention_cost").summary()


def test_a_changed_line_is_left_out_and_counted():
    lesson = Lesson("attention_cost")
    lesson.predict("doubling").guess = 3
    assert lesson.check("score_flops", correct).is_right
    path, text = lesson.progress.path, lesson.progress.path.read_bytes()
    for at in range(0, len(text), 97):  # one flipped bit
        if text[at : at + 1] == b"\n":
            continue
        path.write_bytes(text[:at] + bytes([text[at] ^ 4]) + text[at + 1 :])
        assert Lesson("attention_cost").progress.data["damaged"] >= 1
    path.write_bytes(text)
    assert Lesson("attention_cost").progress.data["damaged"] == 0


def test_progress_of_an_earlier_version_is_kept(tmp_path):
    path = tmp_path / "progress" / "attention_cost.json"
    path.parent.mkdir()
    known = {"score_flops": {"is_right": True, "attempts": 2, "hints": 1, "when": ""}}
    old = {"lesson": "attention_cost", "learner": "Ada", "guesses": {}, "checks": known}
    path.write_text(json.dumps(old))
    lesson = Lesson("attention_cost")
    lesson.predict("doubling").guess = 3
    assert (
        "1 of 2 predictions, 1 of 2 exercises, 0 of 1 for a second hour"
        in Lesson("attention_cost").summary()
    )


def test_progress_of_a_lesson_that_was_cut_is_in_its_parts():
    whole = Progress("loops_rates_kernels")
    whole.add("guess", "horizon", guess=3, truth=4)
    for name in ("sees_future", "search_rate", "search_rate"):
        whole.add("check", name, is_right=name == "sees_future", words="")
    parts = ("causality_trap", "known_rates", "own_kernel", "ring")
    found = {name: Lesson(name).progress.data for name in parts}
    assert {name: [*data["guesses"], *data["checks"]] for name, data in found.items()} == {
        "causality_trap": ["sees_future"], "known_rates": ["horizon", "search_rate"],
        "own_kernel": [], "ring": [],
    }  # fmt: skip
    Progress("known_rates").add("check", "search_rate", is_right=True, words="")
    check = Progress("known_rates").data["checks"]["search_rate"]
    assert (check["is_right"], check["attempts"]) == (True, 3)


def test_a_file_that_is_no_progress_is_named(tmp_path):
    path = tmp_path / "progress" / "attention_cost.json"
    path.parent.mkdir()
    nested = "[" * 100_000
    for text in ("", "[]", '{"lesson": "x", "learner": "", "guesses": [], "checks": {}}', nested):
        path.write_text(text)
        with pytest.raises(ValueError, match="holds no progress of a lesson"):
            Lesson("attention_cost")
    path.unlink()
    path.with_suffix(".jsonl").write_text("hello\n")
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
    (room / "attention_cost.jsonl").write_bytes(lesson.progress.path.read_bytes())
    page = gather(room).read_text()
    assert page.count("<td>right (1 tries)</td>") == 4
    assert "Ada" in page
    assert "<b>Bob" not in page
    assert "&lt;b&gt;Bob" in page
    assert "note.html" in page
    assert "Learners: 4. Lessons: 1." in page
    assert "Guesses: 4." in page


def test_learners_of_one_name_stay_apart_and_one_who_hands_in_twice_is_one(tmp_path, monkeypatch):
    room = tmp_path / "room"
    for folder, times in (("first", 2), ("second", 1)):
        monkeypatch.setenv("TOOLKIT_PROGRESS", str(tmp_path / folder))
        lesson = Lesson("attention_cost")
        for at in range(times):
            page = lesson.export(learner="Ada", directory=room)
            page.rename(room / f"{folder} {at}.html")
            lesson.check("score_flops", correct)
    other = Lesson("ring")
    other.export(learner="Ada", directory=room)
    page = gather(room).read_text()
    assert "Learners: 2. Lessons: 2." in page
    assert page.count("<td>Ada</td>") == 2  # once per lesson
    assert "<td>Ada (2)</td>" in page
    assert page.count("<td>right (1 tries)</td>") == 1  # the second page of the first learner
    names = {Lesson("attention_cost").export("Ada!"), Lesson("attention_cost").export("Ada?")}
    monkeypatch.setenv("TOOLKIT_PROGRESS", str(tmp_path / "first"))
    assert len(names | {Lesson("attention_cost").export("Ada!")}) == 2
    with pytest.raises(ValueError, match="learner: got 3,000 characters, wanted at most 100"):
        lesson.export("A" * 3000)


def test_hostile_pages_end_no_gathering(tmp_path):
    room = tmp_path / "room"
    Lesson("attention_cost").export(learner="Ada", directory=room)
    lesson = "attention_cost"
    odd: list[Any] = [[[]], {"a": 1}, 10**400, float("nan"), "x" * 9000, None, True]
    pages = [
        {"lesson": lesson, "learner": value,
         "guesses": {"doubling": {"guess": value, "truth": value}},
         "checks": {"score_flops": {"attempts": value, "hints": value, "is_right": value}}}
        for value in odd
    ]  # fmt: skip
    for at, page in enumerate(pages):
        (room / f"{at}.json").write_text(json.dumps(page))
    (room / "nested.json").write_text("[" * 100_000)
    (room / "nested.jsonl").write_text("[" * 100_000)
    (room / "binary.html").write_bytes(b"\xff\xfe\x00")
    (room / "folder.json").mkdir()
    page = gather(room).read_text()
    for name in ("nested.json", "nested.jsonl", "binary.html", "Ada"):
        assert name in page
    assert "x" * 200 not in page


def test_a_room_shows_who_is_stuck_and_with_which_words(tmp_path):
    lesson = Lesson("attention_cost")
    for _ in range(3):
        lesson.check("score_flops", lambda *sizes: "<i>much</i>")
    lesson.export(learner="Ada", directory=tmp_path / "room")
    page = gather(tmp_path / "room").read_text()
    row = "<td>Ada</td><td>score flops</td><td>3</td><td>0</td><td>&lt;lambda&gt; returned str"
    assert row in page


def test_the_last_box_writes_the_page_and_offers_it(tmp_path, monkeypatch):
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    lesson = Lesson("attention_cost")
    lesson.predict("doubling").guess = 3
    box = lesson.hand_in()
    box.name.value = "Ada <b>"
    box.button.click()
    (page,) = (tmp_path / "progress").glob("*.html")
    assert f"Written: {page}" in box.done.value
    assert box.done.value.count("<a download=") == 2
    assert "a machine of Kaggle that is deleted with the session" in texts_of(box)
    assert "The lesson was not run" in box._repr_mimebundle_()[0]["text/plain"]
    box.name.value = "A" * 3000
    box.button.click()
    assert "wanted at most 100" in box.done.value
    assert Lesson("attention_cost").hand_in().name.value == "Ada <b>"


def test_thirty_learners_enter_a_room_at_once(tmp_path):
    lesson = Lesson("attention_cost")
    lesson.check("score_flops", lambda *sizes: "<script>alert(1)</script>")
    page = lesson.export(learner="<script>alert(1)</script>").read_text()
    own = lesson.progress.learner_id()
    pages = []
    for at in range(30):
        pages.append(tmp_path / f"{at}.html")
        pages[-1].write_text(page.replace(own, f"learner-{at}"))
    with Room(tmp_path / "room", host="127.0.0.1", port=0) as room:
        threading.Thread(target=room.serve_forever, daemon=True).start()
        start = time.perf_counter()
        with ThreadPoolExecutor(30) as class_of_30:
            answers = [*class_of_30.map(lambda path: send(path, room.address), pages)]
        seconds = time.perf_counter() - start
        assert answers == ["The room has your page on attention cost."] * 30
        assert len([*(tmp_path / "room").glob("*.json")]) == 30
        assert seconds < max(1, slowness())
        shown = urllib.request.urlopen(room.page_address).read().decode()
        assert "Learners: 30. Lessons: 1." in shown
        assert "<script>alert" not in shown
        with pytest.raises(ValueError, match="join code is another"):
            send(pages[0], f"{room.address[:-5]}wrong")
        pages[0].write_text("hello")
        with pytest.raises(ValueError, match="no page of a lesson"):
            send(pages[0], room.address)
        room.shutdown()
    with pytest.raises(OSError, match="cannot be reached"):
        send(pages[1], room.address)
    with pytest.raises(ValueError, match="wanted an address such as"):
        send(pages[1], "file:///etc/hosts")


def test_an_empty_room_is_refused(tmp_path):
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
    # The minutes of the parts are those that the lesson says.
    lesson = (ROOT / "tutorials" / f"{page.stem}.ipynb").read_text()
    minutes = re.search(r"(\d+) minutes to work through(?:, and (\d+) for a second hour)?", lesson)
    assert minutes
    timing = " ".join(text.split("## Timing\n")[1].split("<!--")[0].split())
    first, _, second = timing.partition(";")
    times = len(outline.exercises) if "for each exercise" in first else 1
    *parts, last = map(int, re.findall(r"\b\d+\b", first))
    assert sum(parts) + times * last == int(minutes[1]) <= 60
    assert re.findall(r"\d+", second) == [extra for extra in minutes.groups()[1:] if extra]
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
