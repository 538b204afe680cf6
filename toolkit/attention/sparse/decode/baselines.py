"""Baselines of every system: the best selection there is, the most recent tokens, and chance."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from toolkit._pytrees import register_dataclass
from toolkit.attention.execution.precision import accumulator
from toolkit.attention.sparse.selector import Selector, setting


@register_dataclass
@dataclass(frozen=True)
class Oracle(Selector):
    """Rank tokens by their exact scores: this reads every key, and no selection does better.

        score_i = q . k_i

    The heads of a group share the tokens with the largest summed shares of the whole softmax; no
    other selection of the same size holds more of it on average. With `FixedTokens` it is the top-k
    oracle, with `MassTarget` the top-p one.
    """

    group: ClassVar[str] = "sum"
    counts_forced: ClassVar[bool] = True

    def scores(self, index: Any, keys: Array, q: Array, length) -> Array:
        precise = accumulator(q.dtype)
        return jnp.einsum("gk,sk->gs", q, keys, preferred_element_type=precise)

    def index_bytes(self, index: Any, q: Array, length) -> Array:
        return length * (q.shape[1] * q.dtype.itemsize)


@register_dataclass
@dataclass(frozen=True)
class Window(Selector):
    """Sinks and the most recent tokens that fit the budget, whatever the query.

    These are the tokens of StreamingLLM (Xiao et al. 2023, arXiv:2309.17453), which also numbers
    their positions anew.
    """

    estimates_mass: ClassVar[bool] = False

    def start(self, index: Any, length, count) -> Array:
        return jnp.maximum(length - jnp.maximum(count - self.sinks, 1), 0)

    def recent_slots(self, most: int) -> int:
        return max(most - self.sinks, 1)

    def least_recent(self, most: int) -> int:
        return self.recent_slots(most)


@register_dataclass
@dataclass(frozen=True)
class Random(Selector):
    """Random tokens, drawn anew in every step and the same for all heads.

    Attributes:
        seed: of the draws.
    """

    seed: int = setting(0)

    group: ClassVar[str] = "sum"
    estimates_mass: ClassVar[bool] = False
    compares_scores: ClassVar[bool] = True

    def scores(self, index: Any, keys: Array, q: Array, length) -> Array:
        drawn = jax.random.uniform(
            jax.random.fold_in(jax.random.key(self.seed), length), keys.shape[:1]
        )
        return jnp.broadcast_to(drawn, (q.shape[0], keys.shape[0]))
