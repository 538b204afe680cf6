"""Argument checks shared by the token mixers: small functions that compose, readable errors.

Shapes and dtypes are known while JAX traces, so those checks always run, before compilation.
Values are known only for concrete arrays, so checks of values are skipped under `jax.jit`,
`jax.grad` and `jax.vmap`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax import Array


def check_rank(name: str, array: Array, axis_names: str) -> None:
    """Refuse an `array` without exactly the axes in `axis_names`, such as "batch time"."""
    wanted = axis_names.split()
    if array.ndim != len(wanted):
        raise ValueError(
            f"{name} must have {len(wanted)} axes [{', '.join(wanted)}]; "
            f"got shape {tuple(array.shape)}."
        )


def check_shape(name: str, array: Array, wanted: Sequence[int], axis_names: str) -> None:
    """Refuse an `array` whose shape is not exactly `wanted`; `axis_names` names the axes."""
    check_rank(name, array, axis_names)
    if tuple(array.shape) != tuple(wanted):
        raise ValueError(
            f"{name} [{', '.join(axis_names.split())}] must have shape {tuple(wanted)}; "
            f"got {tuple(array.shape)}."
        )


def check_sizes(of: str, **sizes: int) -> None:
    """Refuse a size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} of {of} must be at least 1; got {size}.")


def check_floating(name: str, array: Array) -> None:
    """Refuse an `array` that is not real floating point."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating point; got {array.dtype}.")


def check_integers(name: str, array: Array) -> None:
    """Refuse an `array` that does not hold integers."""
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers; got {array.dtype}.")


def check_same_dtype(**arrays: Array) -> None:
    """Refuse floating-point arrays of different dtypes: promotion is the caller's decision."""
    for name, array in arrays.items():
        check_floating(name, array)
    if len({array.dtype for array in arrays.values()}) > 1:
        found = ", ".join(f"{name} {array.dtype}" for name, array in arrays.items())
        raise TypeError(f"{', '.join(arrays)} must share one dtype; got {found}.")


def check_multiple(name: str, size: int, base_name: str, base: int) -> None:
    """Refuse a `size` that is not a whole multiple of `base` (grouped heads)."""
    if base < 1 or size % base:
        raise ValueError(f"{name} must be a multiple of {base_name}; got {size} and {base}.")


def check_log_decay(name: str, g: Array) -> None:
    """Refuse a positive log-decay, which would make the state grow; skipped while tracing."""
    try:
        largest = float(jnp.max(g, initial=-jnp.inf))
    except jax.errors.ConcretizationTypeError:
        return
    if largest > 0:
        raise ValueError(
            f"{name} is a natural-log decay and must be <= 0 everywhere; "
            f"its largest is {largest:g}."
        )


def check_write_strength(name: str, beta: Array) -> None:
    """Refuse a beta outside [0, 2], with which the state could grow; skipped while tracing."""
    try:
        least, largest = float(jnp.min(beta, initial=1.0)), float(jnp.max(beta, initial=1.0))
    except jax.errors.ConcretizationTypeError:
        return
    if least < 0 or largest > 2:
        raise ValueError(
            f"{name} is a writing strength and must lie in [0, 2]; got {least:g} to {largest:g}."
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

    An axis has one size wherever it is named, or the one `known`. None passes, as not given.
    """
    sizes = dict(known)
    for name, array in arrays.items():
        if array is None:
            continue
        annotation = declared.__annotations__[name]
        shape = next(a for a in (annotation, *get_args(annotation)) if hasattr(a, "dim_str"))
        name = prefix + name
        check_rank(name, array, shape.dim_str)
        for axis, size in zip(shape.dim_str.split(), array.shape, strict=True):
            sizes.setdefault(axis, size)
        wanted = [sizes[axis] for axis in shape.dim_str.split()]
        check_shape(name, array, wanted, shape.dim_str)
        if "int32" in shape.dtypes:
            check_integers(name, array)
        else:
            check_floating(name, array)
    return sizes


# Where one head serves several: the axis of the many, of the few, and how both are called.
_GROUPED = (
    ("value_heads", "heads", "the heads of v", "the heads of q and k"),
    ("heads", "key_value_heads", "the heads of q", "the heads of k and v"),
)


def check_inputs(function: Callable[..., Any], **arrays: Array | None) -> dict[str, int]:
    """Check what a mixer or its step was given, by its signature; returns the size of each axis."""
    sizes = check_shapes(function, arrays)
    for axis, size in sizes.items():
        if size == 0:
            one = "token" if axis == "time" else axis
            raise ValueError(f"the inputs must hold at least one {one}; got {axis} = 0.")
    for many, few, of_many, of_few in _GROUPED:
        if many in sizes and few in sizes:
            check_multiple(of_many, sizes[many], of_few, sizes[few])
    given = {name: x for name, x in arrays.items() if x is not None}
    tokens = ("q", "k", "v", "q_t", "k_t", "v_t")
    check_same_dtype(**{name: x for name, x in given.items() if name in tokens})
    for name, array in given.items():
        if name in ("g", "g_t", "log_decay"):
            check_log_decay(name, array)
        if name in ("beta", "beta_t"):
            check_write_strength(name, array)
    return sizes
