"""What a search sees in a round: its candidates' losses, and loss against rate."""

from collections.abc import Mapping

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from toolkit.figures import ACCENT, FAINT, INK, look
from toolkit.figures.axes import log_ticks
from toolkit.lab.kit.plot import Plot
from toolkit.lab.lr.search_rounds import Settings
from toolkit.lab.lr.search_view import SearchView, columns
from toolkit.lab.lr.small_problems import problem

KNOWN = look("full").colour
PLAN = (0, (3, 2))
BAND, POSTERIOR = "#f0cfdb", "#d5e6f2"
DEVIATIONS = 2  # drawn, each way
WIDE = 500  # times the lowest rate: ticks at powers of ten suffice
HEADROOM = 1.25  # times the first loss of a stage


class RoundPlot(Plot):
    """A plot of a round: `name` writes what all rounds of a search share, `move` the rest."""

    _settings: Settings | None = None

    def show(self, view: SearchView) -> None:
        if view.settings != self._settings:
            self._settings = view.settings
            self.name(view)
        self.move(view)

    def name(self, view: SearchView) -> None:
        """Limits and words that are the same in all rounds of a search."""

    def move(self, view: SearchView) -> None:
        """Move everything to a round."""
        raise NotImplementedError


class CandidatePlot(RoundPlot):
    """Loss curves of a stage's candidates, and where each is expected to end."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set_xlabel("step", labelpad=2)
        self._set_scale("linear")
        # The axes move too, since every round has its own, and so does the title.
        self.moving(axes.xaxis)
        self.moving(axes.yaxis)
        self._title = self.moving(axes.set_title(""))
        self._band = self.moving(axes.fill_between([0.0], [0.0], color=BAND, linewidth=0))
        self.curves = self.segments()
        self._trained = self.line(color=INK, linewidth=1.6)
        self._outlook = self.line(color=ACCENT, linewidth=1.6, linestyle=PLAN)
        self._expected = self.marks(FAINT, "o"), self.marks(ACCENT, "D")
        old, new = (
            axes.plot([], [], color=colour, linewidth=width)[0]
            for colour, width in ((FAINT, 1.1), (ACCENT, 2.6))
        )
        legend_below(
            axes,
            {
                "candidates": old, "new": new, "training kept": self._trained,
                "forecast": self._outlook, "expected at the end": self._expected[0],
            },
        )  # fmt: skip

    def move(self, view: SearchView) -> None:
        curves = [candidate.losses for candidate in view.candidates]
        longest = max(map(len, [*curves, view.trained]))
        _, expected, _ = columns(view.candidates)
        limits = self._show_axes([*curves, view.trained], expected, max(view.horizon, longest, 1))
        is_new = np.array([view.is_new(candidate) for candidate in view.candidates], bool)
        self.curves.set(
            segments=[np.stack([np.arange(len(curve)), curve], 1) for curve in curves],
            color=np.where(is_new, ACCENT, FAINT),
            linewidth=np.where(is_new & (is_new.sum() == 1), 2.6, 1.1),
        )
        self._trained.set_data(np.arange(len(view.trained)), view.trained)
        at = np.full(len(expected), float(view.horizon or max(map(len, curves), default=0)))
        for marks, is_of in zip(self._expected, (~is_new, is_new), strict=True):
            marks.set_data(at[is_of], _inside(expected, limits)[is_of])
        steps, mean, deviation = view.outlook
        self._outlook.set_data(steps, mean)
        self._band.set_data(steps, mean - DEVIATIONS * deviation, mean + DEVIATIONS * deviation)
        stage = f"Stage {int(view.taken[-1].before.stage) + 1}"
        if view.horizon:
            title = f"{stage}: loss, and forecast for step {view.horizon:,}"
        else:
            scores = f"{stage}: annealed probes and their scores"
            title = scores if curves else "The training so far"
        self._title.set_text(title)

    def _show_axes(
        self, every: list[np.ndarray], expected: np.ndarray, end: int
    ) -> tuple[float, float]:
        first = max((losses[0] for losses in every if len(losses)), default=1.0)
        top = max(HEADROOM * first, _most(expected))
        values = np.concatenate([*every, expected])
        values = values[np.isfinite(values) & (values < top)]
        low = values.min() if len(values) else 0.0
        limits = _rounded(low - 0.06 * (top - low), top)
        scale = "linear" if len(expected) else "log"
        if scale == "log":  # the whole training
            limits = low / 1.15, first * 1.15
        if scale != self.axes.get_yscale():
            self._set_scale(scale)
        # Not `axes.set`, which has the whole figure drawn anew.
        self.axes.set_xlim(-0.02 * end, 1.04 * end)
        self.axes.set_ylim(limits)
        return limits

    def _set_scale(self, scale: str) -> None:
        self.axes.set_yscale(scale)
        log_ticks(self.axes.yaxis, 1, 3)
        if scale == "linear":
            self.axes.yaxis.set_major_locator(MaxNLocator(5))


class LandscapePlot(RoundPlot):
    """Loss against rate: the tried rates, and the search's fit to them."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, xscale="log")
        axes.set_xlabel("learning rate", labelpad=2)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        self.moving(axes.yaxis)
        self._band = self.moving(axes.fill_between([1.0], [0.0], color=POSTERIOR, linewidth=0))
        # The bound is thousands of deviations below: it has a scale of its own.
        own_scale = axes.twinx()
        own_scale.set(ylim=(0, 1), yticks=[])
        own_scale.grid(False)
        own_scale.spines["right"].set_visible(False)
        (bound,) = own_scale.plot([], [], color=INK, linewidth=1.1, linestyle=(0, (1, 1)))
        self._bound = self.moving(bound)
        self._mean = self.line(color=KNOWN, linewidth=1.8)
        self._bars = self.segments(colors=FAINT, linewidths=1.3)
        self.pins = [
            self.marks(INK, marker, markersize=5.5, markerfacecolor=face)
            for marker, face in (("o", INK), ("s", "white"), ("v", FAINT))
        ]
        self._new = self.marks(ACCENT, "D")
        (following,) = own_scale.plot([], [], color=INK, marker="^", markersize=9, linestyle="none")
        self._next = self.moving(following)
        self._chosen = self.moving(own_scale.axvline(1, color=INK, linewidth=1.3, linestyle=PLAN))

    def name(self, view: SearchView) -> None:
        settings = view.settings
        names = {"forecast": self.pins[0], "new": self._new, "its mean": self._mean}
        if settings.method == "probe":
            names = {"probes": self.pins[0], "new": self._new, "parabola": self._mean}
        elif settings.proposals == "sequential":
            names[f"mean − {settings.kappa:,.0f} sd, own scale"] = self._bound
        legend_below(self.axes, {**names, "tried next": self._next, "trained": self._chosen})
        low, high = problem(settings.problem).lr_range
        self.axes.set_title(view.landscape.title)
        # Only probes may go beyond the range.
        beyond = 3.0 if settings.method == "probe" else 1.15
        self.axes.set_xlim(low / beyond, high * beyond)
        log_ticks(self.axes.xaxis, *((1, 3) if high < WIDE * low else (1,)))

    def move(self, view: SearchView) -> None:
        land = view.landscape
        pins = land.pins[-len(self.pins) :]
        rates, values, deviations = columns(sum(pins, ()))
        finite = values[np.isfinite(values)]
        top, low = _most(finite), finite.min(initial=np.inf) if len(finite) else 0.0
        pad = 0.12 * (top - low) or 0.1 * abs(top) or 1.0
        limits = _rounded(low - 2 * pad, top + pad)
        self.axes.set_ylim(limits)
        self._mean.set_data(land.rates, land.mean)
        spread, count = DEVIATIONS * land.deviation, len(land.deviation)
        middle = land.mean[:count]
        self._band.set_data(land.rates[:count], middle - spread, middle + spread)
        for marks, group in zip(self.pins, [*pins, (), (), ()], strict=False):
            x, y, _ = columns(tuple(pin for pin in group if not view.is_new(pin)))
            marks.set_data(x, _inside(y, limits))
        x, y, _ = columns(tuple(pin for group in pins for pin in group if view.is_new(pin)))
        self._new.set_data(x, _inside(y, limits))
        bars = zip(rates, _inside(values, limits), DEVIATIONS * deviations, strict=True)
        self._bars.set_segments([[(x, y - d), (x, y + d)] for x, y, d in bars if d > 0])
        bound = land.bound
        if len(bound):
            bound = 0.04 + 0.3 * (bound - bound.min()) / (np.ptp(bound) or 1.0)
        self._bound.set_data(land.rates[: len(bound)], bound)
        self._next.set_data(land.next_rates, np.full(len(land.next_rates), 0.025))
        # Not made invisible, for a legend made then would show no line either.
        self._chosen.set_xdata([np.nan if land.chosen_rate is None else land.chosen_rate] * 2)


