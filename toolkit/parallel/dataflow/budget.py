"""The fastest of several layouts that fits a memory budget, by the compiled program."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from toolkit.measure import in_words, program_cost
from toolkit.parallel.causes.comparison import compiled_gradient
from toolkit.parallel.cuts import largest_cut, with_axes
from toolkit.parallel.layout import Layout, Placement


def first_that_fits(
    loss_fn: Callable, params: Any, batch: Any, layouts: Iterable[Layout], memory: int
) -> Layout:
    """The first layout whose compiled loss and gradients stay within `memory` bytes per device."""
    needed = []
    for found in layouts:
        compiled = compiled_gradient(loss_fn, params, batch, found)
        needed.append(program_cost(compiled).resident_bytes)
        if needed[-1] <= memory:
            return found
    raise ValueError(
        f"memory={memory}: the least of {len(needed)} layouts compiled needs {min(needed)} bytes "
        f"({in_words(min(needed), 'bytes')}) per device; that, a smaller batch or more devices "
        "would fit"
    )


def cut_further(found: Layout, axis: str, stacked: set[tuple[int, int]]) -> Layout:
    """The layout with every parameter cut along the batch's axis too, as ZeRO-3 does."""

    def finer(place: int, row: Placement) -> Placement:
        layers = [at for where, at in stacked if where == place]
        best, reason = largest_cut(row.shape, row.spec, found.mesh, (axis,), 0, layers)
        if best is None:
            return row
        spec = with_axes(row.spec, best, (axis,))
        return dataclasses.replace(row, spec=spec, reason=f"{row.reason}; for memory, {reason}")

    rows = tuple(finer(place, row) for place, row in enumerate(found.placements))
    return dataclasses.replace(found, placements=rows)
