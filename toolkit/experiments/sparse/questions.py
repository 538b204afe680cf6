"""Questions on long texts with known answers: what does a model still answer, reading sparsely?

A prompt ends with the beginning of a sentence that follows from the text, and the answer is how it
goes on, so that models answer that follow no instructions. The text before the question is read
densely and indexed before the question is seen, as in kvpress ("query-agnostic" compression); the
question and the answer are decoded sparsely, and an answer counts if every token of it is the
likeliest one. Systems stand at equal bytes, and random tokens are the control.

`QUESTIONS` has those of kvpress and sparse-frontier that need no download: a needle in the user's
own text, keys among other keys, chains of variables, the most common word of a list, a story and
what preceded in it. They differ from the originals in that one answer is asked for, as a
completion, and in the sizes, which follow from the length.

Source: Hsieh et al., "RULER", 2024, arXiv:2404.06654, section 3; Nawrot et al., "The Sparse
Frontier", 2025, arXiv:2504.17768, section 3, and its published tasks; kvpress, its evaluation.
"""

import itertools
import string
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int
from tqdm import tqdm

from toolkit.attention.sparse import SELECTORS, FixedTokens
from toolkit.experiments.sparse.audit import (
    CONTROL,
    EQUAL,
    ROUNDING,
    Reader,
    bytes_per_token,
    run_sparsely,
    without_rows,
)
from toolkit.experiments.sparse.quality import (
    Quality,
    at_small_budgets,
    fewer_tokens,
    quality_of_steps,
)
from toolkit.looped import LoopedLM
from toolkit.measure.tables import text_table

MARGIN = 0.25  # of the answers: what chance must lose for a question to decide anything
DENSE = "dense"
_HOPS, _CHAINS, _COMMON = 2, 4, 10
_PLACES = ("Rome", "Troy", "Argos", "Delphi", "Tyre", "Sidon", "Petra", "Susa", "Thebes", "Sparta")
_PEOPLE = ("Iris", "Leon", "Cleo", "Hector", "Rhea", "Adrian", "Daria", "Niko", "Selene", "Felix")
_LOOKS = ("ancient", "gilded", "ornate", "sturdy", "polished", "delicate", "weathered", "mystic")
_STUFFS = ("bronze", "silver", "ivory", "jade", "amber", "marble", "copper", "crystal", "obsidian")
_ITEMS = ("lamp", "vase", "mask", "shield", "goblet", "ring", "statue", "comb", "horn", "key")


class Asked(NamedTuple):
    """A question before the text around it has a length.

    Attributes:
        needed: sentences from which the answer follows; they stand at random places of the text.
        others: sentences around them, in their order; endless.
        question: the end of the prompt.
        answer: what follows it.
    """

    needed: list[str]
    others: Iterator[str]
    question: str
    answer: str


def _name(draw: np.random.Generator, letters: str, size: int) -> str:
    return "".join(draw.choice(list(letters), size))


def needle(draw: np.random.Generator, text: str) -> Asked:
    """A sentence in the user's own text, as kvpress puts it into a haystack."""
    number, key = _name(draw, string.digits, 6), _name(draw, string.ascii_lowercase, 6)
    sentence = f"\nThe secret number of {key} is"
    lines = text.splitlines(keepends=True) or [" "]
    first = int(draw.integers(len(lines)))
    others = itertools.cycle(lines[first:] + lines[:first])
    return Asked([f"{sentence} {number}.\n"], others, sentence, f" {number}.")


def keys(draw: np.random.Generator, text: str) -> Asked:
    """A key among many, each with its value: RULER's needles, with other needles as the hay."""

    def sentence(end: str = "") -> tuple[str, str]:
        key, value = (_name(draw, string.ascii_lowercase + string.digits, 6) for _ in range(2))
        return f"The value for key {key} is:", f" {value}."

    question, answer = sentence()
    others = ("".join(sentence()) + " " for _ in itertools.count())
    return Asked([f"{question}{answer} "], others, question, answer)


