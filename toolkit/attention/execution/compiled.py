"""One program per call: eager calls cost a dispatch, and compile nothing the second time."""

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from toolkit._kinds import alternatives, hints_of
from toolkit.attention.execution.cores import free_cores

Function = TypeVar("Function", bound=Callable[..., Any])
_CHOICES = (int, bool, str, type(None))


def compiled(function: Function) -> Function:
    """Run a function as one program, compiled for every choice of its keywords.

    A keyword is a choice if its annotation allows neither arrays nor numbers with a fraction:
    the name of an implementation, a size, True or False.
    """
    program: Callable[..., Any] | None = None
    names = inspect.signature(function).parameters.keys()

    def whole(*arrays: Any, cores: Any, **keywords: Any) -> Any:
        return function(*arrays, **keywords)

    whole.__name__ = whole.__qualname__ = function.__name__

    @functools.wraps(function)
    def call(*arrays: Any, **keywords: Any) -> Any:
        nonlocal program
        if not keywords.keys() <= names:  # refused by name; JAX would complain of the value
            return function(*arrays, **keywords)
        if program is None:
            program = jax.jit(whole, static_argnames=("cores", *_choices(function)))
        # What is spread over which cores is decided inside, so that it is part of the program.
        return program(*arrays, cores=free_cores(), **keywords)

    return typing.cast(Function, call)


def _choices(function: Callable[..., Any]) -> list[str]:
    hints, parameters = hints_of(function), inspect.signature(function).parameters.values()
    return [
        x.name
        for x in parameters
        if x.kind is x.KEYWORD_ONLY and all(map(_is_choice, alternatives(hints[x.name])))
    ]


def _is_choice(kind: Any) -> bool:
    kind = getattr(kind, "__origin__", kind)
    return kind is typing.Literal or kind in _CHOICES
