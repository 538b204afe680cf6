"""Forgetting attention as a layer: no positions, and a forget gate per head from the token."""

from typing import Any, ClassVar

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.attention import ForgettingCache, forgetting_attention, forgetting_attention_step
from toolkit.attention.execution.precision import accumulator
from toolkit.looped.layers import linear
from toolkit.looped.mixing.attention import AttentionLayer, AttentionOptions
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions


class ForgettingLayer(AttentionLayer):
    """Grouped-query forgetting attention.

        q, k, v = x W_q, x W_k, x W_v;   g = log sigmoid(x W_f + b_f)
        y = forgetting_attention(q, k, v, g) W_o

    There is no rotary embedding: the gates tell how far back a token is. `output_gate` and
    `query_key_norm` are those of the paper's "Pro" block.

    Source: Lin et al., "Forgetting Transformer", 2025, sections 3 and 4.
    """

    word: ClassVar[str] = "fox"
    Options: ClassVar[type[LayerOptions]] = AttentionOptions
    can_cut_time: ClassVar[bool] = False
    has_rows: ClassVar[bool] = False

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        width, dtype = config.width, config.compute_dtype
        std = width**-0.5
        self.forget = linear(width, config.heads, dtype, rngs, std=std, has_bias=True)

    @classmethod
    def empty_cache(
        cls, config: LayerConfig, batch: int, capacity: int, *, window: int | None = None
    ) -> Any:
        """Keys, values and gates for `capacity` tokens."""
        heads, key_value_heads, size = cls.sizes_of(config)
        sizes = batch, heads, key_value_heads, size, size, capacity
        return ForgettingCache.empty(*sizes, config.compute_dtype)

    def turn(self, x: Float[Array, "... heads size"], positions: Int[Array, "..."]) -> Array:
        return x

    def _mix(self, x, positions, window, past):
        return forgetting_attention(*self._project(x, positions), self._gate(x), **past)

    def _mix_step(self, x_t, cache, window):
        inputs = self._project(x_t, cache.length)
        return forgetting_attention_step(*inputs, self._gate(x_t), cache)

    def _gate(self, x):
        return jax.nn.log_sigmoid(self.forget(x).astype(accumulator(x.dtype)))
