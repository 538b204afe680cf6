"""Traces of `jax.profiler`: recorded, read, and drawn as Perfetto shows them."""

import gzip
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from toolkit.figures import FAINT, LOOKS, in_words
from toolkit.lab.lessons.drawing import Drawing, png_of

CALLS = 10
PYTHON = "python"


class Event(NamedTuple):
    """One event of a trace; times are in microseconds from the first operation on."""

    name: str
    lane: str
    start: float
    end: float


class Trace(NamedTuple):
    """A trace of a profiler: the operations of the program, what Python did, and the file."""

    operations: list[Event]
    python: list[Event]
    path: Path

    def lanes(self) -> list[str]:
        """The threads that ran operations, the busiest first."""
        total: dict[str, float] = defaultdict(float)
        for event in self.operations:
            total[event.lane] += event.end - event.start
        return sorted(total, key=lambda lane: -total[lane])

    def spans(self) -> list[tuple[str, float, float]]:
        """(name, start, end) of every operation, on whichever thread."""
        return [(event.name, event.start, event.end) for event in self.operations]

    def picture(self) -> Drawing:
        """The lanes as Perfetto shows them: time to the right, a lane per thread."""
        length = max(event.end for event in self.operations)
        names = dict.fromkeys(event.name for event in self.operations)
        words = (
            f"{len(self.operations)} operations of {len(names)} kinds on {len(self.lanes())} "
            f"threads in {in_words(length / 1e6, 'seconds')}, and what Python did (measured here)."
        )
        return Drawing(png_of(self._draw, 3.6), words)

    def _draw(self, figure: Figure) -> None:
        axes = figure.add_axes((0.12, 0.17, 0.85, 0.7))
        looks = [LOOKS[name].colour for name in ("full", "window", "gdn")]
        names = [*dict.fromkeys(event.name for event in self.operations)]
        lanes = [PYTHON, *self.lanes()]
        for event in (*self.python, *self.operations):
            is_python = event.lane == PYTHON
            axes.barh(
                lanes.index(event.lane), max(event.end - event.start, 1), 0.7, left=event.start,
                color=FAINT if is_python else looks[names.index(event.name) % len(looks)],
                edgecolor="white", linewidth=0.4,
            )  # fmt: skip
        axes.set_yticks(
            range(len(lanes)), [PYTHON, *(f"thread {n + 1}" for n in range(len(lanes) - 1))]
        )
        axes.invert_yaxis()
        axes.set(xlabel="microseconds", xlim=(0, max(event.end for event in self.operations)))
        axes.grid(False, axis="y")


def record(calls: int = CALLS) -> Trace:
    """Trace calls of a small step on this machine, each waited for, and read the file."""
    import jax
    import jax.numpy as jnp

    def loss(weights: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1]) ** 2)

    weights, x = (jnp.ones((128, 512)), jnp.ones((512, 128))), jnp.ones((256, 128))
    step = jax.jit(jax.grad(loss))
    jax.block_until_ready(step(weights, x))
    folder = tempfile.mkdtemp(prefix="toolkit-trace-")
    with jax.profiler.trace(folder):
        for _ in range(calls):
            jax.block_until_ready(step(weights, x))
    (path,) = Path(folder).rglob("*.trace.json.gz")
    return read_trace(path)


def read_trace(path: Path) -> Trace:
    """Read a file of `jax.profiler`, in Chrome's format; operations are what names an `hlo_op`."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event.get("name") == "thread_name"
    }
    whole = [event for event in events if event.get("ph") == "X"]
    ran = [event for event in whole if "hlo_op" in event.get("args", {})]
    if not ran:
        raise ValueError(f"{path} holds no operation of a compiled program")
    first, last = min(e["ts"] for e in ran), max(e["ts"] + e["dur"] for e in ran)

    def event_of(event: dict[str, Any], lane: str) -> Event:
        start = event["ts"] - first
        return Event(event["name"], lane, start, start + event["dur"])

    lane = {thread: f"{name} {thread[1]}" for thread, name in named.items()}
    python = [
        event_of(event, PYTHON)
        for event in whole
        if named.get((event["pid"], event["tid"])) == PYTHON and first <= event["ts"] <= last
    ]
    operations = [
        event_of(event, lane.get((event["pid"], event["tid"]), str(event["tid"]))) for event in ran
    ]
    return Trace(operations, python, path)


def busy_time(spans: list[tuple[str, float, float]]) -> float:
    """Time in which at least one of the spans runs."""
    total, reached = 0.0, float("-inf")
    for _, start, end in sorted(spans, key=lambda span: span[1]):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
