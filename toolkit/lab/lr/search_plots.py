"""What a search sees in a round: its candidates' losses, and loss against rate.

Artists are made once and moved to the view data.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.ticker import MaxNLocator

from toolkit.figures import ACCENT, FAINT, INK, look
from toolkit.figures.axes import log_ticks
from toolkit.lab.kit.plot import Plot
from toolkit.lab.lr.search_problems import problem
from toolkit.lab.lr.search_rounds import Settings
from toolkit.lab.lr.search_view import SearchView

KNOWN = look("full").colour
PLAN = (0, (3, 2))
BAND, POSTERIOR = "#f0cfdb", "#d5e6f2"
DEVIATIONS = 2  # drawn, each way
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
        self._set_ticks(is_long=False)
        # The axes move too, since every round has its own, and so does the title.
        self.moving(axes.xaxis)
        self.moving(axes.yaxis)
        self._title = self.moving(
            axes.annotate(
                "", (0, 1), (0, 9), xycoords="axes fraction", textcoords="offset points",
                fontsize=11.5, fontweight="bold",
            )
        )  # fmt: skip
        band = axes.fill_between([0.0], [0.0], color=BAND, linewidth=0)
        self._outlook_band: Any = self.moving(band)
        old = LineCollection([], colors=FAINT, linewidths=1.1)
        self._old = self.moving(axes.add_collection(old))
        self.new = self.line(color=ACCENT, linewidth=2.6)
        self._trained = self.line(color=INK, linewidth=1.6)
        self._outlook = self.line(color=ACCENT, linewidth=1.6, linestyle=PLAN)
        self._expected = self.line(color=FAINT, marker="o", linestyle="none")
        self._expected_new = self.line(color=ACCENT, marker="D", linestyle="none")
        legend_below(
            axes,
            {
                "candidates": self._old, "new": self.new, "training kept": self._trained,
                "forecast": self._outlook, "expected at the end": self._expected,
            },
        )  # fmt: skip

    def move(self, view: SearchView) -> None:
        none = np.zeros(0)
        new = [one for one in view.candidates if one.is_new]
        thick = new[0] if len(new) == 1 else None
        shown = [one for one in view.candidates if one is not thick]
        self._old.set_segments(
            [np.stack([np.arange(len(one.losses)), one.losses], 1) for one in shown]
        )
        self._old.set_color([ACCENT if one.is_new else FAINT for one in shown])
        losses = none if thick is None else thick.losses
        self.new.set_data(np.arange(len(losses)), losses)
        self._trained.set_data(np.arange(len(view.trained)), view.trained)
        every = [*(one.losses for one in view.candidates), view.trained]
        longest = max((len(one.losses) for one in view.candidates), default=0)
        expected = np.array([one.expected for one in view.candidates])
        is_long = not view.candidates
        limits = self._show_axes(every, expected, max(view.horizon, *map(len, every), 1), is_long)
        at = np.full(len(expected), float(view.horizon or longest))
        is_new = np.array([one.is_new for one in view.candidates], bool)
        inside = _inside(expected, limits)
        self._expected.set_data(at[~is_new], inside[~is_new])
        self._expected_new.set_data(at[is_new], inside[is_new])
        outlook = view.outlook
        steps, mean = (none, none) if outlook is None else (outlook.steps, outlook.mean)
        spread = none if outlook is None else DEVIATIONS * outlook.deviation
        self._outlook.set_data(steps, mean)
        self._outlook_band.set_data(steps, mean - spread, mean + spread)
        if view.horizon:
            title = f"Stage {view.stage}: loss, and forecast for step {view.horizon:,}"
        elif view.candidates:
            title = f"Stage {view.stage}: annealed probes and their scores"
        else:
            title = "The training so far"
        self._title.set_text(title)

    def _show_axes(
        self, every: list[np.ndarray], expected: np.ndarray, end: int, is_long: bool
    ) -> tuple[float, float]:
        first = max((losses[0] for losses in every if len(losses)), default=1.0)
        top = max(HEADROOM * first, _most(expected))
        values = np.concatenate([*every, expected])
        values = values[np.isfinite(values) & (values < top)]
        low = values.min() if len(values) else 0.0
        limits = _rounded(low - 0.06 * (top - low), top)
        if is_long:
            limits = low / 1.15, first * 1.15
        if is_long != (self.axes.get_yscale() == "log"):
            self.axes.set_yscale("log" if is_long else "linear")
            self._set_ticks(is_long)
        self.axes.set_xlim(-0.02 * end, 1.04 * end)
        self.axes.set_ylim(limits)
        return limits

    def _set_ticks(self, is_long: bool) -> None:
        log_ticks(self.axes.yaxis, 1, 3)
        if not is_long:
            self.axes.yaxis.set_major_locator(MaxNLocator(5))


class LandscapePlot(RoundPlot):
    """Loss against rate: pins, and what the search makes of them."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        axes.set(xscale="log")
        axes.set_xlabel("learning rate", labelpad=2)
        log_ticks(axes.xaxis, 1, 3)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        self.moving(axes.yaxis)
        band = axes.fill_between([1.0], [0.0], color=POSTERIOR, linewidth=0)
        self._band: Any = self.moving(band)
        # The bound is thousands of deviations below: it has a scale of its own.
        own_scale = axes.twinx()
        own_scale.set(ylim=(0, 1), yticks=[])
        own_scale.grid(False)
        own_scale.spines["right"].set_visible(False)
        (bound,) = own_scale.plot([], [], color=INK, linewidth=1.1, linestyle=(0, (1, 1)))
        self._bound = self.moving(bound)
        self._mean = self.line(color=KNOWN, linewidth=1.8)
        bars = LineCollection([], colors=FAINT, linewidths=1.3)
        self._pin_bars = self.moving(axes.add_collection(bars))
        self.pins = [
            self.line(
                color=INK, marker=marker, markersize=5.5, linestyle="none", markerfacecolor=face
            )
            for marker, face in (("o", INK), ("s", "white"), ("v", FAINT))
        ]
        self._new_pins = self.line(color=ACCENT, marker="D", linestyle="none")
        (following,) = own_scale.plot([], [], color=INK, marker="^", markersize=9, linestyle="none")
        self._next = self.moving(following)
        self._chosen = self.moving(own_scale.axvline(1, color=INK, linewidth=1.3, linestyle=PLAN))

    def name(self, view: SearchView) -> None:
        settings = view.settings
        if settings.method == "probe":
            names = {
                "shorter probes": self.pins[0], "longer probes": self.pins[1],
                "new": self._new_pins, "parabola": self._mean,
            }  # fmt: skip
        else:
            names = {"forecast": self.pins[0], "new": self._new_pins, "its mean": self._mean}
        if settings.method != "probe" and settings.proposals == "sequential":
            names[f"mean − {settings.kappa:,.0f} sd, own scale"] = self._bound
        names |= {"tried next": self._next, "trained": self._chosen}
        legend_below(self.axes, names)
        low, high = problem(settings.problem).lr_range
        self.axes.set_title(view.landscape.title)
        # Only probes may go beyond the range.
        beyond = 3.0 if settings.method == "probe" else 1.15
        self.axes.set_xlim(low / beyond, high * beyond)

    def move(self, view: SearchView) -> None:
        land, none = view.landscape, np.zeros(0)
        pins = land.pins[-len(self.pins) :]
        inside = [one.values[~one.is_diverged] for one in pins]
        values = np.concatenate([*inside, none])
        top = _most(values)
        low = values.min() if len(values) else 0.0
        pad = 0.12 * (top - low) or 0.1 * abs(top) or 1.0
        limits = _rounded(low - 2 * pad, top + pad)
        self.axes.set_ylim(limits)
        has_mean = len(land.mean) > 0
        self._mean.set_data(*(land.rates, land.mean) if has_mean else (none, none))
        spread = DEVIATIONS * land.deviation if has_mean and land.deviation is not None else 0.0
        shown = (land.rates, land.mean - spread, land.mean + spread)
        self._band.set_data(*shown if np.ndim(spread) else (none, none, none))
        self._show_pins(pins, limits)
        bound = none if land.bound is None else land.bound
        if len(bound):
            bound = 0.04 + 0.3 * (bound - bound.min()) / (np.ptp(bound) or 1.0)
        self._bound.set_data(land.rates if len(bound) else none, bound)
        self._next.set_data(land.next_rates, np.full(len(land.next_rates), 0.025))
        # Not made invisible, for a legend made then would show no line either.
        self._chosen.set_xdata([np.nan if land.chosen_rate is None else land.chosen_rate] * 2)

    def _show_pins(self, pins: Any, limits: tuple[float, float]) -> None:
        bars, new = [], []
        for line, group in zip(self.pins, [*pins, None, None, None], strict=False):
            if group is None:
                line.set_data([], [])
                continue
            y = _inside(np.where(group.is_diverged, np.inf, group.values), limits)
            line.set_data(group.rates[~group.is_new], y[~group.is_new])
            bars += _error_bars(group.rates, y, DEVIATIONS * group.deviations)
            new += list(zip(group.rates[group.is_new], y[group.is_new], strict=True))
        self._pin_bars.set_segments(bars)
        self._new_pins.set_data(*np.array(new).T if new else ([], []))


