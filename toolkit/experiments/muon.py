"""Do the parameters that Muon trains and those that Adam trains need rates of their own?

Every pair of rates of a grid makes a probe of 20 steps and two runs. A search then chooses a pair
by the probes, and has what it did not spend on them for its run:

    one rate        three probes, the same rate for both; a run of 240 steps
    three times     the same, but Adam's rate is always three times Muon's
    in turns        one rate first, then three probes of Adam's rate beside it; 180 steps
    jointly         the lowest of all 42 probes, of which six are counted; 180 steps

The last is more than any Gaussian process over pairs can learn from six probes. Muon's updates are
as large as Adam's (`toolkit.training.OPTIMIZERS`), so that 1 is the usual ratio.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from toolkit.experiments.kit.chart import LOOKS, caption_below, draw_bar, looks, two_panels
from toolkit.experiments.kit.experiment import Column, Experiment, Workspace
from toolkit.experiments.kit.results import Results
from toolkit.experiments.kit.verdicts import LEAST_SEEDS, Claim, Margins, fails, in_words, judging
from toolkit.experiments.lr.training import LaneTrainer
from toolkit.experiments.lr.workloads import workload
from toolkit.experiments.probes import PROBE
from toolkit.lr import shape_rates
from toolkit.lr.fits.peak import curve_ends, first_before_a_rise
from toolkit.lr.probe_then_decay import PROBE_WARMUP, RUN_WARMUP
from toolkit.training.optimiser import OPTIMIZERS, hidden_matrices

MUON = tuple(float(rate) for rate in np.geomspace(1e-3, 10**-0.5, 6))  # two per decade
ADAM = tuple(float(rate) for rate in np.geomspace(10**-3.5, 10**-0.5, 7))
SAME = 1  # the place of Muon's lowest rate among Adam's
STEPS = 300
WORKLOADS = ("gru", "sets", "graphs", "field", "autoencoder")  # of those no constant comes from
ONE, THRICE, TURNS, JOINT, CHANCE = "one rate", "three times", "in turns", "jointly", "by chance"
BY_PAIR = "test loss by pair"
MATTERS = 0.02  # nats, or half a squared deviation
SEEDS = 2 * LEAST_SEEDS


@dataclass(frozen=True)
class MuonSetting:
    """A workload, and the evaluations of a search."""

    workload: str
    steps: int = STEPS


def grouped() -> optax.GradientTransformation:
    """Muon with Adam, both at rate 1; Adam's updates are multiplied by the "ratio" in the state."""
    both = optax.chain(OPTIMIZERS["muon"].direction(0.9, 0.95, 1e-8), optax.scale(-1.0))

    def init(params: Any) -> dict[str, Any]:
        return {"both": both.init(params), "ratio": jnp.ones(())}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, inner = both.update(updates, state["both"], params)
        updates = jax.tree.map(
            lambda axes, leaf: leaf if axes else state["ratio"] * leaf,
            hidden_matrices(updates),
            updates,
            is_leaf=lambda axes: axes is None or isinstance(axes, MuonDimensionNumbers),
        )
        return updates, {**state, "both": inner}

    return optax.GradientTransformation(init, update)


@functools.lru_cache(maxsize=1)
def _block(setting: MuonSetting, first: int) -> list[dict[str, Any]]:
    """The outcomes of seeds that are trained together."""
    seeds = np.arange(first, first + LEAST_SEEDS)
    trainer = LaneTrainer(workload(setting.workload), grouped())
    muon, adam = (rates.ravel() for rates in np.meshgrid(MUON, ADAM, indexing="ij"))
    start = trainer.init(seeds, len(muon))
    ratios = jnp.tile(jnp.asarray(adam / muon, jnp.float32), (len(seeds), 1))
    start = replace(start, optimizer_state={**start.optimizer_state, "ratio": ratios})

    def train(steps: int, rise: float) -> tuple[Any, np.ndarray]:
        rates = np.multiply.outer(muon, shape_rates("trapezoid", steps, round(rise * steps)))
        return trainer.train(start, seeds, np.tile(rates.astype(np.float32), (len(seeds), 1, 1)))

    curves = train(PROBE, PROBE_WARMUP)[1]
    reached = [train(setting.steps - probes * PROBE, RUN_WARMUP)[0] for probes in (3, 6)]
    losses = [trainer.evaluate(lanes, trainer.workload.test) for lanes in reached]
    # What diverged is worth no more than the start.
    grid = (len(seeds), len(MUON), len(ADAM))
    whole, shorter = (np.fmin(found, curves[..., 0]).reshape(grid) for found in losses)
    return [
        _chosen(curve_ends(curves[at]), whole[at], shorter[at], np.random.default_rng(int(seed)))
        for at, seed in enumerate(seeds)
    ]


