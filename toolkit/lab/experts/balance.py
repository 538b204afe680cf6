"""A bias that evens the loads of experts without a loss, step by step."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from matplotlib.axes import Axes

from toolkit.experts import expert_loads, route, updated_choice_bias
from toolkit.figures import ACCENT, FAINT, INK, look
from toolkit.lab.experts.small_mixture import CHOSEN, EXPERTS, LAYERS, TIME, held_out_logits
from toolkit.lab.experts.tokens import NAMES, TINTS, TRAINED
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Data, Progress, View

STEPS = 400
NEAR = 0.25  # above an even load
WINDOWS_PER_STEP = 2
RATES = (1e-3, 3e-3, 1e-2, 3e-2)


class Levelling(NamedTuple):
    """What every step of the bias leads to, before the first step and after each."""

    bias: Float[np.ndarray, "steps experts"]  # [steps + 1, experts]
    # [steps + 1, experts], pairs of the whole text with that bias
    loads: Float[np.ndarray, "steps experts"]
    # [steps + 1], share of the pairs that go to another expert than without a bias
    moved: Float[np.ndarray, "steps"]

    @property
    def violation(self) -> Float[np.ndarray, "steps"]:
        """The fullest expert's load over the mean, minus 1."""
        return self.loads.max(1) / self.loads.mean(1) - 1


@functools.cache
def levelling(model: str, layer: int, rate: float) -> Levelling:
    """All steps for one layer, counted from 1; every step reads the next windows of the text."""
    logits = held_out_logits(model)[layer - 1]
    return Levelling(*map(np.asarray, _levelled(jnp.asarray(logits), jnp.float32(rate))))


@jax.jit
def _levelled(logits: Float[Array, "tokens experts"], rate: Any) -> tuple[Array, Array, Array]:
    each = WINDOWS_PER_STEP * TIME
    batches = logits.reshape(-1, each, EXPERTS)

    def chosen(logits: Array, bias: Array) -> Array:
        return route(logits, CHOSEN, scores="sigmoid", choice_bias=bias).experts

    first = chosen(logits, jnp.zeros(EXPERTS))

    def seen(bias: Array) -> tuple[Array, Array, Array]:
        now = chosen(logits, bias)
        stays = (now[:, :, None] == first[:, None]).any(-1).mean()
        return bias, expert_loads(now, EXPERTS).astype(jnp.float32), 1 - stays

    def step(bias: Array, number: Array) -> tuple[Array, tuple[Array, Array, Array]]:
        loads = expert_loads(chosen(batches[number % len(batches)], bias), EXPERTS)
        return updated_choice_bias(bias, loads.astype(jnp.float32), rate), seen(bias)

    last, found = jax.lax.scan(step, jnp.zeros(EXPERTS), jnp.arange(STEPS))
    bias, loads, moved = (
        jnp.concatenate([all_but_last, end[None]])
        for all_but_last, end in zip(found, seen(last), strict=True)
    )
    return bias, loads, moved


@dataclass(frozen=True)
class BalanceView(View):
    """The loads after some steps of the bias."""

    model: str
    layer: int
    rate: float
    step: int
    of: Levelling

    @property
    def loads(self) -> Float[np.ndarray, "experts"]:
        """Loads of the experts, over an even one."""
        return self.of.loads[self.step] / self.of.loads[self.step].mean()

    @property
    def bias(self) -> Float[np.ndarray, "experts"]:
        """Their biases."""
        return self.of.bias[self.step]

    def data(self) -> Data:
        start = self.of.loads[0] / self.of.loads[0].mean()
        return {
            "expert": [str(expert + 1) for expert in range(EXPERTS)],
            "bias": [*map(float, self.bias)],
            "without bias, of an even load (share)": [*map(float, start)],
            "with it (share)": [*map(float, self.loads)],
        }

    def sentence(self) -> str:
        before, now = 1 + self.of.violation[[0, self.step]]
        within = np.flatnonzero(self.of.violation < NEAR)
        reached = (
            f"It first comes within {NEAR:.0%} of an even load at step {within[0]}."
            if len(within)
            else f"In {STEPS} steps it does not come within {NEAR:.0%} of an even load."
        )
        return (
            f"Layer {self.layer} of the model trained {TRAINED[self.model]}: after {self.step} "
            f"steps of {self.rate:g} the fullest expert has {now:.2f} times an even load, and "
            f"{before:.2f} times without a bias. {self.of.moved[self.step]:.0%} of the pairs go to "
            f"another expert than without it. {reached}"
        )

    def footnote(self) -> str:
        return (
            f"Measured here: a trained router on {len(held_out_logits(self.model)[0]):,} bytes of "
            f"held-out text, {WINDOWS_PER_STEP * TIME} a step. Nothing but the bias changes."
        )


