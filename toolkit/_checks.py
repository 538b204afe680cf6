"""Arguments and fields held against their annotations, so that a wrong one is refused in one line.

An annotation says what a value is; which of those it may be (at least 1, below the vocabulary) is
checked by whoever knows. A value that jax traces passes for any number.
"""

import functools
import inspect
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

Function = TypeVar("Function", bound=Callable[..., Any])

_WORDS = {
    int: "an int",
    float: "a finite number",
    bool: "True or False",
    str: "a text",
    types.NoneType: "None",
    os.PathLike: "a path",
    Callable: "a function",
    jax.Array: "an array",
    np.ndarray: "an array",
}


_DTYPES = ("float32", "bfloat16", "float16", "float64", "int32", "uint8")


class _Wanted(NamedTuple):
    """What an argument may be.

    Attributes:
        kinds: the alternatives of its annotation.
        is_infinite: whether it may be infinite: where its default is.
        types: types of which every value will do, and `axes` and `dtypes` of which every array:
            what most calls need to know.
    """

    kinds: tuple[Any, ...]
    is_infinite: bool
    types: frozenset[type]
    axes: int | None
    dtypes: frozenset[Any]

    def is_surely(self, value: Any) -> bool:
        """Whether a value is fine by its type or axes alone, in a microsecond."""
        if isinstance(value, jax.Array):
            return value.ndim == self.axes and value.dtype in self.dtypes
        return type(value) in self.types


def checked(function: Function) -> Function:
    """Refuse arguments that are not what the function's annotations say."""
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        wanted = _wanted(function)
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if name in wanted and not wanted[name].is_surely(value):
                _check(name, value, wanted[name])
        return function(*args, **kwargs)

    return typing.cast(Function, call)


def check_fields(instance: Any, prefix: str = "") -> None:
    """Refuse fields of a dataclass that are not what their annotations say, with a ValueError."""
    for name, wanted in _wanted(type(instance)).items():
        try:
            _check(prefix + name, getattr(instance, name), wanted)
        except TypeError as error:
            raise ValueError(str(error)) from None


def check_rank(name: str, array: Array, axis_names: str) -> None:
    """Refuse an `array` without exactly the axes in `axis_names`, such as "batch time"."""
    wanted = axis_names.split()
    is_any = [axis == "..." or axis.startswith("*") for axis in wanted]
    if array.ndim < len(wanted) - sum(is_any) or (array.ndim > len(wanted) and not any(is_any)):
        raise ValueError(
            f"{name} must have {len(wanted)} axes [{', '.join(wanted)}]; "
            f"got shape {tuple(array.shape)}."
        )


def check_floating(name: str, array: Array) -> None:
    """Refuse an `array` that is not real floating point of 16 bits at least."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating point; got {array.dtype}.")
    if jnp.finfo(array.dtype).bits < 16:
        raise TypeError(f"{name} must have at least 16 bits; got {array.dtype}.")


def check_integers(name: str, array: Array) -> None:
    """Refuse an `array` that does not hold integers."""
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers; got {array.dtype}.")


def _check_numbers(name: str, array: Array, kind: Any) -> None:
    """Refuse an `array` whose numbers are not of the sort that an annotation names."""
    if "float32" in kind.dtypes:
        check_floating(name, array)
    elif "int32" in kind.dtypes:
        check_integers(name, array)
    elif set(kind.dtypes) <= {"bool", "bool_"} and array.dtype != bool:
        raise TypeError(f"{name} must be boolean; got {array.dtype}.")


def shown(value: Any) -> str:
    """A value as an error shows it: type and shape of an array, the start of a long text."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:40]}... ({type(value).__name__})"


@functools.cache
def _wanted(owner: Any) -> dict[str, _Wanted]:
    try:
        hints = typing.get_type_hints(owner)
    except NameError:  # where it is imported for types only
        import optax

        hints = typing.get_type_hints(owner, localns={"optax": optax})
    wanted = {}
    for name, parameter in inspect.signature(owner).parameters.items():
        is_one = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_one and name in hints:
            wanted[name] = _wanted_of(_alternatives(hints[name]), parameter.default)
    return wanted


