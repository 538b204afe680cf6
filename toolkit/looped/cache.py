"""What a looped model remembers while it writes: one cache for every (loop, layer) pair.

The loops share weights, not memories: the same layer sees different inputs in every loop.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from toolkit.looped.blocks import empty_layer_cache
from toolkit.looped.config import LoopedConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoopedCache:
    """Caches of all layers; every array has a leading axis of loops.

    Attributes:
        layers: one entry a physical layer: keys and values of softmax layers (the window alone
            for "window"), state and convolution tail of gated delta nets.

    Source: LT2, decode-time state; the same index loop * N + layer appears in vLLM's Ouro.
    """

    layers: tuple[Any, ...]

    @classmethod
    def empty(cls, config: LoopedConfig, batch: int, capacity: int) -> "LoopedCache":
        """A cache before the first token.

        Args:
            config: the model.
            batch: sequences decoded together.
            capacity: tokens a full-attention layer can hold, prompt included.

        Returns:
            The cache, in the model's compute type (delta-net states in float32).

        Raises:
            ValueError: if batch or capacity is less than one.
        """
        for name, number in (("batch", batch), ("capacity", capacity)):
            if number < 1:
                raise ValueError(f"{name} is {number}; a cache needs at least 1.")
        layers = tuple(empty_layer_cache(word, config, batch, capacity) for word in config.layers)
        return cls(jax.tree.map(lambda leaf: jnp.repeat(leaf[None], config.loops, axis=0), layers))


def cache_bytes_per_sequence(config: LoopedConfig, capacity: int) -> int:
    """Bytes of decode-time state one sequence needs, nothing allocated.

    Softmax layers take loops * 2 * key_value_heads * head_size numbers a token; a window stops
    growing at its length; a gated delta net never grows.

    Args:
        config: the model.
        capacity: tokens, prompt included.

    Returns:
        Bytes of keys, values, states and convolution tails (not of the length counters).

    Raises:
        ValueError: if capacity is less than one.

    Source: LT2, decode-time state.
    """
    cache = jax.eval_shape(lambda: LoopedCache.empty(config, 1, capacity))
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(cache)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    )
