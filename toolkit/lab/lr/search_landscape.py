"""Loss against rate in a search: AutoLRS's Gaussian process, or the scores of probes."""

import functools
from typing import NamedTuple

import numpy as np

from toolkit.lab.lr.search_rounds import Candidate, Round, Search
from toolkit.lr import AutoLRS
from toolkit.lr.autolrs import posterior
from toolkit.lr.fits.gaussian_process import finite_values

POINTS = 161
CLIFF = 8  # times the rise on the other side
NONE = np.zeros(0)


class Landscape(NamedTuple):
    """A search's view of the rates tried so far: points, and possibly a curve."""

    title: str
    pins: tuple[tuple[Candidate, ...], ...]  # comparable ones together, the shortest runs first
    next_rates: np.ndarray = NONE  # to be tried next
    chosen_rate: float | None = None  # trained with next or now; None while that is open
    rates: np.ndarray = NONE  # of the curve
    mean: np.ndarray = NONE
    deviation: np.ndarray = NONE  # one standard deviation of the posterior; none of a parabola
    bound: np.ndarray = NONE  # mean - kappa deviation, where something goes by it


def landscape(search: Search, number: int) -> Landscape:
    """The landscape of a search in one of its rounds, counted from 1."""
    taken, after, next_rates = search.rounds[:number], search.request_after(number), NONE
    if after is not None and after.kind == "probe":
        next_rates = after.rates.max(1)
    if isinstance(search.searcher, AutoLRS):
        return _posterior(search.searcher, taken, next_rates)
    return _scores(taken, next_rates)


def _posterior(searcher: AutoLRS, taken: tuple[Round, ...], next_rates: np.ndarray) -> Landscape:
    now, probes = taken[-1], [took for took in taken if took.candidates]
    if not probes:
        return Landscape("No search yet", ())
    # A stage that was not searched goes by the last one that was.
    last = probes[-1]
    pins = sum((took.candidates for took in probes if took.before.stage == last.before.stage), ())
    if now is not last:  # after training a new stage begins, in which these pins have no say
        next_rates, chosen = NONE, float(now.request.rates[0, 0])
    else:
        chosen = None if len(next_rates) else min(pins, key=lambda pin: pin.expected).rate
    mean, deviation = _process(searcher, last)
    goes_by_bound = searcher.proposals == "sequential" and len(next_rates)
    return Landscape(
        "Gaussian process: loss at stage's end", (pins,), next_rates, chosen,
        np.geomspace(*searcher.lr_range, POINTS), mean, deviation,
        mean - searcher.kappa * deviation if goes_by_bound else NONE,
    )  # fmt: skip


@functools.lru_cache(maxsize=512)
def _process(searcher: AutoLRS, last: Round) -> tuple[np.ndarray, np.ndarray]:
    return posterior(searcher, last.after).predict(np.linspace(0.0, 1.0, POINTS))


def _scores(taken: tuple[Round, ...], next_rates: np.ndarray) -> Landscape:
    # Scores of runs of another length are no values of the same curve.
    tried = [candidate for took in taken for candidate in took.candidates]
    lengths = sorted({len(candidate.losses) for candidate in tried})
    pins = tuple(
        tuple(candidate for candidate in tried if len(candidate.losses) == steps)
        for steps in lengths
    )
    plan = [*taken[-1].after.plan, *(took.request.rates.max() for took in taken if took.is_kept)]
    chosen = float(max(plan)) if plan else None
    if not pins:
        return Landscape("No probes", (), next_rates, chosen)
    rates, expected, _ = columns(pins[-1])
    curve = parabola(rates, finite_values(expected))
    return Landscape("Loss after each annealed probe", pins, next_rates, chosen, *curve)


def columns(pins: tuple[Candidate, ...]) -> np.ndarray:
    """Rates, what is expected of them, and its deviations: [3, pins]."""
    return np.array([(pin.rate, pin.expected, pin.deviation) for pin in pins]).reshape(-1, 3).T


def parabola(rates: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rates and values through the lowest value and its neighbours, over the logarithm of the rate.

    Empty where the lowest is at an edge, or where one neighbour is so much worse than the other
    that it is on its way to infinity.
    """
    order = np.argsort(rates)
    x, y = np.log(rates[order]), values[order]
    best = int(np.argmin(y))
    near = slice(best - 1, best + 2)
    if best in (0, len(x) - 1):
        return NONE, NONE
    rises = y[near][[0, 2]] - y[best]
    if rises.max() > CLIFF * rises.min():
        return NONE, NONE
    places = np.linspace(x[best - 1], x[best + 1], 41)
    return np.exp(places), np.polyval(np.polyfit(x[near] - x[best], y[near], 2), places - x[best])
