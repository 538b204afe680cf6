"""The layers that mix tokens: softmax attention (full or windowed) and the gated delta net.

Each works on a whole sequence, with or without a cache to continue from, and one token at a time.
The mathematics of mixing is `toolkit.attention`'s; here are the projections around it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from toolkit.attention import (
    KVCache,
    gated_delta_net,
    gated_delta_net_step,
    softmax_attention,
    softmax_attention_step,
)
from toolkit.looped.config import LoopedConfig
from toolkit.looped.layers import ShortConvolution, linear, rotary_embedding, unit_length


class AttentionLayer(nnx.Module):
    """Causal grouped-query softmax attention with rotary positions, full or windowed.

    q, k = rope(x W_q), rope(x W_k); v = x W_v; y = (softmax(q k^T / sqrt(K)) v) W_o, with the
    optional gate sigmoid(x W_g) on the heads' outputs (zero-initialised: 1/2 at the start).

    Attributes:
        query, key, value, output: projections.
        gate: projection of the output gate, or None.
        sliding_window: tokens each query sees, or None for all.

    Source: Vaswani et al. 2017; Ainslie et al. 2023 (grouped queries); LT2 (output gate).
    """

    def __init__(self, config: LoopedConfig, *, sliding_window: int | None, rngs: nnx.Rngs):
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
        self.head_size = size
        self.rope_theta = config.rope_theta
        self.sliding_window = sliding_window

    @staticmethod
    def empty_cache(
        config: LoopedConfig, batch: int, capacity: int, *, sliding_window: int | None
    ) -> KVCache:
        """Keys and values for `capacity` tokens; a window needs room for itself, no more."""
        _, key_value_heads, size = config.attention_sizes
        room = capacity if sliding_window is None else sliding_window
        return KVCache.empty(batch, key_value_heads, size, size, room, config.compute_dtype)

    def __call__(
        self,
        x: Float[Array, "batch time width"],
        *,
        segment_ids: Int[Array, "batch time"] | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Float[Array, "batch time width"], KVCache | None]:
        """Mix a sequence; with a cache it continues what the cache holds."""
        positions = jnp.arange(x.shape[1]) + (0 if cache is None else cache.length)
        q, k, v = self._project(x, positions)
        out, cache = softmax_attention(
            q,
            k,
            v,
            sliding_window=self.sliding_window,
            segment_ids=segment_ids,
            initial_state=cache,
        )
        return self._finish(x, out), cache

    def step(
        self, x_t: Float[Array, "batch width"], cache: KVCache
    ) -> tuple[Float[Array, "batch width"], KVCache]:
        """Mix one token and append it to the cache."""
        q_t, k_t, v_t = self._project(x_t, cache.length)
        out_t, cache = softmax_attention_step(
            q_t, k_t, v_t, cache, sliding_window=self.sliding_window
        )
        return self._finish(x_t, out_t), cache

    def _project(self, x, positions):
        split = (*x.shape[:-1], -1, self.head_size)
        q, k, v = (p(x).reshape(split) for p in (self.query, self.key, self.value))
        q = rotary_embedding(q, positions, theta=self.rope_theta)
        return q, rotary_embedding(k, positions, theta=self.rope_theta), v

    def _finish(self, x, out):
        out = out.reshape(*x.shape[:-1], -1)
        if self.gate is not None:
            out *= jax.nn.sigmoid(self.gate(x))
        return self.output(out)


class GatedDeltaNetCache(NamedTuple):
    """What a gated delta net remembers: constant in size however long the text.

    Attributes:
        state: float32 [batch, value heads, key, value].
        tail: the last taps - 1 inputs of the short convolution [batch, taps - 1, channels].
    """

    state: Float[Array, "batch heads key value"]
    tail: Float[Array, "batch past channels"]


class GatedDeltaNetLayer(nnx.Module):
    """Linear-time mixing by a gated delta rule, with short convolution and gated output norm.

        q, k, v = silu(conv(x W_qkv)),  q and k scaled to unit length
        g = -exp(A_log) softplus(x W_a + dt_bias)      (log-decay of the state, float32)
        beta = sigmoid(x W_b)                          (write strength; doubled on request)
        y = ( RMSNorm(gated_delta_net(q, k, v, g, beta)) * silu(x W_g) ) W_o

    Query, key and value share one projection, one convolution and one convolution tail.

    Attributes:
        query_key_value, decay, write, gate, output: projections.
        convolution: the short convolution over queries, keys and values.
        log_rate: A_log, [value heads].
        step_bias: dt_bias, [value heads].
        norm: RMSNorm over the value channels, one weight vector for all heads.

    Source: Yang et al., "Gated Delta Networks", 2024; LT2 for the sizes.
    """

    def __init__(self, config: LoopedConfig, *, rngs: nnx.Rngs):
        width, dtype, std = config.width, config.compute_dtype, config.width**-0.5
        self.sizes = config.gated_delta_net_sizes
        heads, value_heads, key_size, value_size = self.sizes
        keys, values = heads * key_size, value_heads * value_size
        self.query_key_value = linear(width, 2 * keys + values, dtype, rngs, std=std)
        self.convolution = ShortConvolution(
            2 * keys + values, config.convolution_size, dtype=dtype, rngs=rngs
        )
        self.decay = linear(width, value_heads, dtype, rngs, std=std)
        self.write = linear(width, value_heads, dtype, rngs, std=std)
        self.gate = linear(width, values, dtype, rngs, std=std)
        self.output = linear(values, width, dtype, rngs, std=std)
        # The rate exp(A_log) is uniform up to 16, kept away from 0 where its logarithm diverges;
        # the time step softplus(dt_bias) is log-uniform between 1e-3 and 1e-1.
        rate = jax.random.uniform(rngs.params(), (value_heads,), minval=0.01, maxval=16.0)
        self.log_rate = nnx.Param(jnp.log(rate))
        step = jnp.exp(
            jax.random.uniform(
                rngs.params(), (value_heads,), minval=jnp.log(1e-3), maxval=jnp.log(1e-1)
            )
        )
        self.step_bias = nnx.Param(step + jnp.log(-jnp.expm1(-step)))
        self.norm = nnx.RMSNorm(value_size, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)
        self.negative_eigenvalues = config.negative_eigenvalues

    @staticmethod
    def empty_cache(config: LoopedConfig, batch: int) -> GatedDeltaNetCache:
        """A zero state and a zero convolution tail."""
        heads, value_heads, key_size, value_size = config.gated_delta_net_sizes
        channels = 2 * heads * key_size + value_heads * value_size
        return GatedDeltaNetCache(
            state=jnp.zeros((batch, value_heads, key_size, value_size), jnp.float32),
            tail=jnp.zeros((batch, config.convolution_size - 1, channels), config.compute_dtype),
        )

    def __call__(
        self,
        x: Float[Array, "batch time width"],
        *,
        segment_ids: Int[Array, "batch time"] | None = None,
        cache: GatedDeltaNetCache | None = None,
    ) -> tuple[Float[Array, "batch time width"], GatedDeltaNetCache | None]:
        """Mix a sequence; with a cache it continues from the cache's state."""
        mixed, tail = self.convolution(
            self.query_key_value(x),
            tail=None if cache is None else cache.tail,
            segment_ids=segment_ids,
        )
        out, state = gated_delta_net(
            *self._heads(mixed),
            *self._gates(x),
            initial_state=None if cache is None else cache.state,
            segment_ids=segment_ids,
        )
        return self._finish(x, out), None if cache is None else GatedDeltaNetCache(state, tail)

    def step(
        self, x_t: Float[Array, "batch width"], cache: GatedDeltaNetCache
    ) -> tuple[Float[Array, "batch width"], GatedDeltaNetCache]:
        """Mix one token: one read and one write of the state."""
        mixed, tail = self.convolution.step(self.query_key_value(x_t), cache.tail)
        out_t, state = gated_delta_net_step(*self._heads(mixed), *self._gates(x_t), cache.state)
        return self._finish(x_t, out_t), GatedDeltaNetCache(state, tail)

    def _heads(self, mixed):
        heads, _, key_size, value_size = self.sizes
        keys = heads * key_size
        q, k, v = jnp.split(jax.nn.silu(mixed), [keys, 2 * keys], axis=-1)
        lead = mixed.shape[:-1]
        q, k = q.reshape(*lead, heads, key_size), k.reshape(*lead, heads, key_size)
        return unit_length(q), unit_length(k), v.reshape(*lead, -1, value_size)

    def _gates(self, x):
        log_decay = -jnp.exp(self.log_rate[...]) * jax.nn.softplus(
            self.decay(x).astype(jnp.float32) + self.step_bias[...]
        )
        beta = jax.nn.sigmoid(self.write(x).astype(jnp.float32))
        return log_decay, 2 * beta if self.negative_eigenvalues else beta

    def _finish(self, x, out):
        gate = jax.nn.silu(self.gate(x)).reshape(out.shape)
        return self.output((self.norm(out) * gate).reshape(*x.shape[:-1], -1))
