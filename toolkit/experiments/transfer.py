"""The best rate of a small model on a wider and deeper one: which rules carry it over?

A rule sets rates, decays, initial weights and residual branches by width and depth. Its rate is
tuned on the small model; the excess is what that rate costs on a large one, seed by seed, against
the best rate of the same rule there:

    excess = loss(rate tuned at 64 x 2) - min over rates of loss(rate)

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

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array
from optax.contrib import MuonDimensionNumbers

from toolkit.experiments.kit.chart import LOOKS, caption_below
from toolkit.experiments.kit.experiment import Column, Experiment, Workspace
from toolkit.experiments.kit.results import Results
from toolkit.experiments.kit.verdicts import LEAST_SEEDS, Claim, Margins, fails, judging
from toolkit.experiments.lr.sources import (
    Workload,
    characters,
    cross_entropy,
    draw_windows,
    windows,
)
from toolkit.experiments.lr.training import LaneTrainer
from toolkit.lr import Transfer, search, shape_rates, transfer, transferred_weights

STEPS, BATCH, SEQUENCE = 300, 8, 64
DECAY = 0.3  # times the rate; over a run it takes most of a weight at the higher rates
RATES = tuple(2.0**power for power in range(-12, -3))
SIZES = ((64, 2), (512, 2), (64, 16), (512, 16))  # width, layers; the first is tuned
HEAD = 32
WARMUP, LONG_WARMUP = 0.1, 0.5
HELD_OUT = 256  # windows
MATTERS = 0.05  # nats per character, of some 2
STANDARD, MUP, COUPLED, LONG = "standard", "muP", "muP, coupled", "long warm-up"
SPHERE, SEARCH = "hypersphere", "search"
RULES = (STANDARD, MUP, COUPLED, LONG, SPHERE)
LOSSES, LOSS, PLACES = "loss by rate", "loss", "places of these rates"
# At the large size two seeds tried all rates. All rules are tuned at the sixth; the others try that
# and, for the rule that may keep it, its neighbours, for those that do not, the best of all.
TRIED = {
    (MUP, SIZES[-1]): (4, 5, 6),
    (COUPLED, SIZES[-1]): (4, 5, 6),
    (STANDARD, SIZES[-1]): (2, 5),
    (LONG, SIZES[-1]): (3, 5),
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


def execute(setting: TransferSetting, seed: int, workspace: Workspace) -> dict[str, Any]:
    """Losses on held-out text, of the rates tried in one program; or of the searched one."""
    trainer = _trainer(setting.rule, setting.width, setting.layers)
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
    places = _tried(setting)
    rates = np.take(RATES, places)
    table = np.multiply.outer(rates, shape_rates("linear", steps, warmup)).astype(np.float32)
    lanes, _ = trainer.train(
        trainer.init([seed], len(rates)),
        [seed],
        table[None],
        lambda step: workspace.progress(step / steps),
    )
    losses = trainer.evaluate(lanes, problem.test)[0]
    # A run that diverged is worth no more than guessing characters alike.
    worst = float(np.log(problem.test.max() + 1))
    losses = np.where(np.isfinite(losses), np.minimum(losses, worst), worst)
    return {LOSSES: losses, LOSS: float(losses.min()), PLACES: places}


def _tried(setting: TransferSetting) -> Sequence[int]:
    """Places in `RATES`."""
    return TRIED.get((setting.rule, (setting.width, setting.layers)), range(len(RATES)))


@functools.lru_cache(maxsize=1)
def _trainer(rule: str, width: int, layers: int) -> LaneTrainer:
    """One model and rule; a rate multiplies the optimiser's updates."""
    text, vocabulary, sha256 = characters()
    cut = windows(text, SEQUENCE)
    small = _weights(_config(SIZES[0][0], layers, vocabulary), jax.random.key(0))
    shapes = jax.eval_shape(lambda: _weights(_config(width, layers, vocabulary), jax.random.key(0)))
    is_scaled = rule in (MUP, COUPLED)
    moved = transfer(small, shapes, width=width / SIZES[0][0], depth=layers / SIZES[0][1])
    changes = {"head_scale": moved.logits} if is_scaled else {}
    if is_scaled or rule == SPHERE:
        changes["residual_scale"] = moved.residual
    config = _config(width, layers, vocabulary, **changes)
    model = _abstract(config)

    def init(key: Array) -> Any:
        weights = _weights(config, key)
        own = _weights(_config(SIZES[0][0], layers, vocabulary), key)
        return transferred_weights(own, weights) if is_scaled else weights

    norms = jax.tree.map(jnp.linalg.norm, init(jax.random.key(0))) if rule == SPHERE else None

    def loss(params: Any, batch: Array) -> Array:
        if rule == SPHERE:
            params = jax.tree.map(_on_sphere, params, moved.roles, norms)
        graph, state = model
        state = jax.tree.map(lambda x: x, state)
        nnx.replace_by_pure_dict(state, params)
        return cross_entropy(nnx.merge(graph, state)(batch[:, :-1]), batch[:, 1:])

    problem = Workload(
        "transfer", "characters", BATCH, init, loss, cut["training"],
        functools.partial(draw_windows, length=SEQUENCE, batch_size=BATCH),
        cut["validation"][:HELD_OUT], cut["test"][:HELD_OUT], sha256,
    )  # fmt: skip
    return LaneTrainer(problem, _optimizer(rule, moved))


