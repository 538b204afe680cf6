"""The best rate of a small model on a wider and deeper one: which rules carry it over?

A rule sets rates, decays, initial weights and residual branches by width and depth. Its rate is
tuned on the small model; the excess is what that rate costs on a large one, seed by seed, against
the best rate of the same rule there, by the other seeds:

    excess = loss(rate tuned at 64 x 2) - loss(best rate of the other seeds)

    standard        nothing changes (the control: it must lose)
    muP             rates by width, depth by CompleteP, decay such that decay times rate stays
    muP, coupled    the same, but the decay is multiplied by the smaller rate
    long warm-up    nothing changes but a warm-up of half the run, which may do muP's work
    hypersphere     matrices of fixed norm, Muon's direction, depth by CompleteP; no decay
    search          `toolkit.lr.search` on the large model itself, in the steps of one run

Source: muP and CompleteP as in `toolkit.lr.transfer`; Kosson et al. (arXiv:2510.19093) for decay
    and warm-up; Ren et al. (arXiv:2603.28743, HyperP) for the hypersphere, whose Adam parts and
    gradients along the sphere are our own reading.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from toolkit.experiments.kit.chart import LOOKS, caption_below
from toolkit.experiments.kit.experiment import Column, Experiment, Workspace
from toolkit.experiments.kit.results import MissingResultError, Results
from toolkit.experiments.kit.verdicts import Claim, Margins, fails, judging
from toolkit.experiments.lr.transfer_rules import (
    COUPLED,
    LONG,
    MUP,
    RULES,
    SMALL,
    SPHERE,
    STANDARD,
    rule_trainer,
)
from toolkit.lr import search, shape_rates

STEPS = 300
TOLD_EVERY = 10  # steps between two moves of the progress bar
RATES = tuple(2.0**power for power in range(-12, -3))
SIZES = (SMALL, (512, 2), (64, 16), (512, 16))
WARMUP, LONG_WARMUP = 0.1, 0.5
MATTERS = 0.05  # nats per character, of some 2
SEARCH = "search"
LOSSES, LOSS, PLACES = "loss by rate", "loss", "places of these rates"
# Before this record, an H100 tried all rates at the large size with one or two seeds. All rules are
# tuned at the sixth; they try that one and, where that decides a claim, its neighbours or the best.
TRIED = {
    (MUP, SIZES[-1]): (4, 5, 6),
    (COUPLED, SIZES[-1]): (4, 5, 6),
    (STANDARD, SIZES[-1]): (2, 5),
    (LONG, SIZES[-1]): (3, 5),
    (SPHERE, SIZES[-1]): (5,),  # a step costs 5.5 times a gradient: other rates run apart
    # At the large width alone, the rates at and below that one; two rules try all.
    (SPHERE, SIZES[1]): (4, 5, 6),
    (COUPLED, SIZES[1]): (4, 5, 6),
    (LONG, SIZES[1]): (3, 4, 5, 6),
}


@dataclass(frozen=True)
class TransferSetting:
    """A rule on a model."""

    rule: str  # one of `RULES`, or `SEARCH`
    width: int
    layers: int
    steps: int = STEPS

    @property
    def label(self) -> str:
        """As in tables and records."""
        return f"{self.rule}: {self.width} x {self.layers}"

    @property
    def places(self) -> Sequence[int]:
        """Of the rates tried, in `RATES`."""
        return TRIED.get((self.rule, (self.width, self.layers)), range(len(RATES)))


@dataclass(frozen=True)
class OneRateSetting(TransferSetting):
    """A rule on a model at one rate beside those of `TRIED`, which a run of its own can afford."""

    place: int = 0

    @property
    def label(self) -> str:
        """As in tables and records."""
        return f"{super().label}, rate {RATES[self.place]:.3g}"

    @property
    def places(self) -> Sequence[int]:
        """Of the rate tried, in `RATES`."""
        return (self.place,)


def execute(setting: TransferSetting, seed: int, workspace: Workspace) -> dict[str, Any]:
    """Losses on held-out text, of the rates tried in one program; or of the searched one."""
    trainer = rule_trainer(setting.rule, setting.width, setting.layers)
    problem, steps = trainer.workload, setting.steps
    if setting.rule == SEARCH:
        found = search(
            problem.loss,
            problem.init(jax.random.key(seed)),
            (problem.data, jnp.uint32(seed)),
            sample=trainer.sample,
            budget=steps,
            optimizer=trainer.optimizer,
            callback=lambda at, *_: workspace.progress(at.controller.ledger.spent / steps),
        )
        lane = jax.tree.map(lambda leaf: leaf[None, None], found.progress.state)
        return {LOSS: float(trainer.evaluate(lane, problem.test)[0, 0])}
    warmup = round((LONG_WARMUP if setting.rule == LONG else WARMUP) * steps)
    places = setting.places
    rates = np.take(RATES, places)
    table = np.multiply.outer(rates, shape_rates("linear", steps, warmup)).astype(np.float32)
    lanes = trainer.init([seed], len(rates))
    for begin in range(0, steps, TOLD_EVERY):
        lanes, _ = trainer.train(lanes, [seed], table[None, :, begin : begin + TOLD_EVERY])
        workspace.progress(min(begin + TOLD_EVERY, steps) / steps)
    losses = trainer.evaluate(lanes, problem.test)[0]
    # A run that diverged is worth no more than guessing characters alike.
    worst = float(np.log(problem.test.max() + 1))
    losses = np.where(np.isfinite(losses), np.minimum(losses, worst), worst)
    return {LOSSES: losses, LOSS: float(losses.min()), PLACES: places}


def _work(setting: TransferSetting) -> float:
    """Products; those that make a step orthogonal are width / 114 times as many as a gradient's."""
    a_step = setting.width**2 * setting.layers
    if setting.rule == SPHERE:
        a_step *= 1 + setting.width / 114
    rates = 1 if setting.rule == SEARCH else len(setting.places)
    return a_step * setting.steps * rates


