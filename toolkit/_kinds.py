"""The check that a value has the kind of an annotation, and its description in an error.

This is the slow path of `_checks.py`.
"""

import functools
import inspect
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

_WORDS = {
    int: "an int",
    float: "a finite number",
    bool: "True or False",
    str: "a string",
    types.NoneType: "None",
    os.PathLike: "a path",
    Callable: "a function",
    jax.Array: "an array",
    np.ndarray: "an array",
}
_DTYPES = (
    "float16", "bfloat16", "float32", "float64", "bool",
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip


def hints_of(owner: Any) -> dict[str, Any]:
    """The annotations of a function or class, as types."""
    try:
        return typing.get_type_hints(owner, include_extras=True)
    except NameError:  # where it is imported for types only
        import optax

        return typing.get_type_hints(owner, localns={"optax": optax}, include_extras=True)


def alternatives(annotation: Any) -> list[Any]:
    """What a union allows, piece by piece; what a type variable is bound by."""
    if isinstance(annotation, TypeVar) and annotation.__bound__ is not None:
        annotation = annotation.__bound__
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(annotation) for kind in alternatives(part)]
    return [annotation]


def markers_of(annotation: Any) -> list[Any]:
    """What stands behind the types of an annotation."""
    kinds = alternatives(annotation)
    return [marker for kind in kinds for marker in getattr(kind, "__metadata__", ())]


def array_kinds(kinds: Sequence[Any]) -> list[Any]:
    """The types of arrays among the alternatives."""
    return [own for own in map(_bare, kinds) if hasattr(own, "dim_str")]


@functools.cache
def known_dtypes(kind: Any) -> frozenset[Any]:
    """Dtypes that an array of this kind may have, as far as they are common."""
    return frozenset(
        dtype
        for dtype in map(jnp.dtype, _DTYPES)
        if _is_of_numbers(jax.ShapeDtypeStruct((), dtype), kind)
    )


def plain_types(kinds: Sequence[Any]) -> frozenset[type]:
    """Types of which every value is right."""
    return frozenset(kind for kind in kinds if isinstance(kind, type) and kind is not float)


def check_kind(name: str, value: Any, kinds: Sequence[Any], is_infinite: bool) -> None:
    """Refuse a value that is of none of these kinds."""
    if any(_fits(value, kind, is_infinite) for kind in kinds):
        return
    for kind in kinds:
        error = _refusal(name, value, kind) if _fits(value, _bare(kind), is_infinite) else None
        if error is not None:
            raise error
    arrays = array_kinds(kinds)
    if arrays and hasattr(value, "dtype") and hasattr(value, "ndim"):
        check_rank(name, value, arrays[0].dim_str)
        _check_numbers(name, value, arrays[0])
    if arrays and len(kinds) == 1:
        raise TypeError(f"{name} must be an array; got {type(value).__name__}.")
    words = " or ".join(dict.fromkeys(_words(kind) for kind in kinds))
    is_value = any(_fits(value, kind, None) for kind in kinds)
    error = ValueError if is_value else TypeError
    raise error(f"{name} must be {words}; got {shown(value)}.")


def _bare(kind: Any) -> Any:
    return kind.__origin__ if typing.get_origin(kind) is Annotated else kind


def _refusal(name: str, value: Any, kind: Any) -> Exception | None:
    """What the markers behind a type say against a value of that type."""
    for marker in getattr(kind, "__metadata__", ()):
        if hasattr(marker, "of_value") and (error := marker.of_value(name, value)):
            return error
    return None


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
    is_floating, is_whole = "float32" in kind.dtypes, "int32" in kind.dtypes
    if is_floating and not is_whole:
        check_floating(name, array)
    elif is_whole and not is_floating:
        check_integers(name, array)
    elif set(kind.dtypes) <= {"bool", "bool_"} and array.dtype != bool:
        raise TypeError(f"{name} must be boolean; got {array.dtype}.")
    elif not is_floating and len(kind.dtypes) == 1 and array.dtype != kind.dtypes[0]:
        raise TypeError(f"{name} must be {kind.dtypes[0]}; got {array.dtype}.")


def shown(value: Any) -> str:
    """A value as an error shows it: type and shape of an array, the start of what is long."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:40]}... ({type(value).__name__})"


def _fits(value: Any, kind: Any, is_infinite: bool | None) -> bool:
    """Whether a value is of a kind; with `is_infinite` None, of its type at least."""
    if typing.get_origin(kind) is Annotated:
        own = kind.__origin__
        return _fits(value, own, is_infinite) and _refusal("", value, kind) is None
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
        return is_array(value, kind)
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
    if isinstance(value, jax.Array):  # whose number would have to be waited for
        return value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.number)
    if isinstance(value, np.ndarray):
        value = value.item() if value.ndim == 0 else None
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        return False
    return is_infinite is None or math.isfinite(value) or (is_infinite and not math.isnan(value))


def _is_sequence(value: Any, parts: tuple[Any, ...]) -> bool:
    """Lists, tuples and arrays are alike, strings are neither; number and types of parts count."""
    value = value.tolist() if isinstance(value, np.ndarray) and value.ndim else value
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    if not parts or len(parts) == 1 or parts[-1] is Ellipsis:
        parts = parts[:1] * len(value)
    return not parts or (
        len(parts) == len(value)
        and all(
            any(_fits(each, kind, False) for kind in alternatives(part))
            for each, part in zip(value, parts, strict=True)
        )
    )


def is_array(value: Any, kind: Any) -> bool:
    """Whether a value is an array of the axes and numbers of an annotation."""
    if not hasattr(value, "ndim") or not hasattr(value, "dtype"):
        return False
    try:
        check_rank("", value, kind.dim_str)
    except ValueError:
        return False
    return _is_of_numbers(value, kind)


def _is_of_numbers(value: Any, kind: Any) -> bool:
    try:
        _check_numbers("", value, kind)
    except TypeError:
        return False
    return True


def _words(kind: Any) -> str:
    kind = _bare(kind)
    if hasattr(kind, "dim_str"):
        return f"an array [{', '.join(kind.dim_str.split())}]"
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    kind = getattr(kind, "__bound__", None) or kind
    origin = typing.get_origin(kind) or kind
    is_plain = origin not in (list, tuple)
    return _WORDS.get(origin) or f"a {origin.__name__ if is_plain else kind}"
