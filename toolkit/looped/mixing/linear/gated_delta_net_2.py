"""Gated DeltaNet-2 as a layer, with separate gates for erasing and writing."""

from typing import ClassVar

import jax
from flax import nnx

from toolkit.attention.execution.precision import accumulator
from toolkit.looped.layers import linear
from toolkit.looped.mixing.layer import LayerConfig
from toolkit.looped.mixing.linear.kimi import KimiDeltaLayer
from toolkit.looped.mixing.linear.recurrent import Projection, split_heads


class GatedDeltaNet2Layer(KimiDeltaLayer):
    """Kimi Delta Attention's layer with two gates per channel instead of one write strength.

        q, k, v, g and the output gate as in `KimiDeltaLayer`
        b = sigmoid(x W_b),  w = sigmoid(x W_w)        (both doubled where beta would be)

    Attributes:

        log_rate: A_log, [value heads].
        step_bias: dt_bias, [value heads * key].

    Source: Hatamizadeh, Choi, Kautz, "Gated DeltaNet-2", 2026, section 3.
    """

    word: ClassVar[str] = "gdn2"

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        width, dtype, std = config.width, config.compute_dtype, config.width**-0.5
        _, value_heads, key_size, _ = self.sizes
        self.erase = linear(width, value_heads * key_size, dtype, rngs, std=std)
        self.write = linear(width, self.sizes.values, dtype, rngs, std=std)

    def project(self, x, past, segment_ids):
        (*inputs, write), tail, _ = super().project(x, past, segment_ids)
        erase = jax.nn.sigmoid(self.erase(x).astype(accumulator(x.dtype)))
        erase = 2 * erase if self.negative_eigenvalues else erase
        gates = split_heads(erase, self.sizes.key_size), split_heads(write, self.sizes.value_size)
        return Projection((*inputs, *gates), tail)
