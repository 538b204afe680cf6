"""Sequences that double: what a recurrent mixer's time and memory do, forward and backward."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from toolkit.attention import Mixer
from toolkit.bench.agreement import finite
from toolkit.bench.harness import Case, PlannedCase
from toolkit.bench.mixers.inputs import mixer_form, mixer_inputs
from toolkit.measure import program_cost

TIMES = (4096, 8192, 16384, 32768, 65536)
HEADS, SIZE = 2, 64  # the shortest sequence already leaves the processor's caches
MOST_GROWTH = 2.1  # of time and of memory, a doubling
MEMORY = "compiled peak memory"


def cases(rows: Sequence[Mixer]) -> Iterator[PlannedCase]:
    """Every row at the lengths of `TIMES`."""
    for row in rows:
        yield PlannedCase(
            f"{row.name} linear forward+backward B=1 H={HEADS} D={SIZE} float32",
            partial(linear_case, row, TIMES),
        )


def linear_case(row: Mixer, times: tuple[int, ...], name: str) -> Case:
    """One mixer's gradient on sequences of growing length."""
    programs = {f"T={time}": _Gradient(row, time) for time in times}
    return Case(
        name=name,
        contenders=programs,
        check=finite,
        ours=f"T={times[-1]}",
        growth=MOST_GROWTH,
        facts=lambda: {name: {MEMORY: (p.memory, "byte")} for name, p in programs.items()},
    )


def peak_memory(row: Mixer, time: int) -> int:
    """What the compiler reserves for the gradient of a sequence, without running it."""
    return _Gradient(row, time).memory


class _Gradient:
    """The gradients of all inputs from an output weight of ones, compiled when first needed."""

    def __init__(self, row: Mixer, time: int) -> None:
        self._form = mixer_form(row, "xla", backward=True)
        self._row, self._time = row, time
        self._program: Callable[..., Any] | None = None

    def _inputs(self) -> tuple[jax.Array, ...]:
        arrays = mixer_inputs(self._row, self._time, HEADS, SIZE)
        return jnp.ones((1, self._time, HEADS, SIZE)), *arrays

    def _compile(self) -> Any:
        if self._program is None:
            self._shapes = jax.eval_shape(self._inputs)
            self._program = jax.jit(self._form).lower(*self._shapes).compile()
        return self._program

    @property
    def memory(self) -> int:
        return program_cost(self._compile()).resident_bytes

    def __call__(self) -> Any:
        if not hasattr(self, "_arguments"):
            self._arguments = self._inputs()
        return self._compile()(*self._arguments)
