"""What do the first steps tell of a rate, and are they worth keeping? On development workloads.

Each rate of a grid makes a probe, as `toolkit.lr.ProbeThenDecay` does, and two runs of one length:
one begins anew, the other goes on where its probe ended. Losses are read as budget factors, as in
`lr`: 1 for tuned linear decay, 4 for what it reaches in a quarter of the steps.

    probe       20 steps that rise and fall to zero
    anew        240 steps, a plateau and a fall
    kept        the probe's 20 steps, then the same 240
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import optax

from toolkit.experiments.kit.chart import caption_below, looks, two_panels
from toolkit.experiments.kit.experiment import Experiment, Workspace
from toolkit.experiments.kit.results import Results
from toolkit.experiments.kit.verdicts import LEAST_SEEDS, Claim, Margins, fails, in_words, judging
from toolkit.experiments.lr.report import QUARTER
from toolkit.experiments.lr.training import LaneTrainer
from toolkit.experiments.lr.workloads import workload
from toolkit.lr import shape_rates
from toolkit.lr.fits.peak import curve_ends
from toolkit.lr.probe_then_decay import PROBE_WARMUP, RUN_WARMUP

STEPS, RUN, PROBE, THIRD = 300, 240, 20, 7
RATES = tuple(float(rate) for rate in np.geomspace(1e-4, 1.0, 13))  # three per decade
WORKLOADS = ("tabular", "digits-mlp", "char-lm", "adding")
WHOLE, SHORT, ANEW, KEPT = "linear", "linear, a quarter", "anew", "kept"
EARLY, ENDS = "probe, a third", "probe"
MATTERS = float(np.log(1.1) / np.log(QUARTER))  # a tenth of the evaluations


@dataclass(frozen=True)
class ProbeSetting:
    """A workload of development."""

    workload: str
    steps: int = STEPS


@functools.lru_cache(maxsize=1)
def _block(setting: ProbeSetting, first: int) -> list[dict[str, Any]]:
    """The outcomes of seeds that are trained together."""
    problem, seeds = workload(setting.workload), np.arange(first, first + LEAST_SEEDS)
    trainer = LaneTrainer(problem, optax.adam(1.0))

    def train(lanes: Any, shape: str, steps: int, rise: float) -> tuple[Any, np.ndarray]:
        rates = np.multiply.outer(RATES, shape_rates(shape, steps, round(rise * steps)))
        table = np.tile(rates.astype(np.float32), (len(seeds), 1, 1))
        return trainer.train(lanes, seeds, table)

    start, run = trainer.init(seeds, len(RATES)), RUN * setting.steps // STEPS
    probed, curves = train(start, "trapezoid", PROBE, PROBE_WARMUP)
    reached = {
        WHOLE: train(start, "linear", setting.steps, 2 * RUN_WARMUP)[0],
        SHORT: train(start, "linear", setting.steps // 4, 2 * RUN_WARMUP)[0],
        ANEW: train(start, "trapezoid", run, RUN_WARMUP)[0],
        KEPT: train(probed, "trapezoid", run, RUN_WARMUP)[0],
    }
    found = {name: trainer.evaluate(lanes, problem.test) for name, lanes in reached.items()}
    found[ENDS] = np.array([curve_ends(rows).mean(-1) for rows in curves])
    found[EARLY] = np.array([curve_ends(rows[:, :THIRD]).mean(-1) for rows in curves])
    # What diverged is worth no more than the start.
    worst = curves[:, :1, 0]
    found = {
        name: np.where(np.isfinite(x), np.minimum(x, worst), worst) for name, x in found.items()
    }
    return [{name: losses[at] for name, losses in found.items()} for at in range(len(seeds))]


def execute(setting: ProbeSetting, seed: int, workspace: Workspace) -> dict[str, Any]:
    """Losses by rate of probes, of runs anew and kept, and of linear decays."""
    return _block(setting, seed - seed % LEAST_SEEDS)[seed % LEAST_SEEDS]


def _log_factors(results: Results, name: str, label: str, lower: int = 0) -> np.ndarray:
    """Of each seed, to base 4, at the rate that is best for all, or so many places below it."""
    curves = {key: results.curves(label, key) for key in (WHOLE, SHORT, name)}
    best = {key: losses.mean(0).argmin() for key, losses in curves.items()}
    whole, quarter = (curves[key][:, best[key]] for key in (WHOLE, SHORT))
    return (curves[name][:, best[name] - lower] - whole) / (quarter - whole).mean()


def _gain(results: Results) -> tuple[np.ndarray, str]:
    gains = np.array([_log_factors(results, ANEW, label) - _log_factors(results, KEPT, label)
                      for label in WORKLOADS])  # fmt: skip
    return gains.mean(0), "gain by workload: " + in_words(WORKLOADS, QUARTER**gains)


def _any_rate_will_do(results: Results) -> tuple[np.ndarray, str]:
    costs = np.array([_log_factors(results, ANEW, label, 3) - _log_factors(results, ANEW, label)
                      for label in WORKLOADS])  # fmt: skip
    return MATTERS - costs.mean(0), "of a tenth of the rate: " + in_words(WORKLOADS, QUARTER**costs)


def _halving(results: Results) -> tuple[np.ndarray, str]:
    shares = []
    for label in WORKLOADS:
        early, ends = results.curves(label, EARLY), results.curves(label, ENDS)
        kept = early.argsort(1)[:, : len(RATES) // 2]
        shares.append((kept == ends.argmin(1)[:, None]).any(1))
    return np.mean(shares, 0) - 0.5, "best kept: " + in_words(WORKLOADS, np.array(shares), 0)


@judging
def _nearness(results: Results, is_by_chance: bool) -> Margins:
    grid, ratios, random = np.log(RATES), [], np.random.default_rng(0)
    for label in WORKLOADS:
        run = results.curves(label, ANEW).mean(0).argmin()
        best = results.curves(label, ENDS).argmin(1)
        best = random.integers(len(RATES), size=len(best)) if is_by_chance else best
        ratios.append(grid[best] - grid[run])
    words = "probe's best over the run's: " + in_words(WORKLOADS, np.exp(ratios))
    return np.log(2) - np.abs(ratios).mean(0), words


def _draw(results: Results, caption: str) -> Any:
    figure, (left, right) = two_panels()
    for label, look in looks(results):
        for axes, name in ((left, ANEW), (right, ENDS)):
            losses = results.curves(label, name).mean(0)
            share = (losses - losses.min()) / (losses.max() - losses.min())
            axes.plot(RATES, share, label=label, **look.line)
    for axes, title in ((left, f"after a run of {RUN} steps"), (right, f"after {PROBE} steps")):
        axes.set(xscale="log", xlabel="peak rate", ylabel="loss above the best", title=title)
    left.legend(fontsize=8)
    caption_below(figure, f"Of the span between the best rate and the worst; means. {caption}")
    return figure


EXPERIMENT = Experiment(
    name="probes",
    title="What do twenty steps tell of a rate, and are they worth keeping?",
    settings={name: ProbeSetting(name) for name in WORKLOADS},
    execute=execute,
    columns=(),
    claims=(
        Claim(
            "a run that goes on from its best probe needs a tenth fewer evaluations",
            _gain,
            smallest=MATTERS,
            control=fails(_any_rate_will_do),
        ),
        Claim("half of the rates after a third of a probe hold its best", _halving, smallest=0.4),
        Claim(
            "the best rate of probes is within a factor of 2 of the run's",
            _nearness(is_by_chance=False),
            control=fails(_nearness(is_by_chance=True)),
        ),
    ),
    draw=_draw,
    beyond="runs of thousands of steps, whose best rate twenty steps may not show at all.",
    minutes=4,
    seeds_together=LEAST_SEEDS,
)
