"""Rows of weights of equal or different structure as arrays [rows, ...]."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

Tree = Any


class Rows:
    """How the weights of stages become arrays of which each device takes its rows.

    Rows of one structure are stacked. Others become one vector for each dtype, as long as the
    longest row wants.

    Attributes:
        kinds: for each row the number of its structure.
    """

    def __init__(self, rows: Sequence[Tree]):
        structures = [_structure(row) for row in rows]
        self._known = list(dict.fromkeys(structures))
        self.kinds = tuple(self._known.index(structure) for structure in structures)
        self._lengths: dict[np.dtype, int] = {}
        for _, shapes in self._known:
            for dtype in {dtype for _, dtype in shapes}:
                length = sum(int(np.prod(shape)) for shape, of in shapes if of == dtype)
                self._lengths[dtype] = max(self._lengths.get(dtype, 0), length)

    def stack(self, rows: Sequence[Tree]) -> Tree:
        """Arrays [rows, ...]; if structures differ, a dict of vectors by dtype."""
        for row in rows:
            if _structure(row) not in self._known:
                raise ValueError("weights: a row has not the structure with which this was made")
        if len(self._known) == 1:
            return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
        flat = [self._flat(row) for row in rows]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *flat)

    def _flat(self, row: Tree) -> dict[str, Array]:
        leaves, found = jax.tree.leaves(row), {}
        for dtype, length in self._lengths.items():
            parts = [jnp.ravel(leaf) for leaf in leaves if leaf.dtype == dtype]
            vector = jnp.concatenate([*parts, jnp.zeros(0, dtype)])
            found[str(dtype)] = jnp.pad(vector, (0, length - len(vector)))
        return found

    def unpack(self, kind: int, leaves: Sequence[Any]) -> Tree:
        """One row as it was, from the leaves of what `stack` returns without their first axis."""
        tree, shapes = self._known[kind]
        if len(self._known) == 1:
            return tree.unflatten(leaves)
        vectors = dict(zip(sorted(map(str, self._lengths)), leaves, strict=True))
        at, found = dict.fromkeys(vectors, 0), []
        for shape, dtype in shapes:
            name, size = str(dtype), int(np.prod(shape))
            found.append(vectors[name][at[name] : at[name] + size].reshape(shape))
            at[name] += size
        return tree.unflatten(found)

    def unstack(self, stacked: Tree, order: Sequence[int]) -> list[Tree]:
        """The rows again; `order` gives the number of each."""
        leaves = jax.tree.leaves(stacked)
        return [
            self.unpack(self.kinds[row], [leaf[at] for leaf in leaves])
            for at, row in enumerate(order)
        ]


def _structure(row: Tree) -> tuple[Any, tuple[tuple[tuple[int, ...], np.dtype], ...]]:
    leaves, tree = jax.tree.flatten(row)
    return tree, tuple((tuple(jnp.shape(a)), np.dtype(jnp.result_type(a))) for a in leaves)
