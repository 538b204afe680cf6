"""Finite groups as multiplication tables, and which of their elements are transpositions.

Elements of permutation groups are numbered in lexicographic order, so the identity is 0; those of
a product Z_n-like or G x H in the order of pairs.
"""

import dataclasses
import functools
import itertools

import numpy as np


@dataclasses.dataclass(frozen=True)
class Group:
    """A finite group.

    Attributes:
        name: as in `GROUPS`.
        table: table[a, b] is the number of the product a b, int32 [order, order]; 0 is the
            identity.
        swaps: numbers of the elements that exchange two points and fix all others.
    """

    name: str
    table: np.ndarray
    swaps: tuple[int, ...] = ()

    @property
    def order(self) -> int:
        """Number of elements."""
        return len(self.table)


def cyclic(order: int) -> np.ndarray:
    """Multiplication table of the integers modulo `order`."""
    return np.add.outer(np.arange(order), np.arange(order)) % order


def permutations(points: int, *, only_even: bool = False) -> list[tuple[int, ...]]:
    """Permutations of `points` points in lexicographic order, p[i] being the image of i."""
    return [p for p in itertools.permutations(range(points)) if not only_even or _is_even(p)]


def permutation_table(elements: list[tuple[int, ...]]) -> np.ndarray:
    """Multiplication table of permutations: (a b)[i] = a[b[i]]."""
    number = {element: index for index, element in enumerate(elements)}
    return np.array([[number[tuple(a[i] for i in b)] for b in elements] for a in elements])


def direct_product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Multiplication table of pairs (a, b), numbered a |right| + b."""
    size, a = len(right), np.arange(len(left) * len(right))
    rows, columns = np.ix_(a, a)
    return left[rows // size, columns // size] * size + right[rows % size, columns % size]


def _is_even(permutation: tuple[int, ...]) -> bool:
    return sum(a > b for a, b in itertools.combinations(permutation, 2)) % 2 == 0


def _swaps(elements: list[tuple[int, ...]]) -> tuple[int, ...]:
    moved = [sum(image != point for point, image in enumerate(p)) for p in elements]
    return tuple(index for index, count in enumerate(moved) if count == 2)


@functools.cache
def group(name: str) -> Group:
    """The group of a name in `GROUPS`."""
    match name:
        case "Z2" | "Z60":
            return Group(name, cyclic(int(name[1:])))
        case "S3" | "S5":
            elements = permutations(int(name[1:]))
            return Group(name, permutation_table(elements), _swaps(elements))
        case "A5":
            return Group(name, permutation_table(permutations(5, only_even=True)))
        case "A4xZ5":
            alternating = permutation_table(permutations(4, only_even=True))
            return Group(name, direct_product(alternating, cyclic(5)))
    raise ValueError(f"group: got {name!r}, wanted one of {', '.join(GROUPS)}")


GROUPS = ("Z2", "Z60", "S3", "A4xZ5", "A5", "S5")
"""Names of the groups of word problems, of orders 2, 60, 6, 60, 60 and 120."""
