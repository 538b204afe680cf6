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
    """Rates of which something is known.

    Attributes:
        label: what they are.
        rates: [pins].
        values: [pins], forecasts or scores; those of diverged runs lifted above the others.
        deviations: [pins].
        is_diverged: [pins].
        is_new: [pins], whether they come from the round looked at.
    """

    label: str
    rates: np.ndarray
    values: np.ndarray
    deviations: np.ndarray
    is_diverged: np.ndarray
    is_new: np.ndarray


@dataclasses.dataclass(frozen=True)
class Landscape:
    """What a search makes of the rates tried so far.

    Attributes:
        title: what the curve is.
        rates: [points], of the curve.
        mean: [points]; empty where there is none yet.
        deviation: [points], one standard deviation of the posterior; None for a parabola.
        bound: [points], mean - kappa deviation; None where nothing goes by it.
        pins: groups, oldest first.
        next_rates: to be tried next.
        chosen_rate: trained with next or now; None while that is open.
    """

    title: str
    rates: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray | None
    bound: np.ndarray | None
    pins: tuple[Pins, ...]
    next_rates: np.ndarray
    chosen_rate: float | None


def landscape(search: Search, number: int) -> Landscape:
    """What a search made of its candidates in one of its rounds.

    Args:
        search: with at least so many rounds.
        number: of the round, from 1.

    Returns:
        A `Landscape`.

    Cost:
        For AutoLRS a fit of a Gaussian process the first time, some 30 ms.
    """
    now = search.rounds[number - 1]
    after = search.rounds[number].request if number < len(search.rounds) else search.next_request
    is_autolrs = isinstance(search.searcher, AutoLRS)
    next_rates = np.zeros(0)
    # After training, AutoLRS begins a new stage, and these pins have no say in it.
    if (
        after is not None
        and after.kind == "probe"
        and (now.request.kind == "probe" or not is_autolrs)
    ):
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
    """Through the best and its neighbours, in the logarithm of the rate.

    Args:
        pins: in any order.

    Returns:
        Rates and values, [points] each; none where the best is at an edge, or where one neighbour
        is so much worse than the other that it is on its way to infinity.
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
