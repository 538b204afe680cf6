"""Ways to choose a learning rate: an oracle, a default, a tuning-free optimiser, or a search within
a budget.

The default search gets the five decades that are its default, other methods three decades of
rates, and all the same number of gradient evaluations, including those of discarded trials; a
forward pass counts a third. Only an oracle's tuning is free: it is an upper bound, not a contender.
So is AutoLRS where its search is not counted, as in its paper.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from toolkit.experiments.lr.training import LaneTrainer, gathered
from toolkit.experiments.lr.workloads import Workload, workload
from toolkit.lr import LR_RANGE as SEARCHED
from toolkit.lr import AutoLRS, ProbeThenDecay, Searcher, contender, search, shape_rates
from toolkit.lr.contenders import WARMUP
from toolkit.lr.protocol import FORWARD_COST

LR_RANGE = (1e-4, 1e-1)
GRID = tuple(float(rate) for rate in np.geomspace(*LR_RANGE, 7))  # two per decade
DEFAULT_RATE = GRID[3]  # the middle, on all workloads
ORACLE_GRID = tuple(float(rate) for rate in np.geomspace(1e-5, 1, 11))  # as wide as the search's
SWEEPS = (3, 9)  # trials around the default, two per decade
TRIALS = 4
CONTESTANTS = 8  # of successive halving, and random probes
PROBED = 0.1  # of the budget, by these
VALIDATION_BATCHES = 8  # that a trial is judged by

AUTOLRS_FREE = "AutoLRS, search free"  # as its paper counts: half of the steps are search
TEST, PEAK, SPENT = "test loss", "peak rate", "evaluations"
BY_RATE = "test loss by rate"

Progress = Callable[[float], Any]
RunMethod = Callable[[Workload, int, np.ndarray, Progress], list[dict[str, Any]]]


@dataclass(frozen=True)
class Method:
    """A way to choose a learning rate."""

    name: str  # in the names of settings
    kind: str  # "oracle", "fixed", "tuning-free" or "search"
    # (workload, budget, seeds, progress) -> one outcome per seed; `progress` is called with the
    # finished share
    run: RunMethod
    cost: float = 1.0  # gradient evaluations in budgets


@functools.lru_cache(maxsize=2)
def _adam(name: str) -> LaneTrainer:
    """Under all schedules and searches: rates are data, so that one program serves them all."""
    return LaneTrainer(workload(name), optax.adam(1.0))


def _oracle(
    shape: str, problem: Workload, budget: int, seeds: np.ndarray, progress: Progress
) -> list:
    """Linear warm-up and a shape, at every rate of the grid; see `_best_of_grid`."""
    table = np.multiply.outer(ORACLE_GRID, _shape(shape, budget))
    validation, test, _ = _tabulated(problem, np.tile(table, (len(seeds), 1, 1)), seeds, progress)
    outcomes = _best_of_grid(problem, budget, validation, test)
    if shape == "linear":
        for outcome, losses in zip(outcomes, test, strict=True):
            outcome[BY_RATE] = [_finite(problem, loss) for loss in losses]
    return outcomes


def _fixed(
    shape: str, problem: Workload, budget: int, seeds: np.ndarray, progress: Progress
) -> list:
    table = DEFAULT_RATE * np.tile(_shape(shape, budget), (len(seeds), 1, 1))
    _, test, spent = _tabulated(problem, table, seeds, progress)
    return [_outcome(problem, loss, DEFAULT_RATE, spent) for loss in test[:, 0]]


def _optax(
    name: str,
    rate: float | None,
    problem: Workload,
    budget: int,
    seeds: np.ndarray,
    progress: Progress,
) -> list:
    """A contender of `toolkit.lr` by its name, at one rate."""
    rival = contender(name, budget, rate)
    _, test, spent = _contend(rival, problem, budget, seeds, progress)
    return [_outcome(problem, loss, rate, spent) for loss in test[:, 0]]


def _optax_oracle(
    name: str, problem: Workload, budget: int, seeds: np.ndarray, progress: Progress
) -> list:
    found = []
    for done, rate in enumerate(GRID):

        def part(share: float, done: int = done) -> None:
            progress((done + share) / len(GRID))

        found.append(_contend(contender(name, budget, rate), problem, budget, seeds, part)[:2])
    validation, test = (np.concatenate(column, axis=1) for column in zip(*found, strict=True))
    return _best_of_grid(problem, budget, validation, test, GRID)


def _trials(
    is_random: bool,
    count: int,
    shape: str,
    problem: Workload,
    budget: int,
    seeds: np.ndarray,
    progress: Progress,
) -> list:
    """Peaks at random, or around the default; the run of the best validation loss is kept."""
    peaks = _log_uniform(seeds, count) if is_random else _around_default(seeds, count)
    forward = count * VALIDATION_BATCHES * FORWARD_COST
    steps = int((budget - forward) / count)
    table = peaks[..., None] * _shape(shape, steps)
    validation, test, spent = _tabulated(problem, table, seeds, progress, is_charged=True)
    best = validation.argmin(1)
    return [
        _outcome(problem, test[i, best[i]], peaks[i, best[i]], spent + forward)
        for i in range(len(seeds))
    ]


def _random_probes(problem: Workload, budget: int, seeds: np.ndarray, progress: Progress) -> list:
    """Short trials of log-uniform peaks with linear decay, then one long run at the best."""
    forward = CONTESTANTS * VALIDATION_BATCHES * FORWARD_COST
    steps = int(PROBED * budget / CONTESTANTS)
    peaks = _log_uniform(seeds, CONTESTANTS)
    probes = peaks[..., None] * _shape("linear", steps)
    validation, _, spent = _tabulated(
        problem, probes, seeds, lambda share: progress(PROBED * share), is_charged=True
    )
    chosen = peaks[np.arange(len(seeds)), validation.argmin(1)]
    shape = _shape("linear", int(budget - forward - spent))
    _, test, more = _tabulated(problem, chosen[:, None, None] * shape, seeds, progress)
    return [
        _outcome(problem, test[i, 0], chosen[i], spent + more + forward) for i in range(len(seeds))
    ]


def _successive_halving(
    problem: Workload, budget: int, seeds: np.ndarray, progress: Progress
) -> list:
    """Log-uniform peaks, each with a linear decay; at 1/8, 1/4 and 1/2 of it the better half by
    validation loss continues.
    """
    forward = FORWARD_COST * VALIDATION_BATCHES * (8 + 4 + 2)
    # 8 lanes for an eighth, 4 for another, 2 for a quarter and 1 for a half: 2.5 decays.
    eighth = int((budget - forward) / 20)
    trainer, rows = _adam(problem.name), np.arange(len(seeds))[:, None]
    made = trainer.evaluations
    peaks = _log_uniform(seeds, CONTESTANTS)
    lanes, shape = trainer.init(seeds, CONTESTANTS), _shape("linear", 8 * eighth)
    for until in (1, 2, 4, 8):
        table = peaks[..., None] * shape[int(lanes.step) : until * eighth]
        lanes, _ = trainer.train(lanes, seeds, table)
        progress(until / 8)
        if until < 8:
            losses = _or_infinity(trainer.evaluate(lanes, _few(problem)))
            kept = np.sort(losses.argsort(1)[:, : losses.shape[1] // 2], axis=1)
            peaks, lanes = peaks[rows, kept], gathered(lanes, rows, kept)
    test = trainer.evaluate(lanes, problem.test)
    spent = (trainer.evaluations - made) / len(seeds) + forward
    return [_outcome(problem, test[i, 0], peaks[i, 0], spent) for i in range(len(seeds))]


def _search(
    searcher: Callable[[tuple[float, float], int], Searcher],
    lr_range: tuple[float, float],
    problem: Workload,
    budget: int,
    seeds: np.ndarray,
    progress: Progress,
    budgets: int = 1,
) -> list:
    """`toolkit.lr.search` as users call it, one seed after another, in so many budgets."""
    outcomes, trainer, budget = [], _adam(problem.name), budgets * budget
    for place, seed in enumerate(seeds):

        def part(found: Any, *_: Any, place: int = place) -> None:
            progress((place + found.controller.ledger.spent / budget) / len(seeds))

        found = search(
            problem.loss,
            problem.init(jax.random.key(seed)),
            (problem.data, jnp.uint32(seed)),
            sample=trainer.sample,
            lr_range=lr_range,
            budget=budget,
            searcher=searcher,
            optimizer=trainer.optimizer,
            evaluation="vmap",
            callback=part,
        )
        lane = jax.tree.map(lambda leaf: leaf[None, None], found.progress.state)
        [[test]] = trainer.evaluate(lane, problem.test)
        peak = found.progress.controller.rates.max()
        outcomes.append(_outcome(problem, test, peak, found.ledger.spent))
    return outcomes


def autolrs(lr_range: tuple[float, float], budget: int) -> AutoLRS:
    """AutoLRS as published, its stages scaled to the budget: 1/20, 1/10, then 1/5 of it.

    The paper's are 1000 to 8000 of some 100,000 steps.
    """
    first = max(budget // 20, 50)
    return AutoLRS.paper(lr_range, budget, first_stage=first, longest_stage=4 * first)


def _methods() -> dict[str, Method]:
    free = {
        "prodigy_cosine": "Prodigy + cosine",
        "prodigy": "Prodigy",
        "dadapt": "D-Adaptation",
        "dog": "DoG",
        "momo": "MoMo-Adam",
        "cocob": "COCOB",
        "mechanic": "Mechanic",
    }
    shapes = {
        "cosine": "cosine",
        "wsd": "WSD linear",
        "wsd_sqrt": "WSD 1-sqrt",
        "constant": "constant",
    }
    rows = [
        Method("linear (oracle)", "oracle", functools.partial(_oracle, "linear"), 11),
        Method("probe then decay", "search", functools.partial(_search, ProbeThenDecay, SEARCHED)),
        Method("random search", "search", functools.partial(_trials, True, TRIALS, "linear")),
        *(Method(f"sweep of {count}, {shapes.get(shape, shape)}", "search",
                 functools.partial(_trials, False, count, shape))
          for count in SWEEPS for shape in ("linear", "cosine", "wsd")),
        Method("random probes", "search", _random_probes),
        *(Method(title, "tuning-free", functools.partial(_optax, name, None))
          for name, title in free.items()),
        Method("successive halving", "search", _successive_halving),
        Method("AutoLRS", "search", functools.partial(_search, autolrs, LR_RANGE), 1.5),
        Method(AUTOLRS_FREE, "oracle", functools.partial(_search, autolrs, LR_RANGE, budgets=2), 3),
        Method("AutoLRS, robust", "search",
               functools.partial(_search, AutoLRS.scaled, LR_RANGE), 1.5),
        Method("linear, fixed rate", "fixed", functools.partial(_fixed, "linear")),
        Method("Schedule-Free, fixed", "fixed",
               functools.partial(_optax, "schedule_free", DEFAULT_RATE)),
        Method("on plateau, fixed", "fixed",
               functools.partial(_optax, "reduce_on_plateau", DEFAULT_RATE)),
        *(Method(f"{title} (oracle)", "oracle", functools.partial(_oracle, shape), 7)
          for shape, title in shapes.items()),
        Method("Schedule-Free (oracle)", "oracle",
               functools.partial(_optax_oracle, "schedule_free"), 10),
    ]  # fmt: skip
    return {row.name: row for row in rows}


METHODS: dict[str, Method] = _methods()
"""Name -> method; those used by the claims come first."""


def _tabulated(
    problem: Workload,
    table: np.ndarray,
    seeds: np.ndarray,
    progress: Progress,
    is_charged: bool = False,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Trains along rates [seeds, lanes, steps]: validation, test losses, evaluations per seed."""
    trainer = _adam(problem.name)
    made = trainer.evaluations
    steps = table.shape[-1]
    lanes, _ = trainer.train(
        trainer.init(seeds, table.shape[1]), seeds, table, lambda step: progress(step / steps)
    )
    validation = trainer.evaluate(lanes, _few(problem) if is_charged else problem.validation)
    test = trainer.evaluate(lanes, problem.test)
    return _or_infinity(validation), test, (trainer.evaluations - made) / len(seeds)


