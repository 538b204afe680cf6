"""Weights that are used several times, with one copy per part of the batch.

    y = x w          x [rows, in], w [in, out]             every use sums the gradient of w
    y_d = x_d w_d    x [N, rows / N, in], w [N, in, out]   only after all uses the N are summed

Every trip of a loop is a use. A device has its copy already, so that nothing moves before. Without
copies, XLA for CPUs and GPUs sums the gradient of every use over devices.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from toolkit._pytrees import register_dataclass


@register_dataclass
@dataclass(frozen=True)
class Copies:
    """A weight [...], and the same [N, ...] with one copy per part of the batch."""

    whole: Array
    each: Array

    def map(self, view: Callable) -> "Copies":
        return Copies(view(self.whole), jax.vmap(view)(self.each))


def copies_of(weight: Array, mesh: Mesh, batch: tuple[str, ...]) -> Copies:
    """A copy on the devices of each part of the batch."""
    parts = math.prod(mesh.shape[axis] for axis in batch)
    free = [PartitionSpec.UNCONSTRAINED] * weight.ndim
    each = jnp.broadcast_to(weight, (parts, *weight.shape))
    place = NamedSharding(mesh, PartitionSpec(batch, *free))
    return Copies(weight, jax.lax.with_sharding_constraint(each, place))


def product_of_copies(
    product: Callable, given: list[Any], rows: tuple[int, int], shape: tuple[int, ...]
) -> Array | None:
    """A product of copies and of an array with rows of the batch, device by device.

    `rows` are its dimensions with rows, before and after; None if the parts do not divide them.
    """
    (parts,) = (len(x.each) for x in given if isinstance(x, Copies))
    before, after = rows

    def parted(x: Array) -> Array:
        return x.reshape(*x.shape[:before], parts, -1, *x.shape[before + 1 :])

    if any(x.shape[before] % parts for x in given if not isinstance(x, Copies)):
        return None
    axes = tuple(0 if isinstance(x, Copies) else before for x in given)
    each = [x.each if isinstance(x, Copies) else parted(x) for x in given]
    return jax.vmap(product, axes, after)(*each).reshape(shape)


def spread(copies: Copies, params: Any, rows: int) -> Array | None:
    """A `broadcast_in_dim` of copies over rows of the batch; None if parts do not divide them."""
    shape, parts = [*params["shape"]], len(copies.each)
    if shape[rows] % parts:
        return None
    shape[rows] //= parts
    view = partial(
        jax.lax.broadcast_in_dim, shape=shape, broadcast_dimensions=params["broadcast_dimensions"]
    )
    return jax.vmap(view, 0, rows)(copies.each).reshape(params["shape"])
