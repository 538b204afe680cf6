"""Layers that follow the delta rule, with and without decay.

    S <- S + beta k (v - S^T k)^T

They share one projection and one short convolution for queries, keys and values, keys of unit
length (longer ones would expand the state), and a write strength beta = sigmoid(x W_b), optionally
doubled so that a step can reflect.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from toolkit.attention import log_decay, unit_length
from toolkit.attention.execution.precision import accumulator
from toolkit.looped.layers import linear
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions
from toolkit.looped.mixing.linear.convolution import ShortConvolution
from toolkit.looped.mixing.linear.gates import log_rate, step_bias
from toolkit.looped.mixing.linear.recurrent import (
    GroupedOptions,
    Projection,
    RecurrentLayer,
    RecurrentSizes,
    split_heads,
)


@dataclasses.dataclass(frozen=True)
class DeltaOptions(GroupedOptions):
    """Options of delta-rule layers, beside their sizes.

    Attributes:
        convolution_size: taps of the short convolution.
        negative_eigenvalues: let beta reach 2, so that a step can reflect.
    """

    convolution_size: int = 4
    negative_eigenvalues: bool = False


@dataclasses.dataclass(frozen=True)
class DeltaProductOptions(GroupedOptions):
    """Options of "delta_product" layers: `convolution_size`, and `steps`, the corrections per
    token."""

    convolution_size: int = 4
    steps: int = 2


class DeltaLayer(RecurrentLayer):
    """The shared part of delta-rule layers.

        q, k, v = silu(conv(x W_qkv)),  q and k scaled to unit length
        beta = sigmoid(x W_b)                          (write strength; doubled on request)

    Source: Schlag et al. 2021; Yang et al., "Parallelizing Linear Transformers with the Delta
        Rule", 2024.
    """

    Options: ClassVar[type[LayerOptions]] = DeltaOptions
    starts_from_attention: ClassVar[bool] = True
    write: nnx.Linear

    def _set_projections(self, config: LayerConfig, rngs: nnx.Rngs):
        width, dtype, std = config.width, config.compute_dtype, config.width**-0.5
        channels, options = self._channels(config), self.options_of(config)
        self.query_key_value = linear(width, channels, dtype, rngs, std=std)
        self.convolution = ShortConvolution(
            channels, options.convolution_size, dtype=dtype, rngs=rngs
        )
        self.steps = self.corrections(config)
        # Products of reflections need write strengths up to 2.
        self.negative_eigenvalues = getattr(options, "negative_eigenvalues", True)

    @classmethod
    def corrections(cls, config: LayerConfig) -> int:
        """Keys, values and write strengths per token."""
        return 1

    @classmethod
    def _channels(cls, config):
        sizes = cls.sizes_of(config)
        return sizes.keys + cls.corrections(config) * (sizes.keys + sizes.values)

    @classmethod
    def tail_shape(cls, config: LayerConfig) -> tuple[int, int]:
        return cls.options_of(config).convolution_size - 1, cls._channels(config)

    def project(self, x, past, segment_ids):
        mixed, tail = self.convolution(
            self.query_key_value(x),
            tail=None if past is None else past.tail,
            segment_ids=segment_ids,
        )
        beta = jax.nn.sigmoid(self.write(x).astype(accumulator(x.dtype)))
        beta = 2 * beta if self.negative_eigenvalues else beta
        return Projection((*self._heads(mixed), *self._decay(x), beta), tail)

    def _heads(self, mixed):
        _, _, key_size, value_size = self.sizes
        keys = self.sizes.keys
        q, k, v = jnp.split(jax.nn.silu(mixed), [keys, keys + self.steps * keys], axis=-1)
        q, k = unit_length(split_heads(q, key_size)), unit_length(split_heads(k, key_size))
        return q, k, split_heads(v, value_size)

    def _decay(self, x) -> tuple[Array, ...]:
        return ()


class DeltaNetLayer(DeltaLayer):
    """The delta rule without decay or output gate.

        q, k, v, beta as in `DeltaLayer`
        y = RMSNorm(delta_net(q, k, v, beta)) W_o

    Source: Yang et al., "Parallelizing Linear Transformers with the Delta Rule", 2024, section 3.3.
    """

    word: ClassVar[str] = "delta"

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        width, dtype = config.width, config.compute_dtype
        self._set_projections(config, rngs)
        value_heads = self.sizes_of(config).value_heads
        self.write = linear(width, value_heads, dtype, rngs, std=width**-0.5)
        super().__init__(config, gate=None, rngs=rngs)


class GatedDeltaLayer(DeltaLayer):
    """The delta rule with one decay per head and a SiLU gate on its outputs.

        q, k, v, beta as in `DeltaLayer`
        g = -exp(A_log) softplus(x W_a + dt_bias)      (log-decay of the state, float32)
        y = ( RMSNorm(mixer(q, k, v, g, beta)) * silu(x W_g) ) W_o

    Source: Yang et al., "Gated Delta Networks", 2024, section 3.4.
    """

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        width, dtype, std = config.width, config.compute_dtype, config.width**-0.5
        sizes = self.sizes_of(config)
        self._set_projections(config, rngs)
        self.decay = linear(width, sizes.value_heads, dtype, rngs, std=std)
        self.write = linear(width, self.steps * sizes.value_heads, dtype, rngs, std=std)
        gate = linear(width, sizes.values, dtype, rngs, std=std)
        super().__init__(config, gate=gate, rngs=rngs)
        self.log_rate = log_rate(rngs, sizes.value_heads, lowest=0.01)
        self.step_bias = step_bias(rngs, sizes.value_heads)

    def _decay(self, x) -> tuple[Float[Array, "batch time heads"]]:
        return (log_decay(self.decay(x), self.log_rate[...], self.step_bias[...]),)


class GatedDeltaNetLayer(GatedDeltaLayer):
    """Gated DeltaNet: `GatedDeltaLayer` with one correction per token.

    Source: Yang et al., "Gated Delta Networks", 2024; LT2 for the sizes.
    """

    word: ClassVar[str] = "gdn"

    @classmethod
    def sizes_of(cls, config: LayerConfig) -> RecurrentSizes:
        """Keys of 0.75 width / heads channels, rounded to a multiple of 8, and values of twice as
        many."""
        options = cls.options_of(config)
        heads = options.heads or config.heads
        key_size = options.key_size or max(8, 8 * round(0.75 * config.width / heads / 8))
        return RecurrentSizes(
            heads, options.value_heads or heads, key_size, options.value_size or 2 * key_size
        )


class DeltaProductLayer(GatedDeltaLayer):
    """Gated DeltaProduct: several keys, values and write strengths per token, after one decay.

    Write strengths always reach 2, because products of reflections need it. The channels of a
    head's corrections lie side by side.

    Source: Siems et al., "DeltaProduct", 2025, sections 3 and 4.
    """

    word: ClassVar[str] = "delta_product"
    Options: ClassVar[type[LayerOptions]] = DeltaProductOptions
    starts_from_attention: ClassVar[bool] = False  # it has several keys and values per token

    @classmethod
    def corrections(cls, config: LayerConfig) -> int:
        return cls.options_of(config).steps

    def project(self, x, past, segment_ids):
        (q, k, v, g, beta), tail, _ = super().project(x, past, segment_ids)
        k, v = (a.reshape(*x.shape[:2], -1, self.steps, a.shape[-1]) for a in (k, v))
        return Projection((q, k, v, g, beta.reshape(*x.shape[:2], -1, self.steps)), tail)
