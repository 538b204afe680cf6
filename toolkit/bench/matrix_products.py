"""The matrix products of a function, counted in the program jax traces.

A compiler counts the body of a loop once and every exponential besides; the traced program knows
how often a scan runs, and its products can be told from the rest. So a gradient, whose work no
formula of a row of `MIXERS` gives, is counted instead: what runs, recomputation included.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr


def matrix_flops(function: Callable[..., Any], *arguments: Any) -> int:
    """FLOPs of all matrix products of one call, two a multiply-add.

    2 * sum over products of (numbers of the result) * (terms of each)
    """
    return _count(jax.make_jaxpr(function)(*arguments).jaxpr)


def _count(jaxpr: Jaxpr) -> int:
    total = 0
    for equation in jaxpr.eqns:
        name, parameters = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = parameters["dimension_numbers"]
            left: Any = equation.invars[0].aval
            result: Any = equation.outvars[0].aval
            total += 2 * result.size * math.prod(left.shape[axis] for axis in contracted)
            continue
        counts = [_count(inner) for value in parameters.values() for inner in _programs(value)]
        if name == "while" and any(counts):
            raise ValueError("a while loop with matrix products: its turns cannot be counted")
        if name == "cond":
            total += max(counts)
        else:
            total += parameters.get("length", 1) * sum(counts) if name == "scan" else sum(counts)
    return total


def _programs(value: Any) -> Iterator[Jaxpr]:
    """The programs inside a parameter of an equation; a rule of differentiation is none."""
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _programs(item)