def _contend(
    rival: Any, problem: Workload, budget: int, seeds: np.ndarray, progress: Progress
) -> tuple[np.ndarray, np.ndarray, float]:
    trainer = LaneTrainer(problem, rival.transformation, rival.evaluation_params)
    # The rates are the optimiser's own: updates are taken as they come.
    ones = np.ones((len(seeds), 1, budget), np.float32)
    lanes, _ = trainer.train(trainer.init(seeds), seeds, ones, lambda step: progress(step / budget))
    validation = _or_infinity(trainer.evaluate(lanes, problem.validation))
    return validation, trainer.evaluate(lanes, problem.test), trainer.evaluations / len(seeds)


def _best_of_grid(
    problem: Workload,
    budget: int,
    validation: np.ndarray,
    test: np.ndarray,
    rates: Sequence[float] = ORACLE_GRID,
) -> list[dict[str, Any]]:
    """The rate with the lowest mean validation loss over the seeds; its search is free."""
    best = int(validation.mean(0).argmin())
    return [_outcome(problem, losses[best], rates[best], budget) for losses in test]


def _outcome(problem: Workload, test: float, peak: float | None, spent: float) -> dict[str, Any]:
    found = {TEST: _finite(problem, test), SPENT: float(spent)}
    return found if peak is None else {**found, PEAK: float(peak)}


