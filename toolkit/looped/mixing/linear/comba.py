"""Comba as a layer: Gated DeltaNet with feedback to the state and to the output."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from toolkit.looped.mixing.layer import LayerConfig
from toolkit.looped.mixing.linear.delta import GatedDeltaLayer
from toolkit.looped.mixing.linear.recurrent import Projection

CORRECTION = 0.02
"""Initial d: the authors' choice for 340M parameters; for 1.3B they take 1."""


class CombaLayer(GatedDeltaLayer):
    """The gated delta rule with closed-loop control and a sigmoid gate on its outputs.

        q, k, v, g, beta as in `GatedDeltaLayer`
        b = sigmoid(feedback),  d = correction         (one number each per head)
        y = ( RMSNorm(comba(q, k, v, g, beta, b, d)) * sigmoid(x W_g) ) W_o

    Attributes:

        log_rate: A_log, [value heads].
        step_bias: dt_bias, [value heads].
        feedback: logits of b, [value heads].
        correction: d, [value heads].

    Source: Hu et al., "Improving Bilinear RNNs with Closed-loop Control", 2025, section 3.
    """

    word: ClassVar[str] = "comba"
    key_share: ClassVar[float] = 0.75
    value_share: ClassVar[float] = 1.5
    gate_activation = staticmethod(jax.nn.sigmoid)

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.feedback = nnx.Param(jnp.ones(self.sizes.value_heads))
        self.correction = nnx.Param(jnp.full(self.sizes.value_heads, CORRECTION))

    def project(self, x, past, segment_ids):
        (*inputs, beta), tail, _ = super().project(x, past, segment_ids)
        per_head = jax.nn.sigmoid(self.feedback[...]), self.correction[...]
        return Projection(
            (*inputs, beta, *(jnp.broadcast_to(a, beta.shape) for a in per_head)), tail
        )
