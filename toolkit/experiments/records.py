"""Finished runs on disk: one JSON line per run while an experiment goes on, records at its end.

The lines are what makes an experiment resumable; the records are what is committed and redrawn.
A number's record holds the mean and, as samples, one value per seed; a curve's holds one run.
"""

import dataclasses
import json
import os
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from toolkit.experiments.experiment import Experiment, Results, Run
from toolkit.measure import Record, environment
from toolkit.training import read_metrics
from toolkit.training.locks import locked

_PROVENANCE = ("device", "versions", "commit", "date", "command")
_CURVE = re.compile(r"(?P<name>.*), seed (?P<seed>\d+)")


class FinishedRuns:
    """The file `runs.jsonl` of one experiment.

    Attributes:
        path: the file.
        lines: what it holds: experiment, label, seed, setting, outcome, environment.
    """

    def __init__(self, directory: Path, experiment: Experiment):
        self.path = directory / "runs.jsonl"
        self.experiment = experiment
        self.lines = self._read()

    def holds(self, run: Run) -> bool:
        """Whether a run is finished."""
        return any(line["label"] == run.label and line["seed"] == run.seed for line in self.lines)

    def append(self, run: Run, outcome: dict[str, Any]) -> None:
        """Adds a finished run; it is on disk when this returns, whole or not at all.

        Any number of processes may append to one folder.
        """
        facts = environment()
        line = {
            "experiment": self.experiment.name,
            "label": run.label,
            "seed": run.seed,
            "setting": setting_facts(run.setting),
            "outcome": outcome,
            "environment": {name: facts[name] for name in _PROVENANCE},
        }
        text = json.dumps(line, allow_nan=False) + "\n"
        with locked(self.path.with_suffix(".lock"), wait=True), self.path.open("ab+") as file:
            _drop_unfinished_line(file)
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        self.refresh()

    def refresh(self) -> None:
        """Takes in what other processes have finished in the same folder."""
        self.lines = self._read()

    def _read(self) -> list[dict[str, Any]]:
        lines = read_metrics(self.path)
        for line in lines:
            self._require_same(line)
        return lines

    def results(self, runs: Iterable[Run]) -> Results:
        """The outcomes of those of `runs` that are finished."""
        wanted = list(runs)
        outcomes: dict[str, dict[int, Any]] = {run.label: {} for run in wanted}
        pairs = {(run.label, run.seed) for run in wanted}
        for line in self.lines:
            if (line["label"], line["seed"]) in pairs:
                outcomes[line["label"]][line["seed"]] = line["outcome"]
        return Results(outcomes)

    def records(self, results: Results) -> list[Record]:
        """The results as records, each with the provenance of the last run behind it."""
        units = {"seconds": "s"} | {c.name: c.unit for c in self.experiment.columns}
        records = []
        for label in results.labels:
            runs = results.outcomes[label]
            [*_, last] = [line for line in self.lines if line["label"] == label]
            facts = last["environment"]
            for name in dict.fromkeys(name for outcome in runs.values() for name in outcome):
                prefix, unit = f"{self.experiment.name} | {label} | {name}", units.get(name, "1")
                found = {seed: out[name] for seed, out in sorted(runs.items()) if name in out}
                numbers = [value for value in found.values() if not isinstance(value, list)]
                if numbers:
                    mean = statistics.fmean(numbers)
                    records.append(Record(prefix, mean, unit, "measured", samples=tuple(numbers),
                                          **facts))  # fmt: skip
                for seed, curve in found.items():
                    if isinstance(curve, list) and curve:  # one without points says nothing
                        records.append(Record(f"{prefix}, seed {seed}", curve[-1], unit, "measured",
                                              samples=tuple(curve), **facts))  # fmt: skip
        return records

    def _require_same(self, line: dict[str, Any]) -> None:
        name, label = line["experiment"], line["label"]
        if name != self.experiment.name:
            raise ValueError(
                f"directory: {str(self.path)!r} belongs to experiment {name!r}, not "
                f"{self.experiment.name!r}; give each its own"
            )
        setting = self.experiment.settings.get(label)
        if setting is None or setting_facts(setting) != line["setting"]:
            raise ValueError(
                f"directory: {str(self.path)!r} holds {label!r} of another version of this "
                "experiment; give a new directory, or delete that one"
            )


def _drop_unfinished_line(file: BinaryIO) -> None:
    """Cuts off what a process killed in the middle of an append has left."""
    file.seek(0)
    whole = file.read().rfind(b"\n") + 1
    file.truncate(whole)


def setting_facts(setting: Any) -> dict[str, Any]:
    """A setting as it reads when it comes back from JSON."""
    return json.loads(json.dumps(dataclasses.asdict(setting)))


def results_of(records: Iterable[Record], experiment: Experiment) -> Results:
    """Reads results back from the records of an experiment."""
    outcomes: dict[str, dict[int, dict[str, Any]]] = {}
    for record in records:
        name, *rest = record.name.split(" | ")
        if name != experiment.name or len(rest) != 2:
            raise ValueError(
                f"recorded: found a record of {record.name!r}, wanted those of experiment "
                f"{experiment.name!r}"
            )
        label, number = rest
        runs = outcomes.setdefault(label, {})
        if curve := _CURVE.fullmatch(number):
            runs.setdefault(int(curve["seed"]), {})[curve["name"]] = list(record.samples)
        else:
            for seed, value in enumerate(record.samples):
                runs.setdefault(seed, {})[number] = value
    return Results(outcomes)
