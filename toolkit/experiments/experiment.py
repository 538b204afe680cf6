"""What an experiment is: settings, seeds, a function that runs one, and claims to hold against it.

An experiment says beforehand which claims it tests and how it judges them; a claim that the
numbers do not bear out is reported as not seen.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.measure.tables import text_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Outcome = Mapping[str, Any]
"""What one run found: numbers and curves (lists or arrays of numbers), by name."""


class Stopped(Exception):
    """A run was asked to stop, and has saved what it needs to go on."""


@dataclass(frozen=True)
class Workspace:
    """What a run may use beside its setting and seed.

    Attributes:
        directory: the run's own folder, kept until the run is finished: for checkpoints.
        progress: to be called now and then with the share of the run that is done, 0 to 1.

    Example:
        >>> from pathlib import Path
        >>> workspace = Workspace(Path("run"), progress=print)
        >>> workspace.progress(0.5)
        0.5
    """

    directory: Path
    progress: Callable[[float], None]


@dataclass(frozen=True)
class Run:
    """One setting with one seed.

    Attributes:
        label: the setting's name.
        setting: all that decides the outcome but the seed, a frozen dataclass.
        seed: of every random choice.

    Example:
        >>> [run.seed for run in load_experiment("parity").runs(seeds=2, only="full attention")]
        [0, 1]
    """

    label: str
    setting: Any
    seed: int


@dataclass(frozen=True)
class Column:
    """A number of the printed table.

    Attributes:
        name: the number's name in an `Outcome`.
        unit: its unit, "1" for a share.
        digits: digits after the point.

    Example:
        >>> Column("accuracy", digits=2)
        Column(name='accuracy', unit='1', digits=2)
    """

    name: str
    unit: str = "1"
    digits: int = 3


@dataclass(frozen=True)
class Claim:
    """A sentence that an experiment can contradict.

    Attributes:
        text: the claim, one line.
        judge: results -> (whether it is seen, the numbers that decided it).

    Example:
        >>> claim = Claim("a is right", lambda found: (found.mean("a", "accuracy") > 0.5, "..."))
        >>> claim.judge(Results({"a": {0: {"accuracy": 0.9}}}))
        (True, '...')
    """

    text: str
    judge: Callable[["Results"], tuple[bool, str]]


@dataclass(frozen=True)
class Verdict:
    """A claim after the experiment.

    Attributes:
        claim: its text.
        is_seen: None when the runs it needs were left out.
        numbers: what decided.

    Example:
        >>> print(Verdict("a is right", True, "accuracy 0.90"))
        seen       a is right
                   accuracy 0.90
    """

    claim: str
    is_seen: bool | None
    numbers: str

    def __str__(self) -> str:
        word = {True: "seen", False: "not seen", None: "not tested"}[self.is_seen]
        return f"{word:<10} {self.claim}\n{'':<10} {self.numbers}"


class MissingResultError(LookupError):
    """A setting or number that these results do not hold."""


@dataclass(frozen=True)
class Results:
    """Outcomes of the finished runs.

    Attributes:
        outcomes: label of the setting -> seed -> outcome.

    Example:
        >>> results = Results({"a": {0: {"accuracy": 0.5}, 1: {"accuracy": 1.0}}})
        >>> results.samples("a", "accuracy"), results.mean("a", "accuracy")
        ([0.5, 1.0], 0.75)
    """

    outcomes: Mapping[str, Mapping[int, Outcome]]

    @property
    def labels(self) -> tuple[str, ...]:
        """Settings with at least one finished run, in the experiment's order."""
        return tuple(label for label, runs in self.outcomes.items() if runs)

    def samples(self, label: str, name: str) -> list[Any]:
        """A number (or curve) of a setting, one per seed; `MissingResultError` if there is none."""
        runs = self.outcomes.get(label, {})
        found = [outcome[name] for _, outcome in sorted(runs.items()) if name in outcome]
        if not found:
            raise MissingResultError(f"no finished run of {label!r} has {name!r}")
        return found

    def mean(self, label: str, name: str) -> float:
        """Mean over the seeds of a number; see `samples`."""
        return statistics.fmean(self.samples(label, name))

    def curves(self, label: str, name: str) -> np.ndarray:
        """One row of a curve per seed, [seeds, points]; see `samples`."""
        return np.array(self.samples(label, name), float)


