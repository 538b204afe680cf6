r"""H2O: the tokens with the largest sums of attention so far, beside the most recent ones.

    score_i = sum over all queries t so far, heads of p_ti        p over the tokens that t read

Half of the budget goes to recent tokens and half to these heavy hitters. What a step did not read
is gone for good.

Source: Zhang et al. (2023), arXiv:2306.14048.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from toolkit._pytrees import register_dataclass
from toolkit.attention.sparse.evict.evictor import Evictor, over_queries
from toolkit.attention.sparse.selector import HalfRecent, setting


@register_dataclass
@dataclass(frozen=True)
class H2O(HalfRecent, Evictor):
    """Keep the tokens that were attended to most, summed over all queries."""

    sinks: int = setting(0)

    sees_weights: ClassVar[bool] = True

    def build(self, keys: Array, values: Array, length, queries: Array) -> Array:
        return over_queries(lambda sums, p: sums + p.sum(axis=(0, 1)), keys, queries, length)

    def update(self, index: Array, k: Array, v: Array, position) -> Array:
        return index.at[position].set(0)

    def observe(self, index: Array, log_weights: Array) -> Array:
        is_read = log_weights.max(axis=0) > -jnp.inf
        return jnp.where(is_read, index + jnp.exp(log_weights).sum(axis=0), -jnp.inf)
