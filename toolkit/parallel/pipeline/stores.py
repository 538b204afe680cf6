"""Buffers that kinds of stages share, where one stores as much as the others, and more."""

from collections.abc import Sequence
from typing import Any

Arrays = list[Any]


class Stores:
    """The arrays of each store, and those of them that each kind of stage uses.

    Attributes:
        leaves: for each store the shapes of its arrays.
    """

    def __init__(self, stores: Sequence[int], kinds: Sequence[Sequence[Any]]):
        """`stores` has the store of each kind, `kinds` the shapes of what it stores."""
        self._stores = stores
        self.leaves: list[Arrays] = [[] for _ in range(max(stores) + 1)]
        self._places: list[list[int]] = []
        for store, mine in zip(stores, kinds, strict=True):
            known, places = self.leaves[store], list[int]()
            for array in mine:
                free = (at for at in range(len(known)) if at not in places)
                alike = (at for at in free if _alike(known[at], array))
                places.append(next(alike, len(known)))
                if places[-1] == len(known):
                    known.append(array)
            self._places.append(places)

    def put(self, stored: list[Arrays], kind: int, values: Sequence[Any]) -> list[Arrays]:
        """One slot of every store, with the values of a kind in their places."""
        found = [list(arrays) for arrays in stored]
        for at, value in zip(self._places[kind], values, strict=True):
            found[self._stores[kind]][at] = value
        return found

    def get(self, stored: list[Arrays], kind: int) -> Arrays:
        """The values of a kind."""
        return [stored[self._stores[kind]][at] for at in self._places[kind]]


def _alike(a: Any, b: Any) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype)
