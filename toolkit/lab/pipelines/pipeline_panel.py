"""A pipeline that plays: time runs, messages travel, tasks can be moved by hand."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from matplotlib.axes import Axes

from toolkit.figures import ACCENT, FAINT, look
from toolkit.lab.kit.controls import Choice, Number, Words
from toolkit.lab.kit.played import LANES_LEFT, LANES_WIDTH, PlayedPanel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.view import Progress
from toolkit.lab.pipelines.pipeline_view import (
    MOST_DEVICES,
    MOST_MICROBATCHES,
    NONE,
    RULES,
    SEARCHED,
    Compiled,
    PipelineView,
    pipeline_view,
    place_in_words,
    scene_of,
)
from toolkit.measure import in_words

_POLL_SECONDS = 0.5
_MOST_SECONDS = 300
_WHOSE = ("schedule", "devices", "microbatches")  # controls that start a new order


class MemoryPlot(Plot):
    """What each device holds over the time above it, one device boldly."""

    is_timed = True

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, title="Activations held, in stages of one microbatch", grid="y")
        # Shares of the time: limits that stay make a redraw cheap.
        axes.set(xlim=(0, 1), xticks=[], ylim=(0, 1.06), yticks=[])
        self.others = self.segments(colors=FAINT, linewidths=0.9)
        self.own = self.line(color=ACCENT, linewidth=2, drawstyle="steps-post")
        self._top = self.text(-0.01, 1.0, ha="right", va="center", fontsize=9.5)
        self._zero = axes.text(-0.01, 0.0, "0", ha="right", va="center", fontsize=9.5)

    def show(self, view: PipelineView) -> None:
        end, most = view.makespan, max(max(sizes) for _, sizes in view.memory)
        lines = []
        for times, sizes in view.memory:
            corners = [(0.0, 0.0)]
            for at, value in zip(times, sizes, strict=True):
                corners += [(at / end, corners[-1][1]), (at / end, value / most)]
            lines.append(corners)
        self.others.set_segments(lines)
        times, sizes = view.memory[view.device]
        self.own.set_data([at / end for at in times], [value / most for value in sizes])
        self._top.set_text(f"{most:g}")


class EndPlot(Plot):
    """When the schedule ends, before which none does, and how long the busiest device works."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, grid="")
        axes.set_title("Its end and its bound (modelled)", fontsize=10)
        names = ("this schedule ends", "no order before", "busiest device works")
        axes.set_yticks(range(3), names)
        axes.tick_params(axis="y", length=0)
        axes.set(xticks=[], xlim=(0, 1.22), ylim=(2.6, -0.6))
        axes.spines["bottom"].set_visible(False)
        colours = (look("full").colour, "white", FAINT)
        flat = {"is_flat": True, "color": colours, "edgecolor": look("full").colour}
        self.bars = self.bars_at(range(3), 0.62, **flat)
        self._words = [self.text(0, row, va="center", fontsize=9) for row in range(3)]

    def show(self, view: PipelineView) -> None:
        values = view.makespan, view.bound, float(view.work.max())
        texts = (
            f"{values[0]:.4g}, bubble {view.bubble:.1%}",
            *(f"{value:.4g}" for value in values[1:]),
        )
        for bar, words, value, text in zip(self.bars, self._words, values, texts, strict=True):
            bar.set_width(value / values[0] * 0.85)
            words.set(x=value / values[0] * 0.85 + 0.015, text=text)


