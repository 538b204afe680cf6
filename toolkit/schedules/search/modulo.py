"""The shortest period of a steady state, as an integer program: modulo scheduling."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

from toolkit._checks import checked
from toolkit.schedules.search.shapes import Shape

# The share of the time that goes into the latency, once a period is found to be possible.
POLISHING = 5


@dataclass(frozen=True)
class Repetend:
    """A steady state, of K microbatches per period T: of microbatch r = q K + c, block i starts at
    starts[c n + i] + q T, with n blocks per microbatch.

    Attributes:
        period: T.
        starts: of each block of the first K microbatches.
        bound: no period is shorter: the work of the busiest device.
        is_proved: whether every shorter period of as many microbatches was shown to be impossible
            in this memory.
        copies: K.

    Example:
        >>> Repetend(period=4, starts=(0, 1), bound=4, is_proved=True).microbatches
        1
    """

    period: int
    starts: tuple[int, ...]
    bound: int
    is_proved: bool
    copies: int = 1

    @property
    def rate(self) -> float:
        """Time per microbatch."""
        return self.period / self.copies

    def row(self, microbatch: int) -> tuple[int, ...]:
        """Starts of the blocks of a microbatch."""
        again, copy = divmod(microbatch, self.copies)
        size = len(self.starts) // self.copies
        return tuple(s + again * self.period for s in self.starts[copy * size : (copy + 1) * size])

    def __str__(self) -> str:
        several = self.copies > 1
        each = f", {self.rate:g} per microbatch" if several else ""
        proof = "" if self.is_proved else " (not proved to be the shortest)"
        return (
            f"period {self.period} for {self.copies} microbatch{'es' * several}{each}{proof}; "
            f"lower bound {self.bound / self.copies:g} per microbatch"
        )

    @property
    def microbatches(self) -> int:
        """Number of microbatches whose blocks one period mixes."""
        return 1 + max(self.starts) // self.period - min(self.starts) // self.period


@checked
def find_repetend(
    shape: Shape, memory: int, *,
    copies: int = 1, most_periods: int | None = None, seconds: float = 10.0,
) -> Repetend | None:  # fmt: skip
    """The shortest steady state of a shape, and of those one in which blocks start early.

        s_i = T k_i + o_i,  0 <= o_i < T,  k_i >= 0         for each block i of one microbatch
        s_j >= s_i + span_i                                 if j needs i
        o_j >= o_i + span_i  and  o_i + T >= o_j + span_j   or the reverse, on a shared device
        sum over blocks that started <= memory              whenever a block allocates

    Every microbatch runs the same, T later than the one before: warm-up and cool-down are parts of
    it, and hold no more than the steady state. T goes up from the bound until it is possible.

    Args:
        shape: the blocks of one microbatch.
        memory: of every device.
        copies: K, microbatches per period. More than one may take less time per microbatch where
            memory is short: the V of 4 devices with memory for 3 takes 8 with one, 12 / 2 = 6 with
            two and 16 / 3 with three.
        most_periods: the largest k_i; None: the number of blocks.
        seconds: time for each period's program.

    Returns:
        The steady state; None if a period was neither possible nor impossible in time, or if the
        memory holds no microbatch.

    Raises:
        ValueError: a microbatch does not free what it holds.
        ImportError: OR-tools is missing (extra `search`).

    Cost: 0.1 s for 16 blocks on 8 devices.

    Source: Lin et al., "Tessel", 2023 (arXiv:2311.15269), for the problem; Rau, "Iterative Modulo
        Scheduling", 1994, for the model, in which no blocks are enumerated.

    Example:
        >>> from toolkit.schedules.search import tessel_shape
        >>> find_repetend(tessel_shape("V", devices=2), memory=2).period
        4
    """
    if copies < 1:
        raise ValueError(f"copies: got {copies}, wanted at least 1")
    devices = sorted({d for block in shape for d in block.devices})
    for device in devices:
        if left := sum(block.memory for block in shape if device in block.devices):
            raise ValueError(f"shape: a microbatch leaves {left} on device {device}; wanted 0")
    shape = tuple(
        replace(block, after=tuple(i + copy * len(shape) for i in block.after))
        for copy in range(copies)
        for block in shape
    )
    bound = max(sum(b.span for b in shape if d in b.devices) for d in devices)
    for period in range(bound, sum(block.span for block in shape) + 1):
        found, is_known = _at_period(shape, memory, period, most_periods or len(shape), seconds)
        if found is not None:
            return Repetend(period, found, bound, True, copies)
        if not is_known:
            return None
    return None


def _at_period(
    shape: Shape, memory: int, period: int, most: int, seconds: float
) -> tuple[tuple[int, ...] | None, bool]:
    """Starts at a period, if there are any, and whether that is known."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    k = [model.new_int_var(0, most, f"k{i}") for i in range(len(shape))]
    o = [model.new_int_var(0, period - 1, f"o{i}") for i in range(len(shape))]
    s = [period * a + b for a, b in zip(k, o, strict=True)]
    model.add(o[0] == 0)  # all may be shifted alike
    for i, block in enumerate(shape):
        for before in block.after:
            model.add(s[i] >= s[before] + shape[before].span)
    first: dict[tuple[int, int], Any] = {}
    for i, j in itertools.combinations(range(len(shape)), 2):
        if {*shape[i].devices} & {*shape[j].devices}:
            is_first = model.new_bool_var(f"{i}<{j}")
            for a, b, when in ((i, j, is_first), (j, i, ~is_first)):
                model.add(o[b] >= o[a] + shape[a].span).only_enforce_if(when)
                model.add(o[a] + period >= o[b] + shape[b].span).only_enforce_if(when)
                first[a, b] = when
    for e, block in enumerate(shape):
        if block.memory <= 0:
            continue
        for device in block.devices:
            needed = block.memory - block.memory * k[e]
            for i, other in enumerate(shape):
                if i != e and device in other.devices and other.memory:
                    needed += other.memory * (first[i, e] - k[i])
            model.add(needed <= memory)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 2
    solver.parameters.random_seed = 0
    solver.parameters.max_time_in_seconds = seconds
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, status == cp_model.INFEASIBLE
    found = tuple(solver.value(start) for start in s)
    for variable in (*k, *o):
        model.add_hint(variable, solver.value(variable))
    model.minimize(cp_model.LinearExpr.sum(s))
    solver.parameters.max_time_in_seconds = seconds / POLISHING
    if solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        found = tuple(solver.value(start) for start in s)
    return found, True
