"""The rule by which every claim is judged, fixed before any run.

A claim gives each seed a margin, positive where that seed bears it out. Settings are paired by
seed: with the same one they start alike and see the same data.

    seen            at least five seeds, and every margin is positive: the worst seed decides
    contradicted    at least five seeds, and every margin is negative
    not shown       anything else

Of two settings that differ by chance alone, five seeds agree on one once in 2^5 = 32 times: this is
the sign test at the level of 3 %. A difference of means, however large, decides nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from toolkit._checks import checked
from toolkit.experiments.kit.results import MissingResultError, Results

LEAST_SEEDS = 5

Judge = Callable[[Results], tuple[Sequence[float] | np.ndarray, str]]
"""Results -> (a margin per seed, the numbers that they come from)."""


@dataclass(frozen=True)
class Claim:
    """A sentence that an experiment can contradict.

    Attributes:
        text: the claim, one line.
        judge: results -> (margins [seeds], positive where a seed bears the claim out; the numbers
            behind them, in words).

    Example:
        >>> claim = Claim("a is right", above("accuracy", ["a"], 0.5))
        >>> claim.judge(Results({"a": {0: {"accuracy": 0.75}}}))
        (array([0.25]), 'accuracy: a 0.75')
    """

    text: str
    judge: Judge

    def verdict(self, results: Results) -> "Verdict":
        """What the results say of it, by the rule of this module."""
        try:
            margins, numbers = self.judge(results)
        except MissingResultError as missing:
            margins, numbers = (), str(missing)
        margins = np.asarray(margins, float)
        word = "not shown"
        if len(margins) >= LEAST_SEEDS:
            word = {1: "seen", -1: "contradicted"}.get(_common_sign(margins), word)
        return Verdict(self.text, word, int((margins > 0).sum()), len(margins), numbers)


@dataclass(frozen=True)
class Verdict:
    """A claim after the experiment.

    Attributes:
        claim: its text.
        word: "seen", "contradicted" or "not shown".
        agreeing: seeds that bear the claim out.
        seeds: of those that have all the numbers it needs.
        numbers: what decided.

    Example:
        >>> print(Verdict("a is right", "seen", 5, 5, "accuracy: a 0.9 0.9 0.8 0.9 1.0"))
        seen         a is right
                     5 of 5 seeds bear it out; accuracy: a 0.9 0.9 0.8 0.9 1.0
        >>> print(Verdict("a is right", "not shown", 1, 1, "accuracy: a 0.9"))
        not shown    a is right (1 seed)
                     1 of 1 seed bears it out; accuracy: a 0.9
    """

    claim: str
    word: str
    agreeing: int
    seeds: int
    numbers: str

    def __str__(self) -> str:
        seeds = f"{self.seeds} seed{'s' * (self.seeds != 1)}"
        few = f" ({seeds})" if self.seeds < LEAST_SEEDS else ""
        bear = f"{self.agreeing} of {seeds} bear{'s' * (self.seeds == 1)} it out; "
        numbers = bear + self.numbers if self.seeds else self.numbers
        return f"{self.word:<12} {self.claim}{few}\n{'':<12} {numbers}"


@checked
def above(name: str, labels: Sequence[str], floor: float | Sequence[str], digits: int = 2) -> Judge:
    """Judges whether every one of these settings is above a number, or above all other settings.

        margin of a seed = min over labels - (floor, or max over its settings)

    Args:
        name: of the number in the outcomes.
        labels: the settings that ought to be above.
        floor: a number, or the settings that ought to be below.
        digits: printed after the point.

    Returns:
        The `judge` of a `Claim`.

    Example:
        >>> judge = above("accuracy", ["a"], ["b"])
        >>> results = Results({"a": {0: {"accuracy": 0.75}}, "b": {0: {"accuracy": 0.5}}})
        >>> judge(results)
        (array([0.25]), 'accuracy: a 0.75, b 0.50')
    """
    return _compared(name, labels, floor, digits, 1)


@checked
def below(
    name: str, labels: Sequence[str], ceiling: float | Sequence[str], digits: int = 2
) -> Judge:
    """Judges whether every one of these settings is below a number, or below all other settings.

        margin of a seed = (ceiling, or min over its settings) - max over labels

    Args:
        name: of the number in the outcomes.
        labels: the settings that ought to be below.
        ceiling: a number, or the settings that ought to be above.
        digits: printed after the point.

    Returns:
        The `judge` of a `Claim`.

    Example:
        >>> below("loss", ["a"], 1.0)(Results({"a": {0: {"loss": 0.75}}}))
        (array([0.25]), 'loss: a 0.75')
    """
    return _compared(name, labels, ceiling, digits, -1)


def _compared(
    name: str, labels: Sequence[str], bound: float | Sequence[str], digits: int, sign: int
) -> Judge:
    others = [] if isinstance(bound, int | float) else list(bound)

    def judge(results: Results) -> tuple[np.ndarray, str]:
        rows = results.paired(name, [*labels, *others])
        ours, theirs = sign * rows[: len(labels)], sign * rows[len(labels) :]
        limit = theirs.max(0) if others else sign * float(bound)  # pyright: ignore
        return ours.min(0) - limit, f"{name}: {in_words([*labels, *others], rows, digits)}"

    return judge


def in_words(labels: Sequence[str], rows: np.ndarray, digits: int = 2) -> str:
    """Numbers [labels, seeds] for a verdict, those of a setting one after the other."""
    return ", ".join(
        f"{label} " + " ".join(f"{number:.{digits}f}" for number in row)
        for label, row in zip(labels, rows, strict=True)
    )


def _common_sign(margins: np.ndarray) -> int:
    return 1 if (margins > 0).all() else -1 if (margins < 0).all() else 0
