"""The schedules that a search is held against: the best there is, and the tuned usual shapes.

On the noisy quadratics both come from a formula, but take minutes to find, so they are stored:

    python -m toolkit.lab.lr.known_schedules        # writes data/schedules/noisy-quadratic.json
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from toolkit.lab.kit.stored import stored_folder
from toolkit.lab.lr.search_problems import (
    BUDGETS,
    STABLE,
    NetworkProblem,
    Problem,
    QuadraticProblem,
    problem,
)
from toolkit.lr import NoisyQuadratic, Request, shape_rates
from toolkit.measure import Record, read_records, record, write_records

SHAPES = ("linear", "cosine", "wsd")
STORED = ("quadratic 10", "quadratic 100")
PIECES = 250
"""Equal stretches of constant rate: at 1,000 steps 0.006 % above the best with a rate per step."""

FILE = "noisy-quadratic.json"
PEAKS_PER_DECADE = 4


class Known(NamedTuple):
    """A schedule to compare with."""

    rates: np.ndarray  # [steps]
    losses: np.ndarray  # before each
    loss: float  # at its end, as `Problem.loss` says it
    peak: float  # its highest rate


@functools.cache
def best_known(name: str, steps: int) -> Known | None:
    """The schedule of lowest final loss, in `BUDGETS` steps; None where it is not known."""
    if name == "network":
        return None
    task = problem(name)
    if name == "quadratic 1d":  # where greed is best
        rates = _quadratic(name).greedy_rates(steps)
    else:
        rates = np.repeat(_stored(name, steps, "best").samples, steps // PIECES)
    return follow(task, rates)


@functools.cache
def tuned(name: str, shape: str, steps: int) -> Known:
    """A usual shape, one of `SHAPES`, with the peak that ends lowest; tuning is not charged."""
    task = problem(name)
    if isinstance(task, NetworkProblem):
        return min((run_peak(name, shape, steps, peak) for peak in peaks(task)), key=_loss)
    peak = (
        _stored(name, steps, shape).samples[0] if name in STORED else _best_peak(name, shape, steps)
    )
    return run_peak(name, shape, steps, peak)


def peaks(task: Problem) -> np.ndarray:
    """The peaks among which a shape is tuned on the network, four per decade."""
    low, high = task.lr_range
    count = round(PEAKS_PER_DECADE * np.log10(high / low)) + 1
    return np.geomspace(low, high, count)


@functools.cache
def run_peak(name: str, shape: str, steps: int, peak: float) -> Known:
    """A run along a shape with this highest rate, remembered."""
    return follow(problem(name), peak * shape_rates(shape, steps))


def follow(task: Problem, rates: np.ndarray) -> Known:
    """A run from the start along any schedule, rates [steps]."""
    state, losses = task.run(task.start(), Request("train", np.asarray(rates)[None]))
    return Known(rates, losses[0], task.loss(state), float(rates.max()))


def find_schedules(name: str, steps: int) -> list[Record]:
    """Finds what is stored for one quadratic and one length; at 1000 steps in a minute.

    A record of the final loss for "best", whose samples are the rates of `PIECES` pieces, and for
    each of `SHAPES`, whose only sample is the peak.
    """
    best = _quadratic(name).best_rates(steps, STABLE, pieces=PIECES)[:: steps // PIECES]
    # Five digits: what they leave out changes the loss in the ninth.
    found = {"best": [float(f"{rate:.5g}") for rate in best]}
    found |= {shape: [float(f"{_best_peak(name, shape, steps):.5g}")] for shape in SHAPES}
    return [
        record(_key(name, steps, which), _value(name, steps, which, rates), "1", kind="modelled",
               samples=rates)
        for which, rates in found.items()
    ]  # fmt: skip


def main() -> None:
    """Writes the file anew."""
    records = []
    for name in STORED:
        for steps in BUDGETS:
            records += find_schedules(name, steps)
            print(
                _key(name, steps, ""), *(f"{one.value:.5f}" for one in records[-1 - len(SHAPES) :])
            )
    folder = stored_folder("schedules")
    write_records(folder / FILE, records)


def _value(name: str, steps: int, which: str, rates: list[float]) -> float:
    if which == "best":
        return follow(problem(name), np.repeat(rates, steps // PIECES)).loss
    return run_peak(name, which, steps, rates[0]).loss


def _best_peak(name: str, shape: str, steps: int) -> float:
    from scipy.optimize import minimize_scalar

    bounds = tuple(np.log(problem(name).lr_range))

    def loss(log_peak: float) -> float:
        return float(np.log(run_peak(name, shape, steps, float(np.exp(log_peak))).loss))

    found: Any = minimize_scalar(loss, bounds=bounds, method="bounded")
    return float(np.exp(found.x))


def _quadratic(name: str) -> NoisyQuadratic:
    task = problem(name)
    assert isinstance(task, QuadraticProblem)
    return task.quadratic


def _loss(known: Known) -> float:
    return known.loss if np.isfinite(known.loss) else np.inf


def _key(name: str, steps: int, which: str) -> str:
    return f"{name} | {steps} steps | {which}"


@functools.cache
def _records() -> dict[str, Record]:
    return {one.name: one for one in read_records(stored_folder("schedules") / FILE)}


def _stored(name: str, steps: int, which: str) -> Record:
    if steps not in BUDGETS:
        raise ValueError(f"steps: got {steps}, wanted one of {', '.join(map(str, BUDGETS))}")
    return _records()[_key(name, steps, which)]


if __name__ == "__main__":
    main()
