r"""KVzip: what a model looks at while it writes its context again is what it needs of it.

    score_i = max over the queries t of the repetition, heads of p_ti        p over the context

`queries` are those of a second pass that repeats the prompt, one per token, in the slots of the
tokens that they write again; with the prompt's own queries it is another, weaker method. In the
release a query also weighs the repetition before it, which changes p but is not counted.

Source: Kim et al. (2025), arXiv:2505.23416.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array

from toolkit._pytrees import register_dataclass
from toolkit.attention.sparse.evict.evictor import Evictor, over_queries


@register_dataclass
@dataclass(frozen=True)
class KVzip(Evictor):
    """Keep the tokens that some query of a repetition of the prompt attends to strongly."""

    def build(self, keys: Array, values: Array, length, queries: Array) -> Array:
        def widen(most: Array, p: Array) -> Array:
            return jnp.maximum(most, p.max(axis=(0, 1)))

        return over_queries(widen, keys, queries, length, is_causal=False)
