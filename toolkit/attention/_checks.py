"""Argument checks shared by the token mixers: small functions that compose, readable errors.

Shapes and dtypes are known while JAX traces, so those checks always run, before compilation.
Values are known only for concrete arrays, so checks of values are skipped under `jax.jit`,
`jax.grad` and `jax.vmap`.
"""

import math
from collections.abc import Callable, Collection, Mapping
from numbers import Integral
from types import MappingProxyType, NoneType
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from toolkit._checks import check_shape
from toolkit._kinds import check_floating, check_integers, check_rank, shown


def check_count(name: str, count: int, least: int, why: str = "") -> None:
    """Refuse a `count` that is no whole number from `least` on."""
    if not isinstance(count, Integral) or isinstance(count, bool):
        raise TypeError(f"{name} must be an int; got {count!r}.")
    if count < least:
        raise ValueError(f"{name} must be at least {least}{why}; got {count}.")
    if count >= 2**31:  # an index of jax has 32 bits
        raise ValueError(f"{name} must be below 2**31; got {count}.")


def check_known(name: str, number: float | Array) -> None:
    """Refuse a number that JAX traces where compilation needs it."""
    if isinstance(number, Tracer):
        raise TypeError(f"{name} must be known when compiling; got a traced {shown(number)}.")


def check_sizes(of: str, **sizes: int) -> None:
    """Refuse a size that is no whole number from 1 on."""
    for name, size in sizes.items():
        check_count(f"{name} of {of}", size, 1)


def check_same_dtype(**arrays: Array) -> None:
    """Refuse floating-point arrays of different dtypes: promotion is the caller's decision."""
    for name, array in arrays.items():
        check_floating(name, array)
    if len({array.dtype for array in arrays.values()}) > 1:
        found = ", ".join(f"{name} {array.dtype}" for name, array in arrays.items())
        raise TypeError(f"{', '.join(arrays)} must share one dtype; got {found}.")


def check_dtype(dtype: Any) -> None:
    """Refuse to make a cache for numbers that are not floating point."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype must be floating point; got {shown(dtype)}.")


def check_multiple(name: str, size: int, base_name: str, base: int) -> None:
    """Refuse a `size` that is not a whole multiple of `base` (grouped heads)."""
    if base < 1 or size % base:
        raise ValueError(f"{name} must be a multiple of {base_name}; got {size} and {base}.")


# What arguments of these names mean, and between which numbers they must lie.
_RANGES = {
    "g": ("a natural-log decay", -math.inf, 0.0),
    "log_decay": ("a natural-log decay", -math.inf, 0.0),
    "beta": ("a writing strength", 0.0, 2.0),
    "dt": ("a time step", 0.0, math.inf),
    "rate": ("a share to erase", 0.0, 1.0),
}


def check_range(name: str, array: Array) -> None:
    """Refuse values that the name rules out, such as a positive `g`; skipped while tracing."""
    if name.removesuffix("_t") not in _RANGES:
        return
    meaning, least, largest = _RANGES[name.removesuffix("_t")]
    try:
        found = float(jnp.min(array)), float(jnp.max(array))
    except jax.errors.ConcretizationTypeError:
        return
    if found[0] < least or found[1] > largest:
        bounds = f"in [{least:g}, {largest:g}]"
        if math.isinf(least) or math.isinf(largest):
            bounds = f"<= {largest:g}" if math.isinf(least) else f">= {least:g}"
        raise ValueError(
            f"{name} is {meaning} and must be {bounds}; got {found[0]:g} to {found[1]:g}."
        )


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Refuse a `value` that is not among `choices`."""
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {listed}; got {value!r}.")


def check_shapes(
    declared: Any,
    arrays: Mapping[str, Array | None],
    known: Mapping[str, int] = MappingProxyType({}),
    prefix: str = "",
) -> dict[str, int]:
    """Hold arrays against the axes that a function or class declares; returns the size of each.

    An axis has one size wherever it is named, or the one `known`. None passes where it is declared.
    """
    sizes = dict(known)
    for name, array in arrays.items():
        annotation = declared.__annotations__[name]
        if array is None and NoneType in get_args(annotation):
            continue
        shape = declared_shape(annotation)
        name = prefix + name
        if array is None or not hasattr(array, "ndim"):
            raise TypeError(f"{name} must be an array; got {type(array).__name__}.")
        check_rank(name, array, shape.dim_str)
        for axis, size in zip(shape.dim_str.split(), array.shape, strict=True):
            sizes.setdefault(axis, size)
        wanted = [sizes[axis] for axis in shape.dim_str.split()]
        check_shape(name, array, wanted, shape.dim_str)
        if "float32" not in shape.dtypes:
            check_integers(name, array)
        elif "int32" not in shape.dtypes:
            check_floating(name, array)
    return sizes


def declared_shape(annotation: Any) -> Any:
    """The array type of an annotation that may also allow None."""
    return next(a for a in (annotation, *get_args(annotation)) if hasattr(a, "dim_str"))


def check_broadcasts(name: str, array: Array | None, wanted: Mapping[str, int]) -> None:
    """Refuse an `array` that does not have the `wanted` axes, each as long or 1; None passes."""
    if array is None:
        return
    check_rank(name, array, " ".join(wanted))
    for axis, size, most in zip(wanted, array.shape, wanted.values(), strict=True):
        if size not in (1, most):
            raise ValueError(
                f"{name} [{', '.join(wanted)}] must have {most} or 1 along {axis}; "
                f"got shape {tuple(array.shape)}."
            )


# Where one head serves several: the axis of the many, of the few, and how both are called.
_GROUPED = (
    ("value_heads", "heads", "the heads of v", "the heads of q and k"),
    ("heads", "key_value_heads", "the heads of q", "the heads of k and v"),
)


def check_inputs(function: Callable[..., Any], **arrays: Array | None) -> dict[str, int]:
    """Check what a mixer or its step was given, by its signature; returns the size of each axis."""
    sizes = check_shapes(function, arrays)
    for axis, size in sizes.items():
        if size == 0 and axis != "past":  # a convolution of one tap remembers nothing
            one = "token" if axis == "time" else axis
            raise ValueError(f"the inputs must hold at least one {one}; got {axis} = 0.")
    for many, few, of_many, of_few in _GROUPED:
        if many in sizes and few in sizes:
            check_multiple(of_many, sizes[many], of_few, sizes[few])
    given = {name: x for name, x in arrays.items() if x is not None}
    tokens = ("q", "k", "v", "q_t", "k_t", "v_t")
    check_same_dtype(**{name: x for name, x in given.items() if name in tokens})
    for name, array in given.items():
        check_range(name, array)
    return sizes
