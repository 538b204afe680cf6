"""Lightning attention: retention without rotation, whose heads forget later in deeper layers."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from toolkit.attention.execution.precision import accumulator
from toolkit.looped.mixing.layer import LayerConfig, LayerOptions
from toolkit.looped.mixing.linear.gates import GroupNorm
from toolkit.looped.mixing.linear.linear_attention import QueryKeyValueLayer
from toolkit.looped.mixing.linear.recurrent import Projection, RecurrentOptions

NORM_EPSILON = 1e-6


class LightningLayer(QueryKeyValueLayer):
    """MiniMax's lightning attention, in layer l of L with H heads.

        q, k, v = silu(x W_q), silu(x W_k), silu(x W_v)
        ln gamma_h = -2^(-8 h / H) (1 - l / (L - 1)),   h = 1 .. H,   l = 0 .. L - 1
        y = ( RMSNorm(retention(q, k, v)) * sigmoid(x W_g) ) W_o        (norm over all heads)

    MiniMax adds 1e-5 to L - 1 and to the last factor. It is computed as Mamba-2 with steps of 1,
    which takes the decays as an input.

    Source: MiniMax, "MiniMax-01", 2025, arXiv:2501.08313, section 2.2, and its published code.
    """

    word: ClassVar[str] = "lightning"
    mixer: ClassVar[str] = "mamba2"
    Options: ClassVar[type[LayerOptions]] = RecurrentOptions
    starts_from_attention: ClassVar[bool] = False
    has_depth: ClassVar[bool] = True
    gate_activation = staticmethod(jax.nn.sigmoid)

    def __init__(self, config: LayerConfig, *, rngs: nnx.Rngs, depth: tuple[int, int] = (0, 1)):
        super().__init__(config, rngs=rngs)
        layer, layers = depth
        heads = np.arange(1, self.sizes.heads + 1)
        slopes = 2.0 ** (-8 * heads / len(heads)) * (1 - layer / (layers - 1 + 1e-5) + 1e-5)
        self.log_decay = tuple(map(float, -slopes))
        how: dict[str, Any] = {"epsilon": NORM_EPSILON, "dtype": config.compute_dtype}
        self.norm = GroupNorm(self.sizes.values, 1, is_centred=False, **how)

    def project(self, x, past, segment_ids):
        q, k, v = (jax.nn.silu(part) for part in super().project(x, past, segment_ids).inputs)
        steps = jnp.ones_like(v[..., 0], dtype=accumulator(x.dtype))
        return Projection((q, k, v, steps * jnp.asarray(self.log_decay, steps.dtype), steps))

    def finish(self, x, out, aside):
        out = self.norm(out.reshape(*x.shape[:-1], -1))
        assert self.gate is not None
        return self.output(out * self.gate_activation(self.gate(x)))
