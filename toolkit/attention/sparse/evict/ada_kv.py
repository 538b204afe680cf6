r"""Ada-KV: the heads of a layer share one budget, the more for a head the larger its scores.

    tokens_h = floor((1 - floor) adaptive_h + floor tokens)
    adaptive_h = how many of the heads x tokens best tokens of the layer are those of head h

Sinks and recent tokens are read by every head and stand outside of the comparison. The release
rounds to the nearest number, by which a layer may read a few tokens more than its budget.

Source: Feng et al. (2024), arXiv:2407.11550, algorithm 2 and its release.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from toolkit._checks import check_fields
from toolkit.attention._checks import check_count
from toolkit.attention.sparse.budget import Ranked
from toolkit.attention.sparse.selector import HEADS


@dataclass(frozen=True)
class AdaKV:
    """A budget of `tokens` per head on average, shared out by the scores of the layer's heads.

    Attributes:
        tokens: per head on average, sinks and recent tokens counted.
        heads: the layer's key-value heads.
        floor: share of the average that every head has.

    Example:
        >>> AdaKV(128, heads=4).most(4096)
        435
    """

    needs_mass: ClassVar[bool] = False
    compares_heads: ClassVar[bool] = True

    tokens: int
    heads: int
    floor: float = 0.2

    def __post_init__(self):
        check_fields(self)
        check_count("tokens", self.tokens, 1, " token")
        check_count("heads", self.heads, 1)
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor must be from 0 to 1; got {self.floor}.")

    def most(self, capacity: int) -> int:
        whole = self.heads * self.tokens
        return min(int((1 - self.floor) * whole + self.floor * self.tokens), capacity)

    def least(self, capacity: int) -> int:
        return min(self.tokens, capacity)

    def count(self, length: Array, head: Array) -> Array:
        return jnp.int32(self.tokens)

    def selected(self, ranked: Ranked) -> Array:
        scores = lax.all_gather(ranked.scores, HEADS)
        order = jnp.argsort(-scores.reshape(-1), stable=True)
        best = jnp.arange(order.size, dtype=jnp.int32) < self.heads * ranked.room
        best &= scores.reshape(-1)[order] > -jnp.inf
        own = order // scores.shape[1]
        adaptive = jnp.zeros(self.heads, jnp.int32).at[own].add(best.astype(jnp.int32))
        share, room = (
            x.astype(jnp.float32) for x in (adaptive[lax.axis_index(HEADS)], ranked.room)
        )
        return jnp.floor((1 - self.floor) * share + self.floor * room).astype(jnp.int32)
