"""Finished runs on disk, one JSON line per run, for resuming, recording and redrawing.

A line holds the experiment, the setting, the seed, the outcome and the provenance of one run. Any
number of processes may append lines atomically. A checksum detects edited records.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from toolkit._files import append_sealed_line, read_sealed_lines
from toolkit.experiments.kit.experiment import Experiment, Run
from toolkit.experiments.kit.results import Results
from toolkit.measure import environment
from toolkit.training.checkpoints.locks import locked

RECORDS = Path(__file__).parents[3] / "data/experiments"
"""Records in this folder of a checkout must come from trees without uncommitted changes."""

_FIELDS = {"label", "seed", "setting", "outcome", "environment"}
_PROVENANCE = ("device", "versions", "commit", "date")


class FinishedRuns:
    """A file of finished runs of one experiment, to be added to.

    Attributes:
        path: the file.
        lines: its lines, see `read_runs`.
    """

    def __init__(self, path: Path, experiment: Experiment):
        self.path = path
        self.experiment = experiment
        if path.resolve().is_relative_to(RECORDS) and is_changed(environment()["commit"]):
            raise ValueError(
                f"runs: {path.name} is a record, and this tree is not a commit without changes; "
                "commit them, or leave --runs out to write to the experiment's folder"
            )
        self.refresh()

    def holds(self, run: Run) -> bool:
        """Whether a run is finished."""
        return any(line["label"] == run.label and line["seed"] == run.seed for line in self.lines)

    def append(self, run: Run, outcome: dict[str, Any], command: str) -> None:
        """Append a finished run; it is on disk when this returns."""
        facts = environment()
        line = {
            "experiment": self.experiment.name,
            "label": run.label,
            "seed": run.seed,
            "setting": setting_facts(run.setting),
            "outcome": outcome,
            "environment": {name: facts[name] for name in _PROVENANCE} | {"command": command},
        }
        with locked(self.path.with_suffix(".lock"), wait=True):
            append_sealed_line(self.path, line)
        self.refresh()

    def refresh(self) -> None:
        """Read runs that other processes have appended to the file."""
        self.lines = read_runs(self.path, self.experiment)
        for line in self.lines:
            setting = self.experiment.settings.get(line["label"])
            if setting is None or setting_facts(setting) != line["setting"]:
                raise ValueError(
                    f"runs: {str(self.path)!r} holds {line['label']!r} of another version of this "
                    "experiment; give another directory or file, or delete that one"
                )


def read_runs(path: Path, experiment: Experiment) -> list[dict[str, Any]]:
    """The lines of a file: experiment, label, seed, setting, outcome, environment."""
    lines = read_sealed_lines(path)
    for line in lines:
        if lacking := sorted(_FIELDS - line.keys()):
            raise ValueError(f"runs: {str(path)!r} has a line without {', '.join(lacking)}")
        if (name := line.get("experiment")) != experiment.name:
            raise ValueError(
                f"runs: {str(path)!r} belongs to experiment {name!r}, not {experiment.name!r}; "
                "give each its own"
            )
    return lines


def results_of(
    lines: Iterable[dict[str, Any]], experiment: Experiment, runs: Iterable[Run] | None = None
) -> Results:
    """The outcomes of finished runs in the experiment's order; of `runs` only, if given."""
    wanted = None if runs is None else {(run.label, run.seed) for run in runs}
    outcomes: dict[str, dict[int, Any]] = {label: {} for label in experiment.settings}
    origins: dict[str, dict[int, str]] = {label: {} for label in experiment.settings}
    for line in lines:
        label, seed = line["label"], line["seed"]
        if label in outcomes and (wanted is None or (label, seed) in wanted):
            outcomes[label][seed] = line["outcome"]
            origins[label][seed] = _origin(line["environment"])
    return Results({label: found for label, found in outcomes.items() if found}, origins)


def _origin(facts: dict[str, Any]) -> str:
    """The commit and the minor version of Python: texts to train on are those of its manual."""
    version = ".".join(facts["versions"]["python"].split(".")[:2])
    return f"{facts['commit']} on Python {version}"


def is_changed(commit: str) -> bool:
    """Whether the provenance's commit does not identify the code that ran."""
    return commit.endswith("+changes") or commit == "unknown"


def setting_facts(setting: Any) -> dict[str, Any]:
    """A setting as JSON returns it."""
    return json.loads(json.dumps(dataclasses.asdict(setting)))
