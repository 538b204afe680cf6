"""An experiment: settings, seeds, a function that runs one setting, and claims to judge."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit._checks import checked
from toolkit.experiments.kit.results import MissingResultError, Outcome, Results
from toolkit.experiments.kit.verdicts import LEAST_SEEDS, Claim, Verdict
from toolkit.measure.tables import text_table


class Stopped(Exception):
    """A run was asked to stop, and has saved its state."""


@dataclass(frozen=True)
class Workspace:
    """Resources of a run besides its setting and seed.

    Attributes:
        directory: the run's folder for checkpoints, kept until the run is finished.
        progress: callback for the finished share of the run, 0 to 1.

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
        setting: everything that determines the outcome except the seed; a frozen dataclass.
        seed: seed of all random choices.

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
class Experiment:
    """The description of one experiment, for `run_experiment`.

    Attributes:
        name: name on the command line.
        title: the question, one line.
        settings: label -> setting, a frozen dataclass that goes through JSON.
        execute: (setting, seed, workspace) -> outcome; raises `Stopped` when asked to stop, and
            resumes from `workspace.directory` when called again. Deterministic.
        columns: the numbers of the table.
        claims: the claims to test.
        draw: (results, caption) -> the figure.
        beyond: what two cores cannot show, and how to run it elsewhere.
        minutes: of all settings with five seeds, on two idle cores.
        work: setting -> cost of a run, in any unit, for the expected time left.
        report: results -> text printed in place of `result_table`.
        seeds_together: number of neighbouring seeds that `execute` trains together, in one process.
        devices: number of devices that `execute` needs, simulated where there are fewer.

    Example:
        >>> experiment = load_experiment("parity")
        >>> experiment.title
        '...'
        >>> [verdict.word for verdict in experiment.verdicts(Results({}))]
        ['not shown', 'not shown']
    """

    name: str
    title: str
    settings: Mapping[str, Any]
    execute: Callable[[Any, int, Workspace], Outcome]
    columns: tuple[Column, ...]
    claims: tuple[Claim, ...]
    draw: Callable[[Results, str], Any]
    beyond: str
    minutes: float
    work: Callable[[Any], float] = lambda setting: 1.0
    report: Callable[[Results], str] | None = None
    seeds_together: int = 1
    devices: int = 1

    def runs(self, seeds: int = LEAST_SEEDS, only: str = "") -> list[Run]:
        """Settings whose label contains `only`, each with every seed."""
        if seeds < 1:
            raise ValueError(f"seeds: got {seeds}, wanted at least 1")
        labels = [label for label in self.settings if only in label]
        if not labels:
            known = "; ".join(self.settings)
            raise ValueError(f"only: {only!r} is in the name of no setting; they are: {known}")
        return [Run(label, self.settings[label], seed) for label in labels for seed in range(seeds)]

    def verdicts(self, results: Results) -> list[Verdict]:
        """One verdict per claim, by the rule of `toolkit.experiments.kit.verdicts`."""
        return [claim.verdict(results, len(self.claims)) for claim in self.claims]


@checked
def result_table(experiment: Experiment, results: Results) -> str:
    """Mean and spread over the seeds of the experiment's columns, one line a setting.

    Args:
        experiment: the experiment with the columns.
        results: the finished runs.

    Returns:
        Text with cells "mean +- standard deviation (number of seeds)", empty without a number.

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
    return f"{statistics.fmean(samples):z,.{column.digits}f} +- {spread:z,.{column.digits}f}"
