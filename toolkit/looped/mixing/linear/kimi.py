"""Kimi Delta Attention as a layer: a decay per key channel, gates of low rank."""

from typing import ClassVar

import jax
from flax import nnx
from jaxtyping import Array, Float

from toolkit.attention import log_decay
from toolkit.looped.layers import linear
from toolkit.looped.mixing.layer import LayerConfig
from toolkit.looped.mixing.linear.delta import DeltaLayer
from toolkit.looped.mixing.linear.gates import LowRank, log_rate, step_bias
from toolkit.looped.mixing.linear.recurrent import split_heads


class KimiDeltaLayer(DeltaLayer):
    """The delta rule with one decay per key channel and a sigmoid gate on its outputs.

        q, k, v, beta as in `DeltaLayer`
        g = -exp(A_log) softplus(x W_f1 W_f2 + dt_bias)      (log-decays of a head's key channels)
        y = ( RMSNorm(kimi_delta_attention(q, k, v, g, beta)) * sigmoid(x W_g1 W_g2) ) W_o

    Both low-rank maps pass through as many channels as a head has values.

    Source: Kimi Team, "Kimi Linear", 2025, sections 3 and 4.
    """

    word: ClassVar[str] = "kda"
    gate_activation = staticmethod(jax.nn.sigmoid)

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        width, dtype, std = config.width, config.compute_dtype, config.width**-0.5
        _, value_heads, key_size, rank = sizes = self.sizes_of(config)
        channels = value_heads * key_size
        self._set_projections(config, rngs)
        self.decay = LowRank(width, rank, channels, dtype=dtype, rngs=rngs)
        self.write = linear(width, value_heads, dtype, rngs, std=std)
        gate = LowRank(width, rank, sizes.values, dtype=dtype, rngs=rngs)
        super().__init__(config, gate=gate, rngs=rngs)
        self.log_rate = log_rate(rngs, value_heads, lowest=1.0)
        self.step_bias = step_bias(rngs, channels)

    def _decay(self, x) -> tuple[Float[Array, "batch time heads key"]]:
        raw, bias = (
            split_heads(a, self.sizes.key_size) for a in (self.decay(x), self.step_bias[...])
        )
        return (log_decay(raw, self.log_rate[...][:, None], bias),)