def legend_below(axes: Axes, names: Mapping[str, Artist], *, columns: int = 3) -> None:
    """Below the axes, where nothing is drawn over it."""
    axes.legend(
        names.values(), names.keys(), loc="upper left", bbox_to_anchor=(-0.03, -0.195),
        ncols=columns, handlelength=1.6, columnspacing=1, labelspacing=0.3, fontsize=8.5,
        borderaxespad=0,
    )  # fmt: skip


def _most(values: np.ndarray) -> float:
    """An upper limit that a few wild values do not move."""
    values = np.sort(values[np.isfinite(values)])
    if not len(values):
        return 0.0
    low, high = values[0], values[-1]
    middle = values[len(values) // 2 if len(values) < 4 else 3 * (len(values) - 1) // 4]
    return float(min(high, low + 4 * (middle - low)))


def _inside(values: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
    """Values, those beyond the limits put on the edge, as are those of runs that diverged."""
    edge = 0.025 * (limits[1] - limits[0])
    return np.clip(np.nan_to_num(values, nan=np.inf), limits[0] + edge, limits[1] - edge)


def _rounded(low: float, high: float) -> tuple[float, float]:
    """Limits in coarse steps, so that most rounds of a stage share them."""
    step = 10 ** np.floor(np.log10(max(high - low, 1e-12))) / 5
    return float(np.floor(low / step) * step), float(np.ceil(high / step) * step)
