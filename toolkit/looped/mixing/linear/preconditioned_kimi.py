"""Preconditioned Kimi Delta Attention as a layer: KDA's, and what sums the squares of keys."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from toolkit.attention import log_decay
from toolkit.attention.execution.precision import accumulator
from toolkit.looped.layers import linear
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions
from toolkit.looped.mixing.linear.gates import log_rate, step_bias
from toolkit.looped.mixing.linear.kimi import KimiDeltaLayer
from toolkit.looped.mixing.linear.recurrent import GroupedOptions

CENTER = -0.2


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