def _wanted_of(kinds: list[Any], default: Any) -> _Wanted:
    is_infinite = isinstance(default, float) and math.isinf(default)
    plain = frozenset(kind for kind in kinds if isinstance(kind, type) and kind is not float)
    axes, dtypes = None, frozenset()
    arrays = [kind for kind in kinds if hasattr(kind, "dim_str")]
    if arrays and not re.search(r"[*.]", arrays[0].dim_str):
        axes = len(arrays[0].dim_str.split())
        known = (name for name in _DTYPES if name in arrays[0].dtypes)
        dtypes = frozenset(map(jnp.dtype, known))
    return _Wanted(tuple(kinds), is_infinite, plain, axes, dtypes)


def _alternatives(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(annotation) for kind in _alternatives(part)]
    return [annotation]


def _check(name: str, value: Any, wanted: _Wanted) -> None:
    kinds, is_infinite, *_ = wanted
    if any(_fits(value, kind, is_infinite) for kind in kinds):
        return
    arrays = [kind for kind in kinds if hasattr(kind, "dim_str")]
    if arrays and hasattr(value, "dtype"):
        check_rank(name, value, arrays[0].dim_str)
        _check_numbers(name, value, arrays[0])
    if arrays and types.NoneType not in kinds and len(kinds) == 1:
        raise TypeError(f"{name} must be an array; got {type(value).__name__}.")
    words = " or ".join(dict.fromkeys(_words(kind) for kind in kinds))
    is_value = any(_fits(value, kind, None) for kind in kinds)
    error = ValueError if is_value else TypeError
    raise error(f"{name} must be {words}; got {shown(value)}.")


def _fits(value: Any, kind: Any, is_infinite: bool | None) -> bool:
    """Whether a value is of a kind; with `is_infinite` None, of its type at least."""
    origin, parts = typing.get_origin(kind) or kind, typing.get_args(kind)
    if isinstance(kind, TypeVar):
        return kind.__bound__ is None or _fits(value, kind.__bound__, is_infinite)
    if kind is Any:
        return True
    if getattr(origin, "_is_protocol", False):
        names = {*inspect.get_annotations(origin), *vars(origin)}
        return all(hasattr(value, name) for name in names if not name.startswith("_"))
    if origin is Literal:
        return isinstance(value, type(parts[0])) if is_infinite is None else value in parts
    if hasattr(kind, "dim_str"):
        return _is_array(value, kind)
    if kind in (int, float) and isinstance(value, Tracer):
        return value.ndim == 0
    if kind is bool:
        return isinstance(value, bool | np.bool_)
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind is float:
        return _is_number(value, is_infinite)
    if kind in (jax.Array, np.ndarray):
        return isinstance(value, jax.Array | np.ndarray)
    if origin is Path:
        return isinstance(value, str | os.PathLike)
    if origin in (list, tuple, Sequence):
        return _is_sequence(value, parts)
    if origin is Iterable and isinstance(value, str):
        return False
    return isinstance(value, origin) if isinstance(origin, type) else True


def _is_number(value: Any, is_infinite: bool | None) -> bool:
    if isinstance(value, jax.Array | np.ndarray):
        value = value.item() if value.ndim == 0 else None
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        return False
    return is_infinite is None or math.isfinite(value) or (is_infinite and not math.isnan(value))


def _is_sequence(value: Any, parts: tuple[Any, ...]) -> bool:
    """Lists, tuples and arrays are alike, texts are none; number and types of parts count."""
    value = value.tolist() if isinstance(value, np.ndarray) and value.ndim else value
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    if not parts or len(parts) == 1 or parts[-1] is Ellipsis:
        parts = parts[:1] * len(value)
    return not parts or (
        len(parts) == len(value)
        and all(
            any(_fits(each, kind, False) for kind in _alternatives(part))
            for each, part in zip(value, parts, strict=True)
        )
    )


def _is_array(value: Any, kind: Any) -> bool:
    if not hasattr(value, "ndim") or not hasattr(value, "dtype"):
        return False
    try:
        check_rank("", value, kind.dim_str)
        _check_numbers("", value, kind)
    except (TypeError, ValueError):
        return False
    return True


def _words(kind: Any) -> str:
    if hasattr(kind, "dim_str"):
        return f"an array [{', '.join(kind.dim_str.split())}]"
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    kind = getattr(kind, "__bound__", None) or kind
    origin = typing.get_origin(kind) or kind
    is_plain = origin not in (list, tuple)
    return _WORDS.get(origin) or f"a {origin.__name__ if is_plain else kind}"
