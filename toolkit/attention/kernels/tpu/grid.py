"""The grid of the chunked kernels: rows and chunks, forwards or backwards, and blocks of both."""

import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from toolkit.attention.kernels.tpu.blocks import Products
from toolkit.attention.kernels.tpu.call import rows_per_program
from toolkit.attention.kernels.tpu.rule import Chunk

# Rows of one program, side by side: their chains of dependent products fill each other's gaps.
ROWS = 4


class Grid(NamedTuple):
    """Blocks of a grid (groups of rows, chunks), whose second axis runs sequentially.

    Rows whose values differ may share a query and key. A program's `row_block` rows share
    `key_block` of them, whole groups or a part of one.
    """

    rows: int
    row_block: int
    key_block: int
    chunks: int
    size: int
    interpret: "bool | pltpu.InterpretParams"
    products: Products
    is_reversed: bool = False

    def _number(self, c):
        return self.chunks - 1 - c if self.is_reversed else c

    @property
    def programs(self) -> int:
        return self.rows // self.row_block

    def tokens(self, x: Any) -> pl.BlockSpec:
        """[rows, time, n] cut along time, or [rows, chunks, m, n] chunk by chunk.

        Where rows are fewer than those of values, each serves several programs, one in gradients.
        """
        if x.ndim == 3:
            block = self.row_block if x.shape[0] == self.rows else self.key_block
            share = self.programs * block // x.shape[0]
            return pl.BlockSpec(
                (block, self.size, x.shape[2]), lambda r, c: (lax.div(r, share), self._number(c), 0)
            )
        return pl.BlockSpec(
            (self.row_block, None, *x.shape[2:]), lambda r, c: (r, self._number(c), 0, 0)
        )

    def chunk(self, chunk: Chunk) -> Chunk:
        return jax.tree.map(self.tokens, chunk)

    def state(self, x: Any) -> pl.BlockSpec:
        """[rows, key, value], the same for all chunks."""
        return pl.BlockSpec((self.row_block, *x.shape[1:]), lambda r, c: (r, 0, 0))


def block_sizes(state: Array, group: int) -> tuple[int, int]:
    """Rows of a program, and the number of queries and keys they share, `group` rows each."""
    rows = rows_per_program(state, ROWS)
    if rows % group and group % rows:
        rows = math.gcd(rows, group)
    return rows, max(1, rows // group)


def multiply_adds(chunk: Chunk, state: Array, size: int) -> int:
    """Multiply-adds of the forward pass, one for each product whatever its dtypes."""
    readers = 1 if chunk.beta is None else 2
    key, value = state.shape[1:]
    products = readers * size**2 * key + (readers + 1) * size * key * value + size**2 * value
    if chunk.beta is not None:
        products += size**2 * value + size**3 * int(math.log2(size / 8))
    return products * chunk.v.shape[0] * chunk.v.shape[1] // size
