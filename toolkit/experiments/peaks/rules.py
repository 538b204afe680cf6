"""Rules that read a rate from probes whose ends are recorded for every rate."""

import functools

import numpy as np

from toolkit.lr import LR_RANGE, ProbeThenDecay, ask, fit_gaussian_process, init, tell
from toolkit.lr.fits.gaussian_process import finite_values
from toolkit.lr.fits.peak import PeakRate, find_peak, peak_at
from toolkit.lr.probe_then_decay import best_peak

MIDDLE = float(np.prod(LR_RANGE)) ** 0.5
# All that the search can ask for, and one between two of them.
RATES = tuple(sorted([*LR_RANGE, *(MIDDLE * 10 ** (place / 3) for place in range(-7, 8))]))
SEARCH, PROCESS, BEST, SAME, HALVES, MIDST, CHANCE = (
    "the search", "a Gaussian process", "the best believed", "the same rate", "half a probe",
    "the middle", "by chance",
)  # fmt: skip
DIVERGED = 1e9  # in a record, which holds no infinities


def chosen_rate(rule: str, budget: int, probes: np.ndarray, halves: np.ndarray, seed: int) -> float:
    """The peak rate of a run by a rule, from the ends of probes [rates, points] and of probes half
    as long.
    """
    if rule in (MIDST, CHANCE):
        return MIDDLE if rule == MIDST else float(np.random.default_rng(seed).choice(RATES))
    searcher = ProbeThenDecay(LR_RANGE, budget, extensions=0)
    probes, halves = (np.where(ends >= DIVERGED, np.inf, ends) for ends in (probes, halves))
    controller = init(searcher)
    while (request := ask(searcher, controller)) and request.kind == "probe":
        # Of the steps before the ends only the first is read, which is the same for all.
        losses = np.full(request.rates.shape, probes[np.isfinite(probes)].max())
        losses[:, -probes.shape[1] :] = probes[_places(request.rates.max(1))]
        controller, _ = tell(searcher, controller, request, losses)
    tried, ends = controller.table["rate"], controller.ends
    peak = best_peak(searcher, controller)
    if rule == SAME:
        return float(np.exp(peak.log_rate))
    if rule == PROCESS:
        peak = PeakRate(_lowest_mean(tuple(tried), tuple(map(tuple, ends))), 0)
    elif rule in (BEST, HALVES):
        # A single point counts as it is, whatever its noise.
        read = ends.mean(1, keepdims=True) if rule == BEST else halves[_places(tried)]
        found = find_peak(tried, read, np.log(MIDDLE))
        peak = found or PeakRate(float(np.log(tried.min())), -1)
    return peak_at(len(controller.plan), peak, searcher.probe_steps)


def _places(rates: np.ndarray) -> np.ndarray:
    return np.abs(np.log(rates)[:, None] - np.log(RATES)).argmin(1)


@functools.cache
def _lowest_mean(rates: tuple[float, ...], rows: tuple[tuple[float, ...], ...]) -> float:
    """The logarithm of the rate of the lowest posterior mean, between the rates that were tried."""
    ends = np.array(rows)
    finite = np.isfinite(ends).all(1)
    variances = np.zeros(len(ends))
    if ends.shape[1] > 1 and finite.sum() > 1:
        alone = ends[finite] - np.median(ends[finite], axis=0)  # the batches are the same for all
        variances[finite] = alone.var(1, ddof=1) / ends.shape[1]
    low, high = np.log(LR_RANGE)
    places = (np.log(rates) - low) / (high - low)
    process = fit_gaussian_process(places, finite_values(ends.mean(1)), variances)
    grid = np.linspace(places.min(), places.max(), 501)
    return float(low + grid[process.predict(grid)[0].argmin()] * (high - low))
