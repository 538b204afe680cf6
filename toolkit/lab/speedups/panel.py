"""Every recorded time beside the model of other chips, and beside a time taken here."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from toolkit.figures import ACCENT, FAINT, log_axes, look
from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Progress
from toolkit.lab.speedups.measurement import can_measure, measure_here
from toolkit.lab.speedups.recorded import (
    FORWARD,
    GRADIENT,
    OTHER,
    STEP,
    Time,
    recorded_times,
    title_of,
)
from toolkit.lab.speedups.view import CHIPS, EVERY, SpeedupView, speedups
from toolkit.measure import in_words

MOST_ROWS = 14
# Who is drawn how: name, which times, look.
GROUPS = (
    ("this package", lambda time: time.is_ours and not time.is_here, look("full")),
    ("others, recorded", lambda time: not time.is_ours and not time.is_here, look("gdn")),
    ("measured here", lambda time: time.is_here, look("window")),
)
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
        self._groups = [
            self.marks(seen.colour, seen.marker, markersize=5.5, markeredgecolor="white",
                       markeredgewidth=0.5)
            for _, _, seen in GROUPS
        ]  # fmt: skip
        for (name, *_), marks in zip(GROUPS, self._groups, strict=True):
            marks.set_label(name)
        axes.legend(
            handles=self._groups, loc="lower right", handletextpad=0.1, borderaxespad=0.1,
            labelspacing=0.25, fontsize=8.5,
        )  # fmt: skip
        self._ring = self.marks(
            ACCENT, "o", markersize=13, markerfacecolor="none", markeredgewidth=2
        )
        self._none = self.text(
            0.5, 0.5, transform=axes.transAxes, ha="center", va="center", color=FAINT
        )

    def show(self, view: SpeedupView) -> None:
        label = f"least on one {view.chip.name} (modelled)"
        if self.axes.get_xlabel() != label:
            self.axes.set_xlabel(label)
        found = [(time, x) for time in view.times if (x := view.modelled(time)) is not None]
        for (_, belongs, _), marks in zip(GROUPS, self._groups, strict=True):
            own = [(x, time.record.value) for time, x in found if belongs(time)]
            marks.set_data([x for x, _ in own], [y for _, y in own])
        ringed = [(x, time.record.value) for time, x in found if time is view.time]
        self._ring.set_data([x for x, _ in ringed], [y for _, y in ringed])
        self._none.set_text("" if found else "nothing here that\na formula models")


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
            "this package": self.marks(look("full").colour, "o", markersize=8),
            "others": self.marks(look("gdn").colour, "^", markersize=8),
            "measured here": self.marks(look("window").colour, "s", markersize=8),
            "modelled": self.marks(
                FAINT, "D", markersize=7, markerfacecolor="white", markeredgewidth=1.6
            ),
        }
        self._ring = self.marks(
            ACCENT, "o", markersize=14, markerfacecolor="none", markeredgewidth=2
        )
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
            self._bars[place].set_data(
                [edge, row.seconds] if row else [], [place] * 2 if row else []
            )
            name, value = self._labels[place], self._values[place]
            name.set_text(_folded(row.name) if row else "")
            value.set_text(_said(row) if row else "")
            is_bold = row is not None and row.is_chosen
            for words in (name, value):
                words.set_fontweight("bold" if is_bold else "normal")


def _folded(name: str) -> str:
    head, comma, tail = name.rpartition(", ")
    return f"{head},\n{tail}" if comma and len(name) > 22 else name


def _said(row) -> str:
    words = in_words(row.seconds, "seconds")
    return words if row.ratio is None else f"{words} ({in_words(row.ratio, 'times')})"


_TIMES = recorded_times()
_METHODS = {title_of(name): name for name in dict.fromkeys(time.method for time in _TIMES)}
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
        "Work", GRADIENT,
        {"every kind of work": EVERY, "forward": FORWARD, "forward and backward": GRADIENT,
         "one decoded token": STEP, "other": OTHER},
    )  # fmt: skip
    tokens = Choice("Length (tokens)", 0, {"every length": 0, **{f"{n:,}": n for n in _LENGTHS}})
    batch = Choice("Batch (sequences)", 0, {"every batch": 0, **{f"{n}": n for n in _BATCHES}})
    chip = Choice(
        "Chip", "h100",
        {f"{peak.name} (modelled)": name for name, peak in CHIPS.items()},
        explanation="Whose published peaks bound the time on the left",
    )  # fmt: skip
    point = Number(
        "Ringed", 1, low=1, high=len(_TIMES), maximum=lambda view: max(1, len(view.times)),
        explanation="Which of the times is ringed and compared with its rivals",
    )  # fmt: skip

    def __init__(self, **values: Any) -> None:
        self.times: tuple[Time, ...] = _TIMES
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
        if not can_measure(chosen.time):
            command = "" if chosen.time is None else f"; run: {chosen.time.record.command}"
            yield 1, 1, f"a button cannot do this work{command}"
            return
        for done, total, what, new in measure_here(chosen.time):
            if new is not None:
                self.times = (*self.times, new)
            yield done, total, what
