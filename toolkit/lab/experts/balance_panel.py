"""A bias that evens the loads of experts without a loss, step by step."""

from collections.abc import Iterator
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from toolkit.figures import ACCENT, FAINT, INK, look
from toolkit.lab.experts.balance_view import RATES, STEPS, BalanceView, balance_view
from toolkit.lab.experts.small_mixture import EXPERTS, LAYERS
from toolkit.lab.experts.tokens_panel import NAMES, TINTS
from toolkit.lab.experts.tokens_view import TRAINED
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Progress

_STRIDE = 10  # steps in a piece of the animation


class BarsPlot(Plot):
    """Loads of all experts with their biases in words, and the loads without."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Loads, and biases above them", grid="y")
        axes.set(xlim=(-0.6, EXPERTS - 0.4), ylim=(0, 3), xlabel="expert")
        axes.set_ylabel("of an even load")
        axes.set_xticks(range(EXPERTS), NAMES)
        axes.tick_params(axis="x", length=0)
        bars = axes.bar(range(EXPERTS), 0, 0.72, color=TINTS, edgecolor=INK, linewidth=0.7)
        self.bars = list(map(self.moving, bars))
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

    def __init__(self, axes: Axes, title: str, of: str, top: float) -> None:
        super().__init__(axes, title=title)
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

    def compute(self, **state: Any) -> BalanceView:
        return balance_view(**state)

    def pieces(self) -> Iterator[Progress]:
        start = self.step if self.step < STEPS else 0
        for step in [*range(start, STEPS, _STRIDE), STEPS]:
            self.change(step=step)
            yield step, STEPS, "steps of the bias"

    def after_piece(self) -> None:
        """Nothing: every piece has shown itself."""

    def plots(self, figure: Figure) -> list[Plot]:
        last = figure.add_axes((0.6, 0.19, 0.38, 0.26))
        last.set_xlabel("step")
        return [
            BarsPlot(figure.add_axes((0.075, 0.19, 0.43, 0.7))),
            StepsPlot(
                figure.add_axes((0.6, 0.63, 0.38, 0.26)),
                "Fullest expert above an even load", "violation", 1.6,
            ),
            StepsPlot(last, "Pairs that go elsewhere", "moved", 0.6),
        ]  # fmt: skip
