"""Kimi Delta Attention as layers, with a decay per key channel: plain, and preconditioned."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from toolkit.attention import log_decay
from toolkit.attention.execution.precision import accumulator
from toolkit.looped.layers import linear
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions
from toolkit.looped.mixing.linear.delta import DeltaLayer
from toolkit.looped.mixing.linear.gates import LowRank, log_rate, step_bias
from toolkit.looped.mixing.linear.recurrent import GroupedOptions, split_heads

CENTER = -0.2


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


@dataclasses.dataclass(frozen=True)
class PreconditionedOptions(GroupedOptions):
    """Options of "pkda" layers: sizes, and `convolution_size`, the taps of the short
    convolution."""

    convolution_size: int = 4


class PreconditionedKimiLayer(KimiDeltaLayer):
    """`KimiDeltaLayer` that writes more along key channels with little behind them.

        q, k, v, g, beta as in `KimiDeltaLayer`
        fading = -exp(B_log) softplus(x W_h + db_bias);   weight = e^(-c) sigmoid(x W_w)
        y = ( RMSNorm(preconditioned_kda(q, k, v, g, beta, fading, weight)) * gate ) W_o

    Attributes:
        fade, weigh: projections.
        fade_rate, fade_bias, center: B_log, db_bias and c, [heads].

    Source: Tumma, Loo, Rus, "Preconditioned DeltaNet", 2026, section 4.
    """

    word: ClassVar[str] = "pkda"
    Options: ClassVar[type[LayerOptions]] = PreconditionedOptions
    can_cut_time: ClassVar[bool] = False

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.negative_eigenvalues = False  # a stretched step must not expand the state
        width, dtype, std = config.width, config.compute_dtype, config.width**-0.5
        heads = self.sizes.value_heads
        self.fade = linear(width, heads, dtype, rngs, std=std)
        self.weigh = linear(width, heads, dtype, rngs, std=std)
        self.fade_rate = log_rate(rngs, heads, lowest=1.0)
        self.fade_bias = step_bias(rngs, heads)
        self.center = nnx.Param(jnp.full(heads, CENTER))

    def project(self, x, past, segment_ids):
        found = super().project(x, past, segment_ids)
        fading = log_decay(self.fade(x), self.fade_rate[...], self.fade_bias[...])
        weight = jax.nn.sigmoid(self.weigh(x).astype(accumulator(x.dtype)))
        weight *= jnp.exp(-self.center[...])
        return found._replace(inputs=(*found.inputs, fading, weight))
