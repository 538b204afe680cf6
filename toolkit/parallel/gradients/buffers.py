"""Tensors that travel together lie in one buffer, one row for each replica."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from toolkit.parallel.gradients.compression.compressor import Compressor
from toolkit.parallel.gradients.compression.messages import Rows
from toolkit.parallel.gradients.exchange import Exchange
from toolkit.parallel.gradients.peers import Along


class Leaf(NamedTuple):
    """A tensor's way: its place in the tree, what a device has of it, and what it shall have.

    `axes` are those over which it is to be summed, outermost first; `cuts` the axes by dimension
    along which the sum is to be cut, none or all of `axes`; `others` are the axes that cut it and
    not the batch, along which it is exchanged in parts; `exchange` says how.
    """

    index: int
    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str, ...]
    cuts: tuple[tuple[int, tuple[str, ...]], ...]
    others: tuple[str, ...]
    exchange: Exchange

    @property
    def size(self) -> int:
        """Numbers on a device."""
        return math.prod(self.shape)


class Group(NamedTuple):
    """Tensors that travel as one buffer."""

    leaves: tuple[Leaf, ...]
    along: Along
    is_cut: bool
    dtype: Any

    @property
    def exchange(self) -> Exchange:
        """That of all of its tensors."""
        return self.leaves[0].exchange

    @property
    def compressor(self) -> Compressor:
        """That of the exchange; one of matrices knows how many columns this one has."""
        row, leaf = self.exchange.of_gradients, self.leaves[0]
        if row.of_columns is None:
            return row
        return row.of_columns(leaf.size // leaf.shape[0])

    @property
    def size(self) -> int:
        """Numbers on a device."""
        return sum(leaf.size for leaf in self.leaves)

    @property
    def length(self) -> int:
        """Of a row: the numbers that each replica would own."""
        return self.size // self.along.peers.size

    @property
    def rest(self) -> int:
        """Numbers that are left over when the replicas divide the buffer."""
        return self.size % self.along.peers.size

    def rows(self, values: Sequence[Array]) -> tuple[Rows, Array]:
        """The tensors as rows, and the rest: a cut tensor's row is what its owner shall have."""
        parts = [values[leaf.index].astype(self.dtype) for leaf in self.leaves]
        devices = self.along.peers.size
        if self.is_cut:
            rows = [
                cut_rows(x, leaf, self.along) for x, leaf in zip(parts, self.leaves, strict=True)
            ]
            return jnp.concatenate(rows, axis=1), jnp.zeros(0, self.dtype)
        flat = jnp.concatenate([x.reshape(-1) for x in parts])
        return flat[: devices * self.length].reshape(devices, -1), flat[devices * self.length :]

    def put(self, values: list[Array], mean: Array, rest: Array) -> None:
        """Replace the tensors by their parts of a mean: of all rows, or of the device's own."""
        flat, at = jnp.concatenate([mean.reshape(-1), rest]), 0
        for leaf in self.leaves:
            shape = list(leaf.shape)
            for dimension, axes in leaf.cuts:
                shape[dimension] //= self.along.devices(axes)
            size = math.prod(shape)
            values[leaf.index] = flat[at : at + size].reshape(shape).astype(leaf.dtype)
            at += size


def cut_rows(x: Array, leaf: Leaf, along: Along) -> Rows:
    """A tensor as one row for each device that shall own a part of it, in the order of the mesh."""
    shape: list[int] = []
    places: dict[str, int] = {}
    for dimension, size in enumerate(x.shape):
        axes = dict(leaf.cuts).get(dimension, ())
        for axis in axes:
            places[axis] = len(shape)
            shape.append(along.devices((axis,)))
        shape.append(size // along.devices(axes))
    order = [places[axis] for axis in leaf.axes]
    rows = jnp.moveaxis(x.reshape(shape), order, range(len(order)))
    return rows.reshape(along.peers.size, -1)
