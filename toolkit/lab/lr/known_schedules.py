"""Reference schedules for a search: the best possible ones, and tuned common shapes.

On the noisy quadratics they take minutes to find and are therefore stored:

    python -m toolkit.lab.lr.known_schedules        # writes data/schedules/noisy-quadratic.json
"""

import functools
from typing import Any

import numpy as np

from toolkit.lab.kit.stored import stored_folder
from toolkit.lab.lr.search_problems import BUDGETS, STABLE, NetworkProblem, Run, follow, problem
from toolkit.lr import shape_rates
from toolkit.measure import Record, read_records, record, write_records

SHAPES = ("linear", "cosine", "wsd")
STORED = ("quadratic 10", "quadratic 100")
PIECES = 250
"""Equal stretches of constant rate: at 1,000 steps 0.006 % above the best with a rate per step."""

FILE = "noisy-quadratic.json"
PEAKS_PER_DECADE = 4


@functools.cache
def best_known(name: str, steps: int) -> Run | None:
    """The schedule of lowest final loss in `BUDGETS` steps; None if unknown."""
    task = problem(name)
    if isinstance(task, NetworkProblem):
        return None
    if name in STORED:
        return follow(task, np.repeat(_stored(name, steps, "best").samples, steps // PIECES))
    return follow(task, task.quadratic.greedy_rates(steps))  # in one dimension greed is best


@functools.cache
def tuned(name: str, shape: str, steps: int) -> Run:
    """A common shape, one of `SHAPES`, with its best peak; tuning is not charged."""
    if name in STORED:
        return run_peak(name, shape, steps, _stored(name, steps, shape).samples[0])
    if name != "network":
        return run_peak(name, shape, steps, _best_peak(name, shape, steps))
    runs = [run_peak(name, shape, steps, peak) for peak in peaks(name)]
    return runs[np.nanargmin([run.loss for run in runs])]


def peaks(name: str) -> np.ndarray:
    """The peaks among which a shape is tuned on the network, four per decade."""
    low, high = problem(name).lr_range
    return np.geomspace(low, high, round(PEAKS_PER_DECADE * np.log10(high / low)) + 1)


@functools.cache
def run_peak(name: str, shape: str, steps: int, peak: float) -> Run:
    """A run along a shape with this highest rate, remembered."""
    return follow(problem(name), peak * shape_rates(shape, steps))


def find_schedules(name: str, steps: int) -> list[Record]:
    """Find the stored schedules of one quadratic and length; a minute at 1000 steps.

    A record of the final loss for "best", whose samples are the rates of `PIECES` pieces, and for
    each of `SHAPES`, whose only sample is the peak.
    """
    task = problem(name)
    assert not isinstance(task, NetworkProblem)
    best = task.quadratic.best_rates(steps, STABLE, pieces=PIECES)[:: steps // PIECES]
    found = {"best": best} | {shape: [_best_peak(name, shape, steps)] for shape in SHAPES}
    # Five digits: what they leave out changes the loss in the ninth.
    found = {which: [float(f"{rate:.5g}") for rate in rates] for which, rates in found.items()}
    runs = {shape: run_peak(name, shape, steps, found[shape][0]) for shape in SHAPES}
    runs["best"] = follow(task, np.repeat(found["best"], steps // PIECES))
    return [
        record(_key(name, steps, which), runs[which].loss, "1", kind="modelled", samples=rates)
        for which, rates in found.items()
    ]


def main() -> None:
    """Writes the file anew."""
    records = []
    for name in STORED:
        for steps in BUDGETS:
            records += (found := find_schedules(name, steps))
            print(_key(name, steps, ""), *(f"{record.value:.5f}" for record in found))
    write_records(stored_folder("schedules") / FILE, records)


def _best_peak(name: str, shape: str, steps: int) -> float:
    from scipy.optimize import minimize_scalar

    def loss(log_peak: float) -> float:
        return float(np.log(run_peak(name, shape, steps, float(np.exp(log_peak))).loss))

    bounds = tuple(np.log(problem(name).lr_range))
    found: Any = minimize_scalar(loss, bounds=bounds, method="bounded")
    return float(np.exp(found.x))


def _key(name: str, steps: int, which: str) -> str:
    return f"{name} | {steps} steps | {which}"


@functools.cache
def _records() -> dict[str, Record]:
    return {record.name: record for record in read_records(stored_folder("schedules") / FILE)}


def _stored(name: str, steps: int, which: str) -> Record:
    if steps not in BUDGETS:
        raise ValueError(f"steps: got {steps}, wanted one of {', '.join(map(str, BUDGETS))}")
    return _records()[_key(name, steps, which)]


if __name__ == "__main__":
    main()
