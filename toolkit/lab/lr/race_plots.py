"""The plots of `RacePanel`: rates and losses of every racer, and where each ends."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from toolkit.figures import ACCENT, FAINT, INK, LOOKS, Look
from toolkit.figures.axes import count_ticks, log_ticks, set_limits
from toolkit.lab.kit.plot import Plot
from toolkit.lab.lr.race_view import RACERS, RaceView, plotted, racers
from toolkit.lab.lr.search_problems import problem

RACER_LOOKS = {
    "yours": Look(ACCENT, "-", "P", ""),
    "best": Look(INK, (0, (1, 1.2)), "*", ""),
    **dict(zip(("linear", "cosine", "wsd", "probe", "robust"), LOOKS.values(), strict=True)),
}


class RacerPlot(Plot):
    """A line for each racer, the hand's last, above all others; the base of three plots."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        self.lines: dict[str, Line2D] = {}
        for name in sorted(RACERS, key=lambda name: name == "yours"):
            look, width = RACER_LOOKS[name], 2.8 if name == "yours" else 1.6
            self.lines[name] = self.line(color=look.colour, linestyle=look.dashes, linewidth=width)


def curves(view: RaceView) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Racer -> evaluations, rates and losses that are drawn, empty for those that have not run."""
    drawn: dict[str, Any] = {name: (np.zeros(0),) * 3 for name in RACERS}
    # Yours is drawn before it runs.
    drawn["yours"] = np.arange(view.steps), view.rates, np.full(view.steps, np.nan)
    return drawn | {lane.name: plotted(lane, view.is_exact) for lane in view.lanes}


class RatePlot(RacerPlot):
    """The learning rates."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_title("Learning rate")
        axes.tick_params(axis="x", labelbottom=False)

    def show(self, view: RaceView) -> None:
        for name, (spent, rates, _) in curves(view).items():
            self.lines[name].set_data(spent, rates)
        set_limits(self.axes, x=(0, view.steps), y=(0, 1.06 * problem(view.problem).lr_range[1]))


class LossPlot(RacerPlot):
    """The losses on the way."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set(yscale="log")
        axes.set_xlabel("gradient evaluations, candidates included", labelpad=2)
        axes.set_ylabel("loss")
        count_ticks(axes.xaxis, 6)
        log_ticks(axes.yaxis, 1, 2, 5, count=5)
        middle = {"ha": "center", "va": "center", "transform": axes.transAxes}
        self.waiting = self.text(0.5, 0.5, color=FAINT, **middle)

    def show(self, view: RaceView) -> None:
        self.waiting.set_text("" if view.lanes else "Nothing has run yet: press Race")
        low, high = [0.1], [1.0]
        for name, (spent, _, losses) in curves(view).items():
            self.lines[name].set_data(spent, losses)
            # Limits by the others: yours may diverge, and moves all the time.
            finite = losses[np.isfinite(losses)]
            if name != "yours" and len(finite):
                low.append(finite.min())
                high.append(finite.max())
        set_limits(self.axes, y=(min(low[1:] or low) / 1.2, max(high[1:] or high) * 1.2))


class EndPlot(RacerPlot):
    """Final losses over that of the reference."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set(xscale="log", ylim=(len(RACERS) - 0.4, -0.6))
        axes.set_yticks(range(len(RACERS)), list(RACERS.values()))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        log_ticks(axes.xaxis, 1, 2, 5, count=5)
        self._dots, self._words = {}, {}
        for row, name in enumerate(RACERS):
            look = RACER_LOOKS[name]
            self._dots[name] = self.line(
                color=look.colour, marker=look.marker, markersize=9, linestyle="none"
            )
            self._words[name] = self.text(1, row - 0.18, fontsize=9, va="bottom", ha="right")

    def show(self, view: RaceView) -> None:
        ratios = {lane.name: view.ratio(lane) for lane in view.lanes}
        others = [r for name, r in ratios.items() if r is not None and name != "yours"]
        worst = max((r for r in others if np.isfinite(r)), default=2.0)
        limits = 0.9 * min([*others, 1.0]), max(1.25 * worst, 1.5)
        set_limits(self.axes, x=limits)
        for row, name in enumerate(RACERS):
            ratio = ratios.get(name)
            if ratio is None:
                self.lines[name].set_data([], [])
                self._dots[name].set_data([], [])
            else:
                inside = np.clip(np.nan_to_num(ratio, nan=np.inf), *limits)
                self.lines[name].set_data([limits[0], inside], [row, row])
                self._dots[name].set_data([inside], [row])
            self._words[name].set_position((limits[1], row - 0.18))
            self._words[name].set_text(_end_in_words(view, name))
            self._words[name].set_color(FAINT if ratio is None else INK)
        title = f"Final loss over {RACERS[view.reference]}"
        if self.axes.get_title(loc="left") != title:
            self.axes.set_title(title)


def _end_in_words(view: RaceView, name: str) -> str:
    if name not in racers(view.problem):
        return "not known"
    lane = view.lane(name)
    if lane is None:
        return "not run yet"
    if not np.isfinite(lane.loss):
        return "diverged"
    ratio = view.ratio(lane)
    return f"{lane.loss:.3g}" + ("" if ratio is None else f"   {ratio:.2f}×")
