"""Knorm: keys of a small norm are kept, as they draw attention in many models.

    score_i = -|k_i|

Source: Devoto et al. (2024), arXiv:2406.11430.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from toolkit._pytrees import register_dataclass
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.sparse.evict.evictor import Evictor


@register_dataclass
@dataclass(frozen=True)
class Knorm(Evictor):
    """Keep the tokens with the shortest keys."""

    sees_queries: ClassVar[bool] = False

    def build(self, keys: Array, values: Array, length) -> Array:
        return -jnp.linalg.norm(keys.astype(accumulator(keys.dtype)), axis=1)

    def update(self, index: Array, k: Array, v: Array, position) -> Array:
        return index.at[position].set(-jnp.linalg.norm(k.astype(index.dtype)))
