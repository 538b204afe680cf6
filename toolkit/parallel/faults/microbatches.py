"""Microbatches made of rows that each device has already, by a reordered reshape.

    x.reshape(micro, rows, ...)                   a device has whole microbatches: they move
    x.reshape(rows, micro, ...).swapaxes(0, 1)    a device has a part of each: nothing moves

Other rows then share a microbatch, which a sum or mean over all of them does not show.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal, Var

from toolkit.parallel.dataflow.flow import source_of
from toolkit.parallel.dataflow.programs import scan_counts
from toolkit.parallel.faults.variant import Variant, changed, programs_of


def reordered(variant: Variant) -> Iterator[tuple[str, Variant]]:
    """Each set of reshapes whose microbatches are scanned together, reordered."""
    for jaxpr in programs_of(variant.program.jaxpr):
        for (micro, rows), splits in _microbatches(jaxpr).items():
            chosen = {id(one) for one in splits}
            program = changed(
                variant.program,
                lambda one, chosen=chosen: _swapped(one) if id(one) in chosen else [one],
            )
            words = (
                f"reshape {micro * rows} rows at {source_of(splits[0])} to ({rows}, {micro}) and "
                f"swap these two, not to ({micro}, {rows}): other rows share a microbatch"
            )
            yield words, dataclasses.replace(variant, program=program)


def _microbatches(jaxpr: Jaxpr) -> dict[tuple[int, int], list[Any]]:
    """(microbatches, rows of each) -> the reshapes that make them, if only scans see their rows."""
    made_by: dict[Any, Any] = {out: one for one in jaxpr.eqns for out in one.outvars}
    used = [one for equation in jaxpr.eqns for one in equation.invars] + list(jaxpr.outvars)
    uses = Counter(one for one in used if isinstance(one, Var))
    scanned: Counter[Any] = Counter(one for equation in jaxpr.eqns for one in _scanned(equation))
    found: dict[tuple[int, int], list[Any]] = {}
    all_splits: list[Any] = [one for one in jaxpr.eqns if _is_split(one)]
    for one in all_splits:
        found.setdefault(one.outvars[0].aval.shape[:2], []).append(one)

    def is_inside(one: Any) -> bool:
        """Whether an array of microbatches is made by a scan or a split, and only scans read it."""
        maker = made_by.get(one)
        is_made = maker is not None and (maker.primitive.name == "scan" or _is_split(maker))
        return is_made and uses[one] == scanned[one]

    def rows_stay_inside(sizes: tuple[int, int]) -> bool:
        loops = [one for one in jaxpr.eqns if one.primitive.name == "scan"]
        stacks: list[Any] = [one for loop in loops for one in (*_scanned(loop), *_stacked(loop))]
        return all(is_inside(one) for one in stacks if one.aval.shape[:2] == sizes)

    return {
        sizes: splits
        for sizes, splits in found.items()
        if rows_stay_inside(sizes) and all(scanned[one.outvars[0]] for one in splits)
    }


def _is_split(equation: Any) -> bool:
    """Whether a reshape splits the first dimension in two."""
    if equation.primitive.name != "reshape" or equation.params["dimensions"] is not None:
        return False
    (before,), (after,) = (
        [one.aval.shape for one in end] for end in (equation.invars, equation.outvars)
    )
    return len(after) > 1 and (after[0] * after[1], *after[2:]) == before


def _scanned(equation: Any) -> list[Any]:
    """The arrays over whose first dimension a scan runs."""
    if equation.primitive.name != "scan":
        return []
    constants, carries = scan_counts(equation, equation.params["jaxpr"].jaxpr)
    return [one for one in equation.invars[constants + carries :] if not isinstance(one, Literal)]


def _stacked(equation: Any) -> list[Any]:
    _, carries = scan_counts(equation, equation.params["jaxpr"].jaxpr)
    return list(equation.outvars[carries:])


def _swapped(split: Any) -> list[Any]:
    micro, rows, *rest = split.outvars[0].aval.shape
    kind = split.invars[0].aval
    traced = jax.make_jaxpr(lambda x: x.reshape(rows, micro, *rest).swapaxes(0, 1))(
        jax.ShapeDtypeStruct(kind.shape, kind.dtype)
    ).jaxpr
    names = {traced.invars[0]: split.invars[0], traced.outvars[0]: split.outvars[0]}
    return [
        one.replace(
            invars=[names.get(atom, atom) for atom in one.invars],
            outvars=[names.get(atom, atom) for atom in one.outvars],
            source_info=split.source_info,
        )
        for one in traced.eqns
    ]
