"""Outcomes of the finished runs of an experiment, by setting and seed."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Outcome = Mapping[str, Any]
"""The outcome of one run: numbers and curves (lists or arrays of numbers), by name."""


class MissingResultError(LookupError):
    """These results lack a setting or number."""


@dataclass(frozen=True)
class Results:
    """Outcomes of the finished runs.

    Attributes:
        outcomes: label of the setting -> seed -> outcome.
        origins: label -> seed -> the code and texts that it was run with, where that is known.
        origins_read: of all runs whose numbers have been asked for.
        labels_read: of the settings whose numbers have been asked for.

    Example:
        >>> results = Results({"a": {0: {"accuracy": 0.5}, 1: {"accuracy": 1.0}}})
        >>> results.samples("a", "accuracy"), results.mean("a", "accuracy")
        ([0.5, 1.0], 0.75)
    """

    outcomes: Mapping[str, Mapping[int, Outcome]]
    origins: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    origins_read: set[str] = field(default_factory=set, compare=False)
    labels_read: set[str] = field(default_factory=set, compare=False)

    @property
    def labels(self) -> tuple[str, ...]:
        """Settings with at least one finished run, in the experiment's order."""
        return tuple(label for label, runs in self.outcomes.items() if runs)

    def by_seed(self, label: str, name: str) -> dict[int, Any]:
        """A number (or curve) of a setting by seed, the lowest first; see `samples`."""
        runs = self.outcomes.get(label, {})
        found = {seed: runs[seed][name] for seed in sorted(runs) if name in runs[seed]}
        self.labels_read.add(label)
        self.origins_read.update(self.origins.get(label, {}).get(seed, "") for seed in found)
        self.origins_read.discard("")
        if not found:
            raise MissingResultError(f"no finished run of {label!r} has {name!r}")
        return found

    def samples(self, label: str, name: str) -> list[Any]:
        """A number (or curve) of a setting, one per seed; `MissingResultError` if there is none."""
        return list(self.by_seed(label, name).values())

    def mean(self, label: str, name: str) -> float:
        """Mean over the seeds of a number; see `samples`."""
        return statistics.fmean(self.samples(label, name))

    def curves(self, label: str, name: str) -> np.ndarray:
        """One row of a curve per seed, [seeds, points]; see `samples`."""
        return np.array(self.samples(label, name), float)

    def paired(self, name: str, labels: Sequence[str]) -> np.ndarray:
        """A number or curve of several settings, [labels, seeds, ...], of the seeds that all have;
        `MissingResultError` if there are none.
        """
        found = [self.by_seed(label, name) for label in labels]
        seeds = sorted(set.intersection(*(set(runs) for runs in found)))
        if not seeds:
            raise MissingResultError(f"no seed has {name!r} of all of {', '.join(labels)}")
        return np.array([[runs[seed] for seed in seeds] for runs in found], float)
