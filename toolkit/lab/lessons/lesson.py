"""A lesson as a notebook uses it: predict, check, hint, export."""

import html
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit._checks import checked
from toolkit.figures import ACCENT
from toolkit.lab.lessons.catalogue import load_outline
from toolkit.lab.lessons.drawing import RIGHT, Drawing, as_base64, png_of
from toolkit.lab.lessons.hand_in import HandIn
from toolkit.lab.lessons.outline import Draw, WrongAnswer
from toolkit.lab.lessons.pages import write_export
from toolkit.lab.lessons.prediction import Prediction, Shown
from toolkit.lab.lessons.progress import LONGEST_NAME, Progress
from toolkit.lab.notebooks.waiting import show_working


@dataclass(frozen=True)
class Verdict:
    """The result of a check, displayed in a notebook.

    Attributes:
        is_right: whether the exercise is solved.
        words: the explanation.
        png: a drawing of the code's result and the wanted one; may be empty.
        exercise: name of the exercise.
    """

    is_right: bool
    words: str
    png: bytes
    exercise: str

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        mark, look = (
            ("&#10003;", f"solid {RIGHT}") if self.is_right else ("&#10007;", f"dashed {ACCENT}")
        )
        box = f"border:2px {look};border-left-width:8px;padding:4px 10px;max-width:860px"
        page = f"<div role='status' style='{box}'>{mark} {html.escape(self.words)}</div>"
        if self.png:
            alt = html.escape(self.words, quote=True)
            source = f"data:image/png;base64,{as_base64(self.png)}"
            page += f"<img alt='{alt}' style='max-width:960px;width:100%' src='{source}'>"
        words = self.words
        if not self.is_right:
            hint = f'lesson.hint("{self.exercise}")'
            page += f"<div style='padding:4px 14px'>For a hint, run <code>{hint}</code></div>"
            words += f"\nFor a hint, run {hint}"
        return {"text/html": page, "text/plain": words}, {}


class Lesson:
    """A lesson of `tutorials/`: locked predictions, exercises with checks and hints, progress.

    Guesses and solutions are kept in a file, so that a restarted kernel continues.

    Args:
        name: the notebook's name without its number, such as "attention_cost".

    Attributes:
        progress: the stored guesses and checks.
        outline: questions and exercises.

    Example:
        >>> lesson = Lesson("attention_cost")
        >>> lesson.check("score_flops", lambda tokens, heads, head_size: None).words
        'Not written yet: <lambda> returned None.'
    """

    @checked
    def __init__(self, name: str) -> None:
        self.outline = load_outline(name)
        self.progress = Progress(name)

    @checked
    def predict(
        self,
        question: str,
        panel: Shown | None = None,
    ) -> Prediction:
        """A question; `panel`, if any, appears when a guess has been entered."""
        return Prediction(self.outline.question(question), self.progress, panel)

    @checked
    def check(self, exercise: str, function: Callable[..., Any]) -> Verdict:
        """Check a learner's function for an exercise, and store the result."""
        judged = self.outline.exercise(exercise)
        self.working(judged.seconds)
        drawn: list[Draw] = []
        try:
            is_right, words = True, judged.judge(function, drawn.append)
        except WrongAnswer as wrong:
            is_right, words = False, str(wrong)
        png = png_of(drawn[-1]) if drawn else b""
        found = {"is_right": is_right, "words": words, "code": _code_of(function)}
        self.progress.add("check", exercise, **found, picture=as_base64(png))
        return Verdict(is_right, words, png, exercise)

    def working(self, seconds: float) -> None:
        """Show that the cell works, about so long, until it ends; nothing if it is short."""
        show_working(seconds)

    @checked
    def hint(self, exercise: str) -> None:
        """Print the next of an exercise's three hints, together with earlier ones."""
        hints = self.outline.exercise(exercise).hints
        seen = self.progress.data["checks"].get(exercise, {}).get("hints", 0)
        count = min(seen + 1, len(hints))
        self.progress.add("hint", exercise, count=count)
        for number, words in enumerate(hints[:count], 1):
            print(f"{number} of {len(hints)}: {words}")

    @checked
    def export(self, learner: str = "", directory: str | Path | None = None) -> Path:
        """Write predictions, checks and code as one HTML page, beside the file of progress."""
        if len(learner) > LONGEST_NAME:
            raise ValueError(
                f"learner: got {len(learner):,} characters, wanted at most {LONGEST_NAME}"
            )
        if learner:
            self.progress.add("learner", learner=learner)
        data = self.progress.data | {"learner_id": self.progress.learner_id()}
        return write_export(self.outline, data, Path(directory or self.progress.path.parent))

    @checked
    def picture(self, question: str) -> Drawing:
        """The picture of a question's answer, to look back on at the end of a lesson."""
        answer = self.outline.question(question).answer()
        draw = answer.draw
        if draw is None:
            raise ValueError(f"question: the answer of {question!r} has no picture")
        return Drawing(png_of(lambda figure: draw(figure, None), 3.6), answer.words)

    def hand_in(self) -> HandIn:
        """A field for the learner's name and a button that makes the page to hand in."""
        return HandIn(self)

    def summary(self) -> str:
        """The learner's progress in one line."""
        guesses, checks = self.progress.data["guesses"], self.progress.data["checks"]
        solved = {name for name, check in checks.items() if check.get("is_right")}
        phrases = []
        for is_extra, word in ((False, "exercises"), (True, "for a second hour")):
            names = {each.name for each in self.outline.exercises if each.is_extra == is_extra}
            if names:
                phrases.append(f"{len(solved & names)} of {len(names)} {word}")
        damaged = self.progress.data["damaged"]
        left_out = f"; damaged lines of {self.progress.path}: {damaged}" if damaged else ""
        return (
            f"{self.outline.title}: {len(guesses)} of {len(self.outline.questions)} predictions, "
            f"{', '.join(phrases)}{left_out}"
        )


def _code_of(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # defined where Python keeps no source
        return ""