def variables(draw: np.random.Generator, text: str) -> Asked:
    """The number to which a variable resolves through a chain of assignments."""
    needed, asked, answer = [], "", ""
    for _ in range(_CHAINS):
        asked, answer = "", _name(draw, string.digits, 5)
        for _ in range(_HOPS + 1):
            variable = _name(draw, string.ascii_uppercase, 5)
            needed.append(f"VAR {variable} = {f'VAR {asked}' if asked else answer}. ")
            asked = variable
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. "
    return Asked(needed, itertools.repeat(noise), f"VAR {asked} resolves to", f" {answer}.")


def words(draw: np.random.Generator, text: str) -> Asked:
    """The word of a list that stands there ten times as often as any other."""
    common = _name(draw, string.ascii_lowercase, 5)
    others = (f"{_name(draw, string.ascii_lowercase, 5)}\n" for _ in itertools.count())
    question = "The most common word of this list is"
    return Asked([f"{common}\n"] * _COMMON, others, question, f" {common}")


def _visit(draw: np.random.Generator, place: str) -> tuple[str, str]:
    item = " ".join(str(draw.choice(names)) for names in (_LOOKS, _STUFFS, _ITEMS))
    return f"In {place} Arion met {draw.choice(_PEOPLE)} and bought the {item}. ", item


def _visits(draw: np.random.Generator) -> Iterator[str]:
    # A place of the text around, unlike one that is asked for, has a year beside its name.
    for year in itertools.count(100):
        yield _visit(draw, f"{draw.choice(_PLACES)} of year {year}")[0]


def story(draw: np.random.Generator, text: str) -> Asked:
    """Whom the story's hero met somewhere, and what he bought there."""
    place = str(draw.choice(_PLACES))
    sentence, item = _visit(draw, place)
    question, person = sentence.split(" and ")[0].rsplit(" ", 1)
    return Asked([sentence], _visits(draw), question, f" {person} and bought the {item}.")


def before(draw: np.random.Generator, text: str) -> Asked:
    """What the hero had bought before something else: two hops through the story."""
    visits = [_visit(draw, str(place)) for place in draw.choice(_PLACES, 2, replace=False)]
    (first, earlier), (second, later) = visits
    question = f"Just before the {later} Arion bought the"
    return Asked([first + second], _visits(draw), question, f" {earlier}.")


QUESTIONS: dict[str, Callable[[np.random.Generator, str], Asked]] = {
    kind.__name__: kind for kind in (needle, keys, variables, words, story, before)
}


class Prompts(NamedTuple):
    """Prompts of one kind, all of the same length.

    Attributes:
        tokens: the text, the question and the answer [prompts, length].
        question: tokens of the longest question with its answer.
        answers: tokens of each answer.
    """

    tokens: Int[np.ndarray, "prompts length"]
    question: int
    answers: list[int]


def prompts(kind: str, read: Reader, text: str, length: int, number: int, seed: int) -> Prompts:
    """So many prompts, whose text is as long as makes `length` tokens with question and answer."""
    rows = [
        _prompt(np.random.default_rng((seed, place)), kind, read, text, length)
        for place in range(number)
    ]
    tokens, questions, answers = zip(*rows, strict=True)
    return Prompts(np.stack(tokens), max(questions), list(answers))


def _prompt(draw, kind, read, text, length):
    asked = QUESTIONS[kind](draw, text)
    end = asked.question + asked.answer
    fixed = len(read("".join(asked.needed) + end)[0])
    if fixed > length:
        raise ValueError(f"tokens must be at least {fixed} for {kind!r}; got {length}")
    around: list[str] = []
    while fixed < length + 1:
        around.append(next(asked.others))
        fixed += len(read(around[-1])[0])
    around = around[-1:] + around[:-1]  # what comes first may be cut, no further than its end
    places = np.sort(draw.integers(1, len(around) + 1, len(asked.needed)))
    needed = draw.permutation(np.array(asked.needed, object))
    tokens, pieces = read("".join(np.insert(np.array(around, object), places, needed)) + end)
    while len(tokens) < length:  # where tokens of two sentences became one
        tokens, pieces = read(next(asked.others) + "".join(pieces))
    return tokens[-length:], _tokens_of_end(pieces, end), _tokens_of_end(pieces, asked.answer)


def _tokens_of_end(pieces: list[str], end: str) -> int:
    sizes = np.cumsum([len(piece) for piece in reversed(pieces)])
    return int(np.searchsorted(sizes, len(end))) + 1


