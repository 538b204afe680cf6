"""MesaNet as a layer: the delta rule's projections, and a penalty per key channel."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from toolkit.attention.execution.precision import accumulator
from toolkit.attention.linear.mesa_net import LEAST_PENALTY
from toolkit.looped.layers import linear
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions
from toolkit.looped.mixing.linear.delta import DeltaLayer
from toolkit.looped.mixing.linear.recurrent import GroupedOptions


@dataclasses.dataclass(frozen=True)
class MesaOptions(GroupedOptions):
    """Options of "mesa" layers: sizes, and `convolution_size`, the taps of the short
    convolution."""

    convolution_size: int = 4


class MesaLayer(DeltaLayer):
    """Least squares at every token.

        q, k, v, beta as in `DeltaLayer`;   g = log sigmoid(x W_a + b_a)
        penalty = 1/4 + softplus(p)                 (a parameter of each key channel; 1 at first)
        y = RMSNorm(mesa_net(q, k, v, g, beta, penalty)) W_o

    Attributes:
        decay: projection of the decay, with a bias.
        penalty: p, [heads, key].

    Source: von Oswald et al., "MesaNet", 2025, section 3.
    """

    word: ClassVar[str] = "mesa"
    Options: ClassVar[type[LayerOptions]] = MesaOptions
    can_cut_time: ClassVar[bool] = False

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs):
        width, dtype, std = config.width, config.compute_dtype, config.width**-0.5
        _, value_heads, key_size, _ = self.sizes_of(config)
        self._set_projections(config, rngs)
        self.negative_eigenvalues = False  # a weight of least squares
        self.write = linear(width, value_heads, dtype, rngs, std=std)
        self.decay = linear(width, value_heads, dtype, rngs, std=std, has_bias=True)
        super().__init__(config, gate=None, rngs=rngs)
        at_one = jnp.log(jnp.expm1(1.0 - LEAST_PENALTY))
        self.penalty = nnx.Param(jnp.full((value_heads, key_size), at_one))

    def project(self, x, past, segment_ids):
        found = super().project(x, past, segment_ids)
        penalty = LEAST_PENALTY + jax.nn.softplus(self.penalty[...])
        penalty = jnp.broadcast_to(penalty, (*x.shape[:2], *penalty.shape))
        return found._replace(inputs=(*found.inputs, penalty))

    def _decay(self, x):
        return (jax.nn.log_sigmoid(self.decay(x).astype(accumulator(x.dtype))),)
