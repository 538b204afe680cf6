"""Layers whose memory corrects itself: the delta rule, with and without decay.

    S <- S + beta k (v - S^T k)^T

What they share: queries, keys and values through one projection and one short convolution, keys of
unit length (longer ones would expand the state), and a write strength beta = sigmoid(x W_b),
doubled on request so that a step can reflect.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from toolkit.looped.config import LoopedConfig
from toolkit.looped.convolution import ShortConvolution
from toolkit.looped.layers import linear, unit_length
from toolkit.looped.mixing.gates import log_rate, step_bias, time_step
from toolkit.looped.mixing.recurrent import (
    Projection,
    RecurrentLayer,
    RecurrentSizes,
    split_heads,
)


class DeltaLayer(RecurrentLayer):
    """The shared part of delta-rule layers.

        q, k, v = silu(conv(x W_qkv)),  q and k scaled to unit length
        beta = sigmoid(x W_b)                          (write strength; doubled on request)

    Attributes:
        query_key_value, write: projections.
        convolution: the short convolution over queries, keys and values.
        negative_eigenvalues: whether beta reaches 2.

    Source: Schlag et al. 2021; Yang et al., "Parallelizing Linear Transformers with the Delta
        Rule", 2024.
    """

    write: nnx.Linear

    def _set_projections(self, config: LoopedConfig, rngs: nnx.Rngs):
        width, dtype, std = config.width, config.compute_dtype, config.width**-0.5
        channels = self._channels(config)
        self.query_key_value = linear(width, channels, dtype, rngs, std=std)
        self.convolution = ShortConvolution(
            channels, config.convolution_size, dtype=dtype, rngs=rngs
        )
        self.negative_eigenvalues = config.negative_eigenvalues

    @classmethod
    def _channels(cls, config):
        sizes = cls.sizes_of(config)
        return 2 * sizes.keys + sizes.values

    @classmethod
    def tail_shape(cls, config: LoopedConfig) -> tuple[int, int]:
        return config.convolution_size - 1, cls._channels(config)

    def project(self, x, past, segment_ids):
        mixed, tail = self.convolution(
            self.query_key_value(x),
            tail=None if past is None else past.tail,
            segment_ids=segment_ids,
        )
        beta = jax.nn.sigmoid(self.write(x).astype(jnp.float32))
        beta = 2 * beta if self.negative_eigenvalues else beta
        return Projection((*self._heads(mixed), *self._decay(x), beta), tail)

    def _heads(self, mixed):
        keys, size = self.sizes.keys, self.sizes.key_size
        q, k, v = jnp.split(jax.nn.silu(mixed), [keys, 2 * keys], axis=-1)
        q, k = unit_length(split_heads(q, size)), unit_length(split_heads(k, size))
        return q, k, split_heads(v, self.sizes.value_size)

    def _decay(self, x) -> tuple[Array, ...]:
        return ()


class GatedDeltaNetLayer(DeltaLayer):
    """Linear-time mixing by a gated delta rule, with short convolution and gated output norm.

        q, k, v, beta as in `DeltaLayer`
        g = -exp(A_log) softplus(x W_a + dt_bias)      (log-decay of the state, float32)
        y = ( RMSNorm(gated_delta_net(q, k, v, g, beta)) * silu(x W_g) ) W_o

    Attributes:
        query_key_value, decay, write, gate, output: projections.
        convolution: the short convolution over queries, keys and values.
        log_rate: A_log, [value heads].
        step_bias: dt_bias, [value heads].
        norm: RMSNorm over the value channels, one weight vector for all heads.

    Source: Yang et al., "Gated Delta Networks", 2024; LT2 for the sizes.
    """

    word: ClassVar[str] = "gdn"

    def __init__(self, config: LoopedConfig, *, rngs: nnx.Rngs):
        width, dtype, std = config.width, config.compute_dtype, config.width**-0.5
        sizes = self.sizes_of(config)
        self._set_projections(config, rngs)
        self.decay = linear(width, sizes.value_heads, dtype, rngs, std=std)
        self.write = linear(width, sizes.value_heads, dtype, rngs, std=std)
        gate = linear(width, sizes.values, dtype, rngs, std=std)
        super().__init__(config, gate=gate, rngs=rngs)
        self.log_rate = log_rate(rngs, sizes.value_heads, lowest=0.01)
        self.step_bias = step_bias(rngs, sizes.value_heads)

    @classmethod
    def sizes_of(cls, config: LoopedConfig) -> RecurrentSizes:
        """0.75 width / heads a key, to a multiple of 8, and twice as much a value."""
        key_size = config.gdn_key_size or config.key_size
        key_size = key_size or max(8, 8 * round(0.75 * config.width / config.heads / 8))
        return RecurrentSizes(
            config.heads,
            config.gdn_value_heads or config.value_heads or config.heads,
            key_size,
            config.gdn_value_size or config.value_size or 2 * key_size,
        )

    def _decay(self, x) -> tuple[Float[Array, "batch time heads"]]:
        return (-jnp.exp(self.log_rate[...]) * time_step(self.decay(x), self.step_bias),)
