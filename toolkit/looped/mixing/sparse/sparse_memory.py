"""A softmax layer's keys and values, indexed by a selector so that a step reads only a part.

After a prompt it replaces a `KVCache` and has the same interface for decoding.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from toolkit._pytrees import register_dataclass
from toolkit.attention import KVCache, sparse
from toolkit.attention.softmax.rounding import floats


@register_dataclass
@dataclass(frozen=True)
class SparseMemory(sparse.SparseCache):
    """Keys and values with a selector's index, and what the last step read; a pytree."""

    selector: Any  # the sparse attention method
    # tokens that the last step attended to [batch, key_value_heads]
    tokens: Int[Array, "batch key_value_heads"]
    bytes_read: Int[Array, "batch key_value_heads"]  # bytes it read for that, including the index
    budget: Any = field(metadata={"static": True})  # how many tokens it may attend to
    # whether it adds an estimate for the tokens not read
    corrects_tail: bool = field(metadata={"static": True})

    @classmethod
    def of(cls, cache: KVCache, choice: sparse.Choice, corrects_tail: bool) -> "SparseMemory":
        """Index the contents of a dense cache."""
        heads, capacity = cache.keys.shape[1], cache.capacity
        if choice.selector.sees_queries:
            raise ValueError(
                "words must name a system that needs no queries of the prompt, which a cache does "
                f"not keep; got {choice.selector}."
            )
        choice.selector.check_budget(choice.budget, capacity, heads)
        dtype = cache.keys.dtype if cache.key_scales is None else cache.key_scales.dtype
        keys, values = (x.swapaxes(2, 3) for x in floats(cache, dtype))
        built = sparse.build(choice.selector, keys, values, cache.length)
        # Copies, since a buffer can be donated only once.
        tokens, read = (jnp.zeros(built.keys.shape[:2], jnp.int32) for _ in range(2))
        return cls(
            built.keys,
            built.values,
            built.key_sum,
            built.value_sum,
            built.index,
            built.length,
            choice.selector,
            tokens,
            read,
            choice.budget,
            corrects_tail,
        )

    def step(self, q: Array, k: Array, v: Array) -> tuple[Array, "SparseMemory"]:
        """Append a token and attend to what the selector picks."""
        cache = sparse.update(self.selector, self, k, v)
        read = sparse.decode_step(
            cache, q, self.selector, self.budget, corrects_tail=self.corrects_tail
        )
        return read.out, replace(cache, tokens=read.tokens, bytes_read=read.bytes_read)
