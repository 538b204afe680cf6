"""The two plots of `SpeedupPanel`: all times against a chip's best, and one beside its rivals."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from toolkit.figures import ACCENT, FAINT, log_axes, look
from toolkit.lab.kit.plot import Plot
from toolkit.lab.speedups.view import SpeedupView
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
        axes.set_title("Recorded time", pad=10)
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
        axes.set_title("The ringed work: who takes how long", pad=26, loc="left", x=-0.72)
        self._case = self.text(
            -0.72, 1.03, transform=axes.transAxes, fontsize=9, va="bottom", clip_on=False
        )
        axes.spines["left"].set_visible(False)
        axes.grid(axis="y", visible=False)
        self._bars = [
            self.line(linewidth=1, color=FAINT, linestyle=(0, (1, 2))) for _ in range(MOST_ROWS)
        ]
        self._marks = {
            "recorded": self.marks(look("full").colour, "o", markersize=8),
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
        edge = self.axes.get_xlim()[0]
        for kind, marks in self._marks.items():
            own = [place for place, row in enumerate(rows) if row.kind == kind]
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
