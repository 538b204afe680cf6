"""Checks of arguments and fields against their annotations, with errors of one line.

An annotation gives the type of a value, the shape and dtype of an array and, in `typing.Annotated`,
further conditions (`_annotations.py`). An axis has the same size throughout a call. Traced values
pass as any number. Contents of arrays are read only inside `checking()`, since reading waits for
the device.
"""

import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from toolkit._annotations import Between, Multiple, SameDtype
from toolkit._kinds import (
    alternatives,
    array_kinds,
    check_kind,
    check_rank,
    hints_of,
    is_array,
    known_dtypes,
    markers_of,
    plain_types,
)

Function = TypeVar("Function", bound=Callable[..., Any])

_SCALARS = frozenset((int, float, str, bool, type(None)))
_FLOATING = frozenset(map(jnp.dtype, ("float16", "bfloat16", "float32", "float64")))
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_IS_CHECKING: ContextVar[bool] = ContextVar("_IS_CHECKING", default=False)


@contextmanager
def checking() -> Iterator[None]:
    """Have every call refuse values that are out of range (a gate above 0, a full cache): to debug.

    Elsewhere no value of an array is read, since a read waits for all that the device still has to
    do, and what is out of range gives NaN. What jax traces is not read here either.
    """
    token = _IS_CHECKING.set(True)
    try:
        yield
    finally:
        _IS_CHECKING.reset(token)


def reads_values(*arrays: Any) -> bool:
    """Whether the values of these arrays are to be checked, and can be."""
    return _IS_CHECKING.get() and not any(isinstance(x, Tracer) for x in arrays)


class _Wanted(NamedTuple):
    """The allowed values of an argument, prepared for a call.

    Attributes:
        kinds: the alternatives of its annotation.
        is_infinite: whether it may be infinite: where its default is.
        types: types of which every value is right, with subclasses of them that were met.
        right: numbers and strings that were found right before, with their types.
        axes: names of an array's axes, of which the size of each is shared by the arrays of a
            call; None where their number is open, or the argument is no array.
        dtypes: dtypes of an array that are right without a closer look.
        label: under which its dtype is shared; None where it is its own.
        between: the range of an array's values.
        fields: dataclasses that it may be, and what the arrays in each may be.
    """

    kinds: tuple[Any, ...]
    is_infinite: bool
    types: set[type]
    right: set[tuple[type, Any]]
    axes: tuple[str, ...] | None
    dtypes: frozenset[Any]
    label: str | None
    between: Between | None
    fields: "tuple[tuple[type, dict[str, _Wanted]], ...]"


class _Plan(NamedTuple):
    """What all arguments of a function may be, and how their axes relate."""

    wanted: dict[str, _Wanted]
    positional: tuple[tuple[str, _Wanted], ...]
    multiples: tuple[Multiple, ...]


def checked(function: Function) -> Function:
    """Refuse arguments that are not what the function's annotations say."""
    plan: _Plan | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal plan
        if plan is None:  # annotations may name what is defined further down
            plan = _plan(function)
        sizes: dict[str, Any] = {}
        for (name, wanted), value in zip(plan.positional, args, strict=False):
            _check(name, value, wanted, sizes)
        for name, value in kwargs.items():
            if name in plan.wanted:
                _check(name, value, plan.wanted[name], sizes)
        for multiple in plan.multiples:
            _check_multiple(multiple, sizes)
        return function(*args, **kwargs)

    return typing.cast(Function, call)


def check_fields(instance: Any, prefix: str = "") -> None:
    """Refuse fields of a dataclass that are not what their annotations say, with a ValueError."""
    plan, sizes = _plan(type(instance)), {}
    for name, wanted in plan.wanted.items():
        try:
            _check(prefix + name, getattr(instance, name), wanted, sizes)
        except TypeError as error:
            raise ValueError(str(error)) from None


def _check(name: str, value: Any, wanted: _Wanted, sizes: dict[str, Any]) -> None:
    """Refuse a value that is not what is wanted; what is right is found so in a microsecond."""
    if not _is_right(value, wanted, sizes):
        _check_closely(name, value, wanted, sizes)
        if type(value) in _SCALARS and len(wanted.right) < 64:
            wanted.right.add((type(value), value))
        elif not wanted.types.isdisjoint(type(value).__mro__):
            wanted.types.add(type(value))
    for owner, fields in wanted.fields:
        if isinstance(value, owner):
            for field, own in fields.items():
                array = getattr(value, field)
                if not _is_right(array, own, sizes):
                    _check_closely(f"{name}.{field}", array, own, sizes)


def _is_right(value: Any, wanted: _Wanted, sizes: dict[str, Any]) -> bool:
    """Whether a value is surely allowed; records the sizes of an array."""
    _, _, types, right, axes, dtypes, label, between, _ = wanted
    kind = type(value)
    if kind in types:
        return True
    if kind in _SCALARS:
        return (kind, value) in right
    if axes is None or (between is not None and reads_values(value)):
        return False
    try:
        shape, dtype = value.shape, value.dtype
    except AttributeError:
        return False
    if len(shape) != len(axes) or dtype not in dtypes:
        return False
    for axis, size in zip(axes, shape, strict=True):
        if sizes.setdefault(axis, size) != size:
            return False
    if label is None:
        return True
    return dtype in _FLOATING and 0 not in shape and sizes.setdefault(label, dtype) == dtype


