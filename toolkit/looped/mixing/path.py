"""PaTH attention as a layer: no positions, and a reflection per key head from the token."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.attention import PathCache, path_attention, path_attention_step
from toolkit.attention.execution.precision import accumulator
from toolkit.looped.layers import linear
from toolkit.looped.mixing.attention import AttentionLayer, AttentionOptions
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions

RANK = 32  # of the map from a token to its directions, as in the paper


class PathLayer(AttentionLayer):
    """Grouped-query PaTH attention.

        q, k, v = x W_q, x W_k, x W_v;   w = x W_1 W_2 / |x W_1 W_2|;   beta = 2 sigmoid(x W_b + b)
        y = path_attention(q, k, v, w, beta) W_o

    There is no rotary embedding: the reflections tell how far back a token is. The authors' layer
    convolves x W_1 W_2 over three tokens unless `use_w_shortconv` is off; this is the layer without
    the convolution, so that its cache holds nothing but tokens and can take any of them back.

    Source: Yang et al., "PaTH Attention", 2025, section 2.2.
    """

    word: ClassVar[str] = "path"
    Options: ClassVar[type[LayerOptions]] = AttentionOptions
    can_cut_time: ClassVar[bool] = False
    has_rows: ClassVar[bool] = False

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        width, dtype, std = config.width, config.compute_dtype, config.width**-0.5
        _, key_value_heads, size = self.sizes_of(config)
        self.down = linear(width, RANK, dtype, rngs, std=std)
        self.up = linear(RANK, key_value_heads * size, dtype, rngs, std=RANK**-0.5)
        self.strength = linear(width, key_value_heads, dtype, rngs, std=std, has_bias=True)

    @classmethod
    def empty_cache(
        cls, config: LayerConfig, batch: int, capacity: int, *, window: int | None = None
    ) -> Any:
        """Keys, values and reflections for `capacity` tokens."""
        _, key_value_heads, size = cls.sizes_of(config)
        sizes = batch, key_value_heads, size, size, capacity
        return PathCache.empty(*sizes, config.compute_dtype)

    def turn(self, x: Float[Array, "... heads size"], positions: Int[Array, "..."]) -> Array:
        return x

    def _mix(self, x, positions, window, past):
        return path_attention(*self._project(x, positions), *self._reflections(x), **past)

    def _mix_step(self, x_t, cache, window):
        inputs = self._project(x_t, cache.length)
        return path_attention_step(*inputs, *self._reflections(x_t), cache)

    def _reflections(self, x):
        projected = self.up(self.down(x)).reshape(*x.shape[:-1], -1, self.head_size)
        w = projected.astype(accumulator(projected.dtype))
        w = w * jax.lax.rsqrt(jnp.sum(w * w, axis=-1, keepdims=True) + 1e-6)
        beta = 2 * jax.nn.sigmoid(self.strength(x).astype(w.dtype))
        return w.astype(projected.dtype), beta
