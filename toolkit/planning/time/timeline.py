"""A timeline of one step in lanes: counts and bytes as compiled, durations modelled."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from toolkit._checks import checked
from toolkit.measure import in_words
from toolkit.measure.tables import text_table
from toolkit.measure.words import counted
from toolkit.planning.clusters import Cluster, cluster
from toolkit.planning.time.compiled_work import (
    CompiledWork,
    Compute,
    Loop,
    Send,
    Wait,
    compiled_work,
)
from toolkit.planning.time.seconds import Constants, constants_of
from toolkit.planning.time.step import transfer_seconds

COMPUTE, STRAGGLER, LINK = "compute", "straggler", "collectives"
MOST_EVENTS = 500_000


class Span(NamedTuple):
    """A stretch of one lane.

    Attributes:
        lane: "compute", "straggler" (the slow chip's computing) or "collectives".
        name: "forward", "backward", "update" or "other" (copies and casts that belong to no pass);
            or the kind of a collective. Compilers put the head's forward pass for the loss late,
            because only the loss needs it.
        start: seconds from the beginning of the step.
        seconds: duration.

    Example:
        >>> Span("compute", "forward", 0.0, 0.5).seconds
        0.5
    """

    lane: str
    name: str
    start: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A step in lanes; modelled.

    Attributes:
        cluster: the chips.
        spans: in order of start within each lane; adjacent spans of one name are merged.
        step_seconds: duration of the step.
        computing: seconds that an ordinary chip computes.
        communicating: seconds that its link sends.
        unknown_loops: loops whose trips the program does not tell; they count once.
        unknown_calls: kernels and libraries whose FLOPs it does not tell; they count none.

    Example:
        >>> x = jnp.ones((64, 64))
        >>> found = timeline(jax.jit(jnp.dot).lower(x, x).compile(), "v5e:1")
        >>> found.communicating, found.hidden
        (0.0, 0.0)
    """

    cluster: Cluster
    spans: tuple[Span, ...]
    step_seconds: float
    computing: float
    communicating: float
    unknown_loops: int
    unknown_calls: tuple[str, ...] = ()

    @property
    def hidden(self) -> float:
        """Seconds of communication that an ordinary chip's computing hides."""
        ends = [
            (time, lane, change)
            for lane, _, start, seconds in self.spans if lane != STRAGGLER
            for time, change in ((start, 1), (start + seconds, -1))
        ]  # fmt: skip
        total, before, running = 0.0, 0.0, {COMPUTE: 0, LINK: 0}
        for time, lane, change in sorted(ends):
            total += (time - before) * all(running.values())
            running[lane] += change
            before = time
        return total

    def __str__(self) -> str:
        rows = [(f"on {self.cluster.name}, modelled", "seconds")]
        rows += [
            (name, in_words(seconds, "seconds"))
            for name, seconds in (
                ("computing", self.computing),
                ("communicating", self.communicating),
                ("  hidden behind computing", self.hidden),
                ("step", self.step_seconds),
            )
        ]
        table = text_table(rows, "<>")
        if self.unknown_loops:
            loops = counted(self.unknown_loops, "loop")
            table += f"\n{loops} of unknown length counted as one run"
        if self.unknown_calls:
            table += f"\nFLOPs are unknown and counted as none: {', '.join(self.unknown_calls)}"
        return table


@checked
def timeline(
    compiled: jax.stages.Compiled | CompiledWork,
    chips: str | Cluster,
    *,
    constants: Constants | None = None,
    link_speed: float = 1.0,
    straggler: float = 1.0,
) -> Timeline:
    """Model the timeline of a compiled program on some chips.

    Instructions run one after another in the compiler's order. A collective runs concurrently from
    its start until something waits for its end; only one runs at a time.

        computing      max(FLOPs / (peak matmul), bytes / (bandwidth memory))
        collective     (n - 1) delay latency + bytes sent / (bandwidth link link_speed)

    Args:
        compiled: the result of `jax.jit(f).lower(...).compile()` or `Program.compile`.
        chips: kind and number, such as "v5e:4x4".
        constants: rates that chips and links achieve; None: the defaults.
        link_speed: speed of the links relative to the published one.
        straggler: factor by which one chip computes more slowly; collectives wait for it.

    Raises:
        ValueError: link_speed or straggler out of range, unknown chips, or a program of more than
            500,000 events.

    Cost: Milliseconds, after reading the program: a second per megabyte of its text.

    Example:
        >>> x = jnp.ones((256, 256))
        >>> found = timeline(jax.jit(jnp.dot).lower(x, x).compile(), "v5e:1")
        >>> [(span.lane, span.name) for span in found.spans]
        [('compute', 'other')]
    """
    for name, value, low, high in (
        ("link_speed", link_speed, 1e-3, 1e3), ("straggler", straggler, 1.0, 1e3),
    ):  # fmt: skip
        if not low <= value <= high:
            raise ValueError(f"{name} must lie in [{low:g}, {high:g}]; got {value:g}")
    where = cluster(chips)
    work = compiled if isinstance(compiled, CompiledWork) else compiled_work(compiled)
    durations = _Durations(where, constants_of(where, constants), link_speed)
    items = durations.of(work.items)
    if (events := _events(items)) > MOST_EVENTS:
        raise ValueError(f"compiled must have at most {MOST_EVENTS:,} events; got {events:,}")
    run = _Run((1.0,) if straggler == 1 else (1.0, straggler))
    run.go(items)
    return Timeline(
        where, tuple(run.spans()), max(*run.clocks, run.link_free), run.busy[COMPUTE],
        run.busy[LINK], work.unknown_loops, work.unknown_calls,
    )  # fmt: skip


class _Busy(NamedTuple):
    """Uninterrupted computing, by pass."""

    parts: tuple[tuple[str, float], ...]


class _Sent(NamedTuple):
    number: int
    kind: str
    seconds: float


class _Durations(NamedTuple):
    """Seconds of items; consecutive computation, also in loops, becomes one item."""

    cluster: Cluster
    constants: Constants
    link_speed: float

    def of(self, items: tuple[Any, ...]) -> list[Any]:
        found: list[Any] = []
        parts: list[tuple[str, float]] = []

        def flush():
            if parts:
                found.append(_Busy(_joined(parts)))
                parts.clear()

        for item in items:
            if isinstance(item, Compute):
                parts.append((item.phase, self._computing(item)))
            elif isinstance(item, Loop):
                inside = self.of(item.items)
                if all(isinstance(each, _Busy) for each in inside):
                    parts += [
                        (name, seconds * item.trips)
                        for each in inside for name, seconds in each.parts
                    ]  # fmt: skip
                else:
                    flush()
                    found.append(Loop(item.trips, tuple(inside)))
            else:
                flush()
                is_start = isinstance(item, Send)
                found.append(
                    _Sent(item.number, item.kind, self._sending(item)) if is_start else item
                )
        flush()
        return found

    def _computing(self, item: Compute) -> float:
        chip, constants = self.cluster.chip, self.constants
        return max(
            item.flops / (chip.flops_per_second * constants.matmul),
            item.bytes / (chip.bytes_per_second * constants.memory),
        )

    def _sending(self, item: Send) -> float:
        link = self.cluster.link(item.inner, item.degree)
        rate = link.bytes_per_second * self.link_speed
        link = dataclasses.replace(link, bytes_per_second=rate)
        return transfer_seconds(link, item.bytes_sent, item.degree, self.constants)


def _joined(parts) -> tuple[tuple[str, float], ...]:
    found: list[tuple[str, float]] = []
    for name, seconds in parts:
        if found and found[-1][0] == name:
            seconds += found.pop()[1]
        if seconds:
            found.append((name, seconds))
    return tuple(found)


def _events(items) -> int:
    return sum(item.trips * _events(item.items) if isinstance(item, Loop) else 1 for item in items)


class _Run:
    """Clocks of an ordinary chip, of a slow one if any, and of their link."""

    def __init__(self, slowness: tuple[float, ...]):
        self.slowness = slowness
        self.clocks = [0.0] * len(slowness)
        self.link_free = 0.0
        self.done: dict[int, float] = {}
        self.busy = {COMPUTE: 0.0, STRAGGLER: 0.0, LINK: 0.0}
        self.laid: dict[str, list[Span]] = {COMPUTE: [], STRAGGLER: [], LINK: []}

    def go(self, items) -> None:
        for item in items:
            if isinstance(item, _Busy):
                for chip, slow in enumerate(self.slowness):
                    for name, seconds in item.parts:
                        lane = STRAGGLER if chip else COMPUTE
                        self._lay(lane, name, self.clocks[chip], seconds * slow)
                        self.clocks[chip] += seconds * slow
            elif isinstance(item, _Sent):
                start = max(self.link_free, *self.clocks)
                self.link_free = start + item.seconds
                self.done[item.number] = self.link_free
                self._lay(LINK, item.kind, start, item.seconds)
            elif isinstance(item, Wait):
                self.clocks = [max(clock, self.done[item.number]) for clock in self.clocks]
            else:
                for _ in range(item.trips):
                    self.go(item.items)

    def spans(self) -> Iterator[Span]:
        for laid in self.laid.values():
            yield from laid

    def _lay(self, lane: str, name: str, start: float, seconds: float) -> None:
        self.busy[lane] += seconds
        spans = self.laid[lane]
        if spans and spans[-1].name == name:
            before = spans[-1]
            if start - before.start - before.seconds <= 1e-9 * (start + seconds):
                spans[-1] = Span(lane, name, before.start, start + seconds - before.start)
                return
        spans.append(Span(lane, name, start, seconds))