def _check_closely(name: str, value: Any, wanted: _Wanted, sizes: dict[str, Any]) -> None:
    check_kind(name, value, wanted.kinds, wanted.is_infinite)
    kind = next((kind for kind in array_kinds(wanted.kinds) if is_array(value, kind)), None)
    if kind is None:
        return
    _check_sizes(name, value, kind.dim_str.split(), sizes)
    if wanted.label is not None:
        _check_alike(name, value, wanted.label, sizes)
    if wanted.between is not None and reads_values(value):
        numbers = np.asarray(value)
        error = wanted.between.of_range(name, float(numbers.min()), float(numbers.max()))
        if error is not None:
            raise error


def _check_sizes(name: str, array: Array, axes: list[str], sizes: dict[str, Any]) -> None:
    """Hold a shape against the sizes found so far; `#axis` may also be 1."""
    plain = [axis.removeprefix("#") for axis in axes]
    if not all(map(str.isidentifier, plain)):
        return
    for axis, plain_axis, size in zip(axes, plain, array.shape, strict=True):
        if axis.startswith("#"):
            if size != 1 and sizes.setdefault(plain_axis, size) != size:
                raise ValueError(
                    f"{name} [{', '.join(plain)}] must have {sizes[plain_axis]} or 1 along "
                    f"{plain_axis}; got shape {tuple(array.shape)}."
                )
        else:
            sizes.setdefault(axis, size)
    if not any(axis.startswith("#") for axis in axes):
        check_shape(name, array, tuple(sizes[axis] for axis in axes), " ".join(axes))


def _check_alike(name: str, array: Array, label: str, sizes: dict[str, Any]) -> None:
    for axis, size in sizes.items():
        if isinstance(size, int) and size == 0:
            of = "token" if axis == "time" else axis
            raise ValueError(f"the inputs must hold at least one {of}; got {axis} = 0.")
    # Numbers of 8 bits are what a quantised cache holds, whatever it is used with.
    is_floating = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize > 1
    if is_floating and sizes.setdefault(label, array.dtype) != array.dtype:
        raise TypeError(
            f"{label} must share one dtype; got {name} {array.dtype} beside {sizes[label]}."
        )


def _check_multiple(multiple: Multiple, sizes: dict[str, Any]) -> None:
    many, few = sizes.get(multiple.many), sizes.get(multiple.few)
    if isinstance(many, int) and isinstance(few, int) and many % few:
        raise ValueError(
            f"{multiple.of_many} must be a multiple of {multiple.of_few}; got {many} and {few}."
        )


def check_choice(name: str, value: Any, known: Iterable[Any]) -> None:
    """Refuse a value that is not among those known, which the message lists."""
    if value not in (known := list(known)):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; got {value!r}.")


def check_shape(name: str, array: Array, wanted: Sequence[int], axis_names: str) -> None:
    """Refuse an `array` whose shape is not exactly `wanted`; `axis_names` names the axes."""
    check_rank(name, array, axis_names)
    if tuple(array.shape) != tuple(wanted):
        raise ValueError(
            f"{name} [{', '.join(axis_names.split())}] must have shape {tuple(wanted)}; "
            f"got {tuple(array.shape)}."
        )


def axes_of(owner: Any, name: str) -> tuple[str, ...]:
    """The axes of an array, by the annotation of the argument or field."""
    return _plan(owner).wanted[name].axes or ()


@functools.cache
def _plan(owner: Any) -> _Plan:
    hints, parameters = hints_of(owner), list(inspect.signature(owner).parameters.values())
    wanted = {x.name: _wanted_of(hints[x.name], x.default) for x in parameters if x.name in hints}
    wanted = {
        x.name: wanted.get(x.name, _ANYTHING)
        for x in parameters
        if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)
    }
    annotations = [hints.get(name) for name in wanted]
    kinds = [kind for annotation in annotations for kind in alternatives(annotation)]
    of_arrays = [hint for kind in kinds for hint in _array_hints(kind).values()]
    markers = [marker for each in (*annotations, *of_arrays) for marker in markers_of(each)]
    return _Plan(
        wanted,
        tuple((x.name, wanted[x.name]) for x in parameters if x.kind in _POSITIONAL),
        tuple(dict.fromkeys(x for x in markers if isinstance(x, Multiple))),
    )


def _wanted_of(annotation: Any, default: Any) -> _Wanted:
    kinds, markers = tuple(alternatives(annotation)), markers_of(annotation)
    arrays, axes, dtypes = array_kinds(kinds), None, frozenset()
    if len(arrays) == 1 and all(map(str.isidentifier, arrays[0].dim_str.split())):
        axes, dtypes = tuple(arrays[0].dim_str.split()), known_dtypes(arrays[0])
    return _Wanted(
        kinds,
        isinstance(default, float) and math.isinf(default),
        set(plain_types(kinds)),
        set(),
        axes,
        dtypes,
        next((m.label for m in markers if isinstance(m, SameDtype)), None),
        next((m for m in markers if isinstance(m, Between)), None),
        tuple((kind, fields) for kind in kinds if (fields := _fields(kind))),
    )


def _fields(kind: Any) -> dict[str, _Wanted]:
    """What the arrays in a dataclass may be."""
    return {name: _wanted_of(hint, None) for name, hint in _array_hints(kind).items()}


def _array_hints(kind: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(kind):
        return {}
    hints = hints_of(kind)
    return {name: hint for name, hint in hints.items() if array_kinds(alternatives(hint))}


_ANYTHING = _wanted_of(Any, None)
