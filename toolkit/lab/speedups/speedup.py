"""Every recorded time beside the model of other chips, and beside a time taken here."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from toolkit.bench.mixers import recorded
from toolkit.figures import ACCENT, FAINT, log_axes, look
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Data, Progress, View
from toolkit.measure import Peak, in_words

EVERY = "every"


class Row(NamedTuple):
    """One line of the picture beside the chosen time."""

    name: str  # the contender, or the chip
    seconds: float
    group: str  # as `Time.group` has it, or "modelled"
    ratio: float | None = None  # seconds over ours in the same rounds; None unless all were checked
    is_chosen: bool = False


@dataclass(frozen=True)
class SpeedupView(View):
    """The times that pass the filters."""

    times: tuple[recorded.Time, ...]
    everything: tuple[recorded.Time, ...]  # where rivals are looked for
    chosen: int  # of `times`
    chip: Peak

    @property
    def time(self) -> recorded.Time | None:
        """The chosen one."""
        return self.times[self.chosen] if self.times else None

    def ratio(self, time: recorded.Time) -> float | None:
        """Its seconds over ours in the same rounds, if both were checked."""
        rivals = [other for other in self.everything if other.is_rival(time)]
        # What a user calls comes first; forms that need a line more follow it.
        ours = next((other for other in rivals if other.contender.startswith("toolkit")), None)
        if ours is None or len(rivals) < 2 or not (ours.is_checked and time.is_checked):
            return None
        return time.record.value / ours.record.value

    @property
    def modelled(self) -> list[float | None]:
        """The least time of each on the chip."""
        return [time.modelled_seconds(self.chip) for time in self.times]

    def rows(self) -> list[Row]:
        """The chosen time, its rivals, what was measured here, and what chips could do."""
        if (chosen := self.time) is None:
            return []
        rivals = [
            other
            for other in self.everything
            if other.is_rival(chosen)
            or (other.case == chosen.case and (other.is_here or chosen.is_here))
        ]
        rows = [
            Row(r.contender, r.record.value, r.group, self.ratio(r), r is chosen) for r in rivals
        ]
        least = [(peak.name, chosen.modelled_seconds(peak)) for peak in recorded.CHIPS.values()]
        return rows + [Row(name, s, "modelled") for name, s in least if s is not None]

    def answer(self) -> str:
        """Ours against the fastest other, as the heading has it."""
        ratios = [row.ratio for row in self.rows() if row.group == "others" and row.ratio]
        if not ratios:
            return "Who takes how long"
        best = min(ratios)
        if best >= 1:
            return f"The fastest other takes {in_words(best, 'times')} our time"
        return f"We take {in_words(1 / best, 'times')} the time of the fastest other"

    def data(self) -> Data:
        sizes = {
            name: ["–" if n is None else f"{n:,}" for n in (getattr(t, name) for t in self.times)]
            for name in ("batch", "tokens")
        }
        records = [time.record for time in self.times]
        return {
            "method": [recorded.title_of(time.method) for time in self.times],
            "what": [time.case for time in self.times],
            **sizes,
            "contender": [time.contender for time in self.times],
            "time (seconds)": [record.value for record in records],
            "times ours (times)": [self.ratio(time) for time in self.times],
            f"on one {self.chip.name}, modelled (seconds)": self.modelled,
            "kind": [time.kind for time in self.times],
            "check": [record.check for record in records],
            "device": [record.device for record in records],
            "versions": [_versions(time) for time in self.times],
            "date": [record.date[:10] for record in records],
            "command": [record.command for record in records],
            "commit": [record.commit for record in records],
        }

    def sentence(self) -> str:
        if (time := self.time) is None:
            return "No recorded time passes these filters."
        caption = f"Time {self.chosen + 1} of {len(self.times)}: {time.case}, {time.contender}: "
        caption += f"{in_words(time.record.value, 'seconds')}, {time.kind}."
        rivals = [(row.name, row.ratio) for row in self.rows() if row.ratio is not None]
        if rivals:
            others = ", ".join(f"“{name}” {in_words(ratio, 'times')}" for name, ratio in rivals[1:])
            caption += f" Of the time of “{rivals[0][0]}”, with results that agree: {others}."
        if (floor := time.modelled_seconds(self.chip)) is not None:
            caption += (
                f" One {self.chip.name} needs at least {in_words(floor, 'seconds')} (modelled: "
                "bfloat16, published peaks); the time above is "
                f"{in_words(time.record.value / floor, 'times')} that."
            )
        return caption

    def footnote(self) -> str:
        if (time := self.time) is None:
            return "Nothing to show: let more through."
        record = time.record
        return (
            f"Ringed: {time.kind} on {record.device}; {_versions(time)}; {record.date[:10]}; "
            f"check {record.check}.\n{record.command}, commit {record.commit[:8]}. "
            "Filled: recorded (square: here). Diamonds: modelled, bfloat16."
        )


def _versions(time: recorded.Time) -> str:
    wanted = ("jax", "python")
    return ", ".join(f"{name} {time.record.versions.get(name, '?')}" for name in wanted)


def speedups(
    times: tuple[recorded.Time, ...], *, method: str, work: str, tokens: int, batch: int, chip: str,
    point: int,
) -> SpeedupView:  # fmt: skip
    """Those of `times` that pass, `point` of them chosen; `EVERY` and 0 let everything through."""
    shown = tuple(
        time
        for time in times
        if method in (EVERY, time.method)
        and work in (EVERY, time.work)
        and tokens in (0, time.tokens)
        and batch in (0, time.batch)
    )
    return SpeedupView(shown, times, min(point, max(1, len(shown))) - 1, recorded.CHIPS[chip])


MOST_ROWS = 14
GROUPS = {"this package": look("full"), "others": look("gdn"), "measured here": look("window")}
RING = {"markerfacecolor": "none", "markeredgewidth": 2}
LIMITS = (1e-8, 100.0)
BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8}


class TimesPlot(Plot):
    """Each time against the least that the work takes on one chip."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        log_axes(axes, x_unit="seconds", y_unit="seconds")
        axes.set(xlim=(1e-8, 1e-2), ylim=(1e-6, 1e2), xlabel="least on one chip (modelled)")
        axes.set_title("All recorded times", pad=10)
        ends = np.array(LIMITS)
        for times in (1, 100, 10_000):
            axes.plot(ends, times * ends, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
            at = max(7e-8, 4e-6 / times)
            axes.text(
                at, times * at, "as fast" if times == 1 else f"{times:,}×", color=FAINT,
                fontsize=8.5, ha="center", va="center", bbox=BEHIND,
            )  # fmt: skip
        edge = {"markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 0.5}
        self._groups = {
            name: self.marks(seen.colour, seen.marker, label=name, **edge)
            for name, seen in GROUPS.items()
        }
        self._groups["others"].set_label("others, recorded")
        axes.legend(
            handles=[*self._groups.values()], loc="lower right", handletextpad=0.1,
            borderaxespad=0.1, labelspacing=0.25, fontsize=8.5,
        )  # fmt: skip
        self._ring = self.marks(ACCENT, "o", markersize=13, **RING)
        middle = {"ha": "center", "va": "center", "transform": axes.transAxes}
        self._none = self.text(0.5, 0.5, color=FAINT, **middle)

    def show(self, view: SpeedupView) -> None:
        label = f"least on one {view.chip.name} (modelled)"
        if self.axes.get_xlabel() != label:
            self.axes.set_xlabel(label)
        every = zip(view.times, view.modelled, strict=True)
        found = [(time, least) for time, least in every if least is not None]
        for group, marks in self._groups.items():
            _show_times(marks, [pair for pair in found if pair[0].group == group])
        _show_times(self._ring, [pair for pair in found if pair[0] is view.time])
        self._none.set_text("" if found else "nothing here that\na formula models")


def _show_times(marks: Line2D, found: list[tuple[recorded.Time, float]]) -> None:
    marks.set_data([x for _, x in found], [time.record.value for time, _ in found])


class RivalsPlot(Plot):
    """The chosen work: who takes how long, and what chips could do."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        log_axes(axes, x_unit="seconds", y_unit="seconds")
        axes.set_yscale("linear")
        # Limits that stay make a redraw cheap.
        axes.set(ylim=(MOST_ROWS - 0.5, -0.5), yticks=[], xlim=(1e-8, 1e1), xlabel="time")
        axes.xaxis.set_major_locator(LogLocator(numticks=5))
        left = {"transform": axes.transAxes, "va": "bottom", "clip_on": False}
        self._answer = self.text(-0.6, 1.1, fontsize=12, fontweight="bold", **left)
        self._case = self.text(-0.6, 1.03, fontsize=9, **left)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="y", visible=False)
        self._bars = [
            self.line(linewidth=1, color=FAINT, linestyle=(0, (1, 2))) for _ in range(MOST_ROWS)
        ]
        self._marks = {
            name: self.marks(seen.colour, seen.marker, markersize=8)
            for name, seen in GROUPS.items()
        }
        hollow = {"markersize": 7, "markerfacecolor": "white", "markeredgewidth": 1.6}
        self._marks["modelled"] = self.marks(FAINT, "D", **hollow)
        self._ring = self.marks(ACCENT, "o", markersize=14, **RING)
        left = axes.get_yaxis_transform()
        self._labels, self._values = (
            [
                self.text(x, row, transform=left, ha=side, va="center", fontsize=9, clip_on=False)
                for row in range(MOST_ROWS)
            ]
            for x, side in ((-0.04, "right"), (1.04, "left"))
        )

    def show(self, view: SpeedupView) -> None:
        rows = view.rows()[:MOST_ROWS]
        self._case.set_text(view.time.case if view.time else "")
        self._answer.set_text(view.answer())
        edge = self.axes.get_xlim()[0]
        for kind, marks in self._marks.items():
            own = [place for place, row in enumerate(rows) if row.group == kind]
            marks.set_data([rows[place].seconds for place in own], own)
        ringed = [place for place, row in enumerate(rows) if row.is_chosen]
        self._ring.set_data([rows[place].seconds for place in ringed], ringed)
        for place in range(MOST_ROWS):
            row = rows[place] if place < len(rows) else None
            line = ([edge, row.seconds], [place] * 2) if row else ([], [])
            self._bars[place].set_data(*line)
            weight = "bold" if row and row.is_chosen else "normal"
            name, value = (_folded(row.name), _in_words(row)) if row else ("", "")
            self._labels[place].set(text=name, fontweight=weight)
            self._values[place].set(text=value, fontweight=weight)


def _folded(name: str) -> str:
    head, comma, tail = name.rpartition(", ")
    return f"{head},\n{tail}" if comma and len(name) > 22 else name


def _in_words(row: Row) -> str:
    words = in_words(row.seconds, "seconds")
    return words if row.ratio is None else f"{words} ({in_words(row.ratio, 'times')})"


_TIMES = recorded.recorded_times()
_METHODS = {recorded.title_of(name): name for name in dict.fromkeys(time.method for time in _TIMES)}
_LENGTHS = sorted({time.tokens for time in _TIMES if time.tokens is not None})
_BATCHES = sorted({time.batch for time in _TIMES if time.batch is not None})


class SpeedupPanel(Panel):
    """Recorded times by method, length and batch: the chosen one, its rivals, and what chips could.

    Attributes:
        times: all of them, those measured here last.

    Example:
        >>> panel = SpeedupPanel(method="gdn", work="forward+backward", tokens=2048)
        >>> panel.view.time.record.check
        'passed'
    """

    title = "Who is how fast, and how fast could it be?"
    figure_size = (9.6, 5.2)
    button = "Measure here"

    method = Choice("Method", "gdn", {"every method": EVERY, **_METHODS})
    work = Choice(
        "Work", recorded.GRADIENT,
        {"every kind of work": EVERY, "forward": recorded.FORWARD,
         "forward and backward": recorded.GRADIENT, "one decoded token": recorded.STEP,
         "other": recorded.OTHER},
    )  # fmt: skip
    tokens = Choice("Length (tokens)", 0, {"every length": 0, **{f"{n:,}": n for n in _LENGTHS}})
    batch = Choice("Batch (sequences)", 0, {"every batch": 0, **{f"{n}": n for n in _BATCHES}})
    chip = Choice(
        "Chip", "h100", {f"{peak.name} (modelled)": name for name, peak in recorded.CHIPS.items()},
        explanation="Whose published peaks bound the time on the left",
    )  # fmt: skip
    point = Number(
        "Ringed", 1, low=1, high=len(_TIMES), maximum=lambda view: max(1, len(view.times)),
        explanation="Which of the times is ringed and compared with its rivals",
    )  # fmt: skip

    def __init__(self, **values: Any) -> None:
        self.times: tuple[recorded.Time, ...] = _TIMES
        super().__init__(**values)

    def measure(self) -> None:
        """Time the selected work here, as the button does, and add it to the others.

        Raises:
            ValueError: when the result differs from the reference; nothing is timed then.
        """
        self.page.job.run()

    def compute(self, **state: Any) -> SpeedupView:
        return speedups(self.times, **state)

    places = (
        (RivalsPlot, (0.19, 0.215, 0.24, 0.62)),
        (TimesPlot, (0.665, 0.215, 0.305, 0.7)),
    )

    def pieces(self) -> Iterator[Progress]:
        chosen: Any = self.view
        if not recorded.can_measure(chosen.time):
            command = "" if chosen.time is None else f"; run: {chosen.time.record.command}"
            yield 1, 1, f"a button cannot do this work{command}"
            return
        for done, total, what, new in recorded.measure_here(chosen.time):
            if new is not None:
                self.times = (*self.times, new)
            yield done, total, what
