"""Weights that every trip of a loop shares, with one copy per part of the batch.

    y = x w          x [rows, in], w [in, out]             every trip sums the gradient of w
    y_d = x_d w_d    x [N, rows / N, in], w [N, in, out]   only after the loop the N are summed

A device has its copy already, so that nothing moves before the loop. Without copies, XLA for CPUs
sums the gradient over devices in every trip; XLA for TPUs moves the sum out of the loop itself.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Copies:
    """A weight [...], and the same [N, ...] with one copy per part of the batch."""

    whole: Array
    each: Array

    def astype(self, dtype: Any) -> "Copies":
        return Copies(self.whole.astype(dtype), self.each.astype(dtype))


def copies_of(weight: Array, mesh: Mesh, batch: tuple[str, ...]) -> Copies:
    """A copy on the devices of each part of the batch."""
    parts = math.prod(mesh.shape[axis] for axis in batch)
    free = [PartitionSpec.UNCONSTRAINED] * weight.ndim
    each = jnp.broadcast_to(weight, (parts, *weight.shape))
    place = NamedSharding(mesh, PartitionSpec(batch, *free))
    return Copies(weight, jax.lax.with_sharding_constraint(each, place))


def product_of_copies(equation: Any, left: Any, right: Any, rows: int | None) -> Array | None:
    """A `dot_general` of copies with rows of the batch; None if it sums over `rows`."""
    is_left = isinstance(left, Copies)  # the copies, else the rows
    copies, x = (left, right) if is_left else (right, left)
    sums, batches = equation.params["dimension_numbers"]
    mine = 1 if is_left else 0
    parts = len(copies.each)
    if rows is None or rows in (*sums[mine], *batches[mine]) or x.shape[rows] % parts:
        return None
    before = [at for at in range(x.ndim) if at not in (*sums[mine], *batches[mine])]
    place = len(batches[0]) + before.index(rows)
    if is_left:
        place += left.whole.ndim - len(sums[0]) - len(batches[0])
    x = x.reshape(*x.shape[:rows], parts, -1, *x.shape[rows + 1 :])

    def moved(numbers: tuple[Any, Any]) -> Any:
        """Dimensions after x has one more at `rows`, and the copies one more in front."""
        return [
            tuple(at + (at > rows) if side == mine else at + 1 for at in own)
            for side, own in enumerate(numbers)
        ]

    fronts = [(rows,) if side == mine else (0,) for side in (0, 1)]
    batches = [(*front, *own) for front, own in zip(fronts, moved(batches), strict=True)]
    numbers: Any = moved(sums), batches
    out = jax.lax.dot_general(
        copies.each if is_left else x,
        x if is_left else copies.each,
        numbers,
        precision=equation.params["precision"],
        preferred_element_type=equation.params["preferred_element_type"],
    )
    return jnp.moveaxis(out, 0, place).reshape(equation.outvars[0].aval.shape)
