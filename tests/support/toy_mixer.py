"""A mixer that is in no table: gated linear attention with a write gate per value channel.

S_t = Diag(e^(g_t)) S_(t-1) + k_t (write_t * v_t)^T,   o_t = K^-1/2 S_t^T q_t
"""

import jax
import jax.numpy as jnp
from flax import nnx

from toolkit._checks import check_shape
from toolkit.attention import (
    Input,
    gated_linear_attention,
    gated_linear_attention_reference,
    gated_linear_attention_step,
)
from toolkit.attention.costs import additive_forward_flops, additive_step_flops
from toolkit.attention.inputs import CHANNEL_G, FRACTION, TOKEN, K, Q, V, recurrent
from toolkit.looped.layers import linear
from toolkit.looped.mixing.linear.linear_attention import GatedLinearAttentionLayer
from toolkit.looped.mixing.linear.recurrent import Projection, split_heads


def written(v, write):
    axes = "batch time heads value" if v.ndim == 4 else "batch heads value"
    check_shape("v", v, write.shape, axes)
    # The engine's products keep what is not finite to its token, in gradients too; so must this.
    write = write.astype(v.dtype)
    is_finite = jnp.isfinite(write) & jnp.isfinite(v)
    write, v = (jnp.where(is_finite, x, 0) for x in (write, v))
    return jnp.where(is_finite, write * v, jnp.nan)


def toy(q, k, v, g, write, **options):
    return gated_linear_attention(q, k, written(v, write), g, **options)


def toy_step(q_t, k_t, v_t, g_t, write_t, state):
    return gated_linear_attention_step(q_t, k_t, written(v_t, write_t), g_t, state)


def toy_reference(q, k, v, g, write, **options):
    return gated_linear_attention_reference(q, k, written(v, write), g, **options)


TOY = recurrent(
    name="toy",
    title="Toy",
    paper="A Toy (arXiv:0000.00000)",
    inputs=(Q, K, V, CHANNEL_G, Input("write", (*TOKEN, "value"), FRACTION)),
    function=toy,
    step=toy_step,
    reference=toy_reference,
    forward_flops=additive_forward_flops,
    step_flops=additive_step_flops,
)


class ToyLayer(GatedLinearAttentionLayer):
    word = "toy"

    def __init__(self, config, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        width = config.width
        self.write = linear(width, self.sizes.values, config.compute_dtype, rngs, std=width**-0.5)

    def project(self, x, past, segment_ids):
        inputs = super().project(x, past, segment_ids).inputs
        write = jax.nn.sigmoid(
            split_heads(self.write(x).astype(jnp.float32), self.sizes.value_size)
        )
        return Projection((*inputs, write))