@dataclass(frozen=True)
class Experiment:
    """Everything about one experiment; running it is `run_experiment`'s business.

    Attributes:
        name: as on the command line.
        title: the question, one line.
        settings: label -> setting, a frozen dataclass that goes through JSON.
        execute: (setting, seed, workspace) -> outcome; raises `Stopped` when asked to stop, and
            goes on from `workspace.directory` when called again. Deterministic.
        columns: the numbers of the table.
        claims: what is tested.
        draw: (results, caption) -> the figure.
        beyond: what a machine of two cores cannot show, and how to go there.
        minutes: of all settings with three seeds, on two idle cores.
        work: setting -> cost of a run, in any unit, for the expected time left.
        report: results -> what is printed in place of `result_table`, where a line a setting is
            not how to read them.
        seeds_together: how many neighbouring seeds `execute` trains side by side; of several
            processes in one folder, one does them all.

    Example:
        >>> experiment = load_experiment("parity")
        >>> experiment.title
        '...'
        >>> verdicts = experiment.verdicts(Results({}))  # nothing was run: no claim is tested
    """

    name: str
    title: str
    settings: Mapping[str, Any]
    execute: Callable[[Any, int, Workspace], Outcome]
    columns: tuple[Column, ...]
    claims: tuple[Claim, ...]
    draw: Callable[[Results, str], "Figure"]
    beyond: str
    minutes: float
    work: Callable[[Any], float] = lambda setting: 1.0
    report: Callable[[Results], str] | None = None
    seeds_together: int = 1

    def runs(self, seeds: int = 3, only: str = "") -> list[Run]:
        """Settings whose label holds `only`, each with every seed, one setting after another."""
        if seeds < 1:
            raise ValueError(f"seeds: got {seeds}, wanted at least 1")
        labels = [label for label in self.settings if only in label]
        if not labels:
            known = "; ".join(self.settings)
            raise ValueError(f"only: {only!r} is in the name of no setting; they are: {known}")
        return [Run(label, self.settings[label], seed) for label in labels for seed in range(seeds)]

    def verdicts(self, results: Results) -> list[Verdict]:
        """One verdict per claim: not tested where a run it needs is missing."""
        verdicts = []
        for claim in self.claims:
            try:
                is_seen, numbers = claim.judge(results)
            except MissingResultError as missing:
                is_seen, numbers = None, str(missing)
            verdicts.append(Verdict(claim.text, is_seen, numbers))
        return verdicts


def result_table(experiment: Experiment, results: Results) -> str:
    """Mean and spread over the seeds of the experiment's columns, one line a setting.

    Args:
        experiment: whose columns.
        results: the finished runs.

    Returns:
        Text; "mean +- standard deviation (number of seeds)", nothing where there is no number.

    Cost:
        Arithmetic on a few numbers.

    Example:
        >>> results = Results({"full attention": {0: {"accuracy, first 16": 0.5}}})
        >>> print(result_table(load_experiment("parity"), results))
        setting ...
        full attention ... 0.500 +- 0.000
    """
    heads = [c.name + ("" if c.unit == "1" else f" ({c.unit})") for c in experiment.columns]
    rows = [["setting", "seeds", *heads]]
    for label in results.labels:
        cells = [_cell(results, label, column) for column in experiment.columns]
        rows.append([label, str(len(results.outcomes[label])), *cells])
    head, *lines = text_table(rows, "<" + ">" * len(rows[0][1:])).splitlines()
    return "\n".join([head, "-" * len(head), *lines])


def _cell(results: Results, label: str, column: Column) -> str:
    try:
        samples = results.samples(label, column.name)
    except MissingResultError:
        return ""
    spread = statistics.stdev(samples) if len(samples) > 1 else 0.0
    return f"{statistics.fmean(samples):,.{column.digits}f} +- {spread:,.{column.digits}f}"
