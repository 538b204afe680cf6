"""Microbatches made of rows that each device has already, by a reordered reshape.

    x.reshape(micro, rows, ...)                   a device has whole microbatches: they move
    x.reshape(rows, micro, ...).swapaxes(0, 1)    a device has a part of each: nothing moves

Other rows then share a microbatch, which a sum or mean over all of them does not show.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

from jax import Array
from jax.extend.core import Jaxpr, Literal, Var

from toolkit.parallel.dataflow.flow import source_of
from toolkit.parallel.dataflow.programs import equations_of, scan_counts
from toolkit.parallel.faults.variant import Variant, changed, programs_of


def reordered(variant: Variant) -> Iterator[tuple[str, Variant]]:
    """Each set of reshapes whose microbatches are scanned together, reordered."""
    for jaxpr in programs_of(variant.program.jaxpr):
        for (micro, rows), splits in _microbatches(jaxpr).items():
            chosen = {id(split) for split in splits}
            program = changed(
                variant.program,
                lambda split, chosen=chosen: _swapped(split) if id(split) in chosen else [split],
            )
            words = (
                f"reshape {micro * rows} rows at {source_of(splits[0])} to ({rows}, {micro}) and "
                f"swap these two, not to ({micro}, {rows}): other rows share a microbatch"
            )
            yield words, dataclasses.replace(variant, program=program)


def _microbatches(jaxpr: Jaxpr) -> dict[tuple[int, int], list[Any]]:
    """(microbatches, rows of each) -> the reshapes that make them, if only scans see their rows."""
    made_by: dict[Any, Any] = {out: equation for equation in jaxpr.eqns for out in equation.outvars}
    used = [atom for equation in jaxpr.eqns for atom in equation.invars] + list(jaxpr.outvars)
    uses = Counter(atom for atom in used if isinstance(atom, Var))
    scanned: Counter[Any] = Counter(atom for equation in jaxpr.eqns for atom in _scanned(equation))
    found: dict[tuple[int, int], list[Any]] = {}
    all_splits: list[Any] = [split for split in jaxpr.eqns if _is_split(split)]
    for split in all_splits:
        found.setdefault(split.outvars[0].aval.shape[:2], []).append(split)

    def is_inside(atom: Any) -> bool:
        """Whether an array of microbatches is made by a scan or a split, and only scans read it."""
        maker = made_by.get(atom)
        is_made = maker is not None and (maker.primitive.name == "scan" or _is_split(maker))
        return is_made and uses[atom] == scanned[atom]

    def rows_stay_inside(sizes: tuple[int, int]) -> bool:
        loops = [loop for loop in jaxpr.eqns if loop.primitive.name == "scan"]
        stacks: list[Any] = [atom for loop in loops for atom in (*_scanned(loop), *_stacked(loop))]
        return all(is_inside(atom) for atom in stacks if atom.aval.shape[:2] == sizes)

    return {
        sizes: splits
        for sizes, splits in found.items()
        if rows_stay_inside(sizes) and all(scanned[split.outvars[0]] for split in splits)
    }


def _is_split(equation: Any) -> bool:
    """Whether a reshape splits the first dimension in two."""
    if equation.primitive.name != "reshape" or equation.params["dimensions"] is not None:
        return False
    (before,), (after,) = (
        [atom.aval.shape for atom in end] for end in (equation.invars, equation.outvars)
    )
    return len(after) > 1 and (after[0] * after[1], *after[2:]) == before


def _scanned(equation: Any) -> list[Any]:
    """The arrays over whose first dimension a scan runs."""
    if equation.primitive.name != "scan":
        return []
    constants, carries = scan_counts(equation, equation.params["jaxpr"].jaxpr)
    return [
        atom for atom in equation.invars[constants + carries :] if not isinstance(atom, Literal)
    ]


def _stacked(equation: Any) -> list[Any]:
    _, carries = scan_counts(equation, equation.params["jaxpr"].jaxpr)
    return list(equation.outvars[carries:])


def _swapped(split: Any) -> list[Any]:
    micro, rows, *rest = split.outvars[0].aval.shape

    def parted(x: Array) -> Array:
        return x.reshape(rows, micro, *rest).swapaxes(0, 1)

    return equations_of(parted, split.invars, split.outvars, split)
