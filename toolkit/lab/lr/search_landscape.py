"""Loss against rate, as a search sees it: AutoLRS's Gaussian process, or the scores of probes."""

import dataclasses
import functools

import numpy as np

from toolkit.lab.lr.search_rounds import Round, Search
from toolkit.lr import AutoLRS, fit_gaussian_process
from toolkit.lr.gaussian_process import finite_values

POINTS = 161
CLIFF = 8  # times the rise on the other side


@dataclasses.dataclass(frozen=True)
class Pins:
    """Rates of which something is known; arrays have an entry for each."""

    label: str  # what they are
    rates: np.ndarray
    values: np.ndarray  # forecasts or scores; those of diverged runs lifted above the others
    deviations: np.ndarray
    is_diverged: np.ndarray
    is_new: np.ndarray  # whether they come from the round looked at


@dataclasses.dataclass(frozen=True)
class Landscape:
    """What a search makes of the rates tried so far: a curve over `rates`, and pins."""

    title: str
    rates: np.ndarray
    mean: np.ndarray  # empty where there is none yet
    deviation: np.ndarray | None  # one standard deviation of the posterior; None for a parabola
    bound: np.ndarray | None  # mean - kappa deviation; None where nothing goes by it
    pins: tuple[Pins, ...]  # oldest first
    next_rates: np.ndarray  # to be tried next
    chosen_rate: float | None  # trained with next or now; None while that is open


def landscape(search: Search, number: int) -> Landscape:
    """What a search made of its candidates in one of its rounds, from 1."""
    now = search.rounds[number - 1]
    after, next_rates = search.request_after(number), np.zeros(0)
    # After training, AutoLRS begins a new stage, and these pins have no say in it.
    goes_on = now.request.kind == "probe" or not isinstance(search.searcher, AutoLRS)
    if after is not None and after.kind == "probe" and goes_on:
        next_rates = after.rates.max(1)
    if isinstance(search.searcher, AutoLRS):
        return _posterior(search.searcher, search.rounds[:number], next_rates)
    return _scores(search, search.rounds[:number], next_rates)


def _posterior(searcher: AutoLRS, taken: tuple[Round, ...], next_rates: np.ndarray) -> Landscape:
    low, high = np.log(searcher.lr_range)
    places = np.linspace(0.0, 1.0, POINTS)
    rates = np.exp(low + places * (high - low))
    probes = [one for one in taken if one.request.kind == "probe"]
    if not probes:
        return Landscape("No search yet", rates, np.zeros(0), None, None, (), next_rates, None)
    # A stage that was not searched goes by the last one that was.
    last, now = probes[-1], taken[-1]
    mean, deviation = _process(last, low, high)
    bound = None
    if searcher.proposals == "sequential" and len(next_rates):
        bound = mean - searcher.kappa * deviation
    is_over = not len(next_rates)
    table, rows = last.after.table, _rows(last)
    best = float(table["rate"][rows][np.argmin(table["forecast"][rows])])
    chosen = float(now.request.rates[0, 0]) if now is not last else best
    return Landscape(
        "Gaussian process: loss at stage's end",
        rates, mean, deviation, bound,
        (_pins("forecast", table, rows, last if now is last else None),),
        next_rates, chosen if is_over else None,
    )  # fmt: skip


@functools.lru_cache(maxsize=512)
def _process(last: Round, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    table, rows = last.after.table, _rows(last)
    process = fit_gaussian_process(
        (np.log(table["rate"][rows]) - low) / (high - low),
        finite_values(table["forecast"][rows]),
        table["variance"][rows],
    )
    return process.predict(np.linspace(0.0, 1.0, POINTS))


def _rows(last: Round) -> np.ndarray:
    """Rows of the stage of a round of candidates, in the table that it was told to."""
    return np.flatnonzero(last.after.table["stage"] == int(last.before.stage))


def _scores(search: Search, taken: tuple[Round, ...], next_rates: np.ndarray) -> Landscape:
    now = taken[-1]
    probes = [one for one in taken if one.request.kind == "probe"]
    table = now.after.table
    groups = []
    # Scores of runs of another length are no values of the same curve.
    for steps in np.unique(table["steps"]):
        rows = np.flatnonzero(table["steps"] == steps)
        groups.append(_pins(f"after {steps} steps", table, rows, now if now in probes else None))
    plan = np.asarray(now.after.plan)
    trained = [one.request.rates.max() for one in taken if one.is_kept]
    ahead = [plan.max()] if len(plan) else []
    highest = max([*trained, *ahead], default=None)
    x, y = parabola(groups[-1]) if groups else (np.zeros(0), np.zeros(0))
    title = "Loss after each annealed probe" if groups else "No probes"
    chosen = None if highest is None else float(highest)
    return Landscape(title, x, y, None, None, tuple(groups), next_rates, chosen)


def parabola(pins: Pins) -> tuple[np.ndarray, np.ndarray]:
    """Rates and values through the best pin and its neighbours, in the logarithm of the rate.

    None where the best is at an edge, or where one neighbour is so much worse than the other that
    it is on its way to infinity.
    """
    order = np.argsort(pins.rates)
    x, y = np.log(pins.rates[order]), pins.values[order]
    best = int(np.argmin(y))
    near = slice(best - 1, best + 2)
    if best in (0, len(x) - 1):
        return np.zeros(0), np.zeros(0)
    rises = y[near][[0, 2]] - y[best]
    if rises.max() > CLIFF * rises.min():
        return np.zeros(0), np.zeros(0)
    places = np.linspace(x[best - 1], x[best + 1], 41)
    return np.exp(places), np.polyval(np.polyfit(x[near] - x[best], y[near], 2), places - x[best])


def _pins(label: str, table: dict, rows: np.ndarray, newest: Round | None) -> Pins:
    is_new = np.zeros(len(table["rate"]), bool)
    if newest is not None:
        is_new[-len(newest.losses) :] = True
    forecasts = table["forecast"][rows]
    return Pins(
        label=label,
        rates=table["rate"][rows],
        values=finite_values(forecasts),
        deviations=np.sqrt(table["variance"][rows]),
        is_diverged=~np.isfinite(forecasts),
        is_new=is_new[rows],
    )
