"""Softmax attention as a layer: rotary positions, grouped queries, all tokens or a window."""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.attention import KVCache, softmax_attention, softmax_attention_step
from toolkit.looped.config import LoopedConfig
from toolkit.looped.layers import linear, rotary_embedding


class AttentionLayer(nnx.Module):
    """Causal grouped-query softmax attention with rotary positions.

    q, k = rope(x W_q), rope(x W_k); v = x W_v; y = (softmax(q k^T / sqrt(K)) v) W_o, with the
    optional gate sigmoid(x W_g) on the heads' outputs (zero-initialised: 1/2 at the start) and the
    optional RMSNorm of each head of q and k before it turns.

    Attributes:
        query, key, value, output: projections.
        gate: projection of the output gate, or None.
        query_norm, key_norm: RMSNorm over the channels of a head, or None.
        sliding_window: tokens each query sees, or None for all.

    Source: Vaswani et al. 2017; Ainslie et al. 2023 (grouped queries); LT2 (output gate); Henry et
        al., "Query-Key Normalization", 2020, as in Qwen3.
    """

    word: ClassVar[str] = "full"
    is_recurrent: ClassVar[bool] = False

    def __init__(self, config: LoopedConfig, *, rngs: nnx.Rngs):
        width, dtype, std = config.width, config.compute_dtype, config.width**-0.5
        heads, key_value_heads, size = config.attention_sizes
        self.query = linear(width, heads * size, dtype, rngs, std=std)
        self.key = linear(width, key_value_heads * size, dtype, rngs, std=std)
        self.value = linear(width, key_value_heads * size, dtype, rngs, std=std)
        self.output = linear(heads * size, width, dtype, rngs, std=std)
        self.gate = (
            linear(width, heads * size, dtype, rngs, std=0.0)
            if config.attention_output_gate
            else nnx.data(None)
        )
        norm = functools.partial(
            nnx.RMSNorm, size, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs
        )
        self.query_norm, self.key_norm = (
            (norm(), norm()) if config.query_key_norm else (nnx.data(None), nnx.data(None))
        )
        self.head_size = size
        self.rope_theta, self.rotary_fraction = config.rope_theta, config.rotary_fraction
        self.sliding_window = self._window(config)

    @classmethod
    def empty_cache(
        cls, config: LoopedConfig, batch: int, capacity: int, *, window: int | None = None
    ) -> KVCache:
        """Keys and values for `capacity` tokens; a window needs room for itself, no more."""
        _, key_value_heads, size = config.attention_sizes
        room = window or cls._window(config) or capacity
        return KVCache.empty(batch, key_value_heads, size, size, room, config.compute_dtype)

    @classmethod
    def _window(cls, config):
        return None

    def __call__(
        self,
        x: Float[Array, "batch time width"],
        *,
        segment_ids: Int[Array, "batch time"] | None = None,
        cache: KVCache | None = None,
        window: int | None = None,
    ) -> tuple[Float[Array, "batch time width"], KVCache | None]:
        """Mix a sequence; with a cache it continues what the cache holds.

        `window` replaces the layer's own, in the loops of a model that say so.
        """
        positions = jnp.arange(x.shape[1]) + (0 if cache is None else cache.length)
        q, k, v = self._project(x, positions)
        out, cache = softmax_attention(
            q,
            k,
            v,
            sliding_window=window or self.sliding_window,
            segment_ids=segment_ids,
            initial_state=cache,
        )
        return self._finish(x, out), cache

    def step(
        self, x_t: Float[Array, "batch width"], cache: KVCache, *, window: int | None = None
    ) -> tuple[Float[Array, "batch width"], KVCache]:
        """Mix one token and append it to the cache."""
        q_t, k_t, v_t = self._project(x_t, cache.length)
        out_t, cache = softmax_attention_step(
            q_t, k_t, v_t, cache, sliding_window=window or self.sliding_window
        )
        return self._finish(x_t, out_t), cache

    def _project(self, x, positions):
        split = (*x.shape[:-1], -1, self.head_size)
        q, k, v = (p(x).reshape(split) for p in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        rotation = {"theta": self.rope_theta, "fraction": self.rotary_fraction}
        q, k = (rotary_embedding(x, positions, **rotation) for x in (q, k))
        return q, k, v

    def _finish(self, x, out):
        out = out.reshape(*x.shape[:-1], -1)
        if self.gate is not None:
            out *= jax.nn.sigmoid(self.gate(x))
        return self.output(out)


class WindowLayer(AttentionLayer):
    """`AttentionLayer` whose queries see the last `sliding_window` tokens, themselves included.

    Source: Beltagy, Peters, Cohan, "Longformer", 2020, section 3.1.
    """

    word: ClassVar[str] = "window"

    @classmethod
    def _window(cls, config):
        return config.sliding_window