def _chosen(
    ends: np.ndarray, whole: np.ndarray, shorter: np.ndarray, random: np.random.Generator
) -> dict[str, Any]:
    """What each search ends at, by the ends of all probes [pairs, points]; losses [Muon, Adam]."""
    ends = ends.reshape(*whole.shape, -1)

    def along(ratio: int) -> tuple[int, int]:
        """The pair that is best at a fixed ratio, so many places above `SAME`."""
        places = np.arange(min(len(MUON), len(ADAM) - SAME - ratio))
        place = first_before_a_rise(ends[places, places + SAME + ratio])
        return place, place + SAME + ratio

    muon, adam = along(0)
    beside = np.arange(max(adam - 1, 0), min(adam + 3, len(ADAM)))
    lowest = np.unravel_index(ends.mean(-1).argmin(), whole.shape)
    return {
        ONE: whole[muon, adam],
        THRICE: whole[along(1)],
        TURNS: shorter[muon, beside[ends[muon, beside].mean(-1).argmin()]],
        JOINT: shorter[lowest],
        CHANCE: shorter[random.integers(len(MUON)), random.integers(len(ADAM))],
        BY_PAIR: whole.ravel(),
    }


def execute(setting: MuonSetting, seed: int, workspace: Workspace) -> dict[str, Any]:
    """Losses of every way to choose, and of a run at every pair."""
    return _block(setting, seed - seed % LEAST_SEEDS)[seed % LEAST_SEEDS]


@judging
def _gain(results: Results, name: str) -> Margins:
    """By how much this search ends below that of one rate, on average over the workloads."""
    ones, others = (results.paired(key, WORKLOADS) for key in (ONE, name))
    return (ones - others).mean(0), "by workload: " + in_words(WORKLOADS, ones - others, 3)


def _draw(results: Results, caption: str) -> Any:
    figure, (left, right) = two_panels()
    ratios = 10 ** (np.arange(-3, 4) / 2)
    for label, look in looks(results):
        losses = results.curves(label, BY_PAIR).reshape(-1, len(MUON), len(ADAM)).mean(0)
        best = np.array([np.diagonal(losses, SAME + ratio).min() for ratio in range(-3, 4)])
        left.plot(ratios, best / best[3], label=label, **look.line)
    left.set(xscale="log", xlabel="Adam's rate, in Muon's", ylabel="loss, in that of one rate",
             title="at the best of Muon's rates")  # fmt: skip
    left.legend(fontsize=8)
    for place, (name, look) in enumerate(zip((THRICE, TURNS, JOINT, CHANCE), LOOKS, strict=False)):
        draw_bar(right, place, list(_gain(name)(results)[0]), look, 0.7)
    right.axhline(MATTERS, color="#8a949e", linewidth=1)
    right.set_xticks(range(4), [THRICE, TURNS, JOINT, CHANCE])
    right.set(ylabel="loss below that of one rate", title="what a search ends at")
    caption_below(figure, f"Means over seeds; line: what matters. {caption}")
    return figure


EXPERIMENT = Experiment(
    name="muon",
    title="Do Muon's and Adam's parameters need rates of their own?",
    settings={name: MuonSetting(name) for name in WORKLOADS},
    execute=execute,
    columns=tuple(Column(name) for name in (ONE, THRICE, TURNS, JOINT, CHANCE)),
    claims=tuple(
        Claim(text, _gain(name), MATTERS, SEEDS, control=fails(_gain(CHANCE)))
        for text, name in (
            ("a joint search of both rates ends lower than a search of one rate", JOINT),
            ("a search of one after the other ends lower than a search of one rate", TURNS),
            ("three times Muon's rate for Adam ends lower than the same for both", THRICE),
        )
    ),
    draw=_draw,
    beyond="budgets of thousands, which pay for longer probes of more pairs.",
    minutes=10,
    seeds_together=LEAST_SEEDS,
)