def legend_below(axes: Axes, names: Mapping[str, Artist], *, columns: int = 3) -> None:
    """Below the axes, where nothing is drawn over it."""
    axes.legend(
        names.values(), names.keys(), loc="upper left", bbox_to_anchor=(-0.03, -0.17),
        ncols=columns, handlelength=1.6, columnspacing=1, labelspacing=0.3, fontsize=8.5,
        borderaxespad=0,
    )  # fmt: skip


def _error_bars(x: np.ndarray, y: np.ndarray, spread: np.ndarray) -> list[Any]:
    pairs = zip(x, y, spread, strict=True)
    return [[(at, value - d), (at, value + d)] for at, value, d in pairs if d > 0]


def _most(values: np.ndarray) -> float:
    """An upper limit that a few wild values do not move."""
    values = values[np.isfinite(values)]
    if not len(values):
        return 0.0
    values = np.sort(values)
    low, high = values[0], values[-1]
    middle = values[len(values) // 2 if len(values) < 4 else 3 * (len(values) - 1) // 4]
    return float(min(high, low + 4 * (middle - low)))


def _inside(values: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
    """Values, those beyond the limits put on the edge."""
    edge = 0.025 * (limits[1] - limits[0])
    return np.clip(values, limits[0] + edge, limits[1] - edge)


def _rounded(low: float, high: float) -> tuple[float, float]:
    """Limits in coarse steps, so that most rounds of a stage share them."""
    step = 10 ** np.floor(np.log10(max(high - low, 1e-12))) / 5
    return float(np.floor(low / step) * step), float(np.ceil(high / step) * step)
