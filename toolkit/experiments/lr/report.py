"""Summary of the losses of many methods on many workloads: paired differences, a profile, words.

Losses of different workloads cannot be averaged. They are converted to a factor on the evaluations
that oracle-tuned linear decay would need for the same loss.

    factor(m) = 4^((loss_m - loss_linear(B)) / (loss_linear(B / 4) - loss_linear(B)))

Linear decay with a free oracle has factor 1 in every cell, and 4 is what it reaches with a quarter
of the budget: loss is taken as linear in the logarithm of the budget between the two. As in
AlgoPerf, rho(r) is the share of cells with a factor of at most r, and the score its mean over
1 <= r <= 4; a miss by more than 4 counts as nothing.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from toolkit.experiments.kit.results import MissingResultError, Results
from toolkit.experiments.kit.verdicts import in_words
from toolkit.experiments.lr.methods import AUTOLRS_FREE, BY_RATE, METHODS, ORACLE_GRID, PEAK, TEST

QUARTER = 4.0
LARGEST_FACTOR = 4.0
GOAL = 1.1  # times the evaluations of the oracle, in four cells of five; 1.5 in all
RESAMPLES = 10_000
CONFIDENCE = 0.95
REFERENCE, DEFAULT = "linear (oracle)", "probe then decay"
RIVALS = (REFERENCE, "Prodigy + cosine", "random search")


@dataclass(frozen=True)
class Difference:
    """A paired difference of losses over the seeds."""

    mean: float  # negative where the first is better
    low: float  # of the bootstrap interval
    high: float  # of the bootstrap interval


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Mean of first - second, seed by seed, and a bootstrap interval of 95 %."""
    if len(first) != len(second):
        raise ValueError(f"second: got {len(second)} seeds, wanted those of first, {len(first)}")
    gaps = np.subtract(first, second)
    draws = np.random.default_rng(0).integers(len(gaps), size=(RESAMPLES, len(gaps)))
    tails = (1 - CONFIDENCE) / 2
    low, high = np.quantile(gaps[draws].mean(1), [tails, 1 - tails])
    return Difference(float(gaps.mean()), float(low), float(high))


def budget_factor(loss: float, whole: float, quarter: float) -> float:
    """1 where linear decay with an oracle needs the whole budget for this loss, 4 where a quarter
    does.
    """
    if not quarter > whole:
        raise ValueError(f"quarter: got {quarter}, wanted more than whole, {whole}")
    return QUARTER ** ((loss - whole) / (quarter - whole))


def profile(factors: Iterable[float], ratios: Iterable[float]) -> np.ndarray:
    """rho(r) for each of `ratios`: the share of cells whose factor, infinity for a miss, is at most
    r.
    """
    factors = np.array(list(factors), float)
    return np.array([np.mean(factors <= ratio * (1 + 1e-9)) for ratio in ratios])


def profile_area(factors: Iterable[float]) -> float:
    """The mean of rho over 1 <= r <= 4, exactly: each cell adds the part of it to its right."""
    return float(_shares(np.array(list(factors), float)).mean())


def _shares(factors: np.ndarray) -> np.ndarray:
    return (LARGEST_FACTOR - np.clip(factors, 1, LARGEST_FACTOR)) / (LARGEST_FACTOR - 1)