class CompiledPlot(Plot):
    """The permutes of the compiled program in words."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes, grid="")
        axes.set_title("As one program", fontsize=10)
        axes.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(0, 1))
        axes.spines[:].set_visible(False)
        self._words = self.text(0, 0.92, va="top", fontsize=8.5, linespacing=1.5)

    def show(self, view: PipelineView) -> None:
        if view.compiled is None:
            words = "Not compiled yet, in this schedule\nand with these numbers."
        else:
            program = view.compiled
            words = (
                f"{program.ticks} ticks x {program.channels} channels\n= {program.permutes} "
                f"permutes, counted in the program\n(measured here: {program.compiled_with});\n"
                f"compiled in {in_words(program.seconds, 'seconds')} (measured here);\n"
                f"{program.messages} messages in the schedule."
            )
        self._words.set_text(words)


class PipelinePanel(PlayedPanel):
    """A pipeline schedule that plays, with its memory, its bubble and its bound.

    Drag a task to another place of its device, or write the move: the order is checked, and what
    cannot run is refused with the reason.

    Example:
        >>> panel = PipelinePanel(schedule="1F1B", devices=4, microbatches=8, times=1.0, delay=0.0)
        >>> panel.view.makespan, panel.view.bound
        (33.0, 33.0)
        >>> panel.moves = "F4@0 to 3"
    """

    title = "A pipeline: who waits, for whom, and what does it hold meanwhile?"
    figure_size = (9.6, 3.25)
    has_palette = True
    button = "Search or compile it"
    bar_control = "device"

    schedule = Choice(
        "Schedule", "1F1B", {name: name for name in RULES},
        explanation="A searched one needs OR-tools, and the button",
    )  # fmt: skip
    times = Number("Times as slow", 1.5, low=1.0, high=4.0, step=0.25)
    slow = Number(
        "Slow stage", 2, low=0, high=2 * MOST_DEVICES - 1,
        explanation="Counted from 0", maximum=lambda view: view.timeline.schedule.stages - 1,
    )  # fmt: skip
    delay = Number(
        "Delay", 0.25, low=0.0, high=2.0, step=0.25,
        explanation="Of a message between devices; a forward takes 1",
    )  # fmt: skip
    devices = Number("Devices", 4, low=2, high=MOST_DEVICES, is_continuous=False)
    microbatches = Number("Microbatches", 8, low=1, high=MOST_MICROBATCHES, is_continuous=False)
    device = Number(
        "Device", 0, low=0, high=MOST_DEVICES - 1, explanation="Whose memory is drawn boldly",
        maximum=lambda view: view.timeline.schedule.devices - 1,
    )  # fmt: skip
    moves = Words(
        "Moved by hand", NONE,
        explanation="Such as F3@1 to 5: forward of microbatch 3 at stage 1 to place 5 of its "
        f"device; several with semicolons; {NONE!r} takes them back",
    )  # fmt: skip

    def __init__(self, **values: Any) -> None:
        self._compiled: dict[tuple[Any, ...], Compiled] = {}
        super().__init__(**values)

    def widgets_above(self) -> list[Any]:
        (player,) = super().widgets_above()
        player.on_move(self._dragged)
        return [player]

    def compute(self, **state: Any) -> PipelineView:
        found = self._compiled.get(tuple(state[name] for name in _WHOSE))
        return pipeline_view(**state, compiled=found)

    scene = staticmethod(scene_of)

    def change(self, **values: Any) -> None:
        """As of every panel; another schedule starts without moves."""
        if any(name in _WHOSE and values[name] != self.state[name] for name in values):
            values = {"moves": NONE} | values
        super().change(**values)

    def _dragged(self, bar: int, place: int) -> None:
        view = self.view
        assert isinstance(view, PipelineView)
        words = place_in_words(view.timeline.schedule, bar, place)
        before = "" if self.moves == NONE else f"{self.moves}; "
        self.attempt(self.change, moves=before + words)
        if not self.error:  # the selection goes with the task
            orders = view.timeline.schedule.orders
            starts = [sum(map(len, orders[:device])) for device in range(len(orders))]
            self.player.selected = max(start for start in starts if start <= bar) + place

    def pieces(self) -> Iterator[Progress]:
        """Search the order, if it is one to be searched for, and compile the schedule, without
        moves, in a process of its own."""
        key = tuple(self.state[name] for name in _WHOSE)
        given = *key, self.state["slow"], self.state["times"]
        command = [sys.executable, "-m", "toolkit.lab.pipelines.pipeline_view", *map(str, given)]
        searches = "searching an order, then " * (key[0] in SEARCHED)
        doing = f"{searches}compiling on simulated devices"
        began = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                while process.poll() is None:
                    if time.monotonic() - began > _MOST_SECONDS:
                        raise TimeoutError(f"compiling took more than {_MOST_SECONDS} s")
                    yield 0, 1, doing
                    time.sleep(_POLL_SECONDS)
            finally:
                process.kill()
            out, error = process.communicate()
        if process.returncode:
            raise RuntimeError(error.decode().strip().splitlines()[-1])
        self._compiled[key] = Compiled(**json.loads(out))
        yield 1, 1, "compiled"

    places = (
        (MemoryPlot, (LANES_LEFT, 0.55, LANES_WIDTH, 0.36)),
        (EndPlot, (0.17, 0.1, 0.42, 0.32)),
        (CompiledPlot, (0.66, 0.1, 0.33, 0.32)),
    )
