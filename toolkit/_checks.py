"""Arguments and fields held against their annotations, so that a wrong one is refused in one line.

An annotation says what a value is; which of those it may be (at least 1, below the vocabulary) is
checked by whoever knows. A value that jax traces passes for any number.
"""

import dataclasses
import functools
import inspect
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])

_WORDS = {
    int: "a whole number",
    float: "a finite number",
    bool: "True or False",
    str: "a text",
    types.NoneType: "None",
    os.PathLike: "a path",
    Callable: "a function",
}
_ANYTHING = (Any, inspect.Parameter.empty)


class _Wanted(NamedTuple):
    """What an argument may be, and whether it may be infinite: where its default is."""

    kinds: tuple[Any, ...]
    is_infinite: bool


def checked(function: Function) -> Function:
    """Refuse arguments that are not what the function's annotations say."""
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        wanted = _wanted(function)
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            _check(name, value, wanted.get(name))
        return function(*args, **kwargs)

    return typing.cast(Function, call)


def check_fields(instance: Any, prefix: str = "") -> None:
    """Refuse fields of a dataclass that are not what their annotations say."""
    wanted = _wanted(type(instance))
    for field in dataclasses.fields(instance):
        _check(prefix + field.name, getattr(instance, field.name), wanted.get(field.name))


def shown(value: Any) -> str:
    """A value as an error shows it: type and shape of an array, the start of a long text."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({type(value).__name__})"


@functools.cache
def _wanted(owner: Any) -> dict[str, _Wanted]:
    hints = typing.get_type_hints(owner)
    wanted = {}
    for name, parameter in inspect.signature(owner).parameters.items():
        is_one = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_one and name in hints:
            default = parameter.default
            is_infinite = isinstance(default, float) and math.isinf(default)
            wanted[name] = _Wanted(tuple(_alternatives(hints[name])), is_infinite)
    return wanted


def _alternatives(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(annotation) for kind in _alternatives(part)]
    return [annotation]


def _check(name: str, value: Any, wanted: _Wanted | None) -> None:
    if wanted is None or any(_fits(value, kind, wanted.is_infinite) for kind in wanted.kinds):
        return
    words = " or ".join(dict.fromkeys(_words(kind) for kind in wanted.kinds))
    raise ValueError(f"{name} must be {words}; got {shown(value)}.")


def _fits(value: Any, kind: Any, is_infinite: bool) -> bool:
    origin = typing.get_origin(kind) or kind
    if kind in _ANYTHING or isinstance(kind, TypeVar):
        return True
    if origin is Literal:
        return value in typing.get_args(kind)
    if hasattr(kind, "dim_str"):
        return _is_array(value, kind)
    if kind in (int, float) and isinstance(value, jax.core.Tracer):
        return value.ndim == 0
    if kind is bool:
        return isinstance(value, bool | np.bool_)
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind is float:
        return _is_number(value, is_infinite)
    if origin is Callable:
        return callable(value)
    if origin in (list, tuple):  # either does
        return isinstance(value, list | tuple)
    if isinstance(value, str) and origin in (Sequence, Iterable):
        return False
    return isinstance(value, origin) if isinstance(origin, type) else True


def _is_number(value: Any, is_infinite: bool) -> bool:
    if isinstance(value, jax.Array | np.ndarray):
        value = value.item() if value.ndim == 0 else None
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        return False
    return math.isfinite(value) or (is_infinite and not math.isnan(value))


def _is_array(value: Any, kind: Any) -> bool:
    if not hasattr(value, "ndim") or not hasattr(value, "dtype"):
        return False
    axes = kind.dim_str.split()
    fixed = [axis for axis in axes if axis != "..." and not axis.startswith("*")]
    has_axes = value.ndim >= len(fixed) if len(fixed) < len(axes) else value.ndim == len(axes)
    wanted = jnp.floating if "float32" in kind.dtypes else jnp.integer
    return has_axes and (
        jnp.issubdtype(value.dtype, wanted) or not {"float32", "int32"} & set(kind.dtypes)
    )


def _words(kind: Any) -> str:
    if hasattr(kind, "dim_str"):
        numbers = "numbers" if "float32" in kind.dtypes else "whole numbers"
        return f"an array of {numbers} [{', '.join(kind.dim_str.split())}]"
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    origin = typing.get_origin(kind) or kind
    return _WORDS.get(origin) or f"a {getattr(origin, '__name__', origin)}"
