"""The plots of `RacePanel`: rates and losses of every racer, and where each ends."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from toolkit.figures import ACCENT, FAINT, INK, LOOKS, Look
from toolkit.figures.axes import count_ticks, few_log_ticks, set_limits
from toolkit.lab.kit.plot import Plot
from toolkit.lab.lr.race_view import RACERS, RaceView, racers
from toolkit.lab.lr.search_problems import problem

RACER_LOOKS = {
    "yours": Look(ACCENT, "-", "P", ""),
    "best": Look(INK, (0, (1, 1.2)), "*", ""),
    **dict(zip(("linear", "cosine", "wsd", "probe", "robust"), LOOKS.values(), strict=True)),
}


class RacerPlot(Plot):
    """A line for each racer, the hand's last, above all others; the base of three plots."""

    def __init__(self, axes: Axes, **settings: Any) -> None:
        super().__init__(axes, **settings)
        self.lines: dict[str, Line2D] = {}
        for name in sorted(RACERS, key=lambda name: name == "yours"):
            look, width = RACER_LOOKS[name], 2.8 if name == "yours" else 1.6
            self.lines[name] = self.line(color=look.colour, linestyle=look.dashes, linewidth=width)

    def show_curves(self, view: RaceView, row: int) -> None:
        """Rates (row 1) or losses (row 2) over the evaluations."""
        for name, line in self.lines.items():
            curve = view.curves.get(name, [[], [], []])
            line.set_data(curve[0], curve[row])


class RatePlot(RacerPlot):
    """The learning rates."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Learning rate")
        axes.tick_params(axis="x", labelbottom=False)

    def show(self, view: RaceView) -> None:
        self.show_curves(view, 1)
        set_limits(self.axes, x=(0, view.steps), y=(0, 1.06 * problem(view.problem).lr_range[1]))


class LossPlot(RacerPlot):
    """The losses on the way."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, yscale="log", ylabel="loss")
        axes.set_xlabel("gradient evaluations, candidates included", labelpad=2)
        count_ticks(axes.xaxis, 6)
        middle = {"ha": "center", "va": "center", "transform": axes.transAxes}
        self.waiting = self.text(0.5, 0.5, color=FAINT, **middle)

    def show(self, view: RaceView) -> None:
        self.waiting.set_text("" if view.runs else "Nothing has run yet: press Race")
        self.show_curves(view, 2)
        # Limits by the others: yours may diverge, and moves all the time.
        others = [losses for name, (_, _, losses) in view.curves.items() if name != "yours"]
        finite = np.concatenate([[], *others])
        finite = finite[np.isfinite(finite)]
        low, high = (finite.min(), finite.max()) if len(finite) else (0.1, 1.0)
        if set_limits(self.axes, y=(low / 1.2, high * 1.2)):
            few_log_ticks(self.axes.yaxis, low, high)


class EndPlot(RacerPlot):
    """Final losses over that of the reference."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, xscale="log", ylim=(len(RACERS) - 0.4, -0.6))
        self.name_rows([*RACERS.values()])
        axes.spines["left"].set_visible(False)
        self._dots, self._words = {}, {}
        for row, (name, look) in enumerate((name, RACER_LOOKS[name]) for name in RACERS):
            self._dots[name] = self.marks(look.colour, look.marker, markersize=9, clip_on=False)
            self._words[name] = self.text(1, row - 0.18, fontsize=9, va="bottom", ha="right")

    def show(self, view: RaceView) -> None:
        ratios = {name: np.nan_to_num(view.ratio(name) or np.nan, nan=np.inf) for name in view.runs}
        others = [r for name, r in ratios.items() if np.isfinite(r) and name != "yours"]
        low, high = 0.9 * min(others, default=1.0), max(1.25 * max(others, default=2.0), 1.5)
        if set_limits(self.axes, x=(low, high)):
            few_log_ticks(self.axes.xaxis, low, high)
        for row, (name, words) in enumerate(self._words.items()):
            has_ratio = view.ratio(name) is not None
            end = [np.clip(ratios[name], low, high)] if has_ratio else []
            self.lines[name].set_data([low, *end], [row, *[row] * len(end)])
            self._dots[name].set_data(end, [row] * len(end))
            words.set(position=(high, row - 0.18), text=_end_in_words(view, name))
            words.set_color(INK if has_ratio else FAINT)
        title = f"Final loss over {RACERS[view.reference]}"
        if self.axes.get_title(loc="left") != title:
            self.axes.set_title(title)


def _end_in_words(view: RaceView, name: str) -> str:
    if name not in racers(view.problem):
        return "not known"
    if name not in view.runs:
        return "not run yet"
    loss, ratio = view.runs[name].loss, view.ratio(name)
    if not np.isfinite(loss):
        return "diverged"
    return f"{loss:.3g}" + ("" if ratio is None else f"   {ratio:.2f}×")