@dataclass(frozen=True)
class Cell:
    """A workload with a budget."""

    workload: str  # its name
    budget: int  # gradient evaluations
    # method -> test losses, one per seed, of those that were run
    losses: Mapping[str, Sequence[float]]
    # of oracle-tuned linear decay at a quarter of the budget; empty if not run
    quarter: Sequence[float]
    peaks: Sequence[float] = ()  # of the default, one per seed
    by_rate: Sequence[Sequence[float]] = ()  # [seeds, rates], losses of linear decay on the grid

    @property
    def name(self) -> str:
        """Workload and budget."""
        return f"{self.workload} {self.budget}"

    @property
    def is_telling(self) -> bool:
        """Whether a quarter of the budget is surely worse, so that losses tell methods apart."""
        whole = self.losses.get(REFERENCE)
        if not whole or len(self.quarter) != len(whole):
            return False
        return paired_difference(self.quarter, whole).low > 0

    def factor(self, method: str) -> float:
        """The `budget_factor` of a method's mean loss."""
        whole, quarter = (statistics.fmean(x) for x in (self.losses[REFERENCE], self.quarter))
        return budget_factor(statistics.fmean(self.losses[method]), whole, quarter)

    def factor_of_peaks(self) -> float:
        """The factor of linear decay in the whole budget at the peaks of the default: what its
        choice of a rate costs, without the steps of its probes.
        """
        places, grid = np.log(self.peaks), np.log(ORACLE_GRID)
        losses = [np.interp(x, grid, row) for x, row in zip(places, self.by_rate, strict=True)]
        whole, quarter = (statistics.fmean(x) for x in (self.losses[REFERENCE], self.quarter))
        return budget_factor(float(np.mean(losses)), whole, quarter)

    def log_factors(self, method: str) -> np.ndarray:
        """Logarithms of the factor to base 4, seed by seed against the same seed of the oracle; the
        loss that a quarter of the budget costs is the mean of the seeds.
        """
        losses, whole = self.losses[method], self.losses[REFERENCE]
        return np.subtract(losses, whole) / np.mean(np.subtract(self.quarter, whole))


def cells(
    results: Results,
    workloads: Iterable[str],
    budgets: Iterable[int],
    methods: Iterable[str] = METHODS,
) -> list[Cell]:
    """All cells in order, those of which nothing was run without losses."""
    budgets, methods, found = list(budgets), list(methods), []
    for workload in workloads:
        for budget in budgets:
            losses = {
                method: _samples(results, f"{workload} {budget}: {method}") for method in methods
            }
            losses = {method: samples for method, samples in losses.items() if samples}
            quarter = _samples(results, f"{workload} {round(budget / QUARTER)}: {REFERENCE}")
            peaks = _samples(results, f"{workload} {budget}: {DEFAULT}", PEAK)
            by_rate = _samples(results, f"{workload} {budget}: {REFERENCE}", BY_RATE)
            found.append(Cell(workload, budget, losses, quarter, peaks, by_rate))
    return found


def factors_of(method: str, found: Iterable[Cell]) -> dict[str, float]:
    """Cell -> factor of a method, where it was run and the cell is telling."""
    return {
        cell.name: cell.factor(method)
        for cell in found
        if method in cell.losses and cell.is_telling
    }


def judge_costs_no_more(found: Sequence[Cell], method: str = DEFAULT) -> tuple[np.ndarray, str]:
    """Whether a method reaches the oracle's losses with as many evaluations or fewer: the geometric
    mean of its factors over the telling cells, seed by seed.
    """
    logs = np.mean([cell.log_factors(method) for cell in _compared(found, (method,))], axis=0)
    words = " ".join(f"{factor:.2f}" for factor in QUARTER**logs)
    return -logs, f"geometric mean of the factors: {words}"


def judge_profile(
    found: Sequence[Cell], rival: str, method: str = DEFAULT
) -> tuple[np.ndarray, str]:
    """Whether a method's area is above a rival's, on the telling cells where both were run."""
    both = _compared(found, (method, rival))
    rows = np.array([
        _shares(QUARTER ** np.minimum([cell.log_factors(name) for cell in both], 1)).mean(0)
        for name in (method, rival)
    ])  # fmt: skip
    return rows[0] - rows[1], f"areas, {len(both)} cells: {in_words((method, rival), rows, 3)}"


def headline(found: Sequence[Cell]) -> str:
    """AutoLRS by its paper's count, in which the steps of its search are free: the steps of tuned
    linear decay over its own, for the same loss.
    """
    logs = [cell.log_factors(AUTOLRS_FREE).mean() for cell in _compared(found, (AUTOLRS_FREE,))]
    speedups = np.sort(QUARTER ** -np.array(logs))
    middle = f"{np.median(speedups):.2f}"
    return (
        f"AutoLRS where only its kept steps count, as in its paper: a speed-up of {middle} over\n"
        f"tuned linear decay, the median of {len(logs)} cells, from {speedups[0]:.2f} to "
        f"{speedups[-1]:.2f}. Its paper: 1.22 to 1.5."
    )


def report(found: Sequence[Cell]) -> str:
    """A table per cell, then the paired differences of the default, then the profile."""
    lines = []
    for cell in found:
        lines += [*_cell_lines(cell), ""]
    lines += [*_profile_lines(found), ""]
    lines += [*_why_lines(found), ""]
    with suppress(MissingResultError):
        lines += [headline(found), ""]
    return "\n".join(lines)