def _finite(problem: Workload, loss: float) -> float:
    """A run that diverged is worth what its start was: of the untrained net, seed 0."""
    return float(loss) if np.isfinite(loss) else _untrained(problem.name)


@functools.cache
def _untrained(name: str) -> float:
    trainer = _adam(name)
    return float(trainer.evaluate(trainer.init([0]), workload(name).test)[0, 0])


def _or_infinity(losses: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(losses), losses, np.inf)


def _few(problem: Workload) -> Any:
    """What a trial is judged by."""
    count = VALIDATION_BATCHES * problem.batch_size
    return jax.tree.map(lambda leaf: leaf[:count], problem.validation)


def _shape(shape: str, steps: int) -> np.ndarray:
    return shape_rates(shape, steps, round(WARMUP * steps)).astype(np.float32)


def _around_default(seeds: np.ndarray, count: int) -> np.ndarray:
    """Two peaks per decade."""
    peaks = DEFAULT_RATE * 10 ** ((np.arange(count) - count // 2) / 2)
    return np.tile(peaks, (len(seeds), 1))


def _log_uniform(seeds: np.ndarray, count: int) -> np.ndarray:
    low, high = np.log(LR_RANGE)
    draws = [np.random.default_rng(int(seed)).uniform(low, high, count) for seed in seeds]
    return np.exp(draws)
