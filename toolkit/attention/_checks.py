"""Argument checks shared by the token mixers: small functions that compose, readable errors.

Shapes and dtypes are known while JAX traces, so those checks always run, before compilation.
Values are known only for concrete arrays, so checks of values are skipped under `jax.jit`,
`jax.grad` and `jax.vmap`.
"""

from collections.abc import Callable, Collection, Sequence
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


def check_heads(q: Array, k: Array, v: Array) -> None:
    """Check `q, k, v` [batch, time, heads, size] of grouped-query attention against each other.

    Args:
        q: [batch, time, heads, key].
        k: [batch, time, key_value_heads, key].
        v: [batch, time, key_value_heads, value].

    Raises:
        ValueError: a wrong rank or sizes that do not fit together.
        TypeError: not floating point, or different dtypes.
    """
    check_rank("q", q, "batch time heads key")
    check_rank("k", k, "batch time key_value_heads key")
    check_rank("v", v, "batch time key_value_heads value")
    batch, time, heads, key_size = q.shape
    key_value_heads = k.shape[2]
    check_shape("k", k, (batch, time, key_value_heads, key_size), "batch time key_value_heads key")
    check_shape(
        "v", v, (batch, time, key_value_heads, v.shape[3]), "batch time key_value_heads value"
    )
    check_multiple("the heads of q", heads, "the heads of k and v", key_value_heads)
    check_same_dtype(q=q, k=k, v=v)


def check_segment_ids(segment_ids: Array | None, batch: int, time: int) -> None:
    """Refuse document numbers that are not integers of shape [batch, time]; None passes."""
    if segment_ids is None:
        return
    check_shape("segment_ids", segment_ids, (batch, time), "batch time")
    check_integers("segment_ids", segment_ids)


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


def check_shapes(function: Callable[..., Any], **arrays: Array | None) -> dict[str, int]:
    """Hold arrays against the axes in the signature of `function`; returns the size of each.

    An axis has one size wherever it is named. None passes, as an argument not given.
    """
    sizes: dict[str, int] = {}
    for name, array in arrays.items():
        if array is None:
            continue
        annotation = function.__annotations__[name]
        shape = next(a for a in (annotation, *get_args(annotation)) if hasattr(a, "dim_str"))
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


def check_recurrence(function: Callable[..., Any], **arrays: Array | None) -> None:
    """Check what a linear-time mixer or its step was given, by the shapes in its signature."""
    sizes = check_shapes(function, **arrays)
    for axis, size in sizes.items():
        if size == 0:
            one = "token" if axis == "time" else axis
            raise ValueError(f"the inputs must hold at least one {one}; got {axis} = 0.")
    if "value_heads" in sizes:
        check_multiple("the heads of v", sizes["value_heads"], "those of q", sizes["heads"])
    given = {name: x for name, x in arrays.items() if x is not None}
    check_same_dtype(
        **{name: x for name, x in given.items() if name.removesuffix("_t") in ("q", "k", "v")}
    )
    for name, array in given.items():
        if name in ("g", "g_t", "log_decay"):
            check_log_decay(name, array)
        if name in ("beta", "beta_t"):
            check_write_strength(name, array)
