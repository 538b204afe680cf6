"""Every recorded time beside the model of other chips, and beside a time taken here."""

from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure

from toolkit.lab.kit.controls import Choice, Number
from toolkit.lab.kit.panel import Panel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Progress
from toolkit.lab.speedups.measurement import can_measure, measure_here
from toolkit.lab.speedups.plots import RivalsPlot, TimesPlot
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

    method = Choice("Method", EVERY, {"every method": EVERY, **_METHODS})
    work = Choice(
        "Work", EVERY,
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

    def plots(self, figure: Figure) -> list[Plot]:
        left = figure.add_axes((0.075, 0.215, 0.31, 0.7))
        right = figure.add_axes((0.6, 0.215, 0.235, 0.66))
        return [TimesPlot(left), RivalsPlot(right)]

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
