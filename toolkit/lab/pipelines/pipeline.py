"""A pipeline that plays: time runs, messages travel, tasks can be moved by hand."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from toolkit import schedules
from toolkit.figures import ACCENT, FAINT, look
from toolkit.lab.kit.controls import Choice, Number, Words
from toolkit.lab.kit.played import LANES_LEFT, LANES_WIDTH, PlayedPanel
from toolkit.lab.kit.plot import Plot
from toolkit.lab.kit.scene import Bar, Kind, Message, Node, Scene
from toolkit.lab.kit.view import Data, Progress, View
from toolkit.measure import in_words
from toolkit.measure.words import counted
from toolkit.parallel.pipeline import named

KINDS = {
    "F": Kind("forward", "#a8cfe8"),
    "B": Kind("backward", "#2f7fb8"),
    "I": Kind("input gradient", "#0b5394"),
    "W": Kind("weight gradient", "#e8c46a"),
}
MOST_DEVICES, MOST_MICROBATCHES = 16, 64


@dataclass(frozen=True)
class PipelineView(View):
    """A schedule in time."""

    timeline: schedules.Timeline  # simulated, exact
    # starts, ends: for each device its tasks' times
    starts: tuple[np.ndarray, ...]
    ends: tuple[np.ndarray, ...]
    bound: float  # no order on this placement ends earlier
    slow: int  # the slow stage
    times: float  # how many times as long its tasks take
    device: int  # whose memory is drawn boldly
    compiled: named.Compiled | None  # what the compiler made of it, if it was asked
    is_seed: bool = False  # whether an order is still to be searched for

    @property
    def makespan(self) -> float:
        """When the last task ends."""
        return float(self.timeline.makespan)

    @functools.cached_property
    def work(self) -> np.ndarray:
        """How long each device works."""
        return np.array([sum(b - a) for a, b in zip(self.starts, self.ends, strict=True)])

    @property
    def bubble(self) -> float:
        """Share of the time in which a device idles."""
        return 1 - float(self.work.mean()) / self.makespan

    @functools.cached_property
    def memory(self) -> tuple[tuple[list[float], list[float]], ...]:
        """For each device (times, activations of a stage held from each on)."""
        found, chunks = [], self.timeline.schedule.chunks
        for device in range(self.timeline.schedule.devices):
            steps = [(float(t), float(size)) for t, size in self.timeline.memory(device, chunks)]
            times, sizes = zip((0.0, 0.0), *steps, strict=True)
            found.append((list(times), list(sizes)))
        return tuple(found)

    def data(self) -> Data:
        schedule = self.timeline.schedule
        devices = range(schedule.devices)
        stages = [
            [s for s, d in enumerate(schedule.placement) if d == device] for device in devices
        ]
        return {
            "device": [str(device) for device in devices],
            "stages": [" ".join(map(str, mine)) for mine in stages],
            "tasks": [len(order) for order in schedule.orders],
            "works": [*map(float, self.work)],
            "first start": [float(start[0]) for start in self.starts],
            "last end": [float(end[-1]) for end in self.ends],
            "idle until the end (share)": [float(1 - work / self.makespan) for work in self.work],
            "most activations held": [int(max(sizes)) for _, sizes in self.memory],
        }

    def sentence(self) -> str:
        # tied: tests/lab/pipelines/test_pipeline_view.py::test_sentences_of_the_notebook
        schedule = self.timeline.schedule
        slow = f", stage {self.slow} {self.times:g} times as slow" if self.times > 1 else ""
        sizes = [int(max(values)) for _, values in self.memory]
        hops = counted(schedule.hops, "hop")
        words = "" if self.compiled is None else f" Compiled: {self.program}"
        hint = " The button searches a better order for these stages." if self.is_seed else ""
        return (
            f"{schedule.name} on {counted(schedule.devices, 'device')}, "
            f"{schedule.microbatches} microbatches{slow}: the last task "
            f"ends at {self.makespan:.4g}, and in no order on these devices before "
            f"{self.bound:.4g}. Devices idle {self.bubble:.1%} of the time. Device 0 holds up to "
            f"{sizes[0]} activations of a stage, the last device up to {sizes[-1]}; a microbatch "
            f"makes {hops} on its way forward. Device {self.device} is drawn boldly below."
            f"{hint}{words}".replace("\n", " ")
        )

    @property
    def program(self) -> str:
        """What the compiler made of it, in lines."""
        if (found := self.compiled) is None:
            return "Not compiled yet, in this schedule\nand with these numbers."
        return (
            f"{found.ticks} ticks x {counted(found.channels, 'channel')}\n= {found.permutes} "
            f"permutes, counted in the program\n(measured here: {found.compiled_with});\n"
            f"compiled in {in_words(found.seconds, 'seconds')} (measured here);\n"
            f"{found.messages} messages in the schedule."
        )

    def footnote(self) -> str:
        return (
            "Modelled, exact: a device's forward, input gradient and weight gradient take 1 each. "
            "The bound counts no delays."
        )


def pipeline_view(
    *, schedule: str, devices: int, microbatches: int, slow: int, times: float, delay: float,
    device: int, moves: str, compiled: named.Compiled | None = None,
) -> PipelineView:  # fmt: skip
    """A schedule of `named.RULES` in time; stages and devices are counted from 0."""
    table = compiled.table if compiled else ""
    found = named.schedule_of(schedule, devices, microbatches, moves, table)
    compiled = compiled if moves == named.NONE else None
    slow = min(slow, found.stages - 1)
    factor, hop = (Fraction(number).limit_denominator(named.FINEST) for number in (times, delay))
    how = schedules.Durations(delay=hop, stages=named.factors_of(found, slow, factor))
    timeline = schedules.simulate(found, how)
    as_float = functools.cache(float)
    starts, ends = (
        tuple(np.array([as_float(span[at]) for span in row]) for row in timeline.spans)
        for at in (1, 2)
    )
    bound = named.bound_of(schedule, devices, microbatches, slow, factor)
    return PipelineView(
        timeline, starts, ends, float(bound), slow, times, min(device, devices - 1), compiled,
        is_seed=schedule in named.SEARCHED and not table,
    )  # fmt: skip


def scene_of(view: PipelineView) -> Scene:
    """Devices in a row, their tasks in lanes, and the messages of every hop there and back."""
    schedule, delay = view.timeline.schedule, float(view.timeline.durations.delay)
    used = {task.kind for order in schedule.orders for task in order}
    kinds = [kind for kind in KINDS if kind in used]
    numbers, bars, ends = {kind: n for n, kind in enumerate(kinds)}, [], {}
    has_chunks = schedule.chunks > 1
    for lane, order in enumerate(schedule.orders):
        rows = zip(order, view.starts[lane].tolist(), view.ends[lane].tolist(), strict=True)
        for task, start, end in rows:
            label = f"{task.kind}{task.microbatch}" + (f" @{task.stage}" if has_chunks else "")
            bars.append(Bar(lane, round(start, 6), round(end, 6), label, numbers[task.kind]))
            ends[task] = end
    messages = []
    for task, end in ends.items() if delay else ():
        kind, i, stage = task
        to = stage + 1 if kind == "F" else stage - 1
        if kind == "W" or not 0 <= to < schedule.stages:
            continue
        here, there = schedule.placement[stage], schedule.placement[to]
        if here != there:
            label = f"{kind}{i}"
            times = round(end, 6), round(end + delay, 6)
            messages.append(Message(here, there, *times, label, numbers[kind]))
    most = max(max(sizes) for _, sizes in view.memory)
    places = [d / max(schedule.devices - 1, 1) for d in range(schedule.devices)]
    links = zip(schedule.placement[:-1], schedule.placement[1:], strict=True)
    return Scene(
        view.makespan, view.sentence(), unit="forwards", picks=tuple(bar.lane for bar in bars),
        nodes=tuple(Node(f"device {d}" if schedule.devices < 10 else str(d), x, 0.5)
                    for d, x in enumerate(places)),
        edges=tuple({(min(link), max(link)) for link in links if link[0] != link[1]}),
        tall=0.1, messages=tuple(messages),
        lanes=tuple(f"device {d}" for d in range(schedule.devices)), bars=tuple(bars),
        kinds=tuple(KINDS[kind] for kind in kinds),
        levels=tuple((times, [size / most for size in values]) for times, values in view.memory),
    )  # fmt: skip


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
        corners = (
            (np.repeat(times, 2)[1:] / end, np.repeat(sizes, 2)[:-1] / most)
            for times, sizes in view.memory
        )
        self.others.set_segments([np.stack(line, axis=1) for line in corners])
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
        self._words.set_text(view.program)


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
        "Schedule", "1F1B", {name: name for name in named.RULES},
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
        "Moved by hand", named.NONE,
        explanation="Such as F3@1 to 5: forward of microbatch 3 at stage 1 to place 5 of its "
        f"device; several with semicolons; {named.NONE!r} takes them back",
    )  # fmt: skip

    def __init__(self, **values: Any) -> None:
        self._compiled: dict[tuple[Any, ...], named.Compiled] = {}
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
            values = {"moves": named.NONE} | values
        super().change(**values)

    def _dragged(self, bar: int, place: int) -> None:
        view: Any = self.view
        orders, tasks = view.timeline.schedule.orders, sum(view.timeline.schedule.orders, ())
        before = "" if self.moves == named.NONE else f"{self.moves}; "
        self.attempt(self.change, moves=f"{before}{tasks[bar]} to {place}")
        if not self.error:  # the selection goes with the task
            starts = [sum(map(len, orders[:device])) for device in range(len(orders))]
            self.player.selected = max(start for start in starts if start <= bar) + place

    def pieces(self) -> Iterator[Progress]:
        """Search the order, if it is one to be searched for, and compile the schedule, without
        moves, in a process of its own."""
        key = tuple(self.state[name] for name in _WHOSE)
        searches = "searching an order, then " * (key[0] in named.SEARCHED)
        for found in named.compile_apart(*key, self.state["slow"], self.state["times"]):
            if found is None:
                yield 0, 1, f"{searches}compiling on simulated devices"
            else:
                self._compiled[key] = found
                yield 1, 1, "compiled"

    places = (
        (MemoryPlot, (LANES_LEFT, 0.55, LANES_WIDTH, 0.36)),
        (EndPlot, (0.17, 0.1, 0.42, 0.32)),
        (CompiledPlot, (0.66, 0.1, 0.33, 0.32)),
    )