def _cell_lines(cell: Cell) -> list[str]:
    if not cell.losses:
        return [f"{cell.name} evaluations: not run"]
    note = "" if cell.is_telling else "   (a quarter of the budget is not surely worse)"
    lines = [f"{cell.name} evaluations, loss on the test split{note}"]
    heads = "".join(f"{'less ' + rival:>29}" for rival in RIVALS)
    lines.append(f"  {'':24}{'mean +- sd':>18}{'factor':>8}{heads}")
    for method in METHODS:
        if method not in cell.losses:
            lines.append(f"  {method:24}{'missing':>18}")
            continue
        losses = cell.losses[method]
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        row = f"  {method:24}{statistics.fmean(losses):>9.4f} +-{spread:7.4f}"
        row += f"{_as_factor(cell.factor(method)):>8}" if cell.is_telling else " " * 8
        for rival in RIVALS:
            row += f"{_gap(cell, method, rival):>29}"
        lines.append(row.rstrip())
    return lines


def _gap(cell: Cell, method: str, rival: str) -> str:
    if method == rival or len(cell.losses.get(rival, ())) != len(cell.losses[method]):
        return ""
    gap = paired_difference(cell.losses[method], cell.losses[rival])
    return f"{gap.mean:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}]"


def _profile_lines(found: Sequence[Cell]) -> list[str]:
    telling = [cell for cell in found if cell.is_telling]
    lines = [f"Performance profile over {len(telling)} cells; rho(r) is the share within factor r"]
    lines.append(f"  {'':24}{'area':>7}{'rho(1.1)':>9}{'rho(1.5)':>9}{'rho(2)':>8}{'rho(4)':>8}"
                 f"{'cells':>7}")  # fmt: skip
    scored = {method: list(factors_of(method, telling).values()) for method in METHODS}
    ranked = sorted((m for m in METHODS if scored[m]), key=lambda m: -profile_area(scored[m]))
    for method in ranked:
        shares = profile(scored[method], (GOAL, 1.5, 2.0, LARGEST_FACTOR))
        columns = "".join(f"{share:>{9 - (at > 1)}.2f}" for at, share in enumerate(shares))
        area = profile_area(scored[method])
        lines.append(f"  {method:24}{area:>7.3f}{columns}{len(scored[method]):>7}")
    return lines


def _why_lines(found: Sequence[Cell]) -> list[str]:
    """Where the factors of the default come from, cell by cell."""
    lines = ["Why: the factor of the default, and of linear decay at its rates, with no probes",
             f"  {'':24}{'factor':>8}{'of its rates':>14}{'rates over the best':>22}"]  # fmt: skip
    pairs = []
    for cell in found:
        if not (cell.is_telling and cell.peaks and len(cell.peaks) == len(cell.by_rate)):
            continue
        pair = cell.factor(DEFAULT), cell.factor_of_peaks()
        pairs.append(pair)
        best = ORACLE_GRID[int(np.mean(cell.by_rate, 0).argmin())]
        over = np.sort(np.array(cell.peaks) / best)
        lines.append(f"  {cell.name:24}{_as_factor(pair[0]):>8}{_as_factor(pair[1]):>14}"
                     f"{f'{over[0]:.2g} to {over[-1]:.2g}':>22}")  # fmt: skip
    medians = [_as_factor(middle) for middle in np.median(pairs, 0)] if pairs else ["", ""]
    return [*lines, f"  {'median':24}{medians[0]:>8}{medians[1]:>14}"]


def _compared(found: Sequence[Cell], methods: Sequence[str]) -> list[Cell]:
    """The telling cells where these methods were run with all seeds."""
    compared = [
        cell
        for cell in found
        if cell.is_telling
        and all(len(cell.losses.get(method, ())) == len(cell.quarter) for method in methods)
    ]
    if not compared:
        raise MissingResultError(f"no cell in which more budget helps has {' and '.join(methods)}")
    return compared


def _samples(results: Results, label: str, name: str = TEST) -> list:
    try:
        return results.samples(label, name)
    except MissingResultError:
        return []


def _as_factor(factor: float) -> str:
    return f"{factor:.2f}" if factor <= 99 else ">99"
