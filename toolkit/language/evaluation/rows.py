"""What a model is asked: rows of a task, from a JSONL file or drawn here."""

import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit._checks import check_choice, checked
from toolkit._files import json_object


@dataclass(frozen=True)
class Choice:
    """A question with answers, of which the likeliest is taken.

    Attributes:
        query: the text before an answer.
        choices: the answers; a space is put before each.
        gold: index of the right one.

    Example:
        >>> Choice("The sky is", ("green", "blue"), gold=1).choices[1]
        'blue'
    """

    query: str
    choices: tuple[str, ...]
    gold: int

    def __post_init__(self) -> None:
        if len(self.choices) < 2:
            raise ValueError(f"choices must be a list of at least two texts; got {self.choices!r}")
        if type(self.gold) is not int or not 0 <= self.gold < len(self.choices):
            raise ValueError(f"gold is {self.gold!r}, wanted 0 to {len(self.choices) - 1}")
        _check_texts((self.query,), self.choices)


@dataclass(frozen=True)
class Continuation:
    """A text that is to follow another one exactly as it stands.

    Example:
        >>> Continuation("The sky is", " blue").continuation
        ' blue'
    """

    context: str
    continuation: str

    def __post_init__(self) -> None:
        _check_texts((self.context,), (self.continuation,))


@dataclass(frozen=True)
class Document:
    """A text of which every token is predicted.

    Example:
        >>> Document("The sky is blue.").text
        'The sky is blue.'
    """

    text: str

    def __post_init__(self) -> None:
        _check_texts((), (self.text,))


def _check_texts(before: tuple[Any, ...], asked: tuple[Any, ...]) -> None:
    """Refuse what is no text in UTF-8, and an empty text whose likelihood is asked."""
    for text in (*before, *asked):
        if not isinstance(text, str):
            raise ValueError(f"got {text!r}, wanted a text")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{text!r} holds bytes that are not UTF-8") from None
    if not all(asked):
        raise ValueError("a text whose likelihood is asked is empty")


Row = Choice | Continuation | Document
_FIELDS = {
    Choice: ("query", "choices", "gold"),
    Continuation: ("context", "continuation"),
    Document: ("text",),
}


@checked
def read_task(path: Path) -> list[Row]:
    """Read the rows of a task from a JSONL file, with the fields of lm-evaluation-harness.

    A line is an object with `query`, `choices` and `gold`; with `context` and `continuation`; or
    with `text`. Other fields are not read. All lines of a file are of one kind.

    Args:
        path: the file, in UTF-8.

    Returns:
        The rows in the order of the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line cannot be understood, or the file has none.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("sky.jsonl").write_text('{"text": "The sky is blue."}')
        >>> read_task(Path("sky.jsonl"))
        [Document(text='The sky is blue.')]
    """
    if not path.is_file():
        raise FileNotFoundError(f"path: no file {str(path)!r}")
    rows: list[Row] = []
    for at, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if line.strip():
            rows.append(_row(json_object(line, where := f"{path}, line {at}"), where))
            if type(rows[-1]) is not type(rows[0]):
                raise ValueError(f"{where}: a {type(rows[-1]).__name__} after other kinds of rows")
    if not rows:
        raise ValueError(f"path: {str(path)!r} has no rows")
    return rows


def _row(found: dict[str, Any], where: str) -> Row:
    kind = next((kind for kind, names in _FIELDS.items() if found.keys() >= {*names}), None)
    if kind is None:
        wanted = "; or ".join(", ".join(names) for names in _FIELDS.values())
        raise ValueError(f"{where}: got the fields {', '.join(found)}; wanted {wanted}")
    fields = {name: found[name] for name in _FIELDS[kind]}
    if kind is Choice and isinstance(fields["choices"], list):
        fields["choices"] = tuple(fields["choices"])
    elif kind is Choice:
        raise ValueError(f"{where}: choices must be a list of at least two texts")
    try:
        return kind(**fields)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


_FILLER = (
    "The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.",
    "There and back again.",
)  # fmt: skip


def needle(draw: random.Random, sentences: int) -> Choice:
    """A number that stands somewhere in sentences which say nothing of it."""
    numbers = draw.sample(range(1000, 10000), 4)
    text = [draw.choice(_FILLER) for _ in range(sentences)]
    text.insert(draw.randrange(sentences + 1), f"The secret number is {numbers[0]}.")
    return _shuffled(draw, " ".join([*text, "The secret number is"]), list(map(str, numbers)))


def recall(draw: random.Random, pairs: int) -> Choice:
    """One of many pairs, asked for at the end; the other pairs' values are the wrong answers."""
    keys = draw.sample(
        [a + b for a in string.ascii_lowercase for b in string.ascii_lowercase], pairs
    )
    values = draw.sample(range(10, 100), pairs)
    text = " ".join(f"{key} = {value};" for key, value in zip(keys, values, strict=True))
    asked = draw.randrange(pairs)
    wrong = draw.sample([value for at, value in enumerate(values) if at != asked], 3)
    return _shuffled(draw, f"{text} {keys[asked]} =", [str(values[asked]), *map(str, wrong)])


def associative(draw: random.Random, words: int) -> Choice:
    """What followed a word when it stood in the text before."""
    made = ["".join(draw.choices(string.ascii_lowercase, k=4)) for _ in range(words)]
    asked = draw.randrange(words - 1)
    wrong = draw.sample([word for at, word in enumerate(made) if at != asked + 1], 3)
    return _shuffled(draw, " ".join([*made, made[asked]]), [made[asked + 1], *wrong])


def _shuffled(draw: random.Random, query: str, choices: list[str]) -> Choice:
    right = choices[0]
    draw.shuffle(choices)
    return Choice(query, tuple(choices), choices.index(right))


DRAWN: dict[str, Callable[[random.Random, int], Choice]] = {
    "needle": needle,
    "recall": recall,
    "associative": associative,
}
"""Tasks that need no file; their size is in sentences, pairs or words."""


@checked
def drawn_rows(name: str, size: int, rows: int, seed: int = 0) -> Iterator[Choice]:
    """Rows of a task that needs no file, the same for the same seed.

    Args:
        name: "needle" (a number in sentences that say nothing of it), "recall" (one of many pairs)
            or "associative" (what followed a word before).
        size: sentences, pairs or words of a row, at least 4.
        rows: how many.
        seed: of the drawing.

    Returns:
        Choices among four answers.

    Raises:
        ValueError: a size that the task cannot have.

    Example:
        >>> [row] = drawn_rows("recall", 4, rows=1)
        >>> len(row.choices)
        4
    """
    least = 4
    check_choice("name", name, DRAWN)
    if size < least or (name == "recall" and size > 90):
        most = " to 90" if name == "recall" else " or more"
        raise ValueError(f"size: got {size} for {name}, wanted {least}{most}")
    draw = random.Random(f"{name} {size} {seed}")
    return (DRAWN[name](draw, size) for _ in range(rows))
