"""A question with a lock: nothing below it is shown or computed before a guess is entered."""

import html
from collections.abc import Callable
from typing import Any

import ipywidgets as widgets

from toolkit.lab.kit.panel import Panel
from toolkit.lab.lessons.box import NOT_RUN, Box, narrow, on_enter
from toolkit.lab.lessons.drawing import draw_on_a_line, png_of
from toolkit.lab.lessons.outline import Answer, Question
from toolkit.lab.lessons.progress import Progress
from toolkit.lab.notebooks.waiting import working

LOCKED = "Locked. Enter a guess, and what happens appears here."
_TEXT = "line-height:1.4"
_BOX = f"{_TEXT};border:1px solid #8a949e;border-radius:6px;padding:10px 14px;max-width:860px"
# Long options go on below themselves on a telephone.
_OPTIONS = """<style>
.toolkit-prediction .widget-radio-box label { display: flex; height: auto; line-height: 1.4 }
.toolkit-prediction .widget-radio-box input { flex: none; order: -1 }
</style>"""
Shown = Panel | widgets.Widget | Callable[[], Panel | widgets.Widget]
"""What appears with the answer, or a function that makes it then."""


class Prediction(Box):
    """A question on the page, with the panel that it locks.

    Attributes:
        guess: the guess, or None; can be set once as an attribute.
        answer: the answer, None before a guess.
        png: a drawing of guess and truth; empty before a guess, and for words.
    """

    def __init__(
        self,
        question: Question,
        progress: Progress,
        panel: Shown | None = None,
    ) -> None:
        self._question, self._progress, self._panel = question, progress, panel
        self.answer: Answer | None = None
        self.png, self._guess = b"", None
        layout = widgets.Layout(width="auto", max_width="860px")
        if question.options:
            self._input = widgets.RadioButtons(options=question.options, value=None, layout=layout)
        else:
            placeholder = f"a number {question.unit}".strip()
            self._input = widgets.Text(placeholder=placeholder, layout=narrow())
            self._input.continuous_update = False
            on_enter(self._input, self._enter)
        self._input.add_class("lesson-guess")
        self._button = widgets.Button(description="Enter my guess", icon="lock")
        self._button.add_class("lesson-enter")
        self._button.on_click(lambda _: self._enter())
        self._said = widgets.HTML()
        text = f"<div style='{_BOX}'><b>Your guess first.</b> {html.escape(question.text)}</div>"
        self._ask = widgets.HTML(text + _OPTIONS * bool(question.options))
        self._shown = widgets.VBox([widgets.HTML(f"<i>{LOCKED}</i>")])
        super().__init__([self._ask, self._input, self._button, self._said, self._shown])
        self.add_class("toolkit-prediction")
        if (entered := self._entered()) is not None:
            self._unlock(entered)

    @property
    def guess(self) -> float | str | None:
        return self._guess

    @guess.setter
    def guess(self, guess: Any) -> None:
        if self._guess is not None:
            raise ValueError(f"guess: got {guess!r}; {self._guess!r} is entered already and stays")
        guess = self._question.check(guess)
        if (entered := self._entered()) is not None:  # entered in another box of the same question
            self._unlock(entered)
            raise ValueError(f"guess: got {guess!r}; {entered!r} is entered already and stays")
        self._unlock(guess)
        assert self.answer is not None
        self._progress.add("guess", self._question.name, guess=guess, truth=self.answer.truth)

    def _entered(self) -> float | str | None:
        """The stored guess, from whichever box."""
        found = self._progress.data["guesses"].get(self._question.name)
        return None if found is None else self._question.check(found.get("guess"))

    def _enter(self) -> None:
        if self._guess is not None:  # a second click
            return
        self._button.disabled = True
        self._said.value = working(self._question.seconds)
        try:
            if (entered := self._entered()) is not None:
                self._unlock(entered)
            else:
                self.guess = self._input.value
        except Exception as error:
            self._said.value = self.alert(error)
            self._button.disabled = self._guess is not None

    def _unlock(self, guess: float | str) -> None:
        question, answer = self._question, self._question.answer()
        words = html.escape(self._words(guess, answer))
        parts: list[Any] = [widgets.HTML(f"<p style='{_TEXT}'>{words}</p>")]
        if answer.draw is not None:
            both = answer.draw
            self.png = png_of(lambda figure: both(figure, guess), 3.6)
        elif not question.options:
            line = float(guess), float(answer.truth), question.unit
            self.png = png_of(lambda figure: draw_on_a_line(figure, *line), 1.1)
        if self.png:
            layout = widgets.Layout(width="100%", max_width="960px")
            parts.append(widgets.Image(value=self.png, format="png", layout=layout))
        if self._panel is not None:
            panel = self._panel() if callable(self._panel) else self._panel
            parts.append(panel.page if isinstance(panel, Panel) else panel)
        self.answer, self._guess = answer, guess
        self._said.value, self._shown.children = "", parts
        self._input.disabled = self._button.disabled = True
        self._button.icon = "unlock"

    def _words(self, guess: float | str, answer: Answer) -> str:
        return f"You guessed {_shown(guess)}. {answer.words}"

    def words(self) -> str:
        question, options = self._question, " / ".join(self._question.options)
        if self.answer is None or self._guess is None:
            state = f"{LOCKED}\n{NOT_RUN}"
        else:
            state = self._words(self._guess, self.answer)
        return "\n".join(filter(None, (question.text, options, state)))


def _shown(guess: float | str) -> str:
    return f"“{guess}”" if isinstance(guess, str) else f"{guess:,.10g}"
