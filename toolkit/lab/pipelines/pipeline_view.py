"""A pipeline schedule in time: its messages, its memory, its bound, and its program.

Run as `python -m toolkit.lab.pipelines.pipeline_view SCHEDULE DEVICES MICROBATCHES SLOW TIMES`, in
a process of its own because devices are simulated before jax starts, it compiles a schedule, counts
the permutes and prints JSON. An order that is to be searched for is searched for first, with a
stage TIMES as slow.
"""

import dataclasses
import functools
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from toolkit import schedules
from toolkit.lab.kit.scene import Bar, Kind, Message, Node, Scene
from toolkit.lab.kit.view import Data, View
from toolkit.measure import collectives, in_words
from toolkit.measure.words import counted
from toolkit.parallel import make_mesh, simulate_devices
from toolkit.parallel.pipeline import Pipeline
from toolkit.schedules.search import search_schedule, shape_of
from toolkit.schedules.search.whole import lower_bound

RULES: dict[str, Callable[[int, int], schedules.Schedule]] = {
    "GPipe": schedules.gpipe,
    "1F1B": schedules.one_forward_one_backward,
    "interleaved": schedules.interleaved,
    "breadth first": schedules.breadth_first,
    "ZB-H1": schedules.zero_bubble_h1,
    "ZB-H2": schedules.zero_bubble_h2,
    "ZB-V": schedules.zero_bubble_v,
    "DualPipe-V": schedules.dual_pipe_v,
    # Until an order is searched for, that with which the search begins.
    "searched, chain": schedules.zero_bubble_h1,
    "searched, V": schedules.zero_bubble_v,
}
SEARCHED = tuple(name for name in RULES if name.startswith("searched"))
KINDS = {
    "F": Kind("forward", "#a8cfe8"),
    "B": Kind("backward", "#2f7fb8"),
    "I": Kind("input gradient", "#0b5394"),
    "W": Kind("weight gradient", "#e8c46a"),
}
MOST_DEVICES, MOST_MICROBATCHES = 16, 64
SEARCH_SECONDS = 5.0  # of each integer program
FINEST = 1000  # denominator of slowness and delay: 1.3 is thirteen tenths
NONE = "none"
_MOVE = re.compile(r"([FBIW])(\d+)@(\d+) to (\d+)")


def moved(schedule: schedules.Schedule, moves: str) -> schedules.Schedule:
    """The schedule with tasks moved by hand, such as "F3@1 to 5; B0@2 to 1".

    A move takes a task to a place among the tasks of its device, counted from 0. An order that
    cannot run is refused with the reason.
    """
    for words in moves.split(";"):
        if words.strip() in ("", NONE):
            continue
        match = _MOVE.fullmatch(words.strip())
        if match is None:
            raise ValueError(f"moves: got {words.strip()!r}, wanted such as F3@1 to 5")
        task, place = schedules.Task(match[1], int(match[2]), int(match[3])), int(match[4])
        device = next((d for d, order in enumerate(schedule.orders) if task in order), None)
        if device is None:
            raise ValueError(f"moves: {task} is no task of this schedule")
        order = [other for other in schedule.orders[device] if other != task]
        if place > len(order):
            raise ValueError(f"moves: got place {place}, device {device} has 0 to {len(order)}")
        order.insert(place, task)
        orders = tuple(tuple(order) if d == device else o for d, o in enumerate(schedule.orders))
        schedule = dataclasses.replace(schedule, orders=orders)
        if wrong := schedules.faults(schedule):
            raise ValueError(f"moves: {task} cannot go to {place}: {' '.join(wrong)}")
    return schedule


@functools.lru_cache(32)
def schedule_of(
    name: str, devices: int, microbatches: int, moves: str, table: str = ""
) -> schedules.Schedule:
    """The schedule of a rule in `RULES`, or of a table, with what was moved by hand."""
    found = schedules.from_csv(table, name) if table else RULES[name](devices, microbatches)
    return moved(found, moves)


def searched_table(name: str, devices: int, microbatches: int, slow: int, times: float) -> str:
    """The best order found on the placement of a rule, with a slow stage, as a table; no device
    holds more activations than the rule's device 0."""
    seed = RULES[name](devices, microbatches)
    factor = Fraction(times).limit_denominator(FINEST)
    factors = _factors(seed, min(slow, seed.stages - 1), factor)
    shape = shape_of(seed, schedules.Durations(*[factor.denominator] * 3, stages=factors))
    most = max(seed.peak_activations)
    return schedules.to_csv(
        search_schedule(shape, microbatches, most, seconds=SEARCH_SECONDS).schedule()
    )


@functools.lru_cache(32)
def bound_of(name: str, devices: int, microbatches: int, slow: int, times: Fraction) -> Fraction:
    """No order on this placement ends earlier, without delays."""
    schedule = RULES[name](devices, microbatches)
    scale = times.denominator
    whole = schedules.Durations(*[scale] * 3, stages=_factors(schedule, slow, times))
    found = lower_bound(shape_of(schedule, whole), microbatches)
    return Fraction(found, scale * schedule.chunks)


