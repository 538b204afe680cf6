"""Error-free linear attention as a layer: DeltaNet with keys of any length."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from toolkit.attention import unit_length
from toolkit.looped.layers import linear
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions
from toolkit.looped.mixing.linear.delta import DeltaLayer
from toolkit.looped.mixing.linear.recurrent import GroupedOptions, split_heads


@dataclasses.dataclass(frozen=True)
class ErrorFreeOptions(GroupedOptions):
    """Options of "efla" layers: sizes, and `convolution_size`, the taps of the short
    convolution."""

    convolution_size: int = 4


class ErrorFreeLayer(DeltaLayer):
    """The delta rule's differential equation, solved exactly, without decay or output gate.

        q, k, v = silu(conv(x W_qkv)),  q scaled to unit length;   beta = sigmoid(x W_b)
        y = RMSNorm(error_free_linear_attention(q, k, v, beta)) W_o

    Source: Lei, Zhang, Poria, "Error-Free Linear Attention is a Free Lunch", 2025, section 3.
    """

    word: ClassVar[str] = "efla"
    Options: ClassVar[type[LayerOptions]] = ErrorFreeOptions

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        width, dtype = config.width, config.compute_dtype
        self._set_projections(config, rngs)
        self.negative_eigenvalues = False  # the exact step never reflects
        value_heads = self.sizes_of(config).value_heads
        self.write = linear(width, value_heads, dtype, rngs, std=width**-0.5)
        super().__init__(config, gate=None, rngs=rngs)

    def _heads(self, mixed):
        _, _, key_size, value_size = self.sizes
        keys = self.sizes.keys
        q, k, v = jnp.split(jax.nn.silu(mixed), [keys, 2 * keys], axis=-1)
        return (
            unit_length(split_heads(q, key_size)),
            split_heads(k, key_size),
            split_heads(v, value_size),
        )
