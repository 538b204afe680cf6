"""The cache of sparse decoding: keys and values row by row, and a selector's index of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self, TypeVar

import jax
from jaxtyping import Array, Float, Int

from toolkit._pytrees import register_dataclass
from toolkit.attention._caches import Rows, cleared, picked
from toolkit.attention._shapes import HeldKeys, HeldValues


@register_dataclass
@dataclass(frozen=True)
class SparseCache(Rows):
    """Keys and values of the tokens seen so far and a selector's index of them; a pytree.

    Attributes:
        keys: [batch, key_value_heads, capacity, key].
        values: [batch, key_value_heads, capacity, value].
        key_sum: sum of the keys [batch, key_value_heads, key], at least float32.
        value_sum: likewise.
        index: what the selector keeps, arrays that begin with batch and key_value_heads.
        length: tokens seen so far by each row, int32.

    Example:
        >>> empty = jnp.zeros((1, 2, 8, 4))
        >>> build(Selector(), empty, empty, jnp.array([0])).free(jnp.array([0])).capacity
        8
    """

    keys: HeldKeys
    values: HeldValues
    key_sum: Float[Array, "batch key_value_heads key"]
    value_sum: Float[Array, "batch key_value_heads value"]
    index: Any
    length: Int[Array, "batch"]

    @property
    def capacity(self) -> int:
        """Slots for tokens."""
        return self.keys.shape[2]

    def free(self, rows: Array) -> Self:
        """Forget the tokens of some rows and their index."""
        state = jax.tree.map(lambda array: cleared(array, rows), self._state())
        return replace(self, **state)

    def truncate(self, lengths: Array) -> NoReturn:
        """Refused: a selector's index cannot take tokens back; see `restore`."""
        raise TypeError(
            "a selector's index cannot take tokens back; keep the cache before they were added and "
            "call cache.restore([before], which)."
        )

    def restore(self, earlier: Sequence[Self], which: Int[Array, "batch"]) -> Self:
        """Go back to an earlier state, row b to that of earlier[which[b]].

        Keys and values stay, since those past a row's length are never seen; the sums and the index
        are the earlier ones.
        """
        states = (cache._state() for cache in earlier)
        return replace(self, **jax.tree.map(lambda *arrays: picked(arrays, which), *states))

    def _state(self) -> dict[str, Any]:
        names = ("key_sum", "value_sum", "index", "length")
        return {name: getattr(self, name) for name in names}


Cache = TypeVar("Cache", bound=SparseCache)
