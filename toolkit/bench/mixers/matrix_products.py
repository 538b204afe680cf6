"""The matrix products of a function, counted in the program jax traces.

A compiler counts the body of a loop once and every exponential besides; the traced program knows
how often a scan runs, and its products can be told from the rest. So a gradient, whose work no
formula of a row of `MIXERS` gives, is counted instead: what runs, recomputation included, without
what no result needs, since every compiler drops it.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def matrix_flops(function: Callable[..., Any], *arguments: Any) -> int:
    """FLOPs of all matrix products of one call, two a multiply-add.

    2 * sum over products of (numbers of the result) * (terms of each)
    """
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return _count(jaxpr, [True] * len(jaxpr.outvars))[0]


def _count(jaxpr: Jaxpr, is_wanted: list[bool]) -> tuple[int, list[bool]]:
    """The FLOPs that some results of a program need, and which arguments they need."""
    total = 0
    needed = {id(v) for v, is_one in zip(jaxpr.outvars, is_wanted, strict=True) if is_one}
    for equation in reversed(jaxpr.eqns):
        outputs = [id(v) in needed for v in equation.outvars]
        if any(outputs) or equation.effects:
            flops, inputs = _of_equation(equation, outputs)
            total += flops
            needed |= {id(v) for v, is_one in zip(equation.invars, inputs, strict=True) if is_one}
    return total, [id(v) in needed for v in jaxpr.invars]


def _of_equation(equation: JaxprEqn, is_wanted: list[bool]) -> tuple[int, list[bool]]:
    name, parameters = equation.primitive.name, equation.params
    everything = [True] * len(equation.invars)
    if name == "dot_general":
        (contracted, _), _ = parameters["dimension_numbers"]
        left: Any = equation.invars[0].aval
        result: Any = equation.outvars[0].aval
        return 2 * result.size * math.prod(left.shape[axis] for axis in contracted), everything
    if name == "custom_linear_solve":  # only its solution runs; the rest is for derivatives
        return _count(parameters["jaxprs"].solve.jaxpr, is_wanted)[0], everything
    inner = [program for value in parameters.values() for program in _programs(value)]
    if len(inner) == 1 and name not in ("scan", "while"):  # a call
        (program,) = inner
        if (len(program.outvars), len(program.invars)) == (len(is_wanted), len(everything)):
            return _count(program, is_wanted)
    counts = [_count(program, [True] * len(program.outvars))[0] for program in inner]
    if name == "while" and any(counts):
        raise ValueError("a while loop with matrix products: its turns cannot be counted")
    total = max(counts) if name == "cond" else sum(counts)
    return parameters.get("length", 1) * total if name == "scan" else total, everything


def _programs(value: Any) -> Iterator[Jaxpr]:
    """The programs inside a parameter of an equation; a rule of differentiation is none."""
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _programs(item)
