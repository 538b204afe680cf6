"""Constants of the model of time fitted to measurements of single operations and whole steps."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from toolkit.planning.time.seconds import Constants

# Name -> the range that is searched, and the standard deviation of its logarithm across chips.
BOUNDS = {
    "matmul": (1e-3, 1.0, 0.25),
    "attention": (1e-3, 1.0, 0.4),
    "grouped": (1e-3, 1.0, 0.4),
    "elementwise": (1e-3, 1.0, 0.3),
    "memory": (1e-3, 1.0, 0.15),
    "launch": (1e-9, 1e-2, 0.7),
    "link": (1e-3, 1.0, 0.25),
    "latency": (1e-3, 1e4, 1.0),
    "slowdown": (1.0, 2.0, 0.2),  # at 2, nothing is gained by overlapping
}
# Deviation of measurements from the model with the best constants: noise for single operations,
# effects outside the model for whole steps.
NOISE, STEP_NOISE = 0.02, 0.1
BETWEEN = 0.1  # deviation of groups from each other
# A constant is fitted if that at least halves its variance.
KNOWN_BETTER = 0.5

Model = Callable[[Constants], float]


class Row(NamedTuple):
    """A measurement: its prediction, its seconds, the expected deviation of the best model, and
    whose it is: programs of one group may all be faster or slower than the model (`fit`)."""

    model: Model
    seconds: float
    noise: float
    group: str = ""


def fit(
    rows: Sequence[Row], prior: Constants, *, loss: str = "linear", tolerance: float = 1e-12
) -> tuple[Constants, tuple[str, ...]]:
    """The constants of least squared error, and the names of those that were fitted.

    Where the rows are of several groups, each may be off by a factor of its own, of which `BETWEEN`
    is the expected logarithm: no group's rows, however many, then decide alone.
    """
    from scipy.optimize import least_squares

    noise = np.array([row.noise for row in rows])
    start = {name: math.log(getattr(prior, name)) for name in BOUNDS}
    names = _determined(rows, noise, prior)
    groups = sorted({row.group for row in rows})
    members = [np.array([row.group == group for row in rows]) for group in groups]

    def misses(values):
        found = errors(rows, _constants(prior, names, values))
        beliefs = [
            (value - start[name]) / BOUNDS[name][2]
            for name, value in zip(names, values, strict=True)
        ]
        for mine in members if len(groups) > 1 else ():
            weights = noise[mine] ** -2
            offset = (found[mine] * weights).sum() / (weights.sum() + BETWEEN**-2)
            found[mine] -= offset
            beliefs.append(offset / BETWEEN)
        return np.concatenate([found / noise, beliefs])

    if not names:
        return prior, ()
    low, high = (np.log([BOUNDS[name][side] for name in names]) for side in (0, 1))
    first = np.clip([start[name] for name in names], low + 1e-6, high - 1e-6)
    found = least_squares(
        misses, first, bounds=(low, high), xtol=tolerance, ftol=tolerance, loss=loss
    )
    fitted = tuple(name for name in BOUNDS if name in names)
    return _constants(prior, names, np.clip(found.x, low, high)), fitted


def _constants(prior: Constants, names: list[str], logarithms) -> Constants:
    values = zip(names, map(math.exp, logarithms), strict=True)
    return dataclasses.replace(
        prior, **{name: min(max(v, BOUNDS[name][0]), BOUNDS[name][1]) for name, v in values}
    )


def _determined(rows: Sequence[Row], noise, prior: Constants) -> list[str]:
    """Constants that the rows determine better than their priors, best first and at most one per
    row. Each is judged given those before it, which may explain the same rows."""
    before, slopes = errors(rows, prior), {}
    for name, (_, _, spread) in BOUNDS.items():
        step = 0.05 if name in ("latency", "slowdown") else -0.05  # away from their bounds
        moved = _constants(prior, [name], [math.log(getattr(prior, name)) + step])
        slopes[name] = (errors(rows, moved) - before) / step / noise * spread
    names: list[str] = []
    while len(names) < min(len(rows), len(BOUNDS)):
        left = {}
        for name in BOUNDS:
            if name not in names:
                selected = np.stack([slopes[each] for each in (*names, name)])
                variance = np.linalg.inv(np.eye(len(selected)) + selected @ selected.T)
                left[name] = variance.diagonal().max()
        best = min(left, key=left.__getitem__)
        if left[best] > KNOWN_BETTER:
            break
        names.append(best)
    return names


def errors(rows: Sequence[Row], constants: Constants):
    """Logarithm of predicted over measured seconds, per row."""
    return np.array([math.log(row.model(constants) / row.seconds) for row in rows])


def median_error(logarithms) -> float:
    """Median relative error of logarithms of predicted over measured."""
    return statistics.median(abs(math.expm1(error)) for error in logarithms)
