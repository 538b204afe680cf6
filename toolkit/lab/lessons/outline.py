"""The content of a lesson as data: questions with answers, exercises with judges.

A judge calls a learner's function and compares its values with properties or references. It shows a
drawing of them, and raises `WrongAnswer` with an explanation or returns what is right.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

Draw = Callable[[Figure], None]
"""A function that draws on an empty figure in the house style."""

Show = Callable[[Draw], None]
"""Takes a judge's drawing."""


class Answer(NamedTuple):
    """The answer to a question."""

    truth: float | str
    words: str  # one or two sentences, with where the number comes from
    # Draws the truth and a guess, or the truth alone; without it both are drawn on one line.
    draw: Callable[[Figure, Any], None] | None = None


@dataclass(frozen=True)
class Question:
    """A prediction to enter before anything is shown."""

    name: str
    text: str
    # Computed only when a guess has been entered.
    answer: Callable[[], Answer]
    options: tuple[str, ...] = ()  # none: the guess is a number
    unit: str = ""
    low: float = -math.inf
    high: float = math.inf
    seconds: float = 0.2  # how long the answer takes, about, on two cores

    def check(self, guess: Any) -> float | str:
        """The guess converted to its type, or a ValueError."""
        if self.options:
            if guess not in self.options:
                raise ValueError(f"guess: got {guess!r}, wanted one of {', '.join(self.options)}")
            return guess
        try:
            number = float(guess.replace(",", "")) if isinstance(guess, str) else float(guess)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"guess: got {guess!r}, wanted a number such as 2.5 or 1e6") from None
        if not (self.low <= number <= self.high and math.isfinite(number)):
            raise ValueError(
                f"guess: got {number:g}, wanted a number from {self.low:g} to {self.high:g}"
            )
        return number


class WrongAnswer(Exception):
    """An exercise's function is wrong, for the reason given."""


@dataclass(frozen=True)
class Exercise:
    """An exercise with its judge."""

    name: str
    task: str
    # Takes the learner's function, and what shows a drawing; returns words for a right answer.
    judge: Callable[[Callable[..., Any], Show], str]
    hints: tuple[str, str, str]
    minutes: int = 5
    seconds: float = 0.2  # how long the judge takes, about, on two cores
    is_extra: bool = False  # for a second hour: the lesson is whole without it


@dataclass(frozen=True)
class Outline:
    """A lesson as data."""

    title: str
    questions: tuple[Question, ...]
    exercises: tuple[Exercise, ...] = field(default=())

    def question(self, name: str) -> Question:
        """The question of this name."""
        return self._named("question", self.questions, name)

    def exercise(self, name: str) -> Exercise:
        """The exercise of this name."""
        return self._named("exercise", self.exercises, name)

    def _named(self, kind: str, those: tuple[Any, ...], name: str) -> Any:
        found = {exercise.name: exercise for exercise in those}
        if name not in found:
            raise ValueError(f"{kind}: got {name!r}, wanted one of {', '.join(found)}")
        return found[name]


def ask(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a learner's function; an error or None is a wrong answer."""
    try:
        value = function(*args, **kwargs)
    except WrongAnswer:  # of a function that asks another
        raise
    except Exception as error:
        raise WrongAnswer(f"{name_of(function)} raised {type(error).__name__}: {error}") from error
    if value is None:
        raise WrongAnswer(f"Not written yet: {name_of(function)} returned None.")
    return value


def ask_number(function: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
    """Call a learner's function that should return a number."""
    value = ask(function, *args, **kwargs)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise WrongAnswer(
            f"{name_of(function)} returned {type(value).__name__}; wanted a number."
        ) from None


def ask_array(
    function: Callable[..., Any], shape: tuple[int, ...], *args: Any, **kwargs: Any
) -> np.ndarray:
    """Call a learner's function that should return an array of this shape."""
    value = ask(function, *args, **kwargs)
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise WrongAnswer(
            f"{name_of(function)} returned {type(value).__name__}; wanted an array."
        ) from None
    if array.shape != shape:
        raise WrongAnswer(
            f"{name_of(function)} returned shape {list(array.shape)}; wanted {list(shape)}."
        )
    return array


def ask_numbers(function: Callable[..., Any], count: int, *args: Any) -> list[float]:
    """Call a learner's function that should return `count` numbers, in a list or an array."""
    value = ask(function, *args)
    try:
        numbers = [float(number) for number in value]
    except (TypeError, ValueError):
        raise WrongAnswer(
            f"{name_of(function)} returned {type(value).__name__}; wanted numbers in a list."
        ) from None
    if len(numbers) != count:
        raise WrongAnswer(f"{name_of(function)} returned {len(numbers)} numbers; wanted {count}.")
    return numbers


def are_close(found: Sequence[float], wanted: Sequence[float]) -> bool:
    """Whether numbers agree to five digits; no library is needed, as in a browser."""
    return all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(found, wanted, strict=True))


def name_of(function: Callable[..., Any]) -> str:
    """The learner's name of a function."""
    return getattr(function, "__name__", "the function")