def _config(width: int, layers: int, vocabulary: int, **changes: float) -> Any:
    from toolkit.looped import LoopedConfig

    return LoopedConfig.tiny(
        " ".join(["full"] * layers), loops=1, vocabulary=vocabulary, width=width,
        heads=width // HEAD, feed_forward=2 * width, residual_gate=False,
        embedding_std=0.1, **changes,
    )  # fmt: skip


def _abstract(config: Any) -> tuple[Any, Any]:
    from toolkit.looped import LoopedLM

    return nnx.split(nnx.eval_shape(lambda: LoopedLM(config, rngs=nnx.Rngs(0))))


def _weights(config: Any, key: Array) -> Any:
    from toolkit.looped import LoopedLM

    return nnx.to_pure_dict(nnx.split(LoopedLM(config, rngs=nnx.Rngs(key)))[1])


def _on_sphere(weight: Array, role: str, norm: Array) -> Array:
    return weight * norm / jnp.linalg.norm(weight) if role == "hidden" else weight


def _optimizer(rule: str, moved: Transfer) -> optax.GradientTransformation:
    """With rate 1, as for this size."""
    if rule == SPHERE:
        # A step turns a matrix by the angle `rate`, whatever its size.
        # Muon takes the axes of all weights by default, and here some are another group's.
        every = lambda updates: jax.tree.map(lambda _: MuonDimensionNumbers(), updates)  # noqa: E731
        muon = optax.contrib.scale_by_muon(weight_dimension_numbers=every)
        turning = optax.chain(muon, optax.stateless(_as_long_as_weights))
        parts = {role: optax.scale_by_adam() for role in ("fixed", "input", "output")}
        groups = optax.partition({**parts, "hidden": turning}, moved.roles)
        return optax.chain(groups, optax.scale(-1.0))
    if rule in (MUP, COUPLED):
        adam = optax.scale_by_adam(eps=1e-8 * moved.epsilon)
        decay = moved.add_decayed_weights(DECAY)
        if rule == COUPLED:
            decay = optax.add_decayed_weights(DECAY)
        return optax.chain(adam, decay, moved.scale_rates(), optax.scale(-1.0))
    return optax.adamw(1.0, weight_decay=DECAY)


def _as_long_as_weights(updates: Any, params: Any) -> Any:
    return jax.tree.map(
        lambda u, w: u * jnp.linalg.norm(w) / (jnp.linalg.norm(u) + 1e-12), updates, params
    )


def losses_by_rate(results: Results, rule: str, size: tuple[int, int]) -> np.ndarray:
    """Losses [seeds, rates], NaN for those not tried."""
    label = TransferSetting(rule, *size).label
    rows = np.full((len(results.samples(label, LOSSES)), len(RATES)), np.nan)
    for row, (_, outcome) in zip(rows, sorted(results.outcomes[label].items()), strict=True):
        # Runs of all rates do not say which.
        row[np.asarray(outcome.get(PLACES, range(len(RATES))), int)] = outcome[LOSSES]
    return rows


def best_of(losses: np.ndarray) -> int:
    """The place of the best of the rates that all seeds tried."""
    return int(np.nanargmin(losses.mean(0)))


def excess(results: Results, rule: str, size: tuple[int, int]) -> np.ndarray:
    """What the rate tuned on the small model costs on this one, seed by seed, in nats."""
    tuned = best_of(losses_by_rate(results, rule, SIZES[0]))
    losses = losses_by_rate(results, rule, size)
    return losses[:, tuned] - losses[:, best_of(losses)]


def carried(results: Results, rule: str, size: tuple[int, int]) -> np.ndarray:
    """Losses at the rate tuned on the small model; of the search, its own."""
    if rule == SEARCH:
        return np.array(results.samples(TransferSetting(rule, *size).label, LOSS))
    tuned = best_of(losses_by_rate(results, rule, SIZES[0]))
    return losses_by_rate(results, rule, size)[:, tuned]


@judging
def _costs_little(results: Results, rule: str) -> Margins:
    """Whether the excess on the largest model is below what matters."""
    found = excess(results, rule, SIZES[-1])
    return MATTERS - found, f"excess of {rule}: " + " ".join(f"{x:.3f}" for x in found)


@judging
def _ends_lower(results: Results, rule: str, rival: str) -> Margins:
    """Whether a rule's carried rate ends at a lower loss than another's."""
    both = [carried(results, name, SIZES[-1]) for name in (rule, rival)]
    words = ", ".join(
        f"{name} {loss.mean():.3f}" for name, loss in zip((rule, rival), both, strict=True)
    )
    paired = min(map(len, both))
    return both[1][:paired] - both[0][:paired], f"loss at the carried rate: {words}"


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
                cost, found = excess(results, rule, size), carried(results, rule, size).mean()
                spread = cost.std(ddof=1) if len(cost) > 1 else 0.0
                row += f"{found:>10.3f}{cost.mean():>10.3f} +-{spread:.3f}"
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
    ),
    draw=draw,
    beyond="longer runs, in which the decay has time to act, and larger models; set "
    "`steps` of a `TransferSetting`.",
    minutes=3000,
    work=lambda setting: setting.width**2 * setting.layers * setting.steps * len(_tried(setting)),
    report=report,
    seeds_together=LEAST_SEEDS,
)
