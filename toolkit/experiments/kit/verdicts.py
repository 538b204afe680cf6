"""The rule by which every claim is judged, fixed before any run.

A claim gives each seed a margin, positive if that seed supports it. Settings are paired by
seed: with the same one they start alike and see the same data. The rule looks at the interval of
the mean margin by Student's t, at 95 % for all claims of an experiment together (Bonferroni), and
at the smallest margin that matters, which the claim states:

    void                          the control, which must fail, is not seen to fail
    seen                          the interval lies beyond the smallest margin that matters
    contradicted                  it lies below zero
    no difference that matters    it lies within the smallest margin on both sides of zero
    not shown                     anything else, fewer seeds than planned, a seed left out, runs of
                                  several commits or Pythons, whose manuals are texts to train on

The runs of the control must be of the same commit. More seeds narrow the interval, so the power
never falls with their number, as it would if all seeds had to agree. Nothing is judged before all
planned seeds are finished, and no seed is left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec

import numpy as np

from toolkit._checks import checked
from toolkit.experiments.kit.results import MissingResultError, Results

LEAST_SEEDS = 5
POWER = 0.8  # that seeds are planned for
ERROR = 0.05  # of all claims of an experiment together

Margins = tuple[Sequence[float] | np.ndarray, str]
"""A margin per seed, and the numbers that they come from, in words."""

Judge = Callable[[Results], Margins]
"""Margins by the results."""

Options = ParamSpec("Options")


def judging(judge: Callable[Concatenate[Results, Options], Margins]) -> Callable[Options, Judge]:
    """A function of results and options as one that takes the options and gives a `Judge`."""
    return lambda *given, **named: lambda results: judge(results, *given, **named)


@dataclass(frozen=True)
class Claim:
    """A sentence that an experiment can contradict.

    Attributes:
        text: the claim, one line.
        judge: results -> (margins [seeds], positive for a seed that supports the claim; the numbers
            behind them, in words).
        smallest: the smallest margin that matters, in the unit of the margins; 0 if none was stated
            before the runs, so that any difference counts.
        seeds: planned number of seeds; fewer give no verdict.
        control: judge of the expected failure, positive for a seed that shows it.

    Example:
        >>> claim = Claim("a is right", above("accuracy", ["a"], 0.5))
        >>> claim.judge(Results({"a": {0: {"accuracy": 0.75}}}))
        (array([0.25]), 'accuracy: a 0.75')
    """

    text: str
    judge: Judge
    smallest: float = 0.0
    seeds: int = LEAST_SEEDS
    control: Judge | None = None

    def verdict(self, results: Results, claims: int = 1) -> "Verdict":
        """The verdict on the claim, by the rule of this module; `claims` share the runs."""
        # Anew: what a judge reads of it is noted.
        results = Results(results.outcomes, results.origins)
        try:
            margins, numbers = self.judge(results)
        except MissingResultError as missing:
            margins, numbers = (), str(missing)
        margins = np.asarray(margins, float)
        # Before the runs are looked at, so that those of the control are among them.
        is_void = self.control is not None and self._is_void(results, claims)
        word, found = "not shown", None
        if len(origins := sorted(results.origins_read)) > 1:
            numbers = f"from runs of {' and '.join(origins)}, to be run again on one; {numbers}"
        elif gap := _seed_left_out(results):
            numbers = f"{gap}; {numbers}"
        elif len(margins) >= max(self.seeds, 2) and np.isfinite(margins).all():
            found = interval(margins, claims)
            word = self._word(*found)
            if is_void:
                word, numbers = "void", f"the control is not seen to fail; {numbers}"
            elif word == "not shown":
                numbers = f"{self._missed(margins, claims)}; {numbers}"
        return Verdict(self.text, word, int((margins > 0).sum()), len(margins), numbers, found)

    def _missed(self, margins: np.ndarray, claims: int) -> str:
        """The mean margin from which on such a record would have shown the claim."""
        excess = seen_excess(len(margins), claims=claims) * float(margins.std(ddof=1))
        return f"a mean of {self.smallest + excess:.2g} is seen in {POWER:.0%} of such records"

    def _word(self, low: float, high: float) -> str:
        if low > self.smallest:
            return "seen"
        if high < 0:
            return "contradicted"
        is_within = -self.smallest < low and high < self.smallest
        return "no difference that matters" if is_within else "not shown"

    def _is_void(self, results: Results, claims: int) -> bool:
        try:
            margins = np.asarray(self.control(results)[0], float)  # pyright: ignore
        except MissingResultError:
            return True
        return len(margins) < self.seeds or not interval(margins, claims)[0] > 0


@dataclass(frozen=True)
class Verdict:
    """A claim after the experiment.

    Attributes:
        claim: its text.
        word: "seen", "contradicted", "no difference that matters", "not shown" or "void".
        agreeing: number of seeds that support the claim.
        seeds: of those that have all the numbers it needs.
        numbers: the numbers behind the verdict.
        interval: of the mean margin, lowest and highest; None where it was not judged.

    Example:
        >>> print(Verdict("a is right", "seen", 5, 5, "accuracy: a 0.9 0.9 0.8", (0.3, 0.5)))
        seen         a is right
                     5 of 5 seeds bear it out, by 0.3 to 0.5; accuracy: a 0.9 0.9 0.8
        >>> print(Verdict("a is right", "not shown", 1, 1, "accuracy: a 0.9"))
        not shown    a is right (1 seed)
                     1 of 1 seed bears it out; accuracy: a 0.9
    """

    claim: str
    word: str
    agreeing: int
    seeds: int
    numbers: str
    interval: tuple[float, float] | None = None

    def __str__(self) -> str:
        seeds = f"{self.seeds} seed{'s' * (self.seeds != 1)}"
        few = f" ({seeds})" if self.seeds < LEAST_SEEDS else ""
        by = ", by {:.3g} to {:.3g}".format(*self.interval) if self.interval else ""
        bear = f"{self.agreeing} of {seeds} bear{'s' * (self.seeds == 1)} it out{by}; "
        numbers = bear + self.numbers if self.seeds else self.numbers
        return f"{self.word:<12} {self.claim}{few}\n{'':<12} {numbers}"


def _seed_left_out(results: Results) -> str:
    """A setting among those read that lacks a seed below its highest; empty if none does."""
    for label in sorted(results.labels_read):
        seeds = set(results.outcomes.get(label, ()))
        if left_out := set(range(max(seeds, default=0))) - seeds:
            return f"{label} lacks seed {min(left_out)}"
    return ""


def fails(judge: Judge) -> Judge:
    """The opposite of a judge, for the `control` of a `Claim`."""

    def failure(results: Results) -> Margins:
        margins, numbers = judge(results)
        return -np.asarray(margins, float), numbers

    return failure


def interval(margins: np.ndarray, claims: int = 1) -> tuple[float, float]:
    """Of the mean margin, by Student's t: all `claims` together are right in 95 % of cases."""
    from scipy.stats import t

    half = t.isf(ERROR / 2 / claims, len(margins) - 1) * margins.std(ddof=1) / len(margins) ** 0.5
    return float(margins.mean() - half), float(margins.mean() + half)