def losses_by_rate(results: Results, rule: str, size: tuple[int, int]) -> np.ndarray:
    """Losses [seeds, rates], NaN for those not tried; rates that ran apart beside the others."""
    label = TransferSetting(rule, *size).label
    rows = {seed: np.full(len(RATES), np.nan) for seed in results.by_seed(label, LOSSES)}
    beside = [OneRateSetting(rule, *size, place=place).label for place in range(len(RATES))]
    for name in filter(results.labels.__contains__, (label, *beside)):
        for seed, losses in results.by_seed(name, LOSSES).items():
            if seed in rows:
                # Runs of all rates do not say which.
                places = results.outcomes[name][seed].get(PLACES, range(len(RATES)))
                rows[seed][np.asarray(places, int)] = losses
    return np.array(list(rows.values()))


def best_of(losses: np.ndarray) -> int:
    """The place of the best of the rates that all seeds tried."""
    return int(np.nanargmin(losses.mean(0)))


def excess(results: Results, rule: str, size: tuple[int, int]) -> np.ndarray:
    """What the rate tuned on the small model costs on this one, seed by seed, in nats: against the
    rate that is best for the other seeds, as one chosen by the seed itself is better by chance.

    Refused (`MissingResultError`) where no other rate was tried, which would make it 0."""
    tuned = best_of(losses_by_rate(results, rule, SIZES[0]))
    losses = losses_by_rate(results, rule, size)
    if np.isfinite(losses.mean(0)).sum() < 2:
        raise MissingResultError(f"no other rate of {rule} at {size[0]} x {size[1]}")
    seeds = np.arange(len(losses))
    others = [losses[seeds != seed] if len(seeds) > 1 else losses for seed in seeds]
    return losses[:, tuned] - losses[seeds, [best_of(rows) for rows in others]]


def carried(results: Results, rule: str, size: tuple[int, int]) -> np.ndarray:
    """Losses at the rate tuned on the small model; of the search, its own."""
    return np.array(list(_carried_by_seed(results, rule, size).values()))


def _carried_by_seed(results: Results, rule: str, size: tuple[int, int]) -> dict[int, float]:
    label = TransferSetting(rule, *size).label
    if rule == SEARCH:
        return results.by_seed(label, LOSS)
    tuned = best_of(losses_by_rate(results, rule, SIZES[0]))
    losses = losses_by_rate(results, rule, size)[:, tuned]
    return dict(zip(results.by_seed(label, LOSSES), losses, strict=True))


@judging
def _costs_little(results: Results, rule: str, size: tuple[int, int] = SIZES[-1]) -> Margins:
    """Whether the excess on a model is below what matters."""
    found = excess(results, rule, size)
    return MATTERS - found, f"excess of {rule}: " + " ".join(f"{x:.3f}" for x in found)


@judging
def _ends_lower(results: Results, rule: str, rival: str) -> Margins:
    """Whether a rule's carried rate ends at a lower loss than another's."""
    found = [_carried_by_seed(results, name, SIZES[-1]) for name in (rule, rival)]
    seeds = sorted(found[0].keys() & found[1].keys())
    if not seeds:
        raise MissingResultError(f"no seed has both {rule} and {rival}")
    ours, theirs = (np.array([losses[seed] for seed in seeds]) for losses in found)
    words = f"{rule} {ours.mean():.3f}, {rival} {theirs.mean():.3f}"
    return theirs - ours, f"loss at the carried rate: {words}"


