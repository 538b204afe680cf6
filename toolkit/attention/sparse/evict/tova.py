r"""TOVA: the newest query alone decides; what it weighs least is dropped.

    score_i = mean over all heads of the layer of p_ti        t: the newest query

All heads keep the same tokens. What a step did not read is gone for good.

Source: Oren et al. (2024), arXiv:2401.06104.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from toolkit._pytrees import register_dataclass
from toolkit.attention.sparse.evict.evictor import Evictor, attention
from toolkit.attention.sparse.selector import HEADS, setting


@register_dataclass
@dataclass(frozen=True)
class TOVA(Evictor):
    """Keep the tokens that the last query attended to most, averaged over the layer's heads."""

    sinks: int = setting(0)
    recent: int = setting(1)

    sees_weights: ClassVar[bool] = True

    def build(self, keys: Array, values: Array, length, queries: Array) -> Array:
        last = (length - 1).reshape(1)
        own = queries[:, jnp.maximum(last, 0)]
        return lax.pmean(attention(keys, own, last, length).mean(axis=(0, 1)), HEADS)

    def observe(self, index: Array, log_weights: Array) -> Array:
        score = lax.pmean(jnp.exp(log_weights).mean(axis=0), HEADS)
        return jnp.where(log_weights.max(axis=0) > -jnp.inf, score, -jnp.inf)