@checked
def power(seeds: int, effect: float, *, claims: int = 1, draws: int = 4000) -> float:
    """The power of a claim: how often a true effect is seen.

    Args:
        seeds: planned.
        effect: excess of the mean over the smallest margin, in standard deviations of a seed.
        claims: number of claims that share the runs.
        draws: number of simulated experiments with normal margins.

    Returns:
        The share of draws in which the claim is seen; plan seeds for at least 0.8.

    Example:
        >>> power(10, 1.0) > 0.75 > power(5, 1.0)
        True
    """
    if draws < 1 or seeds < 2:
        raise ValueError(f"wanted 2 seeds and a draw at least; got {seeds} and {draws}")
    margins = np.random.default_rng(0).normal(effect, 1.0, (draws, seeds))
    return float(np.mean([interval(row, claims)[0] > 0 for row in margins]))


def seen_excess(seeds: int, *, claims: int = 1) -> float:
    """The effect of `power` 0.8, in standard deviations of a seed, by the noncentral t."""
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    bound = t.isf(ERROR / 2 / claims, seeds - 1)
    centre: Any = brentq(lambda at: nct.sf(bound, seeds - 1, at) - POWER, 0.0, 10.0 * bound)
    return float(centre) / seeds**0.5


@checked
def above(name: str, labels: Sequence[str], floor: float | Sequence[str], digits: int = 2) -> Judge:
    """Judge whether all these settings are above a number, or above all other settings.

        margin of a seed = min over labels - (floor, or max over its settings)

    Args:
        name: name of the number in the outcomes.
        labels: the settings expected to be above.
        floor: a number, or the settings expected to be below.
        digits: printed digits after the point.

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
    """Judge whether all these settings are below a number, or below all other settings.

        margin of a seed = (ceiling, or min over its settings) - max over labels

    Args:
        name: name of the number in the outcomes.
        labels: the settings expected to be below.
        ceiling: a number, or the settings expected to be above.
        digits: printed digits after the point.

    Returns:
        The `judge` of a `Claim`.

    Example:
        >>> below("loss", ["a"], 1.0)(Results({"a": {0: {"loss": 0.75}}}))
        (array([0.25]), 'loss: a 0.75')
    """
    return _compared(name, labels, ceiling, digits, -1)


@judging
def _compared(
    results: Results, name: str, labels: Sequence[str], bound: float | Sequence[str], digits: int,
    sign: int,
) -> Margins:  # fmt: skip
    others = [] if isinstance(bound, int | float) else list(bound)
    rows = results.paired(name, [*labels, *others])
    ours, theirs = sign * rows[: len(labels)], sign * rows[len(labels) :]
    limit = theirs.max(0) if others else sign * float(bound)  # pyright: ignore
    return ours.min(0) - limit, f"{name}: {in_words([*labels, *others], rows, digits)}"


def in_words(labels: Sequence[str], rows: np.ndarray, digits: int = 2) -> str:
    """Numbers [labels, seeds] for a verdict, those of a setting one after the other."""
    return ", ".join(
        f"{label} " + " ".join(f"{number:.{digits}f}" for number in row)
        for label, row in zip(labels, rows, strict=True)
    )