def _factors(schedule: schedules.Schedule, slow: int, times: Fraction) -> tuple[Fraction, ...]:
    return tuple(times if s == slow else Fraction(1) for s in range(schedule.stages))


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a schedule; see `compiled_facts`."""

    ticks: int  # of its loop
    channels: int  # permutations of the devices that each tick runs
    permutes: int  # counted in the compiled program
    bytes_sent: float  # of them all, by one device
    activation: int  # bytes of one activation
    messages: int  # those with content that the schedule needs, on all links together
    compiled_with: str  # versions and devices
    seconds: float  # that compiling took here
    table: str = ""  # the order that was searched for before, if one was

    def in_words(self) -> str:
        """Two lines."""
        return (
            f"{self.ticks} ticks x {counted(self.channels, 'channel')} = {self.permutes} permutes "
            f"of {in_words(self.activation, 'bytes')}, counted in the\ncompiled program (measured "
            f"here: {self.compiled_with}), compiled in {in_words(self.seconds, 'seconds')}. The "
            f"schedule has {self.messages} messages."
        )


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
    compiled: Compiled | None  # what the compiler made of it, if it was asked
    is_seed: bool = False  # whether an order is still to be searched for

    @property
    def makespan(self) -> float:
        """When the last task ends."""
        return float(self.timeline.makespan)

    @functools.cached_property
    def work(self) -> np.ndarray:
        """How long each device works."""
        pairs = zip(self.starts, self.ends, strict=True)
        return np.array([float((end - start).sum()) for start, end in pairs])

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
        words = "" if self.compiled is None else f" Compiled: {self.compiled.in_words()}"
        return (
            f"{schedule.name} on {counted(schedule.devices, 'device')}, "
            f"{schedule.microbatches} microbatches{slow}: the last task "
            f"ends at {self.makespan:.4g}, and in no order on these devices before "
            f"{self.bound:.4g}. Devices idle {self.bubble:.1%} of the time. Device 0 holds up to "
            f"{sizes[0]} activations of a stage, the last device up to {sizes[-1]}; a microbatch "
            f"makes {hops} on its way forward. Device {self.device} is drawn boldly below."
            f"{self.hint}{words}".replace("\n", " ")
        )

    @property
    def hint(self) -> str:
        """What is left to do for a searched order."""
        return " The button searches a better order for these stages." if self.is_seed else ""

    def footnote(self) -> str:
        return (
            "Modelled, exact: a device's forward, input gradient and weight gradient take 1 each. "
            "The bound counts no delays."
        )


def pipeline_view(
    *, schedule: str, devices: int, microbatches: int, slow: int, times: float, delay: float,
    device: int, moves: str, compiled: Compiled | None = None,
) -> PipelineView:  # fmt: skip
    """A schedule of `RULES` in time; stages and devices are counted from 0."""
    table = compiled.table if compiled else ""
    found = schedule_of(schedule, devices, microbatches, moves, table)
    compiled = compiled if moves == NONE else None
    slow = min(slow, found.stages - 1)
    factor, hop = (Fraction(number).limit_denominator(FINEST) for number in (times, delay))
    how = schedules.Durations(delay=hop, stages=_factors(found, slow, factor))
    timeline = schedules.simulate(found, how)
    as_float = functools.cache(float)
    starts, ends = (
        tuple(np.array([as_float(span[at]) for span in row]) for row in timeline.spans)
        for at in (1, 2)
    )
    bound = bound_of(schedule, devices, microbatches, slow, factor)
    return PipelineView(
        timeline, starts, ends, float(bound), slow, times, min(device, devices - 1), compiled,
        is_seed=schedule in SEARCHED and not table,
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


def place_in_words(schedule: schedules.Schedule, bar: int, place: int) -> str:
    """A bar of `scene_of` taken to a place of its lane, as `moved` takes it."""
    tasks = [task for order in schedule.orders for task in order]
    return f"{tasks[bar]} to {place}"


SEQUENCES, WIDTH = 2, 64


def compiled_facts(
    name: str, devices: int, microbatches: int, slow: int = 0, times: float = 1.0
) -> dict[str, Any]:
    """The fields of `Compiled`, of a chain of matrices and tanh under a schedule of `RULES`."""
    simulate_devices(devices)
    table = searched_table(name, devices, microbatches, slow, times) if name in SEARCHED else ""
    schedule = schedule_of(name, devices, microbatches, NONE, table)
    weights = [np.ones((WIDTH, WIDTH), np.float32)] * schedule.stages
    run = Pipeline(
        lambda w, x, _: jnp.tanh(x @ w), first=lambda _, data: data,
        last=lambda _, x, data: jnp.sum(x**2), weights=weights, schedule=schedule,
        mesh=make_mesh({"stage": devices}, devices=jax.devices()[:devices]),
    )  # fmt: skip
    batch = jnp.ones((microbatches, SEQUENCES, WIDTH))
    placed, start = run.place(weights), time.perf_counter()
    compiled = jax.jit(run).lower(placed, (), batch).compile()
    seconds = time.perf_counter() - start
    sent = [permute for permute in collectives(compiled) if permute.kind == "collective-permute"]
    return {
        "ticks": run.program.length, "channels": len(run.program.channels),
        "permutes": sum(permute.count for permute in sent),
        "bytes_sent": sum(permute.operand_bytes * permute.count for permute in sent),
        "activation": SEQUENCES * WIDTH * 4, "messages": run.program.messages,
        "compiled_with": f"jax {jax.__version__}, {devices} simulated devices", "seconds": seconds,
        "table": table,
    }  # fmt: skip


if __name__ == "__main__":
    _, name, devices, microbatches, slow, times = sys.argv
    found = compiled_facts(name, int(devices), int(microbatches), int(slow), float(times))
    print(json.dumps(found))