class Answered(NamedTuple):
    """How a system answered.

    Attributes:
        kind: of question.
        system: its name; "dense" reads everything.
        budget: the tokens whose bytes it reads.
        accuracy: share of right answers.
        quality: of its attention; None for dense attention.
        is_equal: whether it reads no more bytes than the budget's keys and values.
    """

    kind: str
    system: str
    budget: int
    accuracy: float
    quality: Quality | None
    is_equal: bool


def ask(
    model: LoopedLM, read: Reader, text: str, kinds: tuple[str, ...], *,
    budgets: tuple[int, ...], length: int, number: int, seed: int = 0,
) -> list[Answered]:  # fmt: skip
    """All systems on prompts of all kinds, at equal bytes where their index leaves room for it."""
    if unknown := [kind for kind in kinds if kind not in QUESTIONS]:
        raise ValueError(f"questions must be among {', '.join(QUESTIONS)}; got {unknown[0]!r}")
    if number < 1:
        raise ValueError(f"prompts must be at least 1; got {number}")
    return [
        row
        for kind in kinds
        for row in _ask(model, kind, prompts(kind, read, text, length, number, seed), budgets)
    ]


def _ask(
    model: LoopedLM, kind: str, drawn: Prompts, budgets: tuple[int, ...]
) -> Iterator[Answered]:
    length, per_token = drawn.tokens.shape[1], bytes_per_token(model.config)
    tokens, start = jnp.asarray(drawn.tokens), length - drawn.question - 1
    dense = nnx.jit(lambda model, tokens: model(tokens))(model, tokens)[:, start:]
    yield Answered(kind, DENSE, length, _share_right(drawn, dense), None, True)

    def answer(name: str, most: int, budget: int) -> Answered:
        selector, how = at_small_budgets(name), FixedTokens(budget)
        logits, seen = run_sparsely(model, tokens, selector, start, how)
        quality = quality_of_steps(seen, start)
        is_equal = quality.kilobytes <= (1 + ROUNDING) * most * per_token / 1000
        return Answered(kind, name, most, _share_right(drawn, logits), quality, is_equal)

    cells = [(name, most) for most in budgets for name in SELECTORS]
    for name, most in tqdm(cells, desc=kind, unit="system"):
        least = at_small_budgets(name).least
        if most < least:
            continue
        row = answer(name, most, most)
        if not row.is_equal and row.quality is not None:
            fewer = fewer_tokens(row.quality, most, per_token)
            row = answer(name, most, fewer) if fewer >= least else row
        yield row


def _share_right(drawn: Prompts, logits: Array) -> float:
    found, right = np.asarray(logits.argmax(-1)), 0
    for row, tokens, size in zip(found, drawn.tokens, drawn.answers, strict=True):
        right += bool((row[-size - 1 : -1] == tokens[-size:]).all())
    return right / len(found)


def answers_table(rows: list[Answered]) -> str:
    """Right answers by system and kind of question, the control named, and what is void."""
    kinds = list(dict.fromkeys(row.kind for row in rows))
    budgets = [row.budget for row in rows if row.system != DENSE]
    found = {(row.system, row.budget, row.kind): row for row in rows}
    lines = [["reads", "of tokens", "kB", *kinds]]
    for system, budget in dict.fromkeys((row.system, row.budget) for row in rows):
        own = [found.get((system, budget, kind)) for kind in kinds]
        some = next(row for row in own if row)
        equal = EQUAL if system != DENSE and some.is_equal else ""
        read = "all" if some.quality is None else f"{some.quality.kilobytes:.1f}"
        shares = [f"{row.accuracy:.0%}".replace("%", " %") if row else "" for row in own]
        lines.append([f"{system}{equal}", str(budget), read, *shares])
    table = text_table(lines, "<" + ">" * (len(lines[0]) - 1))
    for kind, budget in itertools.product(kinds, dict.fromkeys(budgets)):
        dense = next(row for row in rows if row.kind == kind and row.system == DENSE).accuracy
        chance = found.get((CONTROL, budget, kind))
        if chance and chance.accuracy > dense - MARGIN:
            words = f"dense attention answers {dense:.0%}, {CONTROL} tokens {chance.accuracy:.0%}"
            table += f"\n{kind} with {budget} tokens is VOID: {words}"
    return table + without_rows(dict.fromkeys(budgets))
