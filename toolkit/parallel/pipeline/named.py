"""A schedule by name: moved by hand, searched for, bounded, and what the compiler makes of it.

Run as `python -m toolkit.parallel.pipeline.named SCHEDULE DEVICES MICROBATCHES SLOW TIMES`, in a
process of its own because devices are simulated before jax starts, it compiles a schedule, counts
the permutes and prints JSON. An order that is to be searched for is searched for first, with a
stage TIMES as slow.
"""

import dataclasses
import functools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from toolkit import schedules
from toolkit.measure import collectives
from toolkit.parallel.devices import simulate_devices
from toolkit.parallel.mesh import make_mesh
from toolkit.parallel.pipeline.running import Pipeline
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
SEARCH_SECONDS = 5.0  # of each integer program
FINEST = 1000  # denominator of slowness and delay: 1.3 is thirteen tenths
NONE = "none"
POLL_SECONDS, MOST_SECONDS = 0.5, 300
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
    factors = factors_of(seed, min(slow, seed.stages - 1), factor)
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
    whole = schedules.Durations(*[scale] * 3, stages=factors_of(schedule, slow, times))
    found = lower_bound(shape_of(schedule, whole), microbatches)
    return Fraction(found, scale * schedule.chunks)


def factors_of(schedule: schedules.Schedule, slow: int, times: Fraction) -> tuple[Fraction, ...]:
    """The slow stage's duration beside those of the others, which are 1."""
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


def compile_apart(*given: Any) -> Iterator[Compiled | None]:
    """The arguments of `compiled_facts`, in a process of its own: None while it works, then what
    it found."""
    command, began = [sys.executable, "-m", "toolkit.parallel.pipeline.named"], time.monotonic()
    command += map(str, given)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            while process.poll() is None:
                if time.monotonic() - began > MOST_SECONDS:
                    raise TimeoutError(f"compiling took more than {MOST_SECONDS} s")
                yield None
                time.sleep(POLL_SECONDS)
        finally:
            process.kill()
        out, error = process.communicate()
    if process.returncode:
        raise RuntimeError(error.decode().strip().splitlines()[-1])
    yield Compiled(**json.loads(out))


if __name__ == "__main__":
    _, name, devices, microbatches, slow, times = sys.argv
    found = compiled_facts(name, int(devices), int(microbatches), int(slow), float(times))
    print(json.dumps(found))