def balance_view(*, model: str, layer: int, rate: float, step: int) -> BalanceView:
    """The loads of a layer, counted from 1, after `step` steps of a bias."""
    return BalanceView(model, layer, rate, step, levelling(model, layer, rate))


_STRIDE = 10  # steps in a piece of the animation


class BarsPlot(Plot):
    """Loads of all experts with their biases in words, and the loads without."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Loads, and biases above them", grid="y")
        axes.set(xlim=(-0.6, EXPERTS - 0.4), ylim=(0, 3), xlabel="expert")
        axes.set_ylabel("of an even load")
        axes.set_xticks(range(EXPERTS), NAMES)
        axes.tick_params(axis="x", length=0)
        look = {"color": TINTS, "edgecolor": INK, "linewidth": 0.7}
        self.bars = self.bars_at(range(EXPERTS), 0.72, **look)
        self.before = self.marks(FAINT, "_", markersize=20, markeredgewidth=2, label="without bias")
        axes.axhline(1, color=INK, linestyle="--", linewidth=1.4, label="even", zorder=5)
        self.biases = [self.text(n, 2.5, ha="center", fontsize=9) for n in range(EXPERTS)]
        axes.legend(loc="upper left", ncols=2, fontsize=9)

    def show(self, view: BalanceView) -> None:
        start = view.of.loads[0] / view.of.loads[0].mean()
        self.before.set_data(range(EXPERTS), start)
        rows = zip(self.bars, self.biases, view.loads, view.bias, strict=True)
        for bar, words, load, bias in rows:
            bar.set_height(load)
            words.set_text(f"{bias:+.2f}")


class StepsPlot(Plot):
    """A share at every step, and the chosen step."""

    def __init__(self, axes: Axes, title: str, of: str, top: float, below: str = "") -> None:
        super().__init__(axes, title=title, xlabel=below)
        self._of = of
        axes.set(xlim=(0, STEPS), ylim=(0, top))
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        self.along = self.line(**look("full" if of == "violation" else "gdn").line)
        self.now = self.line(color=ACCENT, linewidth=1.3)
        self._top = top

    def show(self, view: BalanceView) -> None:
        self.along.set_data(range(STEPS + 1), getattr(view.of, self._of))
        self.now.set_data([view.step] * 2, [0, self._top])


class BalancePanel(Panel):
    """A bias that evens the loads of a trained router's experts without a loss.

    Example:
        >>> panel = BalancePanel(rate=0.01, step=0)
        >>> start = panel.view.loads.max()
        >>> panel.step = 200
        >>> bool(panel.view.loads.max() < start)
        True
    """

    title = "The bias that levels the loads: how fast, and how many tokens does it move?"
    figure_size = (9.6, 4.6)
    has_palette = True
    button = "Play the steps"

    model = Choice("Trained", "plain", {words: name for name, words in TRAINED.items()})
    layer = Number("Layer", 2, low=1, high=LAYERS)
    rate = Choice(
        "Rate", 3e-3, {f"{rate:g}": rate for rate in RATES}, explanation="Added or taken per step"
    )
    step = Number("Step", 60, low=0, high=STEPS, explanation="Steps of the bias so far")

    compute = staticmethod(balance_view)

    def pieces(self) -> Iterator[Progress]:
        start = self.step if self.step < STEPS else 0
        for step in [*range(start, STEPS, _STRIDE), STEPS]:
            self.change(step=step)
            yield step, STEPS, "steps of the bias"

    def after_piece(self) -> None:
        """Nothing: every piece has shown itself."""

    places = (
        (BarsPlot, (0.075, 0.19, 0.43, 0.7)),
        (StepsPlot, (0.6, 0.63, 0.38, 0.26), "Fullest expert above an even load", "violation", 1.6),
        (StepsPlot, (0.6, 0.19, 0.38, 0.26), "Pairs that go elsewhere", "moved", 0.6, "step"),
    )
