"""Small checks of arguments that annotations cannot express."""

from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
from jax import Array

from toolkit._annotations import AtLeast
from toolkit._kinds import check_floating, check_kind, shown


def check_count(name: str, count: int, least: int, why: str = "") -> None:
    """Refuse a `count` that is not a whole number of at least `least`."""
    check_kind(name, count, (int,), False)
    error = AtLeast(least, why).of_value(name, count)
    if error is not None:
        raise error


def check_sizes(of: str, **sizes: int) -> None:
    """Refuse a size that is not a whole number of at least 1."""
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
    """Refuse a cache whose numbers are not floating point."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype must be floating point; got {shown(dtype)}.")


def check_multiple(name: str, size: int, base_name: str, base: int) -> None:
    """Refuse a `size` that is not a whole multiple of `base` (grouped heads)."""
    if base < 1 or size % base:
        raise ValueError(f"{name} must be a multiple of {base_name}; got {size} and {base}.")


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Refuse a `value` that is not among `choices`."""
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {listed}; got {value!r}.")
