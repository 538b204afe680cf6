"""Shared by all calls of TPU kernels: rows per program, sharded axes, a cost for the compiler."""

import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jaxtyping import Array

from toolkit._compat import output_like

# Of the 128 MiB of VMEM of a v5e or v6e, what a kernel may take; unasked it gets 16 or 32.
VMEM_BYTES = 48 << 20
# A block of states may take this much of it: there are two of each input and output, to fetch the
# next while one is in use, and what is computed between.
STATE_BYTES = 1 << 20


def rows_per_program(state: Array, wanted: int) -> int:
    """How many rows of `state` [rows, key, value] a program takes: a divisor of all rows."""
    fitting = max(1, STATE_BYTES // (math.prod(state.shape[1:]) * state.dtype.itemsize))
    return math.gcd(state.shape[0], 1 << (min(wanted, fitting).bit_length() - 1))


def shapes_of(tree: Any, like: Array) -> Any:
    """Shapes and dtypes of a kernel's outputs, which vary over the mesh axes of `like`."""
    return jax.tree.map(lambda x: output_like(x, like), tree)


def cost(multiply_adds: int, exponentials: int, *arrays: Any) -> pl.CostEstimate:
    """The cost that the compiler plans with, since a kernel is opaque to it; `arrays` move once."""
    leaves = jax.tree.leaves(arrays)
    return pl.CostEstimate(
        flops=2 * multiply_adds,
        transcendentals=exponentials,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in leaves),
    )
