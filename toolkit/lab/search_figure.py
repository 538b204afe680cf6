"""The four plots of a round of a search: artists made once, and moved to the view data."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from toolkit.lab.figures import ACCENT, FAINT, INK, look
from toolkit.lab.search_problems import problem
from toolkit.lab.search_rounds import Settings
from toolkit.lab.search_view import SearchView

KNOWN = look("full").colour
PLAN = (0, (3, 2))
BAND = "#f0cfdb"
LOSSES = 4  # at the start, now, tuned linear, best
MANY_TICKS = 30  # times the lowest: powers of ten suffice
DEVIATIONS = 2  # drawn, each way
HEADROOM = 1.25  # times the first loss of a stage
NEARLY = 0.97  # of the run: the last rates before zero need no room


class SearchFigure:
    """Candidates, loss against rate, schedule and ledger of one round.

    Attributes:
        curves, rates, schedule, ledger, losses: axes.
    """

    def __init__(self, figure: Figure) -> None:
        grid = figure.add_gridspec(
            2, 2, left=0.085, right=0.97, top=0.95, bottom=0.155, wspace=0.2, hspace=0.5
        )
        self.curves, self.rates, self.schedule = (
            figure.add_subplot(grid[place]) for place in ((0, 0), (0, 1), (1, 0))
        )
        below = grid[1, 1].subgridspec(2, 1, height_ratios=(0.5, 1), hspace=0.62)
        self.ledger, self.losses = (figure.add_subplot(below[row]) for row in range(2))
        for axes in (self.ledger, self.losses):  # room for the names beside the losses
            box = axes.get_position()
            axes.set_position((box.x0 + 0.045, box.y0, box.width - 0.045, box.height))
        self._settings: Settings | None = None
        self._build_curves()
        self._build_rates()
        self._build_schedule()
        self._build_ledger()
        self._source = figure.text(0.085, 0.012, "", fontsize=9)

    def artists(self) -> list[Artist]:
        """What moves, lowest first."""
        return [
            # These axes change with every round: they move, so that the rest may stay.
            *(self.curves.xaxis, self.curves.yaxis, self.rates.yaxis, self._title),
            *(self._outlook_band, self._old, self._new, self._trained, self._outlook),
            *(self._expected, self._expected_new),
            *(self._band, self._bound, self._mean, self._pin_bars, *self._pins, self._new_pins),
            *(self._next, self._chosen),
            *(self._searched, self._tried, self._best, self._planned, self._done),
            *self._bars, *self._bar_words, self._depth, *self._dots, *self._dot_words,
        ]  # fmt: skip

    def _build_curves(self) -> None:
        axes = self.curves
        # Moves, as a title of the axes would not.
        self._title = axes.annotate(
            "", (0, 1), (0, 9), xycoords="axes fraction", textcoords="offset points",
            fontsize=11.5, fontweight="bold",
        )  # fmt: skip
        axes.set_xlabel("step", labelpad=2)
        self._old = LineCollection([], colors=FAINT, linewidths=1.1)
        axes.add_collection(self._old)
        (self._new,) = axes.plot([], [], color=ACCENT, linewidth=2.6)
        (self._trained,) = axes.plot([], [], color=INK, linewidth=1.6)
        (self._outlook,) = axes.plot([], [], color=ACCENT, linewidth=1.6, linestyle=PLAN)
        self._outlook_band = axes.fill_between([0.0], [0.0], color=BAND, linewidth=0)
        (self._expected,) = axes.plot([], [], color=FAINT, marker="o", linestyle="none")
        (self._expected_new,) = axes.plot([], [], color=ACCENT, marker="D", linestyle="none")
        _legend(
            axes,
            {
                "candidates": self._old, "new": self._new, "training kept": self._trained,
                "forecast": self._outlook, "expected at the end": self._expected,
            },
        )  # fmt: skip

    def _build_rates(self) -> None:
        axes = self.rates
        axes.set(xscale="log")
        axes.set_xlabel("learning rate", labelpad=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(MaxNLocator(5))
        self._band = axes.fill_between([1.0], [0.0], color="#d5e6f2", linewidth=0)
        (self._mean,) = axes.plot([], [], color=KNOWN, linewidth=1.8)
        # The bound is thousands of deviations below: it has a scale of its own.
        self._own_scale = axes.twinx()
        self._own_scale.set(ylim=(0, 1), yticks=[])
        self._own_scale.grid(False)
        self._own_scale.spines["right"].set_visible(False)
        (self._bound,) = self._own_scale.plot(
            [], [], color=INK, linewidth=1.1, linestyle=(0, (1, 1))
        )
        (self._next,) = self._own_scale.plot(
            [], [], color=INK, marker="^", markersize=9, linestyle="none"
        )
        self._chosen = self._own_scale.axvline(1, color=INK, linewidth=1.3, linestyle=PLAN)
        self._pin_bars = LineCollection([], colors=FAINT, linewidths=1.3)
        axes.add_collection(self._pin_bars)
        self._pins = [
            axes.plot(
                [], [], color=INK, marker=marker, markersize=5.5, linestyle="none",
                markerfacecolor=face,
            )[0]
            for marker, face in (("o", INK), ("s", "white"), ("v", FAINT))
        ]  # fmt: skip
        (self._new_pins,) = axes.plot([], [], color=ACCENT, marker="D", linestyle="none")

    def _build_schedule(self) -> None:
        axes = self.schedule
        axes.set(yscale="log")
        axes.set_title("The schedule so far")
        axes.set_xlabel("gradient evaluations, candidates included", labelpad=2)
        axes.set_ylabel("learning rate", labelpad=1)
        axes.yaxis.set_major_locator(LogLocator(numticks=8))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        self._searched = PolyCollection([], facecolor="#e6eaee", linewidth=0)
        axes.add_collection(self._searched)
        (self._tried,) = axes.plot(
            [], [], color=FAINT, marker=".", markersize=3.5, linestyle="none"
        )
        (self._best,) = axes.plot([], [], color=KNOWN, linewidth=1.5, linestyle=(0, (1, 1.2)))
        (self._done,) = axes.plot([], [], color=INK, linewidth=2.4)
        (self._planned,) = axes.plot([], [], color=ACCENT, linewidth=1.6, linestyle=PLAN)

    def _build_ledger(self) -> None:
        axes = self.ledger
        axes.set(ylim=(-0.5, 0.5), yticks=[])
        axes.grid(False)
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        looks = ((FAINT, "///"), (INK, ""), ("white", ""))
        self._bars = [
            axes.barh(0, 0, 0.62, color=colour, edgecolor="white" if hatch else INK, hatch=hatch)[0]
            for colour, hatch in looks
        ]
        self._bar_words = [
            axes.text(0, 0, "", ha="center", va="center", fontsize=8.8, fontweight="bold", bbox=box)
            for box in ({"facecolor": "white", "edgecolor": "none", "pad": 1.5}, None, None)
        ]
        self._bar_words[1].set_color("white")
        self._depth = axes.text(
            1, 1.06, "", ha="right", va="bottom", fontsize=9, transform=axes.transAxes
        )
        axes.set_title("Evaluations")
        self.losses.set_title("Loss")
        axes = self.losses
        axes.set(xscale="log", ylim=(LOSSES - 0.45, -0.55))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        self._dots = [
            axes.plot([], [], color=colour, marker=marker, markersize=8, linestyle="none")[0]
            for colour, marker in ((FAINT, "o"), (ACCENT, "D"), (KNOWN, "s"), (KNOWN, "*"))
        ]
        self._dot_words = [axes.text(1, 0, "", va="center", fontsize=9) for _ in range(LOSSES)]

    def show(self, view: SearchView) -> bool:
        """Move everything to the view data.

        Args:
            view: a round.

        Returns:
            Whether limits, ticks or words changed, so that the background is to be drawn again.

        Cost:
            A few milliseconds.
        """
        is_another, self._settings = view.settings != self._settings, view.settings
        if is_another:
            self._name(view)
        self._show_curves(view)
        self._show_rates(view)
        self._show_schedule(view)
        self._show_ledger(view)
        return is_another

    def _name(self, view: SearchView) -> None:
        """Limits and words that are the same in all rounds of a search."""
        settings = view.settings
        self._source.set_text(
            f"Losses: {view.provenance}. Known schedules: found beforehand. Red: new in this "
            "round. Bars and bands: two standard\ndeviations. Marks on an edge: beyond the plot."
        )
        if settings.method == "probe":
            names = {
                "shorter probes": self._pins[0], "longer probes": self._pins[1],
                "new": self._new_pins, "parabola": self._mean,
            }  # fmt: skip
        else:
            names = {"forecast": self._pins[0], "new": self._new_pins, "its mean": self._mean}
        if settings.method != "probe" and settings.proposals == "sequential":
            names[f"mean − {settings.kappa:,.0f} sd, own scale"] = self._bound
        names |= {"tried next": self._next, "trained": self._chosen}
        _legend(self.rates, names)
        low, high = problem(settings.problem).interval
        self.rates.set_title(view.landscape.title)
        # Only probes may go beyond the interval.
        beyond = 3.0 if settings.method == "probe" else 1.15
        self.rates.set_xlim(low / beyond, high * beyond)
        lowest = min(low, view.best[int(NEARLY * settings.budget)]) / 1.5
        self.schedule.set(xlim=(0, settings.budget), ylim=(lowest, high * 1.8))
        best = "best there is" if view.best_loss is not None else "tuned linear decay"
        names = {"trained": self._done, "planned": self._planned, best: self._best}
        _legend(self.schedule, {**names, "candidates": self._searched}, columns=4)
        self.ledger.set_xlim(0, settings.budget)
        known = [view.start_loss, view.linear_loss, view.best_loss or view.linear_loss]
        lowest, highest = min(known) / 1.25, max(known) * 2.2
        self.losses.set_xlim(lowest, highest)
        parts = (1,) if highest > MANY_TICKS * lowest else (1, 2, 5)
        self.losses.xaxis.set_major_locator(LogLocator(subs=parts, numticks=6))
        last = "best there is" if view.best_loss is not None else "best: not known"
        names = ["at the start", "now", "tuned linear", last]
        self.losses.set_yticks(range(len(names)), names, fontsize=9)

    def _show_curves(self, view: SearchView) -> None:
        axes, old = self.curves, [one for one in view.candidates if not one.is_new]
        new = [one for one in view.candidates if one.is_new]
        is_one = len(new) == 1
        shown = old if is_one else view.candidates
        self._old.set_segments(
            [np.stack([np.arange(len(one.losses)), one.losses], 1) for one in shown]
        )
        self._old.set_color(FAINT if is_one or not new else ACCENT)
        losses = new[0].losses if is_one else np.zeros(0)
        self._new.set_data(np.arange(len(losses)), losses)
        self._trained.set_data(np.arange(len(view.trained)), view.trained)
        longest = max((len(one.losses) for one in view.candidates), default=0)
        end = max(view.horizon, longest, len(view.trained), 1)
        every = [*(one.losses for one in view.candidates), view.trained]
        first = max((one[0] for one in every if len(one)), default=1.0)
        expected = np.array([one.expected for one in view.candidates])
        values = np.concatenate([*every, expected])
        top = max(HEADROOM * first, _most(expected))
        values = values[np.isfinite(values) & (values < top)]
        low = values.min() if len(values) else 0.0
        limits = _rounded(low - 0.06 * (top - low), top)
        is_long = not view.candidates
        if is_long:
            limits = low / 1.15, first * 1.15
        axes.set(xlim=(-0.02 * end, 1.04 * end), yscale="log" if is_long else "linear")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)) if is_long else MaxNLocator(5))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(limits)
        at = np.full(len(expected), float(view.horizon or longest))
        is_new = np.array([one.is_new for one in view.candidates], bool)
        inside = _inside(expected, limits)
        self._expected.set_data(at[~is_new], inside[~is_new])
        self._expected_new.set_data(at[is_new], inside[is_new])
        self._show_outlook(view)
        if view.horizon:
            title = f"Stage {view.stage}: loss, and forecast for step {view.horizon:,}"
        elif view.candidates:
            title = f"Stage {view.stage}: annealed probes and their scores"
        else:
            title = "The training so far"
        self._title.set_text(title)

    def _show_outlook(self, view: SearchView) -> None:
        outlook = view.outlook
        none = np.zeros(0)
        steps, mean, spread = (
            (none, none, none)
            if outlook is None
            else (outlook.steps, outlook.mean, DEVIATIONS * outlook.deviation)
        )
        self._outlook.set_data(steps, mean)
        self._outlook_band.set_data(steps, mean - spread, mean + spread)  # pyright: ignore

    def _show_rates(self, view: SearchView) -> None:
        axes, land = self.rates, view.landscape
        none = np.zeros(0)
        pins = land.pins[-len(self._pins) :]
        inside = [one.values[~one.is_diverged] for one in pins]
        values = np.concatenate([*inside, none])
        top = _most(values)
        low = values.min() if len(values) else 0.0
        pad = 0.12 * (top - low) or 0.1 * abs(top) or 1.0
        limits = _rounded(low - 2 * pad, top + pad)
        axes.set_ylim(limits)
        has_mean = len(land.mean) > 0
        self._mean.set_data(*(land.rates, land.mean) if has_mean else (none, none))
        spread = DEVIATIONS * land.deviation if has_mean and land.deviation is not None else 0.0
        shown = (land.rates, land.mean - spread, land.mean + spread)
        self._band.set_data(*shown if np.ndim(spread) else (none, none, none))  # pyright: ignore
        self._show_pins(pins, limits)
        bound = none if land.bound is None else land.bound
        if len(bound):
            bound = 0.04 + 0.3 * (bound - bound.min()) / (np.ptp(bound) or 1.0)
        self._bound.set_data(land.rates if len(bound) else none, bound)
        self._next.set_data(land.next_rates, np.full(len(land.next_rates), 0.025))
        self._chosen.set_visible(land.chosen_rate is not None)
        if land.chosen_rate is not None:
            self._chosen.set_xdata([land.chosen_rate, land.chosen_rate])

    def _show_pins(self, pins: Any, limits: tuple[float, float]) -> None:
        bars, new = [], []
        for line, group in zip(self._pins, [*pins, None, None, None], strict=False):
            if group is None:
                line.set_data([], [])
                continue
            y = _inside(np.where(group.is_diverged, np.inf, group.values), limits)
            line.set_data(group.rates[~group.is_new], y[~group.is_new])
            bars += _error_bars(group.rates, y, DEVIATIONS * group.deviations)
            new += list(zip(group.rates[group.is_new], y[group.is_new], strict=True))
        self._pin_bars.set_segments(bars)
        self._new_pins.set_data(*np.array(new).T if new else ([], []))

    def _show_schedule(self, view: SearchView) -> None:
        none, limits = np.zeros(0), self.schedule.get_ylim()
        spans: list[tuple[int, int]] = []
        for start, end, _ in view.searched:
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            spans.append((start, end))
        self._searched.set_verts(
            [[(a, limits[0]), (a, limits[1]), (b, limits[1]), (b, limits[0])] for a, b in spans]
        )
        middle = [np.full(len(rates), (a + b) / 2) for a, b, rates in view.searched]
        tried = [rates for _, _, rates in view.searched]
        self._tried.set_data(np.concatenate([none, *middle]), np.concatenate([none, *tried]))
        self._done.set_data(*_with_gaps(view.spent, view.rates))
        self._planned.set_data(*view.planned)
        self._best.set_data(np.arange(len(view.best)), view.best)

    def _show_ledger(self, view: SearchView) -> None:
        budget = view.settings.budget
        parts = (view.search_evaluations, view.training_evaluations, view.unspent)
        start = 0
        for bar, word, name, count in zip(
            self._bars, self._bar_words, ("search", "training", "left"), parts, strict=True
        ):
            bar.set_x(start)
            bar.set_width(count)
            word.set_position((start + count / 2, 0))
            word.set_text(f"{name} {count:,}" if count > 0.17 * budget else "")
            start += count
        self._depth.set_text(f"depth {view.depth:,} steps")
        values = [view.start_loss, view.loss, view.linear_loss, view.best_loss]
        for row, (dot, word, value) in enumerate(
            zip(self._dots, self._dot_words, values, strict=True)
        ):
            dot.set_data([] if value is None else [value], [] if value is None else [row])
            word.set_text("" if value is None else f"   {value:.3g}")
            word.set_position((value or 1.0, row))


def _legend(axes: Axes, names: Mapping[str, Artist], *, columns: int = 3) -> None:
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
    low, middle, high = np.quantile(values, [0.0, 0.75, 1.0])
    return float(min(high, low + 4 * (middle - low)))


def _inside(values: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
    """Values, those beyond the limits put on the edge."""
    edge = 0.025 * (limits[1] - limits[0])
    return np.clip(values, limits[0] + edge, limits[1] - edge)


def _with_gaps(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A line that is not drawn across what was spent on candidates."""
    gaps = np.flatnonzero(np.diff(x) > 1) + 1
    return np.insert(x, gaps, np.nan), np.insert(y, gaps, np.nan)


def _rounded(low: float, high: float) -> tuple[float, float]:
    """Limits in coarse steps, so that most rounds of a stage share them."""
    step = 10 ** np.floor(np.log10(max(high - low, 1e-12))) / 5
    return float(np.floor(low / step) * step), float(np.ceil(high / step) * step)
