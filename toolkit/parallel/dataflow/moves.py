"""Moves of an array from one cut on a mesh axis to another: the collective, its bytes, its time.

Moves cost as much as in a ring:

    seconds = messages * latency + bytes sent / bandwidth

    from \\ to    cut elsewhere          whole                cut
    cut          all-to-all V/N         all-gather V         -
    partial      -                      all-reduce 2 V       reduce-scatter V      (N-1)/N of each

Source: Thakur, Rabenseifner, Gropp, 2005 (the ring).
"""

import math
from typing import Any

from toolkit.parallel.dataflow.flow import PARTIAL, WHOLE, Cut, Flow, Machine, Move, source_of


class Value:
    """The available forms of an array on each axis."""

    def __init__(self, cut: Cut, made_by: Any = None) -> None:
        self.forms, self.made_by = [{place} for place in cut], made_by

    @property
    def cut(self) -> Cut:
        """The form in which it was made; partial sums count as whole only after the sum."""
        return tuple(
            max(form) if max(form) >= 0 else (WHOLE if WHOLE in form else PARTIAL)
            for form in self.forms
        )


class Moves:
    """The moves of one pass over a program, collected in a `Flow`."""

    def __init__(self, mesh: dict[str, int], machine: Machine) -> None:
        self.axes, self.sizes = list(mesh), list(mesh.values())
        self.machine, self.flow = machine, Flow([])

    def settle(
        self, atom: Any, value: Value, axis: int, wanted: int, count: int, equation: Any
    ) -> None:
        """Bring an array into the wanted form on an axis, recording the move."""
        forms = value.forms[axis]
        if wanted in forms or WHOLE in forms or wanted == PARTIAL:
            if wanted != PARTIAL:
                forms.add(wanted)
            return
        self._record(*self._move(atom, value, axis, wanted), axis, count, value, equation)
        forms.add(wanted)

    def _record(
        self, kind: str, sent: float, messages: int, axis: int, count: int, value: Value,
        equation: Any,
    ) -> None:  # fmt: skip
        self.flow.seconds_moving += count * self._time(sent, messages)
        sources = (source_of(value.made_by), source_of(equation))
        self.flow.moves.append(Move(kind, self.axes[axis], sent, count, sources))

    def _time(self, sent: float, messages: int) -> float:
        return messages * self.machine.latency + sent / self.machine.bandwidth

    def _seconds(self, atom: Any, value: Value, axis: int, wanted: int) -> float:
        if wanted in value.forms[axis] or WHOLE in value.forms[axis]:
            return 0.0
        _, sent, messages = self._move(atom, value, axis, wanted)
        return self._time(sent, messages)

    def _move(self, atom: Any, value: Value, axis: int, wanted: int) -> tuple[str, float, int]:
        size = self.sizes[axis]
        others = [
            self.sizes[other]
            for other, place in enumerate(value.cut)
            # In a sum over several axes, each axis sums what the earlier ones scattered.
            if other != axis and (place >= 0 or {PARTIAL, WHOLE} <= value.forms[other])
        ]
        volume = _bytes(atom) / math.prod(others) * (size - 1) / size
        if PARTIAL in value.forms[axis] and max(value.forms[axis]) < 0:
            if wanted == WHOLE:
                return "all-reduce", 2 * volume, 2 * (size - 1)
            return "reduce-scatter", volume, size - 1
        if wanted == WHOLE:
            return "all-gather", volume, size - 1
        return "all-to-all", volume / size, size - 1

    def _all_reduce_seconds(self, atom: Any, cut: list[int], axis: int) -> float:
        size = self.sizes[axis]
        pieces = math.prod(self.sizes[axis] for axis, place in enumerate(cut) if place != WHOLE)
        sent = 2 * _bytes(atom) / pieces * (size - 1) / size
        return self._time(sent, 2 * (size - 1))


def _bytes(atom: Any) -> float:
    aval = atom.aval
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return float(math.prod(getattr(aval, "shape", ()))) * itemsize