def report(results: Results) -> str:
    """Per rule and size: the best rate, its loss, the loss at the carried rate, and the excess."""
    lines = [
        f"{'':15}{'size':>9}{'best rate':>11}{'its loss':>10}{'carried':>10}{'excess +- sd':>18}"
    ]
    for rule in (*RULES, SEARCH):
        for size in SIZES:
            label = TransferSetting(rule, *size).label
            if label not in results.labels:
                continue
            name = f"{rule:15}{f'{size[0]} x {size[1]}':>9}"
            if rule == SEARCH:
                losses = carried(results, rule, size)
                lines.append(f"{name}{'':>21}{losses.mean():>10.3f}")
                continue
            found = losses_by_rate(results, rule, size)
            best, losses = best_of(found), found.mean(0)
            is_bracketed = (
                0 < best < len(RATES) - 1
                and not np.isnan(found[:, best - 1 : best + 2]).all(0).any()
            )
            edge = " " if is_bracketed else "*"
            row = f"{name}{RATES[best]:>10.2g}{edge}{losses[best]:>10.3f}"
            if TransferSetting(rule, *SIZES[0]).label in results.labels:
                row += f"{carried(results, rule, size).mean():>10.3f}"
                if np.isfinite(losses).sum() > 1:
                    cost = excess(results, rule, size)
                    spread = cost.std(ddof=1) if len(cost) > 1 else 0.0
                    row += f"{cost.mean():>10.3f} +-{spread:.3f}"
            lines.append(row)
    return "\n".join([*lines, "* at the edge of the rates tried"])


def draw(results: Results, caption: str) -> Any:
    """One panel per size: loss over the rate, and the rate carried over."""
    from toolkit.figures import new_figure

    ran = {TransferSetting(rule, *size).label: size for size in SIZES for rule in RULES}
    sizes = sorted({ran[label] for label in results.labels if label in ran}, key=SIZES.index)
    figure = new_figure(3.0 + 2.3 * max(len(sizes), 2), 4.4)
    panels: Sequence[Any] = figure.subplots(1, max(len(sizes), 1), sharey=True, squeeze=False)[0]
    figure.subplots_adjust(left=0.06, right=0.985, wspace=0.08, bottom=0.24, top=0.9)
    for axes, size in zip(panels, sizes, strict=False):
        for rule, look in zip(RULES, LOOKS, strict=False):
            label = TransferSetting(rule, *size).label
            if label not in results.labels:
                continue
            losses = losses_by_rate(results, rule, size).mean(0)
            tried = ~np.isnan(losses)
            axes.plot(np.array(RATES)[tried], losses[tried], label=rule, **look.line)
            if TransferSetting(rule, *SIZES[0]).label in results.labels:
                tuned = best_of(losses_by_rate(results, rule, SIZES[0]))
                axes.plot(RATES[tuned], losses[tuned], look.marker, color=look.colour)
        axes.set_xscale("log", base=2)
        axes.set(title=f"width {size[0]}, {size[1]} layers", xlabel="rate")
    panels[0].set(ylabel="held-out loss (nats)")
    if panels[0].lines:
        panels[0].legend(fontsize=8)
    caption_below(
        figure, f"Markers: the best rate of width {SIZES[0][0]}, {SIZES[0][1]} layers. {caption}"
    )
    return figure


_SETTINGS = [TransferSetting(rule, *size) for size in SIZES for rule in RULES]
_SETTINGS += [OneRateSetting(SPHERE, *SIZES[-1], place=place) for place in (4, 6, 7)]
_SETTINGS.append(TransferSetting(SEARCH, *SIZES[-1]))


EXPERIMENT = Experiment(
    name="transfer",
    title="Does the best rate of a small model serve one of 8 times the width and depth?",
    settings={setting.label: setting for setting in _SETTINGS},
    execute=execute,
    columns=(Column(LOSS, "nat"),),
    claims=(
        Claim(
            f"muP's carried rate costs less than {MATTERS} nats at width 512 with 16 layers",
            _costs_little(MUP),
            control=fails(_costs_little(STANDARD)),
        ),
        Claim(
            "muP needs the decay whose product with the rate stays: the coupled one ends higher",
            _ends_lower(MUP, COUPLED),
            smallest=0.01,
            control=fails(_ends_lower(STANDARD, MUP)),
        ),
        Claim(
            "a long warm-up does what muP's rates do: its carried rate costs as little",
            _costs_little(LONG),
            control=fails(_costs_little(STANDARD)),
        ),
        Claim(
            "carrying muP's rate over ends lower than a search on the large model",
            _ends_lower(MUP, SEARCH),
            smallest=0.01,
            control=fails(_ends_lower(STANDARD, MUP)),
        ),
        Claim(
            f"the hypersphere's carried rate costs less than {MATTERS} nats at width 64 with 16 "
            "layers",
            _costs_little(SPHERE, SIZES[2]),
            control=fails(_costs_little(STANDARD, SIZES[2])),
        ),
        Claim(
            f"muP's carried rate costs less than {MATTERS} nats at width 512 with 2 layers",
            _costs_little(MUP, SIZES[1]),
            control=fails(_costs_little(STANDARD, SIZES[1])),
        ),
    ),
    draw=draw,
    beyond="longer runs, in which the decay has time to act, and larger models; set "
    "`steps` of a `TransferSetting`.",
    minutes=520,
    work=_work,
    report=report,
)
