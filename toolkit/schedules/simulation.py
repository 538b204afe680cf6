"""Simulation of a schedule: times of tasks, idle time and memory."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from toolkit._checks import check_fields, checked
from toolkit.schedules.schedule import Schedule, Task, faults

Time = Fraction


@dataclass(frozen=True)
class Durations:
    """Durations of one microbatch on ONE device, all its chunks together; any unit.

    Attributes:
        forward: T_F.
        input_gradient: T_I, which the zero-bubble papers call B.
        weight_gradient: T_W; a whole backward takes T_I + T_W.
        delay: from the end of a task to the start, on another device, of one that waits for it.
        stages: factor of each stage's tasks, such as its layers over the mean; empty: all 1.
        microbatches: factor of each microbatch's tasks, such as its tokens over the mean; empty:
            all 1.
        hops: the delay between each pair of consecutive stages, in place of `delay`.

    Example:
        >>> Durations(forward=1, input_gradient=1, weight_gradient=1).of("B")
        Fraction(2, 1)
        >>> from toolkit.schedules import gpipe
        >>> simulate(gpipe(devices=2, microbatches=3), Durations(stages=(1, 2))).makespan
        Fraction(21, 1)
    """

    forward: float | Fraction = 1
    input_gradient: float | Fraction = 1
    weight_gradient: float | Fraction = 1
    delay: float | Fraction = 0
    stages: tuple[float | Fraction, ...] = ()
    microbatches: tuple[float | Fraction, ...] = ()
    hops: tuple[float | Fraction, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        for name, values in (
            ("forward", (self.forward,)),
            ("input_gradient", (self.input_gradient,)),
            ("weight_gradient", (self.weight_gradient,)),
            ("delay", (self.delay,)),
            ("stages", self.stages),
            ("microbatches", self.microbatches),
            ("hops", self.hops),
        ):
            for value in values:
                if value < 0 or (value == 0 and name not in ("delay", "hops")):
                    raise ValueError(f"{name}: got {value!r}, wanted a positive number")

    def of(self, kind: str) -> Time:
        """A task of one chunk that fills its device."""
        halves = {"F": (self.forward,), "I": (self.input_gradient,), "W": (self.weight_gradient,)}
        parts = halves.get(kind, (self.input_gradient, self.weight_gradient))
        return sum((Fraction(part) for part in parts), Fraction(0))

    def factor(self, task: Task) -> Fraction:
        """How many times as long as usual a task takes, by its stage and its microbatch."""
        stage = Fraction(self.stages[task.stage]) if self.stages else Fraction(1)
        return stage * Fraction(self.microbatches[task.microbatch] if self.microbatches else 1)

    def between(self, stage: int, other: int) -> Time:
        """The delay of a message between neighbouring stages on different devices."""
        return Fraction(self.hops[min(stage, other)] if self.hops else self.delay)

    def check(self, schedule: Schedule) -> None:
        """ValueError where a tuple is not as long as the schedule wants."""
        for name, values, wanted in (
            ("hops", self.hops, schedule.stages - 1),
            ("stages", self.stages, schedule.stages),
            ("microbatches", self.microbatches, schedule.microbatches),
        ):
            if values and len(values) != wanted:
                raise ValueError(
                    f"{name}: got {len(values)} numbers; {schedule.name!r} wants {wanted}"
                )


class Span(NamedTuple):
    """When a task ran.

    Attributes:
        task: which.
        start, end: in the unit of the durations.

    Example:
        >>> from toolkit.schedules import gpipe
        >>> simulate(gpipe(devices=1, microbatches=1)).spans[0][0]
        Span(task=F0@0, start=Fraction(0, 1), end=Fraction(1, 1))
    """

    task: Task
    start: Time
    end: Time


@dataclass(frozen=True)
class Timeline:
    """A simulated schedule. All numbers are modelled and exact (`fractions.Fraction`).

    Attributes:
        schedule: the simulated schedule.
        durations: its durations.
        spans: for each device its tasks with start and end.

    Example:
        >>> from toolkit.schedules import one_forward_one_backward
        >>> timeline = simulate(one_forward_one_backward(devices=4, microbatches=8))
        >>> timeline.makespan, timeline.bubble
        (Fraction(33, 1), Fraction(3, 11))
        >>> timeline.peak_memory()
        (Fraction(4, 1), Fraction(3, 1), Fraction(2, 1), Fraction(1, 1))
    """

    schedule: Schedule
    durations: Durations
    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> Time:
        """From the first start to the last end."""
        return max(row[-1].end for row in self.spans)

    @property
    def work(self) -> tuple[Time, ...]:
        """How long each device works."""
        return tuple(sum((end - at for _, at, end in row), Fraction(0)) for row in self.spans)

    @property
    def busy(self) -> Time:
        """The work of one device, m (T_F + T_I + T_W); the mean where they differ."""
        return sum(self.work, Fraction(0)) / self.schedule.devices

    @property
    def bubble(self) -> Fraction:
        """Share of the makespan in which a device idles: 1 - busy / makespan."""
        return 1 - self.busy / self.makespan

    @property
    def span_bubble(self) -> Fraction:
        """The same between a device's own first and last task, for the device where it is largest.

        The measure of the zero-bubble papers: what remains when the next step's forwards may start
        before the other devices have ended this one.
        """
        rows = zip(self.work, self.spans, strict=True)
        return max(1 - work / (row[-1].end - row[0].start) for work, row in rows)

    def memory(
        self, device: int, activation: float | Fraction = 1, weight_gradient: float | Fraction = 0
    ) -> Iterator[tuple[Time, Fraction]]:
        """(time, memory held from then on) on one device.

        Args:
            device: which.
            activation: M_B, held by a device's share of one microbatch from its forward to the end
                of its backward or input gradient.
            weight_gradient: M_W, held from there to the end of its weight gradient.
        """
        chunks = self.schedule.chunks
        m_b, m_w = Fraction(activation) / chunks, Fraction(weight_gradient) / chunks
        total = Fraction(0)
        # A device's tasks follow one another, and so do its changes.
        for task, start, end in self.spans[device]:
            if task.kind == "F":
                total += m_b
                yield start, total
            else:
                total += {"I": m_w - m_b, "W": -m_w, "B": -m_b}[task.kind]
                yield end, total

    def peak_memory(
        self, activation: float | Fraction = 1, weight_gradient: float | Fraction = 0
    ) -> tuple[Fraction, ...]:
        """The most that each device holds at once; arguments as of `memory`."""
        devices = range(self.schedule.devices)
        return tuple(
            max(total for _, total in self.memory(d, activation, weight_gradient)) for d in devices
        )

    def __str__(self) -> str:
        """One row per device; the width of a task is its duration, dots are idle.

        With several chunks per device a task names its stage first, as in PyTorch's files.
        """

        def label(task: Task) -> str:
            stage = task.stage if self.schedule.chunks > 1 else ""
            return f"{stage}{task.kind}{task.microbatch}"

        everything = [span for row in self.spans for span in row]
        longest = max(len(label(span.task)) for span in everything)
        columns = (longest + 1) / float(min(span.end - span.start for span in everything))
        at = lambda time: round(float(time) * columns)  # noqa: E731
        lines = []
        for device, row in enumerate(self.spans):
            line = ["."] * at(self.makespan)
            for task, start, end in row:
                cell = label(task).ljust(at(end) - at(start) - 1) + "|"
                line[at(start) : at(end)] = cell
            lines.append(f"{device} {''.join(line)}")
        return "\n".join(lines)


@checked
def simulate(schedule: Schedule, durations: Durations | None = None) -> Timeline:
    """Run every device's tasks in order, each as early as possible.

        start = max(end of the device's task before, ends of what it waits for (+ delay))

    Messages do not queue for a link. What a device holds at most follows from the order alone, not
    from the durations: see `Schedule.peak_activations`, and `faults` for a limit.

    Args:
        schedule: a schedule without `faults`.
        durations: of tasks that fill a device; a task of one of v chunks takes 1/v of them. None:
            all three 1, no delay.

    Cost: Proportional to the number of tasks: about 10 us each.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023 (arXiv:2401.10241), section 2, for
        the durations.

    Example:
        >>> from toolkit.schedules import zero_bubble_h1
        >>> print(simulate(zero_bubble_h1(devices=2, microbatches=2)))
        0 F0|F1|...I0|W0|I1|W1|
        1 ...F0|I0|F1|I1|W0|W1|
    """
    if wrong := faults(schedule):
        raise ValueError(f"schedule: {schedule.name!r} cannot run: {wrong[0]}")
    durations = durations or Durations()
    durations.check(schedule)
    took, delays, scale = _whole_numbers(schedule, durations)
    times = functools.cache(lambda time: Fraction(time, scale))
    ends: list[int] = []
    free = [0] * schedule.devices
    spans: list[list[Span]] = [[] for _ in schedule.orders]
    tasks = schedule._runnable
    for device, task, before in tasks:
        start = free[device]
        for place in before:
            there, other, _ = tasks[place]
            delay = 0 if there == device else delays[min(other.stage, task.stage)]
            start = max(start, ends[place] + delay)
        free[device] = start + took(task)
        ends.append(free[device])
        spans[device].append(Span(task, times(start), times(free[device])))
    return Timeline(schedule, durations, tuple(map(tuple, spans)))


def _whole_numbers(
    schedule: Schedule, durations: Durations
) -> tuple[Callable[[Task], int], list[int], int]:
    """Duration of every task and delay of every hop as whole numbers of 1 / scale; the scale."""
    kinds = {kind: durations.of(kind) / schedule.chunks for kind in "FBIW"}
    stages = dict(enumerate(durations.stages or (1,) * schedule.stages))
    microbatches = dict(enumerate(durations.microbatches or (1,) * schedule.microbatches))
    hops = {s: durations.between(s, s + 1) for s in range(schedule.stages - 1)}
    (of_kind, a), (of_stage, b), (of_microbatch, c), (delays, d) = map(
        _as_integers, (kinds, stages, microbatches, hops)
    )
    scale = math.lcm(a * b * c, d)
    factor = scale // (a * b * c)

    def took(task: Task) -> int:
        return of_kind[task[0]] * of_microbatch[task[1]] * of_stage[task[2]] * factor

    return took, [delay * (scale // d) for delay in delays.values()], scale


def _as_integers(numbers: Mapping[Any, float | Fraction]) -> tuple[dict[Any, int], int]:
    """The numbers times their least common denominator, and that."""
    exact = {name: Fraction(number) for name, number in numbers.items()}
    common = math.lcm(*(number.denominator for number in exact.values()))
    return {name: int(number * common) for name, number in exact.items()}, common
