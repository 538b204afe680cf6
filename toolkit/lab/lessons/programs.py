"""All operations of a learner's function, read from its traced program."""

from collections.abc import Callable, Iterator
from typing import Any

import jax


def operations(function: Callable[..., Any], *args: Any) -> list[Any]:
    """The equations of a function's program, including loops and inner functions."""
    return list(_equations(jax.make_jaxpr(function)(*args).jaxpr))


def shapes_made(found: list[Any]) -> list[tuple[int, ...]]:
    """The shape of every array that these operations make."""
    made = (var.aval for each in found for var in each.outvars)
    return [aval.shape for aval in made if hasattr(aval, "shape")]


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)
